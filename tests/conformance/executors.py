"""What every `Executor` must be: the answers of the plain one, for every reducer, fold, view and mixture of jobs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attend.conditions import Condition
from dualform.attend.groups import Table
from dualform.effects.rates import RatesOf
from dualform.engine.doubt import fold_doubts
from dualform.engine.jobs import Executor, Fold, Pass, Sweep
from dualform.engine.measures import PatternMeasure
from dualform.engine.plain import PlainExecutor
from dualform.engine.reducers import (
    Best,
    BestMembers,
    Everything,
    GroupPlaces,
    GroupShares,
    GroupSums,
    KeySums,
    Outputs,
)
from dualform.engine.shares import MaskGroup, SharesOf, fold_shares
from dualform.store.reader import Run

VIEWS: dict[str, tuple[tuple[Condition, ...], int]] = {
    "whole": ((), 9),
    "masked": ((Condition("label <> 1 and sample < 30"),), 9),
    "early": ((), 4),
}


@pytest.fixture(scope="session")
def executed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in several shards, whose first layer's keys repeat."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("executors") / "run"
    inputs = torch.randn(36, 40)
    model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, path, shard_bytes=6000) as recorder:
        for step in range(9):
            rows = torch.arange(12) + 12 * (step % 3)
            recorder.annotate(sample=rows, label=rows % 4)
            optimizer.zero_grad()
            model(inputs[rows]).square().mean().backward()
            optimizer.step()
    return Run(path)


@pytest.fixture(scope="session")
def folded_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in several shards whose layers are trained by AdamW, and share a weight; the last bias by SGD."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("folds") / "run"
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    first, last = model[0].parameters(), [model.get_parameter("2.bias")]
    optimizers = [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(last, lr=0.1, momentum=0.9)]
    with dualform.record(model, optimizers, path, shard_bytes=2000) as recorder:
        for step in range(9):
            recorder.annotate(label=torch.arange(12) % 4)
            model.zero_grad()
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(12, 6, generator=generator)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    return Run(path)


def folds_of(source: Run, view: Table) -> dict[str, Fold[Any]]:
    """Return a fold for every follower, and for every optimizer."""
    every, horizon = tuple(source.initial), view.horizon
    return {
        "start alone": fold_shares(source, ["0"], horizon=horizon, groups=0),
        "kept patterns": fold_shares(source, source.layers, horizon=horizon, groups=1, by=MaskGroup(view.mask)),
        "SGD's too": Fold(every, horizon, SharesOf(1), MaskGroup(view.mask)),
        "doubts": fold_doubts(source, every, horizon=horizon),
        "rates": Fold(every, horizon, RatesOf()),
        "no parameters": Fold((), horizon, SharesOf(2)),
    }


def jobs_of(source: Run, view: Table, layer: str, queries: Tensor) -> dict[str, Pass[Any]]:
    """Return a job for every reducer."""
    grouping = view.group(layer, "label")
    groups = len(grouping.labels)
    shapes = {use: source.description.parameters[use.parameter].shape for use in source.layer(layer).uses}
    attention, magnitude = PatternMeasure("attention"), PatternMeasure("magnitude")
    contribution = PatternMeasure("contribution", None, shapes)
    to_units = PatternMeasure("contribution", torch.arange(len(queries)) % source.layer(layer).d_out, shapes)
    members = BestMembers(1, 2, torch.zeros(groups, dtype=torch.int64), torch.arange(groups))
    d_in, d_out = source.layer(layer).d_in, source.layer(layer).d_out

    def measured(reducer: Any, measure: PatternMeasure, grouped: bool = True) -> Pass[Any]:
        return Pass(layer, view, reducer, queries, queries, measure, groups=grouping if grouped else None)

    return {
        "everything": measured(Everything(), attention, grouped=False),
        "sums": measured(GroupSums(groups), magnitude),
        "places": measured(GroupPlaces(groups), attention),
        "best": measured(Best(groups, 3), attention),
        "worst of all": measured(Best(1, 4, largest=False), attention, grouped=False),
        "best members": measured(members, magnitude),
        "best contributions": measured(Best(groups, 2), to_units),
        "outputs": measured(Outputs(groups, d_out), contribution),
        "key sums": Pass(layer, view, KeySums(groups, d_in), queries, groups=grouping),
        "shares": Pass(layer, view, GroupShares(groups, shapes), queries, groups=grouping, values=True),
    }


def assert_same(found: Any, expected: Any) -> None:
    """Compare two results: tensors and numbers, or tuples, dictionaries or data classes of them."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, Tensor | float):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert found == expected


class ExecutorConformance:
    """Derive, and give a fixture `make`: a function that returns a new executor."""

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("layer", ["0", "2"])
    def test_every_reducer_gives_the_plain_answer(
        self, make: Callable[[], Executor], executed_run: Run, layer: str, view: str
    ) -> None:
        table = Table(executed_run, *VIEWS[view], PlainExecutor())
        queries = torch.randn(5, executed_run.layer(layer).d_in, generator=torch.Generator().manual_seed(1))
        jobs = jobs_of(executed_run, table, layer, queries)
        expected = PlainExecutor().run(executed_run, list(jobs.values()))
        for name, found, plain in zip(jobs, make().run(executed_run, list(jobs.values())), expected, strict=True):
            assert name
            assert_same(found, plain)
        alone = make()
        for job, plain in zip(jobs.values(), expected, strict=True):
            assert_same(alone.run(executed_run, [job])[0], plain)
            assert_same(alone.run(executed_run, [job])[0], plain)  # a result that was given away changes nothing

    def test_jobs_of_different_layers_come_back_in_order(self, make: Callable[[], Executor], executed_run: Run) -> None:
        table = Table(executed_run, *VIEWS["whole"], PlainExecutor())
        jobs = [
            Pass(layer, table, Everything(), queries, queries, PatternMeasure("attention"))
            for layer, width in (("2", 6), ("0", 40), ("2", 6))
            for queries in [torch.randn(2, width)]
        ]
        found = make().run(executed_run, jobs)
        for one, other in zip(found, PlainExecutor().run(executed_run, jobs), strict=True):
            assert_same(one, other)

    def test_no_jobs_and_no_patterns(self, make: Callable[[], Executor], executed_run: Run) -> None:
        assert make().run(executed_run, []) == []
        nothing = Table(executed_run, (Condition("sample < 0"),), 9, PlainExecutor())
        queries = torch.randn(2, 40)
        job = Pass("0", nothing, GroupSums(3), queries, queries, PatternMeasure("magnitude"))
        assert_same(make().run(executed_run, [job])[0], torch.zeros(2, 3, dtype=torch.float64))

    @pytest.mark.parametrize("view", VIEWS)
    def test_every_fold_gives_the_plain_answer(self, make: Callable[[], Executor], folded_run: Run, view: str) -> None:
        conditions = (Condition("label <> 1"),) if VIEWS[view][0] else ()
        table = Table(folded_run, conditions, VIEWS[view][1], PlainExecutor())
        folds = folds_of(folded_run, table)
        plain = [PlainExecutor().run(folded_run, [fold])[0] for fold in folds.values()]
        queries = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
        sweeps = [
            Sweep("0", table, Everything(), queries, queries, PatternMeasure("contribution", torch.full((3,), unit)))
            for unit in (0, 4)
        ]
        swept = PlainExecutor().run(folded_run, sweeps)
        first, *others = folds.values()
        found = make().run(folded_run, [first, sweeps[0], *others, sweeps[1]])  # in a mixture, in order
        for one, other in zip(found, [plain[0], swept[0], *plain[1:], swept[1]], strict=True):
            assert_same(one, other)

    def test_folds_of_one_parameter_at_two_horizons(self, make: Callable[[], Executor], folded_run: Run) -> None:
        folds = [fold_shares(folded_run, ["0"], horizon=horizon, groups=1) for horizon in (9, 4, 9, 0)]
        for fold, found in zip(folds, make().run(folded_run, folds), strict=True):
            assert_same(found, PlainExecutor().run(folded_run, [fold])[0])
