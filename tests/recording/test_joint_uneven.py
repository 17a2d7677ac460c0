"""Processes that run out of batches at different times record with `Join([model, recorder])`, or are refused."""

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.errors import RefusedError
from dualform.store.reader import Run
from helpers.joint_trainings import adamw, sgd
from helpers.loops import WITHIN, loss_of, mlp
from helpers.together import run_together

CASES: dict[str, tuple[Sequence[int], Any, dict[str, Any]]] = {
    "the first runs out": ((3, 5), adamw, {}),
    "the second runs out": ((5, 2), sgd, {}),
    "one has none": ((0, 3), adamw, {"divide_by_initial_world_size": False}),
    "divided by those that are left": ((5, 3), adamw, {"divide_by_initial_world_size": False}),
    "as many": ((3, 3), sgd, {}),
    "accumulated": ((4, 8), adamw, {"micros": 2}),
    "in the middle of a step": ((5, 8), sgd, {"micros": 2}),
    "epochs": ((2, 4), lambda model: torch.optim.SGD(model.parameters(), lr=0.05), {"epochs": 3}),
    "epochs, state brought over": ((4, 2), adamw, {"epochs": 3, "bring": 0}),
}
"""How many batches each process has, its optimizer, and options."""


def train(
    path: Path,
    rank: int,
    counts: Sequence[int],
    make_optimizer: Any,
    *,
    epochs: int = 1,
    micros: int = 1,
    bring: int | None = None,
    recorded: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on so many batches in each process, and return the trained parameters."""
    plain = mlp()
    model = DistributedDataParallel(plain)
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(rank)
    recording: Any = dualform.record(model, optimizer, path) if recorded else contextlib.nullcontext()
    with recording as recorder:
        for epoch in range(epochs):
            with Join([model, recorder] if recorded else [model], **options):
                for number in range(counts[rank]):
                    if recorder is not None:
                        recorder.annotate(epoch=epoch, number=number)
                    last = number % micros == micros - 1
                    with contextlib.nullcontext() if last else model.no_sync():
                        loss_of(model(torch.randn(3, 5, generator=generator))).backward()
                    if last:
                        optimizer.step()
                        optimizer.zero_grad()
            optimizer.zero_grad()
            if bring is not None:
                states = [optimizer.state_dict() if rank == bring else None]
                torch.distributed.broadcast_object_list(states, src=bring)
                if rank != bring:
                    assert states[0] is not None
                    optimizer.load_state_dict(states[0])
    return {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of every case and the trained parameters; recording leaves a training as it is."""
    folder = tmp_path_factory.mktemp("uneven")

    def work(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, (counts, make_optimizer, options) in CASES.items():
                found = train(folder / name, rank, counts, make_optimizer, **options)
                plain = train(folder / name, rank, counts, make_optimizer, **options, recorded=False)
                torch.testing.assert_close(found, plain, rtol=0, atol=0)
                torch.save(found, folder / f"{name} {rank}")

    run_together(folder, work)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_every_batch_of_every_process_is_recorded(name: str, runs: Path) -> None:
    counts, _, options = CASES[name]
    micros, epochs = options.get("micros", 1), options.get("epochs", 1)
    run = Run(runs / name)
    steps = [count // micros for count in counts]
    assert (run.steps, run.description.closed) == (max(steps) * epochs, True)
    memory = dualform.open(runs / name)
    report = memory.verify()
    assert report.passed
    assert max(layer.error or 0.0 for layer in report.layers) < WITHIN[torch.float32]
    for rank in range(2):
        assert memory.verify(torch.load(runs / f"{name} {rank}")).passed
        table = memory.where(rank=rank).patterns("0", columns=["number"]).to_pydict()
        assert table["number"] == [n for _ in range(epochs) for n in range(steps[rank] * micros) for _ in range(3)]
    factors = run.facts("0.weight")[1][:, -1].tolist()
    alone = 1.0 if options.get("divide_by_initial_world_size") is False else 0.5
    expected = [0.5] * min(steps) + [alone] * (max(steps) - min(steps))
    torch.testing.assert_close(factors, expected * epochs)


def test_what_cannot_be_recorded_of_uneven_batches_is_refused_in_all_processes(tmp_path: Path) -> None:
    def attempt(name: str, join: Any, make: Any = sgd, epochs: int = 1, **options: Any) -> str:
        rank = torch.distributed.get_rank()
        model = DistributedDataParallel(mlp())
        optimizer = make(model)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model(torch.full((2, 5), float(rank)))).backward()
            optimizer.step()

        recorded: Any = [optimizer]
        if name == "optimizers":
            *groups, last = model.parameters()
            recorded = [torch.optim.SGD(groups, lr=0.1), torch.optim.SGD([last], lr=0.1)]

        try:
            with dualform.record(model, recorded, tmp_path / name, **options) as recorder:
                for _ in range(epochs):
                    with join(model, recorder):
                        for _ in range(2 + rank):
                            step()
        except dualform.DualformError as error:
            return str(error)
        return "recorded"

    def work(rank: int) -> dict[str, str]:
        def both(model: Any, recorder: Any) -> Join:
            return Join([model, recorder])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                "alone": attempt("alone", lambda model, recorder: model.join()),
                "first": attempt("first", lambda model, recorder: Join([recorder, model])),
                "shares": attempt("shares", both, keep=dualform.Shares(by="label")),
                "steps": attempt("steps", both, keep=dualform.Steps()),
                "detach": attempt("detach", both, on_failure="detach"),
                "optimizers": attempt("optimizers", both),
                "momentum": attempt("momentum", both, epochs=2),
            }

    told = run_together(tmp_path, work)
    for one in told:
        assert "inside of DistributedDataParallel.join()" in one["alone"]
        assert "Join([model, recorder])" in one["alone"]
        assert "Name the model first" in one["first"]
        assert "keeps shares or steps" in one["shares"]
        assert "keeps shares or steps" in one["steps"]
        assert 'on_failure="detach"' in one["detach"]
        assert "has a recorder of 2 optimizers" in one["optimizers"]
        assert "state or the parameters are not the same in all processes. After join()" in one["momentum"]


def test_a_recording_after_a_join_that_has_ended(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        model: Any = DistributedDataParallel(mlp())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                loss_of(model(torch.full((2, 5), 1.0 + rank))).backward()
                optimizer.step()

        def record(name: str, joins: bool) -> None:
            with dualform.record(model, optimizer, tmp_path / name) as recorder:
                joined: list[Any] = [model, recorder]
                with Join(joined) if joins else contextlib.nullcontext():
                    steps(2 + rank if joins else 2)

        record("joined", joins=True)
        record("after", joins=False)
        record("joined again", joins=True)
        with Join([model]):
            steps(2 + rank)
        with pytest.raises(RefusedError) as refused:
            record("after another", joins=False)
        Join([model], enable=False)
        record("told", joins=False)
        optimizer = sgd(model)  # whose momentum a process without batches does not follow
        record("momentum", joins=True)
        with pytest.raises(RefusedError, match="state or the parameters are not the same in all processes"):
            record("after momentum", joins=False)
        return str(refused.value)

    for told in run_together(tmp_path, work):
        assert "make Join([model], enable=False) once" in told
    for name, count in (("joined", 3), ("after", 2), ("joined again", 3), ("told", 2)):
        memory = dualform.open(tmp_path / name)
        assert memory.verify().passed
        assert Run(tmp_path / name).steps == count


def test_three_processes_run_out_one_by_one(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(tmp_path / "three", rank, (1, 4, 2), adamw, divide_by_initial_world_size=False)
            return move_before_the_join_ends(rank)

    def move_before_the_join_ends(rank: int) -> str:
        model: Any = DistributedDataParallel(mlp())
        optimizer = sgd(model)
        with dualform.record(model, optimizer, tmp_path / "moved") as recorder:
            both: list[Any] = [model, recorder]
            with Join(both):
                for _ in range(1 + rank):
                    loss_of(model(torch.ones(2, 5))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if rank == 2:  # the last one, from which all others have their parameters
                    with torch.no_grad():
                        model.module[0].weight += 1.0
            loss_of(model(torch.ones(2, 5))).backward()
            with pytest.raises(RefusedError) as refused:
                optimizer.step()
        return str(refused.value)

    first, second, third = run_together(tmp_path, work, size=3)
    for told in (first, second):
        assert "'0.weight' is not as the last step left it when all processes had joined" in told
    assert "'0.weight' changed between step 3 and step 4 by something other" in third
    memory = dualform.open(tmp_path / "three")
    assert memory.verify().passed
    assert [len(memory.where(rank=rank).patterns("0")) for rank in range(3)] == [3, 12, 6]
    factors = Run(tmp_path / "three").facts("0.weight")[1][:, 0]
    torch.testing.assert_close(factors.tolist(), [1 / 3, 1 / 2, 1.0, 1.0])
