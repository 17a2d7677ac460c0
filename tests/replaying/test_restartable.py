"""A training in pieces starts anywhere: single contributions without all patterns at once, and after a kill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.errors import ReplayError
from dualform.recording.keep import Patterns
from dualform.replaying import replay_executor
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.restart_points import RestartPoints
from dualform.replaying.restartable import Restartable, put_back, take_point
from dualform.replaying.training import record_training
from dualform.store.format import RESTART
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.trainings import MODELS, OPTIMIZERS, batch

STEPS = 10


class Counted:
    """The batches of a training, and how often each was asked for."""

    def __init__(self, kind: str, *, swapped: int | None = None) -> None:
        self.kind = kind
        self.swapped = swapped
        self.asked: list[int] = []

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        self.asked.append(number)
        return batch(self.kind, 99 if number == self.swapped else number)


def make_restartable(
    kind: str = "mlp", optimizer: str = "AdamW", *, every: int | None = None, **options: Any
) -> tuple[Restartable, Counted]:
    """Return a training with noise from two generators, a schedule and a counter, and its batches."""
    batches = Counted(kind, **options)

    def init() -> dict[str, Any]:
        torch.manual_seed(3)
        np.random.seed(3)
        model = MODELS[kind]()
        optimizers = OPTIMIZERS[optimizer](model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 4, gamma=0.5)
        own = torch.Generator().manual_seed(4)
        return {"model": model, "optimizer": optimizers, "schedule": schedule, "own": own, "seen": 0}

    def step(state: dict[str, Any], one: tuple[Tensor, Tensor]) -> None:
        for each in state["optimizer"]:
            each.zero_grad()
        logits = state["model"](one[0])
        noise = torch.rand(()) + torch.rand((), generator=state["own"]) + float(np.random.rand())
        functional.cross_entropy(logits.flatten(0, -2) * (1 + noise), one[1].flatten()).backward()
        for each in state["optimizer"]:
            each.step()
        state["schedule"].step()
        state["seen"] += 1

    def columns(one: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"label": one[1][..., 0] if one[1].dim() > 1 else one[1]}

    return Restartable(init, step, batches, columns=columns, every=every), batches


def ask(train: Restartable, blobs: MemoryBlobs) -> Memory:
    """Open a run whose patterns are never held."""
    return Memory(ReplayedPatterns(Run(blobs), train, held_bytes=0), ReplayExecutor())


def points(blobs: MemoryBlobs) -> list[int]:
    return [int(name.removeprefix(RESTART)[:9]) for name in sorted(blobs.list(RESTART))]


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no layer's patterns be held for a question that goes backwards in time."""
    monkeypatch.setattr(replay_executor, "SWEPT_BYTES", 0)


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize(
    ("kind", "optimizer", "layer"), [("mlp", "AdamW", "1"), ("mlp", "Muon", "3"), ("lstm", "AdamW", "head")]
)
def test_single_contributions_need_a_few_steps_at_a_time(kind: str, optimizer: str, layer: str) -> None:
    blobs, stored = MemoryBlobs(), MemoryBlobs()
    train, batches = make_restartable(kind, optimizer)
    model = record_training(train, blobs)
    assert torch.equal(
        next(model.parameters()),
        next(record_training(make_restartable(kind, optimizer)[0], stored, keep=Patterns()).parameters()),
    )
    queries = {layer: torch.rand(2, dualform.open(stored).layers[layer].d_in)}
    units = torch.tensor([0, 1])
    expected = dualform.open(stored).attend(queries=queries)[layer].top(4, of="contribution", unit=units)
    memory = ask(train, blobs)
    batches.asked.clear()
    found = memory.attend(queries=queries)[layer].top(4, of="contribution", unit=units)
    assert found.to_arrow()["pattern"].equals(expected.to_arrow()["pattern"])
    torch.testing.assert_close(found.values, expected.values, rtol=1e-6, atol=1e-9)
    assert points(blobs) == [3, 6, 9]
    assert len(batches.asked) <= 3 * STEPS  # forwards and backwards, and no more
    assert memory.verify(model).passed


def test_a_replay_after_a_kill_starts_at_the_last_point() -> None:
    blobs = MemoryBlobs()
    train, batches = make_restartable(every=2)
    record_training(train, blobs)
    source = ReplayedPatterns(Run(blobs), train)
    seen: list[range] = []

    def take(part: Any, steps: range) -> None:
        seen.append(steps)
        if steps.stop > 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.replay({"1": "keys"}, take, steps=9, first=0)
    kept = points(blobs)
    assert kept == [2, 4, 6, 8]
    later, batches = make_restartable(every=2)
    seen.clear()
    ReplayedPatterns(Run(blobs), later).replay({"1": "keys"}, lambda part, steps: seen.append(steps), steps=10, first=9)
    assert batches.asked == [8, 9]
    assert seen == [range(9, 10)]


def test_points_lie_in_the_run_folder_and_never_behind_a_link(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    train, batches = make_restartable(every=4)
    record_training(train, run)
    (run / "restart").symlink_to(outside)
    for _ in range(2):
        batches.asked.clear()
        ReplayedPatterns(Run(run), train).replay({"1": "keys"}, lambda part, steps: None, steps=10, first=8)
        assert batches.asked == list(range(10))
    assert list(outside.iterdir()) == []
    (run / "restart").unlink()
    for expected in (list(range(10)), [8, 9]):
        batches.asked.clear()
        ReplayedPatterns(Run(run), train).replay({"1": "keys"}, lambda part, steps: None, steps=10, first=8)
        assert batches.asked == expected
    assert sorted(path.name for path in (run / "restart").iterdir()) == [
        "000000004.safetensors",
        "000000008.safetensors",
    ]


def test_a_point_that_is_not_of_this_training_is_found_out() -> None:
    blobs = MemoryBlobs()
    train, _ = make_restartable(every=5)
    record_training(train, blobs)
    run = Run(blobs)
    ReplayedPatterns(run, train).replay({"1": "keys"}, lambda part, steps: None, steps=10)
    at, point = RestartPoints(run, 5).before(7)
    assert at == 5
    assert point is not None

    def replay_with(change: Callable[[dict[str, Any]], None]) -> None:
        changed = dict(RestartPoints(run, 5).before(7)[1] or {})
        change(changed)
        blobs.remove(blobs.list(RESTART)[0])
        RestartPoints(run, 5).keep(5, lambda: changed)
        try:
            ReplayedPatterns(run, train).replay({"1": "keys"}, lambda part, steps: None, steps=8, first=6)
        finally:
            blobs.remove(blobs.list(RESTART)[0])
            RestartPoints(run, 5).keep(5, lambda: point)

    replay_with(lambda changed: None)
    with pytest.raises(ReplayError, match=r"in step 4, parameter '1.weight' is off"):
        replay_with(lambda changed: changed["model"]["1.weight"].add_(1e-3))
    with pytest.raises(ReplayError, match="in step 5, "):  # of Adam's moments nobody knows before a step is taken
        replay_with(lambda changed: changed["optimizer"][0]["state"][0]["exp_avg"].mul_(2))
    with pytest.raises(ReplayError, match="in step 5, "):
        replay_with(lambda changed: changed.update(generators=take_point({})["generators"]))


def test_a_broken_or_foreign_point_is_as_good_as_missing() -> None:
    blobs, others = MemoryBlobs(), MemoryBlobs()
    train, batches = make_restartable(every=5)
    record_training(train, blobs)
    record_training(make_restartable(every=5, swapped=8)[0], others)
    for place in (blobs, others):
        again = make_restartable(every=5, swapped=None if place is blobs else 8)[0]
        ReplayedPatterns(Run(place), again).replay({"1": "keys"}, lambda part, steps: None, steps=6)
    name = blobs.list(RESTART)[0]
    content = others.load(name)[0]
    for wrong in (content, content[: len(content) // 2], b"{}"):
        blobs.remove(name)
        blobs.publish(name, lambda file, wrong=wrong: file.write(wrong))  # type: ignore[misc]
        assert RestartPoints(Run(blobs), 5).before(9) == (0, None)
    batches.asked.clear()
    ReplayedPatterns(Run(blobs), train).replay({"1": "keys"}, lambda part, steps: None, steps=7, first=6)
    assert batches.asked == [0, 1, 2, 3, 4, 5, 6]
    assert RestartPoints(Run(blobs), 5).before(9)[0] == 5  # and it is made anew


def test_a_state_is_put_back_to_the_bit() -> None:
    class Average:
        def __init__(self) -> None:
            self.value = 0.25

        def state_dict(self) -> dict[str, float]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.value = state["value"]

    state: dict[str, Any] = {"average": Average(), "rows": [torch.arange(3), (1, "a", None)], "seen": {2: 0.1}}
    point = take_point(state)
    drawn = torch.rand(2), np.random.rand(2)
    state["rows"][0].zero_()
    state["average"].value = 1.0
    state["seen"][2] = 5
    put_back(state, point)
    assert torch.equal(torch.rand(2), drawn[0])
    assert np.array_equal(np.random.rand(2), drawn[1])
    assert state["average"].value == 0.25
    assert state["rows"][0].tolist() == [0, 1, 2]
    assert state["rows"][1] == (1, "a", None)
    assert state["seen"] == {2: 0.1}


def test_what_makes_no_sense_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def twice(state: dict[str, Any], one: Tensor) -> None:
        for _ in range(2):
            state["optimizer"].zero_grad()
            state["model"](one).sum().backward()
            state["optimizer"].step()

    with pytest.raises(ReplayError, match=r"took 2 steps of the optimizer for batch 0; expected exactly 1"):
        record_training(Restartable(lambda: state, twice, [torch.rand(3, 2)]), MemoryBlobs())
    with pytest.raises(ReplayError, match=r"init\(\) returned Linear; expected a dictionary"):
        record_training(Restartable(lambda: model, twice, [torch.rand(3, 2)]), MemoryBlobs())  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="every is 0"):
        Restartable(lambda: state, twice, [], every=0)
    with pytest.raises(ReplayError, match=r"data\[0\] of the training's state is a object"):
        take_point({"data": [object()]})
    with pytest.raises(ReplayError, match="The restart point has no 'more'"):
        put_back({"more": 1}, take_point({}))
    whole = take_point(state)
    misfits: list[dict[str, Any]] = [
        {"generators": {}},
        {"generators": None},
        {"model": {"weight": 1}},
        {"optimizer": [2]},
    ]
    for wrong in misfits:
        with pytest.raises(ReplayError, match=r"The restart point does not fit the training \("):
            put_back(dict(state), {**whole, **wrong})


def test_a_question_after_a_kill_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = MemoryBlobs()
    train, _ = make_restartable(every=3)
    record_training(train, blobs)
    queries = {"1": torch.rand(2, 16), "3": torch.rand(2, 6)}

    def answers(memory: Memory) -> list[Tensor]:
        spotlight = memory.attend(queries=queries)
        totals, best = spotlight.compute(dualform.Totals(by="label", of="magnitude"), dualform.Top(5))
        return [one[layer].values for one in (totals, best) for layer in queries]

    whole = MemoryBlobs()
    record_training(make_restartable(every=3)[0], whole)
    expected = answers(ask(make_restartable(every=3)[0], whole))
    killed, batches = make_restartable(every=3)
    real = Counted.__getitem__

    def until_step_8(self: Counted, number: int) -> Any:
        if number == 8:
            raise KeyboardInterrupt
        return real(self, number)

    monkeypatch.setattr(Counted, "__getitem__", until_step_8)
    with pytest.raises(KeyboardInterrupt):
        answers(ask(killed, blobs))
    assert batches.asked == list(range(8))
    monkeypatch.undo()
    again, batches = make_restartable(every=3)
    found = answers(ask(again, blobs))
    assert batches.asked == [6, 7, 8, 9]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
