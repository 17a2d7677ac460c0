"""The spotlight on one layer: what each of its queries attends to; `layer_plans.py` says how questions are answered."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dualform.attend.answers import Effects, GroupTotals, Ranking, combine_strengths
from dualform.attend.groups import Grouping, Table
from dualform.attend.layer_plans import LayerPlans, check_per
from dualform.attend.queries import Captured
from dualform.attend.questions import Per, Plan, Question, Top, Totals, answer_all
from dualform.attend.sums import LayerSums, apply_uses
from dualform.binning import By
from dualform.effects.layer_effects import STRENGTHS, LayerEffects
from dualform.effects.output_gradients import OutputGradients
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.beside_patterns import Media
from dualform.engine.measures import Of, PatternMeasure
from dualform.errors import QueryError
from dualform.identity.parameter_use import takes_ids
from dualform.threads import in_own_dtype

A = TypeVar("A")

SWEEP_UNITS = 64
"""Output units whose contributions one sweep over the steps finds together: each has a measure of every pattern."""


class LayerSpotlight:
    """What each query of one layer attends to, over the patterns of a view."""

    def __init__(
        self,
        table: Table,
        cache: AnswerCache,
        layer: str,
        queries: Captured,
        *,
        gradients: OutputGradients | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self.name = layer
        self.leading = queries.leading
        self._table = table
        self._entry = table.run.layer(layer)
        self._dtype = torch.float64 if self._entry.dtype == "float64" else torch.float32
        ids = takes_ids(self._entry.uses)
        self.queries = queries.rows.to(torch.int64 if ids else self._dtype)  # (Q, d_in)
        like = self.queries.new_empty(0, dtype=self._dtype)
        self._sums = LayerSums(table, cache, layer, like)
        effects = None if gradients is None else LayerEffects(table, cache, layer, self.queries, gradients, self._dtype)
        self._plans = LayerPlans(table, layer, self.queries, self._sums, effects, chunk_size)

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        return f"Spotlight on layer {self.name!r}: {len(self)} queries over {self.count():,} patterns"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that patterns have."""
        return self._table.names

    @property
    def keeps_patterns(self) -> bool:
        """Whether single patterns of the layer are kept; otherwise shares by group are."""
        return self._entry.store != "shares"

    @property
    def media(self) -> Media:
        """What the run keeps for people to look at."""
        return self._table.run.require_files().media()

    def count(self) -> int:
        """Return the number of patterns in this view of the layer."""
        return self._table.count(self.name)

    @in_own_dtype
    def attention(self) -> Tensor:
        """Return every attention, (Q, T). For small memories; see `totals` and `top` for any."""
        size = self.queries.element_size() * len(self) * self.count()
        self._plans.check_affordable(size, "attention()")
        return self._answer(self._plans.everything(PatternMeasure("attention")))

    @in_own_dtype
    def contributions(self) -> Tensor:
        """Return what every pattern adds to the output, (Q, T, d_out). For small memories; see `totals`."""
        size = self._dtype.itemsize * len(self) * self.count() * self._entry.d_out
        self._plans.check_affordable(size, "contributions()")
        d_out = self._entry.d_out
        together = SWEEP_UNITS if self._plans.sums.replayed else 1
        parts: list[Tensor] = []
        for start in range(0, d_out, together):
            units = [torch.full((len(self),), u, device=self.queries.device) for u in range(d_out)[start:][:together]]
            plans = [self._plans.everything(self._plans.contribution(unit)) for unit in units]
            parts += answer_all(self._table.run, self._table.executor, plans)
        return torch.stack(parts, dim=2)

    @in_own_dtype
    def compute(self, *questions: Question) -> list[Any]:
        """Answer several questions by one reading of the patterns.

        >>> totals, best = layer.compute(dualform.Totals(by="label"), dualform.Top(5))  # doctest: +SKIP
        """
        return answer_all(self._table.run, self._table.executor, [self.plan(question) for question in questions])

    def plan(self, question: Question) -> Plan[Any]:
        """Return how a question is answered, for `answer_all`."""
        if isinstance(question, Totals):
            return self._plans.totals(question)
        if isinstance(question, Top):
            return self._plans.top(question)
        raise QueryError(f"{question!r} is no question; expected dualform.Totals(...) or dualform.Top(...).")

    def _answer(self, plan: Plan[A]) -> A:
        answer: A = answer_all(self._table.run, self._table.executor, [plan])[0]
        return answer

    @in_own_dtype
    def totals(self, by: By, *, of: Of = "attention") -> GroupTotals:
        """Sum over the patterns of each group.

        Args:
            by: a column, `dualform.bins(column, width=...)`, or several of these.
            of: `"attention"` (signed) or `"magnitude"` (absolute), (Q, G); `"contribution"`, (Q, G, d_out); or
                `"effect"`, a row per input, (M, G): see `effects`.
        """
        return self._answer(self._plans.totals(Totals(by, of)))

    @in_own_dtype
    def effects(self, by: By | None = None, *, per: Per = "sample", spread: bool = True) -> Effects:
        """Predict what training on each sample, pattern or group brought to the quantity that was asked about.

        A prediction of retraining, not a share of the output: effects do not sum to the weight. Needs
        `memory.attend(model, inputs, targets=..., quantity=...)`.

        Args:
            by: a column (or columns, or bins) to sum over, instead of samples or patterns.
            per: without `by`: `"sample"` sums over all occurrences of a sample; `"pattern"` gives each one, named by
                its number.
            spread: also find how far each effect depends on how strongly later steps are taken to answer. Where
                groups are too many for their shares to lie in memory, this measures every pattern three times.
        """
        return combine_strengths([[one] for one in self._effects_at(by, per, STRENGTHS if spread else STRENGTHS[:1])])

    def _effects_at(self, by: By | None, per: Per, strengths: Sequence[float]) -> list[Effects]:
        """Return the layer's effects at each strength of the filter."""
        check_per(per)
        source = self._require_asked()
        grouping = self._group(by if by is not None else self._plans.column(per))
        self._plans.check_affordable(8 * len(strengths) * len(source) * len(grouping.labels), "effects()")
        found = source.totals_at(grouping, strengths)
        cautions = tuple(source.cautions(None if by is None else grouping))
        answer = Effects((self.name,), source.gradients.quantity, grouping.by, grouping.labels, found[0], {})
        return [dataclasses.replace(answer, values=values, cautions=cautions) for values in found]

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
    ) -> Ranking:
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
        return self._answer(self._plans.top(Top(k, by, of, per, largest, unit, columns)))

    @in_own_dtype
    def output(self) -> Tensor:
        """Return the layer's output in the dual form: start plus the sum of contributions, (*leading, d_out).

        Where another layer uses the same parameter, what its patterns added to it counts too.
        Under a mask these are still the unmasked network's queries; `Memory.apply` runs the whole masked network.
        """
        return self._answer(self._plans.output()).to(self._dtype).reshape(*self.leading, -1)

    @in_own_dtype
    def start(self) -> Tensor:
        """Return what the start alone gives, (Q, d_out); with Muon, start and rounding: all that is no pattern's."""
        return apply_uses(self._sums.starts(), self.queries).to(self._dtype)

    def _group(self, by: By) -> Grouping:
        return self._plans.group(by)

    def _require_asked(self) -> LayerEffects:
        return self._plans.require_effects()
