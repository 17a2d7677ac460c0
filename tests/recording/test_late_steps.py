"""Steps whose numbers are read one step later, as on a GPU: nothing is read in the step, and nothing is lost or wrong.

The CPU stands for the GPU here: every place that asks where a tensor is gets the answer that it is elsewhere.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dualform
from dualform.errors import RefusedError
from dualform.recording import accumulation, gradient_samples, late_steps, probes, step_recorder
from dualform.store import taken_steps
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run

READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    torch.equal,
    torch.allclose,
    torch.nonzero,
}
"""What brings a number of a tensor to the CPU, and so waits for a GPU."""


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "is_one_gpu", lambda devices: True)
    monkeypatch.setattr(gradient_samples, "is_at_hand", lambda tensor: False)
    monkeypatch.setattr(probes, "is_at_hand", lambda tensor: False)
    monkeypatch.setattr(taken_steps, "is_elsewhere", lambda tensor: True)


class NoReads(TorchFunctionMode):
    """Raises where a number is read, but for numbers that have arrived (`LateStep.read` and what comes of it)."""

    def __init__(self) -> None:
        self.allowed = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in READS and not self.allowed:
            raise AssertionError(f"{function} reads a number within the step")
        return function(*args, **(kwargs or {}))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 40, generator=generator)


def train(
    path: Path,
    steps: int = 30,
    *,
    count: bool = True,
    between: Callable[[nn.Module, int], object] = lambda model, step: None,
    **options: Any,
) -> nn.Module:
    model, optimizer = network()
    with dualform.record(model, optimizer, path, **options) as recorder:
        for step, batch in enumerate(batches(steps)):
            recorder.annotate(turn=step)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            between(model, step)
            optimizer.step()
            assert recorder.step == step + 1 or not count
    return model


def clip(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize("between", [lambda model, step: None, clip], ids=["plain", "clipped"])
def test_late_steps_are_recorded_whole(tmp_path: Path, between: Callable[[nn.Module, int], object]) -> None:
    model = train(tmp_path / "late", between=between, shard_bytes=60_000)
    memory = dualform.open(tmp_path / "late")
    assert len(Run(tmp_path / "late").shards) > 2
    assert memory.info().steps == 30
    assert memory.verify().passed
    plain, optimizer = network()
    for step, batch in enumerate(batches(30)):
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        between(plain, step)
        optimizer.step()
    for name, parameter in plain.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name


def test_late_steps_make_the_same_patterns(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    train(tmp_path / "now", shard_bytes=60_000)
    request.getfixturevalue("pretend_gpu")
    train(tmp_path / "late", shard_bytes=60_000)
    files, late = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.suffix != ".json"}
        for folder in (tmp_path / "now", tmp_path / "late")
    )
    assert any("uncovered" in name for name in files), "the buffers are kept with every shard"
    assert files.keys() == late.keys()
    assert [name for name in files if files[name] != late[name]] == []


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.parametrize(
    ("steps", "keep"),
    [(3, dualform.Patterns()), (30, dualform.Patterns()), (3, dualform.Shares(by="turn"))],
    ids=["in full", "sampled", "shares"],
)
def test_no_number_is_read_within_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, keep: dualform.Patterns | dualform.Shares
) -> None:
    model, _ = network()
    mode = NoReads()
    read = late_steps.LateStep.read

    def arrived(late: late_steps.LateStep) -> late_steps.LateNumbers:
        mode.allowed += 1  # until the step's end: what was read is in the CPU's memory
        return read(late)

    prepare = step_recorder.StepRecorder._settle

    def settle(recorder: step_recorder.StepRecorder) -> None:
        prepare(recorder)
        mode.allowed = 0

    monkeypatch.setattr(late_steps.LateStep, "read", arrived)
    monkeypatch.setattr(step_recorder.StepRecorder, "_settle", settle)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if isinstance(keep, dualform.Shares):  # by steps that are matrices; torch's own Adam reads numbers
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, tmp_path, keep=keep) as recorder:
        for step, batch in enumerate(batches(steps)):
            recorder.annotate(turn=step)
            with mode:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    assert dualform.open(tmp_path).verify().passed


def spoil_gradient(model: nn.Module, step: int) -> None:
    if step == 4:
        gradient = model[2].weight.grad  # type: ignore[index]
        gradient[3] *= 2


@pytest.mark.usefixtures("pretend_gpu")
def test_an_edited_gradient_is_refused_one_step_later(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"'2.weight'.*something other than one factor"):
        train(tmp_path, between=spoil_gradient)
    memory = dualform.open(tmp_path)
    assert memory.info().steps == 4, "the step that was refused, and none after it, is missing"


@pytest.mark.usefixtures("pretend_gpu")
def test_an_edited_gradient_in_the_last_step_is_refused_at_closing(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="something other than one factor"):
        train(tmp_path, 5, between=spoil_gradient)
    assert dualform.open(tmp_path).info().steps == 4


@pytest.mark.usefixtures("pretend_gpu")
def test_an_unseen_use_is_refused_one_step_later(tmp_path: Path) -> None:
    def add(model: nn.Module, step: int) -> None:
        (1e-2 * model[0].weight.square().sum()).backward()  # type: ignore[index]

    with pytest.raises(RefusedError, match=r"'0.weight'.*do not explain its gradient"):
        train(tmp_path, between=add)
    assert dualform.open(tmp_path).info().steps == 0


@pytest.mark.usefixtures("pretend_gpu")
def test_an_edited_parameter_is_refused_one_step_later(tmp_path: Path) -> None:
    def edit(model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].weight.data.mul_(1.1)  # type: ignore[index]

    with pytest.raises(RefusedError, match=r"'0.weight' changed between step 3 and step 4"):
        train(tmp_path, between=edit)
    assert dualform.open(tmp_path).info().steps == 3


@pytest.mark.usefixtures("pretend_gpu")
def test_training_goes_on_after_a_late_refusal(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Recording stopped at step 5 and training goes on"):
        train(tmp_path, 8, between=spoil_gradient, on_failure="detach", count=False)
    assert dualform.open(tmp_path).info().steps == 4


@pytest.mark.usefixtures("pretend_gpu")
def test_nothing_is_recorded_behind_a_step_that_was_refused(tmp_path: Path) -> None:
    model, optimizer = network()
    errors = []
    with dualform.record(model, optimizer, tmp_path):
        for step, batch in enumerate(batches(8)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            spoil_gradient(model, step)
            try:
                optimizer.step()
            except RefusedError as error:
                errors.append((step, str(error)))
    assert [step for step, _ in errors] == [5, 6, 7]
    assert "something other than one factor" in errors[0][1]
    assert "An earlier step was not recorded" in errors[1][1]
    assert dualform.open(tmp_path).info().steps == 4


@pytest.mark.usefixtures("pretend_gpu")
def test_a_flush_has_every_step(tmp_path: Path) -> None:
    model, optimizer = network()
    with dualform.record(model, optimizer, tmp_path) as recorder:
        for number, batch in enumerate(batches(3)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            recorder.flush()
            assert Run(tmp_path).manifest.steps == number + 1


@pytest.mark.usefixtures("pretend_gpu")
def test_accumulated_and_cleared_gradients_are_told_apart_without_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation, "is_at_hand", lambda tensor: False)
    model, optimizer = network()
    with dualform.record(model, optimizer, tmp_path):
        for number, batch in enumerate(batches(12)):
            model(batch).square().mean().backward()
            if number % 6 == 1:
                optimizer.zero_grad(set_to_none=False)  # the first two of six are dropped
            if number % 6 == 5:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    memory = dualform.open(tmp_path)
    assert memory.verify().passed
    assert memory.info().layers["0"]["patterns"] == 2 * 4 * 8


def test_a_captured_backward_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "is_capturing", lambda: True)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    with pytest.raises(RefusedError, match="captured into a CUDA graph"):
        train(tmp_path)


@pytest.mark.usefixtures("pretend_gpu")
@pytest.mark.filterwarnings("ignore:A recorder")
def test_a_recorder_that_is_dropped_loses_no_step(tmp_path: Path) -> None:
    model, optimizer = network()
    recorder = dualform.record(model, optimizer, tmp_path).start()
    for batch in batches(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert recorder.step == 3
    del recorder
    gc.collect()
    assert Run(tmp_path).manifest.steps == 3


FOLDED: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "Nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.3),
}


def fold_shares(
    optimizer: str, *, edit: int | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """Train with two backwards a step and clipped gradients that are cleared in place; return what shares are kept."""
    model = network()[0].to(dtype)
    made = FOLDED[optimizer](list(model.parameters()))
    blobs = MemoryBlobs()
    with dualform.record(model, made, blobs, keep=dualform.Shares(by="label", at=[3]), **options) as recorder:
        for step, batch in enumerate(batches(6)):
            for part in batch.to(dtype).split(4):
                recorder.annotate(label=[0, 1, 1, 0] if step < 2 else [2, 0, 0, 1])
                model(part).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            made.step()
            made.zero_grad(set_to_none=False)
            if step == edit:
                made.state[model[0].weight]["exp_avg"].mul_(2)  # type: ignore[index]
    kept = Run(blobs).kept_shares
    assert kept is not None
    assert kept.horizons == (3, 6)
    found: dict[str, Tensor] = {}
    for name in dict(model.named_parameters()):
        one = kept.shares(name, ("label",))
        assert float(one.unexplained.norm()) <= 1e-4 * float(one.shares.norm()), name
        found |= {f"{name} {what}": getattr(one, what) for what in ("shares", "start", "unexplained", "rounding")}
    return found


@pytest.mark.parametrize("optimizer", FOLDED)
def test_shares_of_late_steps_are_the_same(optimizer: str, request: pytest.FixtureRequest) -> None:
    # In float64: of a weight before a BatchNorm, Adam makes more of float32's rounding than these bounds allow.
    now = fold_shares(optimizer, dtype=torch.float64)
    request.getfixturevalue("pretend_gpu")
    late = fold_shares(optimizer, dtype=torch.float64)
    for name, tensor in now.items():
        torch.testing.assert_close(late[name], tensor, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.usefixtures("pretend_gpu")
def test_a_state_that_was_edited_before_a_late_fold_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"'exp_avg' of parameter '0.weight' was edited after its step"):
        fold_shares("AdamW", edit=3)


@pytest.mark.usefixtures("pretend_gpu")
def test_the_state_of_a_recorder_has_the_late_step() -> None:
    model, optimizer = network()
    with dualform.record(model, optimizer, MemoryBlobs(), keep=dualform.Shares(by="turn")) as recorder:
        for step, batch in enumerate(batches(3)):
            recorder.annotate(turn=step)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            assert recorder.state_dict()["sink"]["step"] == step + 1
