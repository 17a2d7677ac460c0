"""The answers: frozen dataclasses that hold tensors, and turn into Arrow or pandas tables."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import Tensor

from dualform.lazy import compute as pc


class Answer(ABC):
    """Anything that can be shown as a table."""

    @abstractmethod
    def to_arrow(self) -> pa.Table:
        """Return the answer as an Arrow table, one row per number."""

    def to_pandas(self) -> Any:
        """Return the answer as a pandas DataFrame."""
        return self.to_arrow().to_pandas()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GroupTotals(Answer):
    """Sums over groups of patterns.

    Attributes:
        layer: the layer's name.
        of: attention, magnitude, contribution or effect.
        by: the names of the grouping columns.
        groups: (G,) each group's value, a tuple where there are several columns.
        values: (Q, G), or (Q, G, d_out) for contributions.
    """

    layer: str
    of: str
    by: tuple[str, ...]
    groups: tuple[Any, ...]
    values: Tensor

    def to_arrow(self) -> pa.Table:
        """Return a row per query and group (and output unit, for contributions)."""
        shape = self.values.shape
        index = torch.cartesian_prod(*(torch.arange(size) for size in shape)).reshape(-1, len(shape))
        columns: dict[str, Any] = {"query": index[:, 0].numpy()}
        for i, name in enumerate(self.by):
            labels = [label[i] if len(self.by) > 1 else label for label in self.groups]
            columns[_free(name, [*columns, "unit", self.of])] = [labels[g] for g in index[:, 1].tolist()]
        if len(shape) == 3:
            columns["unit"] = index[:, 2].numpy()
        return pa.table({**columns, self.of: self.values.reshape(-1).cpu().numpy()})

    def __repr__(self) -> str:
        flat = self.values if self.values.dim() == 2 else self.values.norm(dim=2)
        what = self.of if self.values.dim() == 2 else f"norm of {self.of}"
        names = [group_text(group) for group in self.groups]
        rows = [[str(q), *(f"{x:.4g}" for x in row)] for q, row in enumerate(flat[:10].tolist())]
        more = [] if len(flat) <= 10 else [f"... {len(flat) - 10} more queries"]
        title = f"Totals of {what} by {', '.join(self.by)} in layer {self.layer!r}"
        note = [EFFECT_NOTE] if self.of == "effect" else []
        return "\n".join([title, *grid_lines(["query", *names], rows), *more, *note])


class LookedUpColumns(Mapping[str, list[Any]]):
    """Columns of some patterns, all of them looked up when the first one is read: often none is."""

    def __init__(self, names: Sequence[str], find: Callable[[], Mapping[str, list[Any]]]) -> None:
        self._names = tuple(names)
        self._find = functools.cache(find)

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._find()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking(Answer):
    """The best patterns, or samples, of each query.

    Attributes:
        layer: the layer's name.
        of: attention, magnitude, contribution or effect.
        per: pattern or sample.
        by: the names of the grouping columns; empty when there is one ranking per query.
        groups: (G,) each group's value; one entry, None, without grouping.
        values: (Q, G, k), best first; NaN where a group has fewer.
        patterns: (Q, G, k) the patterns' numbers, or for samples the number of one of their patterns; -1 likewise.
        columns: each annotation (for patterns each address too) of those patterns, Q · G · k entries in order, looked
            up in the run when one is first asked for.
    """

    layer: str
    of: str
    per: str
    by: tuple[str, ...]
    groups: tuple[Any, ...]
    values: Tensor
    patterns: Tensor
    columns: Mapping[str, list[Any]]

    def to_arrow(self) -> pa.Table:
        """Return a row per query, group and rank."""
        queries, groups, k = self.values.shape
        index = torch.cartesian_prod(torch.arange(queries), torch.arange(groups), torch.arange(k)).reshape(-1, 3)
        columns: dict[str, Any] = {"query": index[:, 0].numpy(), "rank": index[:, 2].numpy() + 1}
        for i, name in enumerate(self.by):
            labels = [label[i] if len(self.by) > 1 else label for label in self.groups]
            columns[f"by_{name}"] = [labels[g] for g in index[:, 1].tolist()]
        columns[self.of] = self.values.reshape(-1).cpu().numpy()
        columns["pattern"] = self.patterns.reshape(-1).cpu().numpy()
        for name, column in self.columns.items():
            columns[_free(name, columns)] = pa.array(column)
        table = pa.table(columns)
        return table.filter(pc.field("pattern") >= 0)

    def __repr__(self) -> str:
        table = self.to_arrow().slice(0, 20).to_pylist()
        names = list(table[0]) if table else ["query"]
        rows = [[group_text(row[name]) for name in names] for row in table]
        title = f"Top {self.values.shape[2]} {self.per}s by {self.of} in layer {self.layer!r}"
        note = [EFFECT_NOTE] if self.of == "effect" else []
        return "\n".join([title, *grid_lines(names, rows), *note])


EFFECT_NOTE = (
    "An effect is a prediction of retraining, not a share of the output: without the pattern the quantity is predicted "
    "to be lower by its effect. Effects do not sum to the weight."
)


UNROLLED_NOTE = (
    "The derivative of this very training, with its seed and its order, by the weight of the group's samples; without "
    "the group the quantity is predicted to be lower by its effect. Every step was within {:.1e} of the one that was "
    "differentiated."
)

EffectMethod = Literal["filter", "unrolled"]
"""How effects are found."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Effects(Answer):
    """What training on each group of patterns is predicted to have brought to a quantity of each input.

    A prediction of retraining, not a share of the output: effects do not sum to the weight.

    Attributes:
        layers: the layers whose effects are summed.
        quantity: what was asked about.
        by: the names of the grouping columns; `("sample",)` or `("pattern",)` without grouping.
        groups: (G,) each group's value, a tuple where there are several columns.
        values: (M, G), float64. Without the group, the quantity is predicted to be lower by that.
        outside: layers that contribute nothing to effects, and why.
        method: "filter", the prediction from the memory alone; or "unrolled", the derivative of this very training.
        error: of an unrolled training, how far its steps were at most from those that were differentiated, relative.
        spread: (M, G) how uncertain each effect is, as far as `spread_over` tells; None where it was not asked for.
        spread_over: what the spread is over: the standard deviation over recordings of one recipe; or, of one
            recording, half the range of effects when later steps are taken to answer up to 4 times as weakly and as
            strongly.
        cautions: reasons to trust these effects less, in words.
    """

    layers: tuple[str, ...]
    quantity: str
    by: tuple[str, ...]
    groups: tuple[Any, ...]
    values: Tensor
    outside: Mapping[str, str]
    method: EffectMethod = "filter"
    error: float = 0.0
    spread: Tensor | None = None
    spread_over: str = ""
    cautions: tuple[str, ...] = ()

    def top(self, k: int, *, largest: bool = True) -> "Effects":
        """Return the k groups whose effect on any input is largest (or most negative), best first."""
        best = self.values.amax(dim=0) if largest else self.values.amin(dim=0)
        order = best.argsort(descending=largest, stable=True)[:k]
        groups = tuple(self.groups[g] for g in order.tolist())
        spread = None if self.spread is None else self.spread[:, order]
        return dataclasses.replace(self, groups=groups, values=self.values[:, order], spread=spread)

    def to_arrow(self) -> pa.Table:
        """Return a row per input and group, with the effect's spread where it is known."""
        table = GroupTotals("", "effect", self.by, self.groups, self.values).to_arrow()
        if self.spread is None:
            return table
        return table.append_column(_free("spread", table.column_names), pa.array(self.spread.reshape(-1).cpu().numpy()))

    def __repr__(self) -> str:
        shown = self.groups[:12]
        names = [group_text(group) for group in shown]
        values = self.values[:10, : len(shown)].tolist()
        cells = [[f"{x:.4g}" for x in row] for row in values]
        if self.spread is not None:
            spreads = self.spread[:10, : len(shown)].tolist()
            cells = [
                [f"{a} ± {x:.2g}" for a, x in zip(*both, strict=True)] for both in zip(cells, spreads, strict=True)
            ]
        rows = [[str(q), *row] for q, row in enumerate(cells)]
        title = f"Effects on the {self.quantity} by {', '.join(self.by)}, in {', '.join(self.layers)}"
        more = [] if len(self.groups) <= 12 else [f"... {len(self.groups) - 12} more groups"]
        more += [] if len(self.values) <= 10 else [f"... {len(self.values) - 10} more inputs"]
        more += [f"layer {name!r} contributes nothing: {reason}" for name, reason in self.outside.items()]
        more += [f"± is {self.spread_over}"] if self.spread is not None else []
        more += [f"caution: {reason}" for reason in self.cautions]
        note = EFFECT_NOTE if self.method == "filter" else UNROLLED_NOTE.format(self.error)
        return "\n".join([title, *grid_lines(["input", *names], rows), *more, note])


def add_effects(found: Sequence[Effects], outside: Mapping[str, str]) -> Effects:
    """Return the sum of several layers' effects, without a spread; where a layer does not know a group, it has none."""
    first = found[0]
    place = {group: i for i, group in enumerate(dict.fromkeys(g for each in found for g in each.groups))}
    total = first.values.new_zeros(len(first.values), len(place))
    for each in found:
        columns = torch.tensor([place[group] for group in each.groups], device=total.device)
        total.index_add_(1, columns, each.values.to(total.device))
    names = tuple(name for each in found for name in each.layers)
    cautions = tuple(dict.fromkeys(reason for each in found for reason in each.cautions))
    return Effects(names, first.quantity, first.by, tuple(place), total, outside, cautions=cautions)


def combine_strengths(found: Sequence[Sequence[Effects]], outside: Mapping[str, str] = MappingProxyType({})) -> Effects:
    """Return the sum over layers of effects at the filter's own strength, which come first, with their spread.

    Args:
        found: each layer's effects, for each strength of the filter; with one strength there is no spread.
        outside: layers that contribute nothing, and why.
    """
    sums = [add_effects(layers, outside) for layers in found]
    if len(sums) == 1:
        return sums[0]
    every = torch.stack([one.values for one in sums])
    spread = (every.amax(dim=0) - every.amin(dim=0)) / 2
    over = "half the range of effects if later steps answered up to 4 times as weakly or strongly"
    return dataclasses.replace(sums[0], spread=spread, spread_over=over)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Vote(Answer):
    """For each layer and query, the group with the largest total.

    Attributes:
        by: the grouping column.
        of: attention, magnitude, contribution or effect.
        winners: layer -> (Q,) the winning group's value.
    """

    by: tuple[str, ...]
    of: str
    winners: Mapping[str, tuple[Any, ...]]

    def to_arrow(self) -> pa.Table:
        """Return a row per layer and query."""
        rows = [(layer, q, w) for layer, winners in self.winners.items() for q, w in enumerate(winners)]
        columns: dict[str, Any] = {"layer": [row[0] for row in rows], "query": [row[1] for row in rows]}
        for i, name in enumerate(self.by):
            columns[_free(name, columns)] = [w[i] if len(self.by) > 1 else w for _, _, w in rows]
        return pa.table(columns)

    def agreement(self, targets: Any) -> dict[str, float]:
        """Return, per layer, the share of queries whose winner is the target, (Q,)."""
        wanted = targets.tolist() if isinstance(targets, Tensor) else list(targets)
        return {
            layer: sum(a == b for a, b in zip(winners, wanted, strict=True)) / max(len(wanted), 1)
            for layer, winners in self.winners.items()
        }

    def __repr__(self) -> str:
        count = max((len(winners) for winners in self.winners.values()), default=0)
        wide = min(count, 12)
        shown = [
            [layer, *(group_text(w) for w in winners[:wide]), *[""] * (wide - len(winners))]
            for layer, winners in self.winners.items()
        ]
        title = f"Vote by {', '.join(self.by)}, largest total of {self.of} ({count} queries)"
        return "\n".join([title, *grid_lines(["layer", *map(str, range(min(count, 12)))], shown)])


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name for a user's column that no column of ours has."""
    while name in taken:
        name += "_"
    return name


def group_text(value: Any) -> str:
    """Return a group's value, or a cell of a table, as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def grid_lines(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table of text, columns flush right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
