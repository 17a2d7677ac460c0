"""Shares of weights that processes have rows of: each folds its own, and together they are those of one process."""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dualform
from dualform.errors import CorruptError, RefusedError
from dualform.store.format import MANIFEST, rank_folder, shares_file, shares_state_file
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile
from helpers.manifests import write_manifest
from helpers.together import run_together

STEPS, MICROS, ROWS = 3, 2, 6
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-9}  # of the largest share
ROUNDED_WITHIN = 1e-2  # of the change, of gradients that are computed in bfloat16


class Tied(nn.Module):
    """A Transformer whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        found: Tensor = self.head(self.block(hidden))
        return found


def mlp() -> nn.Module:
    """Return a network with a layer of one row, and with a normalisation."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def lstm() -> nn.Module:
    """Return a network whose weights are used by slices."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.cell, self.head = nn.Embedding(11, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.head(self.cell(self.tokens(tokens))[0])
            return found

    return Recurrent()


Making = Callable[[nn.Module], torch.optim.Optimizer]


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # With the usual 1e-8 an element whose gradient nearly vanishes turns on how a processor rounds its sum.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-6)


CASES: dict[str, tuple[Callable[[], nn.Module], Making, list[list[Any]]]] = {
    "mlp, Nesterov": (mlp, nesterov, [["label"], ["sample"]]),
    "mlp, SGD": (mlp, sgd, [["label", "step"]]),
    # AdamW makes as much of the rounding of an element whose gradient nearly vanishes as of a gradient.
    "mlp, AdamW": (lambda: mlp().double(), adamw, [["label"], ["sample"]]),
    "tied, Nesterov": (Tied, nesterov, [["label"]]),
    "tied, AdamW": (lambda: Tied().double(), adamw, [["label"]]),
    "lstm, AdamW": (lambda: lstm().double(), adamw, [["label"]]),
}


def divide(model: nn.Module, size: int, **options: Any) -> nn.Module:
    """Divide a model by rows among all processes, one part of it apart from the rest."""
    mesh = init_device_mesh("cpu", (size,))
    apart = next(name for name in ("block", "head", "0") if name in dict(model.named_children()))
    fully_shard(model.get_submodule(apart), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch(model: nn.Module, step: int, micro: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, labels and numbers of samples for all processes; labels come and go."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    tokens = torch.randint(11, (ROWS, 4), generator=generator)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(ROWS, 5, generator=generator).to(dtype) if isinstance(model, nn.Sequential) else tokens
    labels = torch.randint(3, (ROWS,), generator=generator) + step // 2
    return inputs, labels, torch.arange(ROWS) + ROWS * micro


def train(place: Any, model: nn.Module, make: Making, by: Any, rank: int = 0, size: int = 1, **options: Any) -> None:
    """Record a training with accumulated and clipped gradients, in one process or in one of several."""
    optimizer = make(model)
    with dualform.record(model, optimizer, place, keep=dualform.Shares(by=by, at=[2]), **options) as recorder:
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(MICROS):
                rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
                inputs, labels, samples = (one[rows] for one in batch(model, step, micro))
                if size > 1 and step % 2:  # reduced once in a step, and after each backward
                    model.set_requires_gradient_sync(micro == MICROS - 1)  # type: ignore[operator]
                recorder.annotate(label=labels, sample=samples)
                losses = model(inputs).flatten(1).square().sum(dim=1) * (1 + labels)
                (losses.sum() * size / ROWS / MICROS).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of every case, by three processes."""
    folder = tmp_path_factory.mktemp("runs")

    def work(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, for tiny models
            for name, (make, make_optimizer, by) in CASES.items():
                train(folder / name, divide(make(), 3), make_optimizer, by, rank, 3)

    run_together(folder, work, size=3)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_shares_are_those_of_one_process_with_all_rows(name: str, runs: Path, tmp_path: Path) -> None:
    make, make_optimizer, by = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(tmp_path / "one", make(), make_optimizer, by)
    both, one = Run(runs / name).kept_shares, Run(tmp_path / "one").kept_shares
    assert both is not None
    assert one is not None
    assert both.horizons == one.horizons == (2, STEPS)
    assert dualform.open(runs / name).verify().passed
    for parameter in Run(tmp_path / "one").manifest.parameters:
        for columns in one.groupings:
            for horizon in one.horizons:
                found = both.shares(parameter, columns, horizon=horizon)
                expected = one.shares(parameter, columns, horizon=horizon)
                assert found.labels == expected.labels
                for mine, theirs in ((found.shares, expected.shares), (found.start, expected.start)):
                    apart = (mine.double() - theirs.double()).abs()
                    if parameter.endswith("in_proj_bias"):  # the true gradient of a key bias is zero
                        apart[..., 8:16] = 0.0
                    within = WITHIN[expected.shares.dtype] * float(theirs.abs().max())
                    assert float(apart.max()) <= within, (parameter, columns, horizon)
    for layer in set(Run(tmp_path / "one").layers) - {"places"}:  # which runs once in a forward, in each process
        for columns in one.groupings:
            mine_keys, their_keys = both.key_sums(layer, columns), one.key_sums(layer, columns)
            assert torch.equal(mine_keys.counts, their_keys.counts)
            torch.testing.assert_close(mine_keys.sums, their_keys.sums, rtol=1e-4, atol=1e-4)


def test_each_process_keeps_its_own_rows_alone(runs: Path) -> None:
    run = Run(runs / "mlp, AdamW")
    each = [TensorFile(one.blob(shares_file(STEPS))).places for one in (run, *run.others) if one is not None]
    place = list(run.manifest.parameters).index("0.weight")
    layer = list(run.layers).index("0")
    for what in (f"unexplained.{place}", f"share.0.{layer}.0.0", f"rounding.{place}"):
        assert [places[what].shape for places in each] == [(3, 5), (3, 5), (1, 5)]
    last = list(run.layers).index("5")
    assert [places[f"share.0.{last}.0.0"].shape for places in each] == [(1, 3), (0, 3), (0, 3)]


def test_shares_of_which_a_process_has_other_groups_are_refused_by_name(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "mlp, SGD", tmp_path / "run")
    place = tmp_path / "run" / rank_folder(1)
    document = json.loads((place / MANIFEST).read_text())
    del document["xxh3"]
    labels = document["shares"]["groupings"][0]["labels"]
    labels[0], labels[1] = labels[1], labels[0]
    write_manifest(place, document)
    with pytest.raises(CorruptError, match="keep shares of different groups by label, step"):
        dualform.open(tmp_path / "run").shares(["label", "step"])


def test_a_process_that_was_killed_may_know_fewer_groups(runs: Path, tmp_path: Path) -> None:
    whole = Run(runs / "mlp, SGD").kept_shares
    shutil.copytree(runs / "mlp, SGD", tmp_path / "run")
    place = tmp_path / "run" / rank_folder(1)
    document = json.loads((place / MANIFEST).read_text())
    del document["xxh3"]
    shares = document["shares"]
    labels = shares["groupings"][0]["labels"]
    shares["groupings"][0]["labels"] = [label for label in labels if int(label[1][1]) < 2]
    shares |= {"horizons": [2], "state": None, "earlier_state": None}
    document["files"] = {name: entry for name, entry in document["files"].items() if name != shares_file(STEPS)}
    document["files"].pop(shares_state_file(STEPS))
    document["files"].pop(shares_state_file(2), None)
    write_manifest(place, document)
    found = Run(tmp_path / "run").kept_shares
    assert whole is not None
    assert found is not None
    assert found.horizons == (2,)
    mine, expected = (one.shares("0.weight", ("label", "step"), horizon=2) for one in (found, whole))
    assert mine.labels == expected.labels
    assert torch.equal(mine.shares, expected.shares)


@pytest.mark.parametrize("on_failure", ["raise", "detach"])
@pytest.mark.parametrize("where", ["_rows", "_move", "_step"])  # before the exchanges, after one, and after all
def test_where_folding_fails_in_one_process_no_other_one_waits(
    where: str, on_failure: Literal["raise", "detach"], tmp_path: Path
) -> None:
    def work(rank: int) -> list[str]:
        model = divide(mlp(), 2)
        optimizer = sgd(model)
        told: list[str] = []
        keep = dualform.Shares(by="label")
        recorder = dualform.record(model, optimizer, tmp_path / "run", keep=keep, on_failure=on_failure).start()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(4):
                inputs, labels, _ = batch(model, 2 * step + rank, 0)
                recorder.annotate(label=labels)
                optimizer.zero_grad()
                model(inputs).square().sum().backward()
                if rank and step == 2:
                    fail_after(recorder._steps._sink._fold, where)  # type: ignore[attr-defined]
                try:
                    optimizer.step()
                except RefusedError as error:
                    told.append(str(error))
        told += [str(one.message) for one in warned if "Recording stopped" in str(one.message)]
        return [*told, f"closed: {recorder.closed}"]

    def fail_after(fold: Any, name: str) -> None:
        whole = getattr(fold, name)

        def failing(*given: Any) -> None:
            whole(*given)
            raise MemoryError("no memory is left")

        setattr(fold, name, failing)

    for told, cause in zip(run_together(tmp_path, work), ("Another process of this", "no memory is left"), strict=True):
        assert cause in told[0]
        if on_failure == "raise":
            assert told[1].startswith("An earlier step was not recorded")
            assert told[2:] == ["closed: False"]
        else:
            assert told[0].startswith("Recording stopped at step 2 and training goes on without it")
            assert told[1:] == ["closed: True"]


def test_rounded_and_recomputed_and_refused(tmp_path: Path) -> None:
    """A policy of mixed precision with recomputed activations; groups of all processes that are too many; parts."""

    def work(rank: int) -> dict[str, str]:
        def attempt(
            name: str, model: nn.Module, make: Making = sgd, *, groups: int = 64, before: Any = None, **options: Any
        ) -> str:
            optimizer = make(model)
            try:
                keep = dualform.Shares(by="label", groups=groups)
                with dualform.record(model, optimizer, tmp_path / name, keep=keep, **options) as recorder:
                    for step in range(3):
                        recorder.annotate(label=torch.tensor([0, 10 * (1 + rank), 10 * (1 + rank) + step]))
                        optimizer.zero_grad()
                        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(2 * step + rank))
                        model(inputs).square().sum().backward()
                        if before is None:
                            optimizer.step()
                            continue
                        before(recorder, step)
                        with contextlib.suppress(RefusedError if step == 0 else ZeroDivisionError):
                            optimizer.step()
            except dualform.DualformError as error:
                return str(error)
            return "recorded"

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            layers = list(mlp().children())
            recomputed = nn.Sequential(*(checkpoint_wrapper(part) for part in (layers[0], nn.Sequential(*layers[1:]))))
            partly = mlp()
            fully_shard(partly.get_submodule("0"), mesh=init_device_mesh("cpu", (2,)))

            def fail_later(recorder: Any, step: int) -> None:
                fold = recorder._steps._sink._fold
                whole = fold.step

                def failing(facts: Any) -> None:
                    whole(facts)
                    raise MemoryError("in one process")

                fold.step = failing if rank and step == 0 else whole

            return {
                "failed": attempt("failed", divide(mlp(), 2), before=fail_later),
                "rounded": attempt("rounded", divide(recomputed, 2, mp_policy=policy), adamw),
                "too many": attempt("many", divide(mlp(), 2), groups=4),  # each process has up to 4
                "again": attempt("many", nn.parallel.DistributedDataParallel(mlp()), resume=True),
                "partly": attempt("partly", partly),
            }

    told_of: list[dict[str, str]] = []
    for told in run_together(tmp_path, work):
        assert told["rounded"] == "recorded"
        assert "An earlier step was not recorded" in told["failed"] or "Another process" in told["failed"]
        assert "is one group more than the 4 that shares by label are kept for" in told["too many"]
        told_of.append(told)
    for name, words in (
        ("again", "keeps shares of divided weights, and the weights are whole now"),
        ("partly", "is whole in every process, while others are divided by rows"),
    ):
        assert any(words in told[name] for told in told_of)
        assert all(words in told[name] or "could not begin" in told[name] for told in told_of)
    assert Run(tmp_path / "many").steps == 1
    report = dualform.open(tmp_path / "rounded").verify()
    assert "explains 99.9" in str(report)  # what a policy rounds is no pattern's, and is reported
    checks = [check for layer in report.layers for check in layer.parameters]
    parts = [check.rest.unexplained / check.change for check in checks if check.rest is not None]
    assert 1e-7 < max(parts) < ROUNDED_WITHIN
