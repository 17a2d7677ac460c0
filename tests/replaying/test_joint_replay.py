"""Two processes that recorded the steps of their training run it again together, and answer as stored patterns do."""

import contextlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.attend.memory import Memory
from dualform.errors import RefusedError, ReplayError
from dualform.replaying import replayed_patterns
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Recording, Train, record_training
from dualform.store.format import rank_folder, restart_file
from dualform.store.reader import Run
from helpers.joint_trainings import Tied, adamw, batches, sgd, train_jointly
from helpers.loops import WITHIN, mlp
from helpers.together import run_together

STEPS = 4
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "plain": (mlp, sgd, {}),
    "accumulated": (mlp, adamw, {"micros": 2, "no_sync": True, "clip": True}),
    "reduced each time": (mlp, sgd, {"micros": 2}),
    "tied": (Tied, adamw, {"clip": True}),
    "divided": (mlp, sgd, {"wrap": "rows", "micros": 2, "no_sync": True, "clip": True}),
    "divided, tied": (Tied, adamw, {"wrap": "rows", "clip": True}),
}


def make_training(name: str, rank: int | None, **broken: Any) -> Train:
    """Return the training function of a case in one of its processes, or of all rows in one process."""
    make, make_optimizer, options = CASES[name]

    def train(recording: Recording) -> None:
        train_jointly(recording, make(), make_optimizer, rank, **{"steps": STEPS, **options, **broken})

    return train


def answers(memory: dualform.Memory, name: str) -> dict[str, Any]:
    """Ask a memory, and return what it says."""
    make = CASES[name][0]
    model = memory.trained(make())
    inputs = next(batches(make(), 1, 1, None))[0][0][:2]
    spotlight = memory.attend(model, inputs)
    layer = next(iter(memory.layers))
    best = spotlight[layer].top(5)
    report = memory.verify()
    return {
        "passed": report.passed,
        "error": max(one.error or 0.0 for one in report.layers),
        "shares": {name: one.shares for name, one in memory.shares("label").items()},
        "totals": {name: spotlight[name].totals("label").values for name in (layer, "head") if name in memory.layers},
        "contributions": spotlight[layer].totals("label", of="contribution").values,
        "best": best.values,
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with runs of steps and of patterns by two processes, and what each process was told of every case."""
    folder = tmp_path_factory.mktemp("told")

    def work(rank: int) -> None:
        found: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for tiny models
            for name in CASES:
                train = make_training(name, rank)
                record_training(train, folder / name)
                record_training(train, folder / f"{name}, patterns", keep=dualform.Patterns())
                memory = dualform.open(folder / name, train=train)
                found[name] = answers(memory, name), answers(dualform.open(folder / f"{name}, patterns"), name)
        torch.save(found, folder / f"told{rank}")

    run_together(folder, work)
    return folder, [torch.load(folder / f"told{rank}") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_steps_answer_as_patterns_and_as_one_process_do(
    name: str, told: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, found = told
    run = Run(folder / name)
    assert (run.steps, run.description.processes, run.description.closed) == (STEPS, 2, True)
    assert {layer.store for layer in run.layers.values()} == {"steps"}
    for steps, patterns in [each[name] for each in found]:
        assert steps.pop("passed")
        assert patterns.pop("passed")
        assert steps["error"] < WITHIN[torch.float32]
        torch.testing.assert_close(steps, patterns, rtol=0, atol=0)
    record_training(make_training(name, None), tmp_path / "one", keep=dualform.Patterns())
    one = answers(dualform.open(tmp_path / "one"), name)
    for answer in ("shares", "totals"):
        for where, expected in one[answer].items():
            mine = steps[answer][where]
            if where.endswith("in_proj_bias"):  # the true gradient of a key bias is zero: Adam trains on its rounding
                mine, expected = mine[:, 16:], expected[:, 16:]
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


def test_one_process_is_told_how_to_ask_and_finds_what_was_answered(told: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = told
    memory = dualform.open(folder / "plain", train=make_training("plain", 0))
    inputs = next(batches(mlp(), 1, 1, None))[0][0][:2]
    spotlight = memory.attend(memory.trained(mlp()), inputs)
    assert torch.equal(spotlight["0"].totals("label").values, found[0]["plain"][0]["totals"]["0"])
    assert memory.patterns("0")["rank"].to_pylist() == ([0] * 4 + [1] * 4) * STEPS  # addresses need no replay
    with pytest.raises(ReplayError, match=r"2 processes recorded .*only this one here.*torchrun --nproc_per_node 2"):
        memory.weights()


def test_what_differs_between_two_processes_ends_the_replay_in_both(
    told: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one process alone would leave the other waiting for its gradients."""
    folder, _ = told

    def attempt(ask: Callable[[dualform.Memory], Any], train: Train, path: str = "plain", **options: Any) -> str:
        try:
            ask(dualform.open(folder / path, train=train, **options))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "answered"

    def take_fails(memory: dualform.Memory) -> None:
        source = memory._run
        assert isinstance(source, ReplayedPatterns)

        def take(part: object, steps: range) -> None:
            if torch.distributed.get_rank() and steps.stop == 2:
                raise MemoryError("no memory is left")

        monkeypatch.setattr(replayed_patterns, "WINDOW_BYTES", 1)
        source.replay({"0": "keys"}, take, steps=STEPS)

    def ask_for_some_steps(memory: dualform.Memory) -> None:
        source = memory._run
        assert isinstance(source, ReplayedPatterns)
        source.replay({}, lambda part, steps: None, steps=2 + torch.distributed.get_rank())

    def ask_in_another_order(memory: dualform.Memory) -> None:
        source = memory._run
        assert isinstance(source, ReplayedPatterns)
        layers = reversed(source.layers) if torch.distributed.get_rank() else iter(source.layers)
        source.replay(dict.fromkeys(layers, "keys"), lambda part, steps: None, steps=1)

    def work(rank: int) -> dict[str, str]:
        train, other = make_training("plain", rank), make_training("plain", 0)
        broken = make_training("plain", rank, scale=1.0 if rank == 0 else 1.1)
        weights = dualform.Memory.weights
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                "data": attempt(weights, other),
                "loss": attempt(weights, broken),
                "length": attempt(weights, make_training("plain", rank, steps=STEPS - 1)),
                "question": attempt(ask_for_some_steps, train),
                "run": attempt(weights, train, path="plain" if rank else "plain, again"),
                "failing": attempt(take_fails, train),
                "unrolled": attempt(lambda memory: memory._run.walk_back(print, steps=1), train),
                "reported": attempt(weights, broken, on_difference="report"),
                "same": attempt(weights, train),
                "ordered otherwise": attempt(ask_in_another_order, train),
            }

    meeting = folder / "meeting"
    meeting.mkdir()
    shutil.copytree(folder / "tied", folder / "plain, again")
    first, second = run_together(meeting, work)
    assert first["data"] == second["data"]
    assert first["data"].startswith("ReplayError: Process 0: The replay is not the recorded training: in step 0, param")
    assert "Process 1: The replay is not the recorded training: in step 0, the annotations" in first["data"]
    assert "in step 0, parameter" in first["loss"]
    assert "in step 0, parameter" in second["loss"]  # the reduced gradient is another in both
    assert f"it took {STEPS - 1} steps; recorded were {STEPS}" in first["length"]
    assert first["question"] == second["question"]
    assert "ask for different things" in first["question"]
    assert "ask for different things" in first["run"]
    assert second["failing"] == "MemoryError: no memory is left"
    assert first["failing"] == "ReplayError: Process 1: MemoryError: no memory is left"
    assert "Unrolled effects differentiate a training in one process" in first["unrolled"]
    assert first["reported"] == first["same"] == second["same"] == "answered"
    assert first["ordered otherwise"] == "answered"  # processes of torchrun hash texts differently


def test_other_numbers_of_processes_are_refused(told: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = told

    def work(rank: int) -> str:
        with pytest.raises(ReplayError) as replayed:
            dualform.open(folder / "plain", train=make_training("plain", rank)).weights()
        group = torch.distributed.new_group([0, 1])
        if rank == 2:
            return str(replayed.value)
        model = DistributedDataParallel(mlp(), process_group=group)
        with pytest.raises(RefusedError, match="2 of 3 train together here"):
            dualform.record(model, sgd(model), folder / "some", keep=dualform.Steps())
        return str(replayed.value)

    meeting = folder / "three"
    meeting.mkdir()
    for message in run_together(meeting, work, size=3):
        assert "torch.distributed has 3 here" in message
        assert "torchrun --nproc_per_node 2" in message


def test_patterns_are_stored_by_a_replay_and_a_training_starts_anywhere(
    told: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = told

    def work(rank: int) -> list[int]:
        train = make_training("accumulated", rank)
        dualform.replay(train, folder / "accumulated", keep=dualform.Patterns(layers="0"), to=tmp_path / "stored")
        stored = dualform.open(tmp_path / "stored", train=train)
        assert [Run(tmp_path / "stored").layers[name].store for name in ("0", "2")] == ["keys+values", "steps"]
        assert stored.verify().passed
        with pytest.raises(ReplayError, match="the annotations are not"):
            dualform.replay(
                make_training("accumulated", 1 - rank),
                folder / "accumulated",
                keep=dualform.Patterns(layers="0"),
                to=tmp_path / "other",
            )

        def init() -> dict[str, Any]:
            torch.manual_seed(0)
            model = DistributedDataParallel(mlp())
            torch.manual_seed(rank)
            return {"model": model, "optimizer": adamw(model), "seen": 0}

        def step(state: dict[str, Any], batch: torch.Tensor) -> None:
            taken.append(state["seen"])
            state["optimizer"].zero_grad()
            state["model"](batch + torch.rand(4, 5)).square().sum().backward()
            state["optimizer"].step()
            state["seen"] += 1

        taken: list[int] = []
        inputs = [torch.full((4, 5), float(rank + number)) for number in range(9)]
        columns = {"columns": lambda batch: {"rank of mine": rank}}
        restartable = dualform.Restartable(init, step, inputs, **columns)  # type: ignore[arg-type]
        record_training(restartable, tmp_path / "pieces")
        source = ReplayedPatterns(Run(tmp_path / "pieces"), restartable, held_bytes=0)
        memory = Memory(source, ReplayExecutor())
        assert memory.verify().passed
        taken.clear()
        place = tmp_path / "pieces"
        (place / rank_folder(1) / restart_file(6) if rank else place / restart_file(3)).unlink()
        source.replay({}, lambda part, steps: None, steps=8, first=7)
        return taken

    for taken in run_together(tmp_path, work):
        assert taken == list(range(8))  # neither has a point that the other has too


def test_processes_that_take_each_others_rows_are_found(tmp_path: Path) -> None:
    """Both move the parameters alike, no recorded layer takes the network's inputs, and nothing is annotated."""

    def make(rank: int) -> Train:
        def train(recording: Recording) -> None:
            torch.manual_seed(0)
            model = DistributedDataParallel(mlp())
            optimizer = sgd(model)
            generator = torch.Generator().manual_seed(rank)
            with recording(model, optimizer, layers=["2"]):
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
                    optimizer.step()

        return train

    def work(rank: int) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record_training(make(rank), tmp_path / "run")
            assert dualform.open(tmp_path / "run", train=make(rank)).verify().passed
            with pytest.raises(ReplayError) as refused:
                dualform.open(tmp_path / "run", train=make(1 - rank)).weights()
        return str(refused.value)

    for message in run_together(tmp_path, work):
        assert "in step 0, its backwards are others than those that were recorded" in message


@pytest.mark.parametrize("rows", [False, True], ids=["whole", "divided"])
def test_processes_may_accumulate_different_numbers_of_backwards(rows: bool, tmp_path: Path) -> None:
    """Every other step has two backwards in process 0 and three in process 1, whose factors are recorded for both."""

    def make(rank: int, most: int = 3) -> Train:
        def train(recording: Recording) -> None:
            plain = mlp()
            model: Any = plain if rows else DistributedDataParallel(plain)
            if rows:
                # Parameters stay whole until a step's last backward: otherwise each forward would wait for the other's.
                fully_shard(plain, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
            optimizer = adamw(model)
            generator = torch.Generator().manual_seed(rank)
            with recording(model, optimizer) as recorder:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    backwards = (most if rank else 2) if step % 2 else 1
                    for number in range(backwards):
                        last = number == backwards - 1
                        if rows:
                            model.set_requires_gradient_sync(last)
                            model.set_reshard_after_backward(last)
                        if recorder is not None:
                            recorder.annotate(label=torch.randint(3, (4,), generator=generator))
                        with contextlib.nullcontext() if rows or last else model.no_sync():
                            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
                    optimizer.step()

        return train

    def work(rank: int) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record_training(make(rank), tmp_path / "run")
            record_training(make(rank), tmp_path / "patterns", keep=dualform.Patterns())
            refused = []
            for most in (2, 4):
                with pytest.raises(ReplayError) as difference:
                    dualform.open(tmp_path / "run", train=make(rank, most)).weights()
                refused.append(str(difference.value))
            steps = answers(dualform.open(tmp_path / "run", train=make(rank)), "plain")
            patterns = answers(dualform.open(tmp_path / "patterns"), "plain")
        assert steps.pop("passed")
        assert patterns.pop("passed")
        torch.testing.assert_close(steps, patterns, rtol=0, atol=0)
        return refused

    for refused in run_together(tmp_path, work):
        for message in refused:
            assert "in step 1, the layers were called with other numbers of rows, or other layers" in message
