"""Folds of the rows of several processes, put together, are the fold of the whole parameter with all patterns."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from dualform.identity.families import divided_fold, optimizer_kinds
from dualform.identity.families.divided_fold import DividedFold, Exchange, SentPatterns, StepUse, SummedRows
from dualform.identity.families.optimizer_kind import ReplayedStep, follow_together
from dualform.identity.families.parameter_fold import ParameterFold, UseRows
from dualform.identity.grouped_products import RowGroups
from dualform.identity.parameter_maps import OuterMap, ParameterMap, RowsMap, ScaleMap, TransposedMap
from dualform.identity.row_division import own_rows

make = torch.optim
OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD": lambda p: make.SGD(p, lr=0.1),
    "momentum": lambda p: make.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "AdamW": lambda p: make.AdamW(p, lr=1e-2),
    "Adam": lambda p: make.Adam(p, lr=1e-2, weight_decay=1e-2),
    "Adadelta": lambda p: make.Adadelta(p, lr=0.3),
}
MAPS: dict[str, tuple[ParameterMap, tuple[int, ...]]] = {
    "outer": (OuterMap(), (5, 3)),
    "rows": (RowsMap(), (7, 3)),
    "scale": (ScaleMap(), (4,)),
    "transposed": (TransposedMap(), (4, 3)),
    "one row": (OuterMap(), (1, 3)),
}
PROCESSES = 3
USE = (0, 0, 0)


def patterns(parameter_map: ParameterMap, shape: Sequence[int], count: int, groups: Sequence[int]) -> UseRows:
    """Return random patterns of a parameter, in random ones of some groups."""
    d_out, d_in = shape[0], shape[-1]
    if isinstance(parameter_map, RowsMap):
        keys, d_out = torch.randint(shape[0], (count, 1)), shape[1]
    else:
        d_in, d_out = (d_out, d_in) if isinstance(parameter_map, TransposedMap) else (d_in, d_out)
        keys = torch.randn(count, d_in, dtype=torch.float64)
    values = torch.randn(count, d_out, dtype=torch.float64)
    codes = torch.tensor(groups)[torch.randint(len(groups), (count,))]
    return UseRows(USE, parameter_map, values, keys, codes, 0.5, RowGroups.of_codes(codes))


def make_exchanges(every: Sequence[Sequence[Exchange]]) -> None:
    """Make the exchanges that each process asked for, in one process."""
    for of_each in zip(*every, strict=True):
        outgoing = [one.outgoing() for one in of_each]
        for rank, one in enumerate(of_each):
            received = [sent[rank] for sent in outgoing]
            assert [len(part) for part in received] == one.incoming(rank)
            one.take(received)


@pytest.mark.parametrize("way", [SentPatterns, SummedRows, "in parts"])
@pytest.mark.parametrize("kind_of_map", MAPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_of_all_processes_are_the_fold_of_one(
    name: str, kind_of_map: str, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter_map, shape = MAPS[kind_of_map]
    if way is SentPatterns and type(parameter_map) not in (OuterMap, RowsMap):
        pytest.skip("its patterns are never sent")
    sizes = {SentPatterns: 0, SummedRows: 1 << 30, "in parts": 1 << 30}
    monkeypatch.setattr(SentPatterns, "nbytes", sizes[way])
    if way == "in parts":
        monkeypatch.setattr(divided_fold, "MAX_SUM_BYTES", 8 * torch.Size(shape).numel())  # one group at a time
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([parameter])
    kind = optimizer_kinds()[type(optimizer)]
    initial = parameter.detach().clone()
    settings: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu"), "warm": None}
    whole = ParameterFold(shape, initial=lambda: initial, **settings)
    places = [own_rows(shape[0], rank, PROCESSES) for rank in range(PROCESSES)]
    folds = [
        DividedFold(initial[mine].shape, whole=shape, rank=rank, initial=lambda mine=mine: initial[mine], **settings)
        for rank, mine in enumerate(places)
    ]
    seen: set[type] = set()
    for step in range(6):
        groups = [0, 2] if step < 2 else [1, 3, 4]  # groups come and go; one process may have none of them
        each = [[patterns(parameter_map, shape, count, groups)] for count in (4, 3)] + [[]]
        gradient = torch.zeros_like(initial)
        for one in [rows for mine in each for rows in mine]:
            gradient += one.factor * parameter_map.gradient(one.values, one.keys, shape).reshape(shape)
        parameter.grad = gradient.clone()
        decoded = kind.decode(kind.encode(optimizer.param_groups[0], optimizer.state[parameter]))
        before = optimizer.state[parameter].get(kind.average) if kind.average else None
        kept = {n: optimizer.state[parameter][n].clone() for n in kind.overwrites_state if optimizer.state[parameter]}
        decays = kind.decays_gradient(decoded)
        averages = None if before is None else before.clone()
        optimizer.step()
        after = {n: one.clone() if isinstance(one, Tensor) else one for n, one in optimizer.state[parameter].items()}

        def rows_of(state: dict[str, Any], mine: slice) -> dict[str, Any]:
            return {n: one[mine] if isinstance(one, Tensor) and one.dim() else one for n, one in state.items()}

        told = StepUse(parameter_map, tuple(groups), tuple(sum(len(one.codes) for one in mine) for mine in each))
        moves = []
        for fold, mine, rows in [
            (whole, slice(None), [one for part in each for one in part]),
            *zip(folds, places, each, strict=True),
        ]:
            if decays:
                fold.keep_average(None if averages is None else averages[mine])
            if isinstance(fold, DividedFold):
                fold.uses = {USE: told}
            linear = kind.read(ReplayedStep(decoded, gradient[mine], rows_of(kept, mine), rows_of(after, mine)))
            live = after.get(kind.average or "")
            live = None if live is None else live[mine]
            moves += fold.step(linear, rows, gradient=gradient[mine], live_average=live)
        make_exchanges([fold.exchanges for fold in folds])
        seen |= {type(one) for one in folds[0].exchanges}
        for fold in folds:
            fold.exchanges = []
        follow_together(moves)
    assert seen == {SentPatterns if way is SentPatterns else SummedRows}
    expected = {group: share for _, group, share in whole.parts()}
    parts = [{group: share for _, group, share in fold.parts()} for fold in folds]
    assert [set(part) for part in parts] == [{0, 1, 2, 3, 4}] * PROCESSES
    for group, share in expected.items():
        found = torch.cat([part[group].weight for part in parts])
        torch.testing.assert_close(found, share.weight, rtol=1e-10, atol=1e-12)
    rests = [fold.rest(parameter.detach()[mine]) for fold, mine in zip(folds, places, strict=True)]
    for found_part, expected_part in zip(zip(*rests, strict=True), whole.rest(parameter.detach()), strict=True):
        torch.testing.assert_close(torch.cat(found_part), expected_part, rtol=1e-9, atol=1e-12)
