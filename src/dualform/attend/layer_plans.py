"""How the questions about one layer are answered: plans of passes, and the shortcuts that need none.

Where they are exact, shortcuts answer from sums that are kept: signed totals are products with sums of keys; magnitudes
equal them where keys and queries are never negative; contributions by group are products with the groups' shares of the
weight. A plan yields the jobs that it needs and is sent their results, so that the plans of several questions share
their reading (`questions.answer_all`).
"""

import dataclasses
import math
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from dualform.attend.answers import GroupTotals, LookedUpColumns, Ranking
from dualform.attend.groups import Grouping, Table
from dualform.attend.questions import Per, Plan, Top, Totals, answer_side_by_side
from dualform.attend.sums import LayerSums, apply_uses
from dualform.binning import By
from dualform.effects.layer_effects import LayerEffects
from dualform.effects.moments import outside
from dualform.engine.jobs import Pass, Sweep
from dualform.engine.measures import Of, PatternMeasure
from dualform.engine.reducers import Best, BestMembers, Everything, GroupSums, Outputs, Reducer, joined
from dualform.errors import QueryError, SelectionError
from dualform.identity.parameter_use import matrix_and_bias

R = TypeVar("R")
MAX_ANSWER_BYTES = 4 << 30
MAX_SHARES_BYTES = 1 << 30  # of the groups' shares of a layer's parameters that may be held
MAX_MEMBER_SUMS_BYTES = 256 << 20  # of sums by sample that one pass may hold
MAX_PASS_QUERIES = 1 << 14


class LayerPlans:
    """Plans of the questions about one layer of one view, for some queries.

    Attributes:
        table: the view.
        name: the layer's name.
        queries: (Q, d_in)
        sums: sums over the layer's patterns that any query can use.
        effects: the effects of patterns, where a quantity was asked about.
        block_patterns: how many patterns to measure at once; None for the executor's choice.
    """

    def __init__(
        self,
        table: Table,
        name: str,
        queries: Tensor,
        sums: LayerSums,
        effects: LayerEffects | None,
        block_patterns: int | None,
    ) -> None:
        self.table = table
        self.name = name
        self.queries = queries
        self.sums = sums
        self.effects = effects
        self.block_patterns = block_patterns
        self._entry = table.run.layer(name)
        self._dtype = table.dtype(name)
        self._device = queries.device

    # Plans --------------------------------------------------------------------------------------------------------

    def totals(self, question: Totals) -> Plan[GroupTotals]:
        """Plan the totals by group."""
        of = question.of
        _check_of(of)
        grouping = self.group(question.by)
        if of == "effect":
            values = self.require_effects().totals(grouping)
        else:
            self.check_affordable(8 * len(self.queries) * len(grouping.labels), "totals()")
            linear = self.queries.is_floating_point()  # in the query; a table's attention is 0 or 1
            if linear and (of == "attention" or (of == "magnitude" and self._never_negative())):
                sums = yield from self.sums.plan_keys(grouping)
                values = self.queries.double() @ sums.T
            elif of != "contribution":
                values = yield from self.reduce(PatternMeasure(of), grouping, GroupSums(len(grouping.labels)))
            else:
                values = yield from self.contribution_totals(grouping)
        return GroupTotals(self.name, of, grouping.by, grouping.labels, values.to(self._dtype))

    def top(self, question: Top) -> Plan[Ranking]:
        """Plan the ranking of patterns or samples."""
        k, of, by = question.k, question.of, question.by
        _check_of(of)
        if k < 1:
            raise QueryError(f"top({k}) asks for no patterns. Ask for at least one.")
        check_per(question.per)
        self.table.run.require_patterns(self.name, "a ranking of patterns")
        self.require_patterns()
        measure = PatternMeasure(of)
        if of == "contribution":
            measure = self.contribution((yield from self._units(question.unit)))
        if question.per == "sample":
            return (yield from self._top_samples(question, measure))
        grouping = None if by is None else self.group(by)
        groups = 1 if grouping is None else len(grouping.labels)
        self.check_affordable(16 * len(self.queries) * groups * k, f"top({k})")
        scores, patterns = yield from self.reduce(measure, grouping, Best(groups, k, question.largest))
        return self._ranked(scores, patterns, grouping, question)

    def everything(self, measure: PatternMeasure) -> Plan[Tensor]:
        """Plan the measures of all patterns, (Q, T)."""
        return (yield from self.reduce(measure, None, Everything()))

    def output(self) -> Plan[Tensor]:
        """Plan the layer's output: start plus the sum of contributions, (Q, d_out), in float64."""
        plans: list[Plan[Any]] = [self.sums.plan_starts()]
        if self.table.count(self.name):
            plans.append(self.contribution_totals(None))
        starts, *totals = yield from answer_side_by_side(plans)
        total = apply_uses(starts, self.queries)
        for one in totals:
            total = total + one[:, 0]
        if elsewhere := self.sums.elsewhere():
            total = total + apply_uses(elsewhere, self.queries)
        return total

    def contribution_totals(self, grouping: Grouping | None) -> Plan[Tensor]:
        """Plan the sum of contributions per group, (Q, G, d_out), the cheaper way."""
        self.table.run.require_values(self.name)
        groups = 1 if grouping is None else len(grouping.labels)
        count, d_in, d_out = len(self.queries), self._entry.d_in, self._entry.d_out
        self.check_affordable(8 * count * groups * d_out, "totals of contributions")
        size = sum(math.prod(shape) for shape in self.sums.shapes.values())
        plain = not self.sums.replayed and matrix_and_bias(self._entry.uses) is not None
        if self.table.keeps_shares(self.name):
            plain = False
        if not plain:
            self.check_affordable(16 * groups * size, "totals of contributions by so many groups")
        if not plain or (count * (d_in + d_out) >= d_in * d_out and 8 * groups * size <= MAX_SHARES_BYTES):
            shares = yield from self.sums.plan_shares(grouping)
            each = [apply_uses({use: s[g] for use, s in shares.items()}, self.queries) for g in range(groups)]
            return torch.stack(each, dim=1)
        outputs = Outputs(groups, d_out)
        return (yield from self.reduce(self.contribution(None), grouping, outputs, most_queries=1024))

    def reduce(
        self,
        measure: PatternMeasure,
        grouping: Grouping | None,
        reducer: Reducer[Any, R],
        most_queries: int | None = None,
    ) -> Plan[R]:
        """Plan the reduction of the measures of all patterns, by passes of at most so many queries each."""
        self.table.run.require_patterns(self.name, self._question_text(measure.of))
        self.require_patterns()
        if measure.of == "effect":
            effects = self.require_effects()
            return effects.reduce(grouping, reducer, block=most_queries, block_patterns=self.block_patterns)
        size = min(most_queries or MAX_PASS_QUERIES, MAX_PASS_QUERIES)
        results = []
        for start in range(0, len(self.queries), size):
            whole = len(self.queries) <= size  # the very tensor, by which an executor may remember measures
            rows = self.queries if whole else self.queries[start : start + size]
            units = measure.units if whole or measure.units is None else measure.units[start : start + size]
            kind = Sweep if units is not None and self.sums.replayed else Pass
            job = kind(
                layer=self.name,
                view=self.table,
                reducer=reducer,
                like=rows if rows.is_floating_point() else self.sums.like,
                queries=rows,
                measure=measure if units is measure.units else dataclasses.replace(measure, units=units),
                groups=grouping,
                block_patterns=self.block_patterns,
                again=whole,
            )
            results += yield [job]
        found: R = joined(results)
        return found

    # What they need -----------------------------------------------------------------------------------------------

    def contribution(self, units: Tensor | None) -> PatternMeasure:
        """Return the measure of contributions to one output unit per query."""
        return PatternMeasure("contribution", units, self.sums.shapes)

    def group(self, by: By) -> Grouping:
        """Group the layer's patterns."""
        self.require_patterns()
        return self.table.group(self.name, by)

    def require_effects(self) -> LayerEffects:
        """Return the layer's effects, or raise where it has none or nothing was asked about."""
        if (reason := outside(self.table.run, self.name)) is not None:
            raise QueryError(f"Layer {self.name!r} has no effects: {reason}.")
        if self.effects is None:
            raise QueryError(
                f"Effects of layer {self.name!r} are effects on something: attend with targets and a quantity, "
                'memory.attend(model, inputs, targets=labels, quantity="margin").'
            )
        self.effects.require()
        return self.effects

    def column(self, per: Per) -> str:
        """Return the column that names a sample, or a pattern."""
        if per == "sample" and "sample" not in self.table.names:
            raise SelectionError(
                'per="sample" needs a column "sample": record with annotate(sample=ids). '
                f"There are: {', '.join(self.table.names)}."
            )
        return per

    def require_patterns(self) -> None:
        """Raise where the view holds no patterns of the layer."""
        if not self.table.count(self.name):
            raise QueryError(
                f"This view of layer {self.name!r} holds no patterns: nothing was recorded, or the mask leaves nothing."
            )

    def check_affordable(self, size: int, what: str) -> None:
        """Raise where an answer would take too many bytes."""
        if size > MAX_ANSWER_BYTES:
            raise QueryError(
                f"{what} would take {size / 1e9:.0f} GB. Use totals() or top(), fewer queries, or a narrower view."
            )

    def _question_text(self, of: Of) -> str:
        """Name a question about every pattern, for a layer that has none."""
        if of == "magnitude":
            return "magnitude, which sums of keys give only where neither keys nor queries are negative,"
        return f"{of} of single patterns"

    def _never_negative(self) -> bool:
        least, greatest = torch.aminmax(self.queries)
        if self.table.keeps_shares(self.name):
            return self.table.kept_groups(None).key_sums(self.name).lowest >= 0 and bool(least >= 0)
        low, high = self.table.run.key_range(self.name)
        return (low >= 0 and bool(least >= 0)) or (high <= 0 and bool(greatest <= 0))

    def _units(self, unit: int | Tensor | None) -> Plan[Tensor]:
        """Plan the output unit of each query, (Q,)."""
        self.table.run.require_values(self.name)
        if unit is None:
            output = yield from self.output()
            return output.to(self._dtype).argmax(dim=1)
        units = torch.as_tensor(unit, device=self._device)
        if units.is_floating_point() or units.shape not in ((), (len(self.queries),)):
            raise QueryError(
                f"unit is {unit}; expected the number of an output unit, or one per query ({len(self.queries)})."
            )
        units = units.expand(len(self.queries)).contiguous()
        if bool((units < 0).any()) or bool((units >= self._entry.d_out).any()):
            raise QueryError(f"Output unit {unit} of layer {self.name!r} is outside 0 to {self._entry.d_out - 1}.")
        return units

    def _top_samples(self, question: Top, measure: PatternMeasure) -> Plan[Ranking]:
        k, by = question.k, question.by
        self.column("sample")
        outer = None if by is None else self.group(by)
        samples = self.group("sample")
        if outer is None:
            pairs, codes = np.arange(len(samples.labels)), samples.codes
        else:
            pairs, codes = np.unique(outer.codes * len(samples.labels) + samples.codes, return_inverse=True)
        first = np.full(len(pairs), -1, dtype=np.int64)
        first[codes[::-1]] = self.table.patterns(self.name)[::-1]  # the first pattern of each sample stands for it
        members = Grouping(("sample",), tuple(range(len(pairs))), codes)
        group_of = pairs // len(samples.labels)
        if None in samples.labels:  # patterns without a sample are nobody's
            group_of[pairs % len(samples.labels) == samples.labels.index(None)] = -1
        groups = 1 if outer is None else len(outer.labels)
        self.check_affordable(16 * len(self.queries) * groups * k, f"top({k})")
        contest = torch.from_numpy(group_of).to(self._device), torch.from_numpy(first).to(self._device)
        scores, patterns = yield from self.reduce(
            measure,
            members,
            BestMembers(groups, k, *contest, question.largest),
            most_queries=max(1, MAX_MEMBER_SUMS_BYTES // (8 * len(pairs))),
        )
        ranked_ones = np.isin(first, patterns.cpu().numpy())
        seen = dict(zip(first[ranked_ones].tolist(), np.bincount(codes)[ranked_ones].tolist(), strict=True))
        occurrences = [seen.get(number) for number in patterns.reshape(-1).tolist()]
        ranked = self._ranked(scores, patterns, outer, question)
        return dataclasses.replace(ranked, columns={"occurrences": occurrences, **ranked.columns})

    def _ranked(self, scores: Tensor, patterns: Tensor, grouping: Grouping | None, question: Top) -> Ranking:
        """Return the answer to a question for the best, whose columns are looked up when one is first asked for."""
        per, columns = question.per, question.columns
        names = [
            n for n in self.table.names if n != "pattern" and (per == "pattern" or n not in self.table.run.address)
        ]
        if columns is not None:
            self.table.require(columns)
            names = [name for name in names if name in columns]
        pattern_ids = patterns.clone()  # out of the user's reach

        def look_up() -> dict[str, list[Any]]:
            return self.table.lookup(self.name, pattern_ids.reshape(-1).cpu().numpy(), names)

        return Ranking(
            layer=self.name,
            of=question.of,
            per=per,
            by=() if grouping is None else grouping.by,
            groups=(None,) if grouping is None else grouping.labels,
            values=scores.masked_fill(patterns < 0, torch.nan).to(self._dtype),
            patterns=patterns,
            columns=LookedUpColumns(names, look_up),
        )


def check_per(per: str) -> None:
    """Raise unless `per` names something that can be ranked."""
    if per not in get_args(Per):
        raise QueryError(f"per is {per!r}; expected one of {get_args(Per)}.")


def _check_of(of: str) -> None:
    if of not in get_args(Of):
        raise QueryError(f"of is {of!r}; expected one of {get_args(Of)}.")
