"""The spotlight on one layer: what each of its queries attends to.

Where they are exact, shortcuts answer without a pass over the patterns: signed totals are products with cached sums of
keys; magnitudes equal them where keys and queries are never negative; contributions by group are products with the
groups' shares of the weight. Effects, which predict a retraining, are found in `effects.py`.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from dualform.attend.answers import Columns, Effects, Top, Totals
from dualform.attend.cache import Cache
from dualform.attend.effects import LayerEffects
from dualform.attend.effects_asked import Asked
from dualform.attend.effects_moments import outside
from dualform.attend.groups import By, Grouping, Table
from dualform.attend.queries import Captured
from dualform.attend.sums import LayerSums, apply_uses
from dualform.engine.jobs import Pass, Sweep
from dualform.engine.measures import Of, PatternMeasure
from dualform.engine.reducers import Best, BestMembers, Everything, GroupSums, Outputs, Reducer, joined
from dualform.engine.source import ADDRESS
from dualform.errors import QueryError, SelectionError
from dualform.identity.parameter_use import matrix_and_bias, takes_ids
from dualform.store.media import Media
from dualform.threads import in_own_dtype

Per = Literal["pattern", "sample"]
R = TypeVar("R")
DENSE = 4 << 30  # bytes of an answer at most
MAX_PASS_QUERIES = 1 << 14
SHARES = 1 << 30  # bytes of group shares that may be held at most


class LayerSpotlight:
    """What each query of one layer attends to, over the patterns of a view."""

    def __init__(
        self,
        table: Table,
        cache: Cache,
        layer: str,
        queries: Captured,
        *,
        media: Media,
        asked: Asked | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self.name = layer
        self._media = media
        self.leading = queries.leading
        self._table = table
        self._entry = table.run.layer(layer)
        self._dtype = torch.float64 if self._entry.dtype == "float64" else torch.float32
        ids = takes_ids(self._entry.uses)
        self.queries = queries.rows.to(torch.int64 if ids else self._dtype)  # (Q, d_in)
        self._chunk_size = chunk_size
        like = torch.empty(0, dtype=self._dtype, device=self.queries.device)
        self._sums = LayerSums(table, cache, layer, like)
        self._effects = None
        if asked is not None:
            self._effects = LayerEffects(table, cache, layer, self.queries, asked, self._dtype)

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        return f"Spotlight on layer {self.name!r}: {len(self)} queries over {self.count():,} patterns"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that patterns have."""
        return self._table.names

    @property
    def media(self) -> Media:
        """What the run keeps for people to look at."""
        return self._media

    def count(self) -> int:
        """Return the number of patterns in this view of the layer."""
        return self._table.count(self.name)

    @in_own_dtype
    def attention(self) -> Tensor:
        """Return every attention, (Q, T). For small memories; see `totals` and `top` for any."""
        self._affordable(self.queries.element_size() * len(self) * self.count(), "attention()")
        return self._reduce(PatternMeasure("attention"), None, Everything())

    @in_own_dtype
    def contributions(self) -> Tensor:
        """Return what every pattern adds to the output, (Q, T, d_out). For small memories; see `totals`."""
        size = self._dtype.itemsize * len(self) * self.count() * self._entry.d_out
        self._affordable(size, "contributions()")
        parts = []
        for unit in range(self._entry.d_out):
            units = torch.full((len(self),), unit, device=self._device)
            parts.append(self._reduce(self._contribution(units), None, Everything()))
        return torch.stack(parts, dim=2)

    @in_own_dtype
    def totals(self, by: By, *, of: Of = "attention") -> Totals:
        """Sum over the patterns of each group.

        Args:
            by: a column, `dualform.bins(column, width=...)`, or several of these.
            of: `"attention"` (signed) or `"magnitude"` (absolute), (Q, G); `"contribution"`, (Q, G, d_out); or
                `"effect"`, a row per input, (M, G): see `effects`.
        """
        _check_of(of)
        grouping = self._group(by)
        if of == "effect":
            values = self._require_asked().totals(grouping)
            return Totals(self.name, of, grouping.by, grouping.labels, values.to(self._dtype))
        self._affordable(8 * len(self) * len(grouping.labels), "totals()")
        linear = self.queries.is_floating_point()  # in the query; a table's attention is 0 or 1
        if linear and (of == "attention" or (of == "magnitude" and self._never_negative())):
            values = self.queries.double() @ self._sums.keys(grouping).T
        elif of != "contribution":
            values = self._reduce(PatternMeasure(of), grouping, GroupSums(len(grouping.labels)))
        else:
            values = self._contribution_totals(grouping)
        return Totals(self.name, of, grouping.by, grouping.labels, values.to(self._dtype))

    @in_own_dtype
    def effects(self, by: By | None = None, *, per: Per = "sample") -> Effects:
        """Predict what training on each sample, pattern or group brought to the quantity that was asked about.

        A prediction of retraining, not a share of the output: effects do not sum to the weight. Needs
        `memory.attend(model, inputs, targets=..., quantity=...)`.

        Args:
            by: a column (or columns, or bins) to sum over, instead of samples or patterns.
            per: without `by`: `"sample"` sums over all occurrences of a sample; `"pattern"` gives each one, named by
                its number.
        """
        _check_per(per)
        source = self._require_asked()
        grouping = self._group(by if by is not None else self._column(per))
        self._affordable(8 * len(source) * len(grouping.labels), "effects()")
        values = source.totals(grouping)
        return Effects((self.name,), source.asked.quantity, grouping.by, grouping.labels, values, {})

    @in_own_dtype
    def top(
        self,
        k: int,
        *,
        by: By | None = None,
        of: Of = "attention",
        per: Per = "pattern",
        largest: bool = True,
        unit: int | Tensor | None = None,
        columns: Collection[str] | None = None,
    ) -> Top:
        """Rank patterns, or samples by the sum over their occurrences.

        Args:
            k: how many.
            by: rank within each group of this column (or columns) instead of overall.
            of: what to rank by. A contribution is that to one output unit; an effect is ranked for each input.
            per: `"sample"` sums over all patterns with the same `sample` annotation first.
            largest: the most positive, or with False the most negative.
            unit: for contributions, the output unit, or one per query (Q,); by default the one whose output is largest.
            columns: the annotations to look up for the answer; by default all.
        """
        _check_of(of)
        if k < 1:
            raise QueryError(f"top({k}) asks for no patterns. Ask for at least one.")
        _check_per(per)
        self._require_patterns()
        measure = self._contribution(self._units(unit)) if of == "contribution" else PatternMeasure(of)
        if per == "sample":
            return self._top_samples(k, by, measure, largest=largest, columns=columns)
        grouping = None if by is None else self._group(by)
        groups = 1 if grouping is None else len(grouping.labels)
        self._affordable(16 * len(self) * groups * k, f"top({k})")
        scores, patterns = self._reduce(measure, grouping, Best(groups, k, largest))
        return self._ranked(scores, patterns, grouping, of, "pattern", columns)

    @in_own_dtype
    def output(self) -> Tensor:
        """Return the layer's output in the dual form: start plus the sum of contributions, (*leading, d_out).

        Where another layer uses the same parameter, what its patterns added to it counts too.
        Under a mask these are still the unmasked network's queries; `Memory.apply` runs the whole masked network.
        """
        total = self.start().double()
        if self.count():
            total = total + self._contribution_totals(None)[:, 0]
        if elsewhere := self._sums.elsewhere():
            total = total + apply_uses(elsewhere, self.queries)
        return total.to(self._dtype).reshape(*self.leading, -1)

    @in_own_dtype
    def start(self) -> Tensor:
        """Return what the start alone gives, (Q, d_out); with Muon, start and rounding: all that is no pattern's."""
        return apply_uses(self._sums.starts(), self.queries).to(self._dtype)

    # How ----------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self.queries.device

    def _group(self, by: By) -> Grouping:
        self._require_patterns()
        return self._table.group(self.name, by)

    def _require_asked(self) -> LayerEffects:
        if (reason := outside(self._table.run, self.name)) is not None:
            raise QueryError(f"Layer {self.name!r} has no effects: {reason}.")
        if self._effects is None:
            raise QueryError(
                f"Effects of layer {self.name!r} are effects on something: attend with targets and a quantity, "
                'memory.attend(model, inputs, targets=labels, quantity="margin").'
            )
        self._effects.require()
        return self._effects

    def _column(self, per: Per) -> str:
        """Return the column that names a sample, or a pattern."""
        if per == "sample" and "sample" not in self._table.names:
            raise SelectionError(
                'per="sample" needs a column "sample": record with annotate(sample=ids). '
                f"There are: {', '.join(self._table.names)}."
            )
        return per

    def _require_patterns(self) -> None:
        if not self.count():
            raise QueryError(
                f"This view of layer {self.name!r} holds no patterns: nothing was recorded, or the mask leaves nothing."
            )

    def _affordable(self, size: int, what: str) -> None:
        if size > DENSE:
            raise QueryError(
                f"{what} would take {size / 1e9:.0f} GB. Use totals() or top(), fewer queries, or a narrower view."
            )

    def _contribution(self, units: Tensor | None) -> PatternMeasure:
        return PatternMeasure("contribution", units, self._sums.shapes)

    def _reduce(
        self,
        measure: PatternMeasure,
        grouping: Grouping | None,
        reducer: Reducer[Any, R],
        most_queries: int = MAX_PASS_QUERIES,
    ) -> R:
        """Reduce the measures of all patterns, by passes of at most so many queries each."""
        self._require_patterns()
        if measure.of == "effect":
            return self._require_asked().reduce(grouping, reducer, block=most_queries, chunk_size=self._chunk_size)
        size = min(most_queries, MAX_PASS_QUERIES)
        results = []
        for start in range(0, len(self), size):
            whole = len(self) <= size
            rows = self.queries if whole else self.queries[start : start + size]
            units = measure.units if whole or measure.units is None else measure.units[start : start + size]
            kind = Sweep if units is not None and self._sums.replayed else Pass
            job = kind(
                layer=self.name,
                view=self._table,
                reducer=reducer,
                like=rows if rows.is_floating_point() else self._sums.like,
                queries=rows,
                measure=dataclasses.replace(measure, units=units),
                groups=grouping,
                block_patterns=self._chunk_size,
            )
            results.append(self._table.answer(job))
        found: R = joined(results)
        return found

    def _never_negative(self) -> bool:
        low, high = self._table.run.key_range(self.name)
        least, greatest = torch.aminmax(self.queries)
        return (low >= 0 and bool(least >= 0)) or (high <= 0 and bool(greatest <= 0))

    def _contribution_totals(self, grouping: Grouping | None) -> Tensor:
        """Return the sum of contributions per group, (Q, G, d_out), the cheaper way."""
        self._table.run.require_values(self.name)
        groups = 1 if grouping is None else len(grouping.labels)
        d_in, d_out = self._entry.d_in, self._entry.d_out
        self._affordable(8 * len(self) * groups * d_out, "totals of contributions")
        size = sum(math.prod(shape) for shape in self._sums.shapes.values())
        plain = not self._sums.replayed and matrix_and_bias(self._entry.uses) is not None
        if not plain:
            self._affordable(16 * groups * size, "totals of contributions by so many groups")
        if not plain or (len(self) * (d_in + d_out) >= d_in * d_out and 8 * groups * size <= SHARES):
            shares = self._sums.shares(grouping)
            each = [apply_uses({use: s[g] for use, s in shares.items()}, self.queries) for g in range(groups)]
            return torch.stack(each, dim=1)
        return self._reduce(self._contribution(None), grouping, Outputs(groups, d_out), most_queries=1024)

    def _units(self, unit: int | Tensor | None) -> Tensor:
        self._table.run.require_values(self.name)
        if unit is None:
            return self.output().reshape(len(self), -1).argmax(dim=1)
        units = torch.as_tensor(unit, device=self._device)
        if units.is_floating_point() or units.shape not in ((), (len(self),)):
            raise QueryError(f"unit is {unit}; expected the number of an output unit, or one per query ({len(self)}).")
        units = units.expand(len(self)).contiguous()
        if bool((units < 0).any()) or bool((units >= self._entry.d_out).any()):
            raise QueryError(f"Output unit {unit} of layer {self.name!r} is outside 0 to {self._entry.d_out - 1}.")
        return units

    def _top_samples(
        self, k: int, by: By | None, measure: PatternMeasure, *, largest: bool, columns: Collection[str] | None
    ) -> Top:
        self._column("sample")
        outer = None if by is None else self._group(by)
        samples = self._group("sample")
        if outer is None:
            pairs, codes = np.arange(len(samples.labels)), samples.codes
        else:
            pairs, codes = np.unique(outer.codes * len(samples.labels) + samples.codes, return_inverse=True)
        first = np.full(len(pairs), -1, dtype=np.int64)
        numbers = self._table.patterns(self.name)
        first[codes[::-1]] = numbers[::-1]  # the first pattern of each sample stands for it
        fine = Grouping(("sample",), tuple(range(len(pairs))), codes)
        group_of = pairs // len(samples.labels)
        if None in samples.labels:  # patterns without a sample are nobody's
            group_of[pairs % len(samples.labels) == samples.labels.index(None)] = -1
        groups = 1 if outer is None else len(outer.labels)
        self._affordable(16 * len(self) * groups * k, f"top({k})")
        contest = torch.from_numpy(group_of).to(self._device), torch.from_numpy(first).to(self._device)
        scores, patterns = self._reduce(
            measure,
            fine,
            BestMembers(groups, k, *contest, largest),
            most_queries=max(1, (256 << 20) // (8 * len(pairs))),
        )
        ranked_ones = np.isin(first, patterns.cpu().numpy())
        seen = dict(zip(first[ranked_ones].tolist(), np.bincount(codes)[ranked_ones].tolist(), strict=True))
        occurrences = [seen.get(number) for number in patterns.reshape(-1).tolist()]
        ranked = self._ranked(scores, patterns, outer, measure.of, "sample", columns)
        return dataclasses.replace(ranked, columns={"occurrences": occurrences, **ranked.columns})

    def _ranked(
        self,
        scores: Tensor,
        patterns: Tensor,
        grouping: Grouping | None,
        of: Of,
        per: Per,
        columns: Collection[str] | None,
    ) -> Top:
        names = [n for n in self._table.names if n != "pattern" and (per == "pattern" or n not in ADDRESS)]
        if columns is not None:
            self._table.require(columns)
            names = [name for name in names if name in columns]
        asked = patterns.clone()  # out of the user's reach

        def look_up() -> dict[str, list[Any]]:
            return self._table.lookup(self.name, asked.reshape(-1).cpu().numpy(), names)

        return Top(
            layer=self.name,
            of=of,
            per=per,
            by=() if grouping is None else grouping.by,
            groups=(None,) if grouping is None else grouping.labels,
            values=scores.masked_fill(patterns < 0, torch.nan).to(self._dtype),
            patterns=patterns,
            columns=Columns(names, look_up),
        )


def _check_per(per: str) -> None:
    if per not in get_args(Per):
        raise QueryError(f"per is {per!r}; expected one of {get_args(Per)}.")


def _check_of(of: str) -> None:
    if of not in get_args(Of):
        raise QueryError(f"of is {of!r}; expected one of {get_args(Of)}.")
