"""Two processes that train with DistributedDataParallel make one run, which is that of one process with all rows."""

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.store.reader import Run
from helpers.joint_trainings import STEPS, Tied, adamw, batches, sgd, train_jointly
from helpers.loops import WITHIN, mlp
from helpers.together import run_together

OF: tuple[Literal["attention", "magnitude"], ...] = ("attention", "magnitude")
FEW = 12  # steps of a case whose other settings a longer one has
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "plain": (mlp, sgd, {}),
    "accumulated": (mlp, adamw, {"micros": 2, "no_sync": True, "clip": True}),
    "reduced each time": (mlp, sgd, {"micros": 2}),
    "tied": (Tied, adamw, {"clip": True}),
    "tied, accumulated": (Tied, sgd, {"steps": FEW, "micros": 2, "no_sync": True, "clip": True}),
    "shares": (mlp, sgd, {"keep": dualform.Shares(by="label")}),
    "tied, shares": (Tied, adamw, {"clip": True, "keep": dualform.Shares(by="label")}),
    "bucket views": (mlp, adamw, {"wrap": {"gradient_as_bucket_view": True, "static_graph": True}}),
    "divided": (mlp, sgd, {"wrap": "rows"}),
    "divided, accumulated": (mlp, adamw, {"wrap": "rows", "micros": 2, "no_sync": True, "clip": True}),
    "divided, reduced each time": (mlp, adamw, {"steps": FEW, "wrap": "rows", "micros": 3, "clip": True}),
    "divided, tied": (Tied, adamw, {"steps": FEW, "wrap": "rows", "clip": True}),
    "divided, shares": (mlp, sgd, {"steps": FEW, "wrap": "rows", "micros": 2, "keep": dualform.Shares(by="label")}),
    "divided, tied, shares": (Tied, adamw, {"wrap": "rows", "clip": True, "keep": dualform.Shares(by="label")}),
    "divided, tied, accumulated": (
        Tied,
        sgd,
        {"steps": FEW, "wrap": "rows", "micros": 2, "no_sync": True, "clip": True},
    ),
}
ROUNDED_WITHIN = 3e-2  # of the change, of gradients that a communication hook rounds to float16
UNRECORDED = ("accumulated", "bucket views", "divided, accumulated")  # cases that are also trained without recording


def train(
    path: Path,
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rank: int | None,
    *,
    recorded: bool = True,
    keep: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Record a training in one process, or in one of several, and return the trained parameters."""

    def recording(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return dualform.record(model, optimizer, path, keep=keep) if recorded else contextlib.nullcontext()

    return train_jointly(recording, model, make_optimizer, rank, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of every case, by two processes; recording leaves a training as it is, to the bit."""
    folder = tmp_path_factory.mktemp("runs")

    def work(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for tiny models
            for name, (make, make_optimizer, options) in CASES.items():
                recorded = train(folder / name, make(), make_optimizer, rank, **options)
                if name in UNRECORDED:
                    plain = train(folder / name, make(), make_optimizer, rank, **options, recorded=False)
                    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)

    run_together(folder, work)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_two_processes_is_that_of_one_with_all_rows(name: str, runs: Path, tmp_path: Path) -> None:
    run = Run(runs / name)
    assert (run.steps, run.description.processes, run.description.closed) == (
        CASES[name][2].get("steps", STEPS),
        2,
        True,
    )
    both = dualform.open(runs / name)
    report = both.verify()
    assert report.passed
    assert max(layer.error or 0.0 for layer in report.layers) < WITHIN[torch.float32]
    rests = [check.rest for layer in report.layers for check in layer.parameters if check.rest is not None]
    assert bool(rests) == ("shares" in name)
    make, make_optimizer, options = CASES[name]
    train(tmp_path / "one", make(), make_optimizer, None, **options)
    one = dualform.open(tmp_path / "one")
    found, expected = both.shares("label"), one.shares("label")
    for parameter, shares in expected.items():
        mine, theirs = found[parameter].shares, shares.shares
        assert found[parameter].labels == shares.labels
        if parameter.endswith("in_proj_bias"):  # the true gradient of a key bias is zero: Adam trains on its rounding
            mine, theirs = mine[:, 16:], theirs[:, 16:]
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    model = both.trained(make())
    inputs = next(batches(model, 1, 1, None))[0][0][:2]
    spotlights = both.attend(model, inputs), one.attend(model, inputs, other_model=True)
    patterns = "shares" not in name
    for layer in one.layers if patterns else set(one.layers) - {"embedding"}:  # attention to tokens counts patterns
        for of in OF if patterns else OF[:1]:
            totals, other = (spotlight[layer].totals("label", of=of) for spotlight in spotlights)
            assert totals.groups == other.groups
            torch.testing.assert_close(totals.values, other.values, rtol=1e-3, atol=1e-3)


def test_a_pattern_has_the_rank_of_its_process(runs: Path) -> None:
    memory = dualform.open(runs / "accumulated")
    assert memory.columns == ("pattern", "rank", "step", "micro", "call", "row", "position", "label")
    table = memory.patterns("0").to_pydict()
    assert table["pattern"] == list(range(STEPS * 16))
    ranks = list(zip(table["step"], table["rank"], table["micro"], table["row"], strict=True))
    assert ranks == [(s, r, m, row) for s in range(STEPS) for r in range(2) for m in range(2) for row in range(4)]
    labels = list(batches(mlp(), STEPS, 2, None))
    expected = [int(labels[s][m][1][4 * r + row]) for s, r, m, row in ranks]
    assert table["label"] == expected
    assert len(memory.where(rank=1).patterns("0")) == len(memory.where("rank = 0").patterns("0")) == STEPS * 8


class Choosing(nn.Module):
    """A network of which each process uses a part of its own, and recomputes another in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for part in (self.parts[0], self.parts[1 + torch.distributed.get_rank()]):
            hidden = hidden + checkpoint(lambda x, part=part: torch.tanh(part(x)), hidden, use_reentrant=False)
        found: Tensor = self.last(hidden)
        return found


def test_unused_parts_recomputed_parts_and_rounded_gradients(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(tmp_path / "choosing", Choosing(), adamw, rank, wrap={"find_unused_parameters": True}, steps=8)
            train(tmp_path / "rounded", mlp(), sgd, rank, steps=8, hook=default_hooks.fp16_compress_hook)

    run_together(tmp_path, work)
    memory = dualform.open(tmp_path / "choosing")
    assert memory.verify().passed
    for part, rank in (("parts.1", 0), ("parts.2", 1)):
        assert set(memory.patterns(part)["rank"].to_pylist()) == {rank}
    rounded = dualform.open(tmp_path / "rounded").verify()
    assert rounded.passed
    assert all(1e-6 < (layer.error or 0.0) < ROUNDED_WITHIN for layer in rounded.layers)
    assert all(check.noise > 0.0 for layer in rounded.layers for check in layer.parameters)


def test_what_several_processes_cannot_record_is_refused_in_all_of_them(tmp_path: Path) -> None:
    def attempt(name: str, model: nn.Module, body: Callable[..., None], **options: Any) -> str:
        optimizer = sgd(model)
        try:
            with dualform.record(model, optimizer, tmp_path / name, **options) as recorder:
                body(model, optimizer, recorder)
        except dualform.DualformError as error:
            return str(error)
        return "recorded"

    def work(rank: int) -> dict[str, str]:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

        def edit(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            step(model, optimizer, recorder)
            if rank:
                model.module[0].weight.data.add_(1.0)  # type: ignore[index, union-attr]
            step(model, optimizer, recorder)

        def hidden_use(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            model(inputs).square().sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.1 * parameter.detach()
            optimizer.step()

        def clamp(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            model(inputs).square().sum().backward()
            if rank:
                model.module[0].weight.grad.clamp_(-1e-3, 1e-3)  # type: ignore[index, union-attr]
            optimizer.step()

        def annotate(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            recorder.annotate(rank=1)

        def join(model: Any, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            with model.join():
                for _ in range(rank + 1):
                    step(model, optimizer, recorder)

        def detach(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any) -> None:
            step(model, optimizer, recorder)
            if rank:
                recorder._steps.hook_failed("Layer '0'", ValueError("a hook's own failure"))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                step(model, optimizer, recorder)
            assert any("training goes on without it" in str(one.message) for one in told)
            assert recorder.closed
            step(model, optimizer, recorder)

        wrapped = DistributedDataParallel
        return {
            "detach": attempt("detach", wrapped(mlp()), detach, on_failure="detach"),
            "edit": attempt("edit", wrapped(mlp()), edit),
            "hidden use": attempt("hidden", wrapped(mlp()), hidden_use),
            "not reduced": attempt("alone", mlp(), step),
            "other start": attempt("other", mlp(seed=rank), step),
            "column": attempt("column", wrapped(mlp()), annotate),
            "join": attempt("join", wrapped(mlp()), join),
            "nested": attempt("nested", nn.Sequential(wrapped(mlp())), step),
            "clamped": attempt("clamped", wrapped(mlp()), clamp),
            "occupied": attempt("edit", wrapped(mlp()), step),
        }

    first, second = run_together(tmp_path, work)
    elsewhere = "Another process of this training cannot record this step"
    assert first["detach"] == second["detach"] == "recorded"
    assert first["edit"].startswith(elsewhere)
    assert "changed between step 1 and step 2" in second["edit"]
    assert first["clamped"].startswith(elsewhere)  # in a step that is checked in full
    assert "is not one factor times the sum of the gradients" in second["clamped"]
    for told in (first, second):
        assert "is not one factor times the sum of the gradients of all 2 processes" in told["hidden use"]
        assert "it is not reduced over these processes" in told["not reduced"]
        assert "do not begin with the same model" in told["other start"]
        assert "'rank' cannot be a column" in told["column"]
        assert "inside of DistributedDataParallel.join()" in told["join"]
        assert told["nested"].startswith("DistributedDataParallel ('0') is not supported")
    assert "holds a recorded run already" in first["occupied"]
    assert "could not begin to record" in second["occupied"]
    assert Run(tmp_path / "edit").steps == Run(tmp_path / "detach").steps == 1
    assert dualform.open(tmp_path / "edit").verify(dict(Run(tmp_path / "edit").initial)).step == 1
