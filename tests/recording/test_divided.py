"""Processes that have rows of the weights (fully_shard): what is recorded of odd divisions, and what is refused."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import CorruptError, QueryError
from dualform.recording.sharded_modules import own_part
from dualform.store import kept_state
from dualform.store.format import INITIAL, MANIFEST, rank_folder
from dualform.store.kept_state import differing, known_state
from dualform.store.manifest import Manifest
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile
from helpers.together import run_together

WHOLE = StateDictOptions(full_state_dict=True)
ROUNDED_WITHIN = 1e-2  # of the change, of gradients that are computed in bfloat16


class Recomputed(nn.Module):
    """A network whose middle part is computed again in the backward, and whose last layer has one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.middle = nn.Sequential(nn.Linear(7, 7), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        found: Tensor = self.last(hidden + checkpoint(self.middle, hidden, use_reentrant=False))
        return found


def divided(size: int, **options: Any) -> Recomputed:
    """Return the network, divided among all processes; its middle part apart from the rest."""
    model = Recomputed()
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model.middle, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, *, micros: int = 1) -> None:
    """Take one step on rows of this process's own."""
    optimizer.zero_grad()
    for micro in range(micros):
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        model(torch.randn(3, 5, generator=generator)).square().sum().backward()
    optimizer.step()


def test_odd_divisions(tmp_path: Path) -> None:
    """Seven rows and one row are divided among three processes, one of which has no row of the last layer."""

    def work(rank: int) -> list[float]:
        def record(name: str, model: nn.Module, *, evaluate: bool = False, micros: int = 1, **options: Any) -> float:
            optimizer = adamw(model)
            if evaluate:
                with torch.no_grad():
                    model(torch.ones(1, 5))
            with dualform.record(model, optimizer, tmp_path / name, **options) as recorder:
                for step in range(4):
                    take_step(model, optimizer, rank, step, micros=micros)
                    if evaluate:  # leaves the outermost parameters with all rows in place
                        with torch.no_grad():
                            model(torch.ones(1, 5))
            return recorder.unexplained

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        waiting = divided(3, mp_policy=policy)
        waiting.set_requires_gradient_sync(False)  # type: ignore[operator]
        take = waiting.forward

        def forward(inputs: Tensor, count: list[int] = [0]) -> Tensor:  # noqa: B006 (counts the calls)
            count[0] += 1
            waiting.set_requires_gradient_sync(count[0] % 2 == 0)  # type: ignore[operator]
            return take(inputs)

        waiting.forward = forward  # type: ignore[method-assign]
        return [
            record("evaluated", divided(3), evaluate=True),
            record("rounded", waiting, micros=2),
            record("keys", divided(3), layers={"*": "keys"}),
        ]

    for evaluated, rounded, _ in run_together(tmp_path, work, size=3):
        assert evaluated == 0.0 < rounded
    run = Run(tmp_path / "evaluated")
    places = [TensorFile(one.blob(INITIAL)).places for one in (run, *run.others) if one is not None]
    assert [place["first.weight"].shape for place in places] == [(3, 5), (3, 5), (1, 5)]
    assert [place["last.bias"].shape for place in places] == [(1,), (0,), (0,)]
    assert run.published.divided
    assert '"version": 4' in (tmp_path / "evaluated" / MANIFEST).read_text()
    memory = dualform.open(tmp_path / "evaluated")
    report = memory.verify()
    assert report.passed
    assert max(layer.error or 0.0 for layer in report.layers) < 1e-5
    assert memory.trained(Recomputed()).state_dict()["first.weight"].shape == (7, 5)
    report = dualform.open(tmp_path / "rounded").verify()
    assert report.passed
    assert 1e-6 < max(layer.error or 0.0 for layer in report.layers) < ROUNDED_WITHIN
    assert dualform.open(tmp_path / "keys").patterns("last").num_rows == 36


def continued(folder: Path, size: int, steps: range, **options: Any) -> list[int]:
    """Train some steps from and to the checkpoint of a folder in several processes; return where each began."""
    meeting = folder / f"meeting{len(list(folder.iterdir()))}"
    meeting.mkdir()
    place = folder / "checkpoint"

    def work(rank: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for gathering states on a CPU
            model = divided(size) if size > 1 else Recomputed()
            optimizer = adamw(model)
            if place.exists():
                saved = torch.load(place)
                set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=WHOLE)
            with dualform.record(model, optimizer, folder / "run", resume=True, **options) as recorder:
                first = recorder.step
                for step in steps:
                    recorder.annotate(process=rank)
                    take_step(model, optimizer, rank, step)
            states = get_state_dict(model, optimizer, options=WHOLE)
            torch.distributed.barrier()
            if not rank:
                torch.save(states, place)
        return first

    return run_together(meeting, work, size)


def test_a_divided_run_goes_on_in_another_number_of_processes(tmp_path: Path) -> None:
    assert continued(tmp_path, 2, range(3)) == [0, 0]
    assert continued(tmp_path, 3, range(3, 6)) == [3, 3, 3]
    assert continued(tmp_path, 1, range(6, 8)) == [6]
    assert dualform.open(tmp_path / "run").verify().passed
    assert continued(tmp_path, 2, range(8, 10)) == [8, 8]
    run = Run(tmp_path / "run")
    assert (run.steps, run.published.processes) == (10, ((0, 2), (3, 3), (6, 1), (8, 2)))
    memory = dualform.open(tmp_path / "run")
    assert memory.verify().passed
    assert memory.at(step=4).verify(memory.at(step=4).weights()).passed


def test_shares_of_a_divided_run_go_on(tmp_path: Path) -> None:
    options = {"keep": dualform.Shares(by="process")}
    assert continued(tmp_path, 2, range(3), **options) == [0, 0]
    assert continued(tmp_path, 2, range(3, 6), **options) == [3, 3]
    memory = dualform.open(tmp_path / "run")
    assert memory.verify().passed
    for shares in memory.shares("process").values():
        assert shares.labels == (0, 1)


def test_a_run_that_not_all_processes_began_is_begun_again(tmp_path: Path) -> None:
    continued(tmp_path, 2, range(0))
    checkpoint_file = tmp_path / "checkpoint"
    checkpoint_file.unlink()
    shutil.rmtree(tmp_path / "run" / rank_folder(1))
    with pytest.raises(CorruptError, match=r"expected \(7, 5\)"):
        _ = Run(tmp_path / "run").initial
    assert continued(tmp_path, 2, range(2)) == [0, 0]
    assert dualform.open(tmp_path / "run").verify().passed
    other = tmp_path / "run" / rank_folder(1)
    manifest = Manifest.read(other)
    entry = manifest.files[INITIAL]
    content = (other / INITIAL).read_bytes()
    assert entry.bytes == len(content)
    (other / INITIAL).write_bytes(content[:-4] + b"\0\0\x80\x7f")
    report = dualform.open(tmp_path / "run")
    with pytest.raises(CorruptError, match="checksum"):
        report.verify()


class Reused(nn.Module):
    """A network that calls one layer three times, and another never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.never = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.first(inputs)
        for _ in range(3):
            found = self.again(torch.tanh(found))
        return found


def test_ways_to_train(tmp_path: Path) -> None:
    """Two optimizers in turn, gradients that are zeroed and skipped, a warm start, and layers that are frozen first."""

    def work(rank: int) -> None:
        def record(name: str, train: Callable[[nn.Module, Callable[..., Any]], None]) -> None:
            model = Reused()
            mesh = init_device_mesh("cpu", (2,))
            fully_shard(model.again, mesh=mesh)
            fully_shard(model, mesh=mesh)
            train(model, lambda *optimizers, **options: dualform.record(model, optimizers, tmp_path / name, **options))

        def backward(model: nn.Module, step: int) -> None:
            model(torch.randn(3, 5, generator=torch.Generator().manual_seed(2 * step + rank))).square().sum().backward()

        def in_turn(model: nn.Module, recording: Callable[..., Any]) -> None:
            adam = torch.optim.AdamW(model.get_submodule("first").parameters(), lr=0.01)
            sgd = torch.optim.SGD(model.get_submodule("again").parameters(), lr=0.01, momentum=0.9)
            with recording(adam, sgd):
                for step in range(4):
                    model.zero_grad()
                    backward(model, step)
                    adam.step()
                    if step % 2:
                        sgd.step()

        def zeroed(model: nn.Module, recording: Callable[..., Any]) -> None:
            optimizer = adamw(model)
            with recording(optimizer):
                for step in range(4):
                    optimizer.zero_grad(set_to_none=step == 1)
                    backward(model, step)
                    if step != 2:
                        optimizer.step()

        def warm(model: nn.Module, recording: Callable[..., Any]) -> None:
            optimizer = adamw(model)
            take_step(model, optimizer, rank, 0)
            model.get_submodule("first").requires_grad_(requires_grad=False)
            with recording(optimizer):
                take_step(model, optimizer, rank, 1)
                model.get_submodule("first").requires_grad_(requires_grad=True)
                take_step(model, optimizer, rank, 2)

        record("in turn", in_turn)
        record("zeroed", zeroed)
        record("warm", warm)

    run_together(tmp_path, work)
    steps = {"in turn": [0, 1, 2, 3], "zeroed": [0, 1, 2], "warm": [1]}
    for name, expected in steps.items():
        memory = dualform.open(tmp_path / name)
        report = memory.verify()
        assert report.passed, name
        assert max(layer.error or 0.0 for layer in report.layers) < 1e-5
        assert sorted(set(memory.patterns("first")["step"].to_pylist())) == expected


class OwnRMSNorm(nn.Module):
    """A norm of a project's own, which is recognised by what it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * (inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + self.eps))


class Speaking(nn.Module):
    """A network with positions, a norm of its own, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.rmsnorm, self.lstm, self.head = OwnRMSNorm(6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        found: Tensor = self.head(self.lstm(self.rmsnorm(hidden))[0])
        return found


def test_kinds_and_rows_of_layers_are_found_as_in_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for what a recurrent layer returns
            model = Speaking()
            mesh = init_device_mesh("cpu", (2,))
            for part in (model.rmsnorm, model.lstm, model):
                fully_shard(part, mesh=mesh)
            optimizer = adamw(model)
            with dualform.record(model, optimizer, tmp_path / "run") as recorder:
                for step in range(2):
                    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(2 * step + rank))
                    recorder.annotate(token=tokens.numpy())
                    optimizer.zero_grad()
                    model(tokens).square().mean().backward()
                    optimizer.step()

    run_together(tmp_path, work)
    run = Run(tmp_path / "run")
    assert [layer.kind for layer in run.layers.values()] == ["Embedding", "Embedding", "RMSNorm", "LSTM", "Linear"]
    found = {name: check.outcome for name, check in run.manifest.rows.items()}
    assert found == {**dict.fromkeys(run.layers, "proved"), "places": "not aligned"}
    assert dualform.open(tmp_path / "run").verify().passed


class Partly(nn.Module):
    """A network with a frozen layer, and with a matrix that no layer covers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen, self.head = nn.Linear(5, 5).requires_grad_(requires_grad=False), nn.Linear(5, 3)
        self.matrix = nn.Parameter(torch.randn(5, 5))
        self.register_buffer("offset", torch.ones(5) * seed)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.frozen(inputs) @ self.matrix + self.offset))
        return found


@pytest.mark.parametrize("kept", ["values", "checksums"])
def test_state_that_no_layer_covers_is_kept_by_rows(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kept == "checksums":
        monkeypatch.setattr(kept_state, "FROZEN_BYTES", 10)

    def work(rank: int) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the matrix, which is not recorded
            model = Partly(1)
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
            with dualform.record(model, optimizer, tmp_path / "run"):
                for step in range(2):
                    take_step(model, optimizer, rank, step)
            return {
                name: getattr(one, "full_tensor", lambda one=one: one)().numpy()
                for name, one in model.state_dict().items()
            }

    expected = run_together(tmp_path, work)[0]
    memory = dualform.open(tmp_path / "run")
    model = Partly(2 if kept == "values" else 1)
    trained = memory.trained(model)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, torch.from_numpy(expected[name]), rtol=0, atol=0)
    run = Run(tmp_path / "run")
    known = known_state(run)
    assert known is not None
    assert known.unknown == {}
    assert set(known.checksums) == ({"frozen.weight", "frozen.bias"} if kept == "checksums" else set())
    assert differing(run, trained) == {}
    with torch.no_grad():
        trained.get_parameter("frozen.weight")[4, 4] += 1.0  # a row of the second process
    assert set(differing(run, trained)) == {"frozen.weight"}
    if kept == "checksums":
        with pytest.raises(QueryError, match=r"frozen.weight"):
            memory.trained(trained)


def test_what_cannot_be_recorded_of_rows_is_refused_in_all_processes(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, str]:
        def attempt(name: str, spoil: Callable[[nn.Module], None], *, before: bool = False, **options: Any) -> str:
            model = divided(2)
            optimizer = adamw(model)
            try:
                with dualform.record(model, optimizer, tmp_path / name, **options) as recorder:
                    for step in range(2):
                        recorder.annotate(step_number=step)
                        if before:
                            spoil(model)
                        optimizer.zero_grad()
                        model(torch.ones(2, 5) * (rank + 1)).square().sum().backward()
                        if not before:
                            spoil(model)
                        optimizer.step()
            except dualform.DualformError as error:
                return str(error)
            return "recorded"

        def edit_rows(model: nn.Module) -> None:
            if rank:
                own_part(model.get_parameter("first.weight"))[0] += 1.0

        def decay(model: nn.Module) -> None:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=0.1)

        def keep_apart(model: nn.Module) -> None:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                "edit": attempt("edit", edit_rows),
                "decay": attempt("decay", decay),
                "not reduced": attempt("apart", keep_apart, before=True),
            }

    first, second = run_together(tmp_path, work)
    assert "Another process of this training cannot record" in first["edit"]
    assert "'first.weight' changed after the recording began and before step 1" in second["edit"]
    for told in (first, second):
        assert "is not made of the gradients of all 2 processes by one factor" in told["decay"]
        assert "was not cleared after the previous step" in told["not reduced"]
