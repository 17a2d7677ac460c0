"""Spotlights: for each query and layer, what it attends to. One layer's is in `layer.py`; here are all together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from dualform.attend.answers import EffectMethod, Effects, Vote, combine_strengths
from dualform.attend.by_layer import ByLayer
from dualform.attend.kept_paths import find_kept, keep_path, name_path
from dualform.attend.layer import LayerSpotlight
from dualform.attend.path import Asked, PathContributions, PathPer, find_path_contributions
from dualform.attend.questions import Per, Question, answer_all
from dualform.attend.unrolled_effects import find_unrolled_effects
from dualform.binning import Bins, By
from dualform.drawing import notebook_html
from dualform.effects.layer_effects import STRENGTHS
from dualform.effects.moments import outside
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.measures import Of
from dualform.errors import QueryError
from dualform.threads import in_own_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Spotlight(ByLayer[LayerSpotlight]):
    """The spotlights of all layers: `spotlight["layers.2"]` is one layer's."""

    layers: Mapping[str, LayerSpotlight]
    asked: Asked | None = None
    known_state: Callable[[], Sequence[tuple[int, Mapping[str, Tensor]]]] = tuple
    cache: AnswerCache | None = None

    def __repr__(self) -> str:
        return "\n".join(repr(layer) for layer in self.layers.values())

    def _repr_html_(self) -> str | None:
        """Return the spotlight as HTML for a notebook, by the function that is registered for it."""
        return notebook_html(self)

    @in_own_dtype
    def compute(self, *questions: Question) -> list[dict[str, Any]]:
        """Answer several questions about all layers by one reading of each layer's patterns.

        Returns, for each question, the answer by layer:

        >>> totals, best = spotlight.compute(dualform.Totals(by="label"), dualform.Top(5))  # doctest: +SKIP
        >>> totals["layers.2"]  # doctest: +SKIP
        """
        if not self.layers:
            return [{} for _ in questions]
        first = next(iter(self.layers.values()))
        plans = [layer.plan(question) for question in questions for layer in self.layers.values()]
        answers = iter(answer_all(first._table.run, first._table.executor, plans))
        return [{name: next(answers) for name in self.layers} for _ in questions]

    @in_own_dtype
    def vote(self, by: By, *, of: Of = "attention") -> Vote:
        """Return, per layer and query, the group with the largest total.

        For contributions it is the total to the output unit that is largest.
        """
        winners = {}
        names: tuple[str, ...] = ()
        for name, layer in self.layers.items():
            totals = layer.totals(by, of=of)
            values, names = totals.values, totals.by
            if of == "contribution":
                units = layer.output().reshape(len(layer), -1).argmax(dim=1)
                values = values.gather(2, units[:, None, None].expand(-1, values.shape[1], 1))[:, :, 0]
            winners[name] = tuple(totals.groups[g] for g in values.argmax(dim=1).tolist())
        return Vote(names, of, winners)

    @in_own_dtype
    def effects(
        self, by: By | None = None, *, per: Per = "sample", method: EffectMethod = "filter", spread: bool = True
    ) -> Effects:
        """Sum the effects of all layers: see `LayerSpotlight.effects`.

        Layers outside the linear family contribute nothing, and are listed in the answer's `outside`.

        Args:
            by: a column (or columns, or bins) to sum over, instead of samples.
            per: without `by`: `"sample"`, summed over all occurrences of a sample.
            method: `"filter"` predicts what a training with any seed and order would change, from the memory alone.
                `"unrolled"` is exact for small changes of this very training, with its seed and its order: the
                derivative by each sample's weight, found backwards through every step and every parameter that was
                trained. It needs a run of steps whose training is a `dualform.Restartable` with `loss=...`, and takes
                one replay and, for each step, about one second backward for each input.
            spread: whether to say how uncertain each predicted effect is, which takes the filter twice more. Unrolled
                effects have no spread.
        """
        if method not in get_args(EffectMethod):
            raise QueryError(f"method is {method!r}; expected one of {get_args(EffectMethod)}.")
        if method == "unrolled":
            if by is None and per != "sample":
                raise QueryError(f'Unrolled effects are those of whole samples; per is {per!r}, expected "sample".')
            first, asked = self._asked_first("Unrolled effects are those on")
            return find_unrolled_effects(first._table, asked, by)
        if by is None and per == "pattern":
            raise QueryError('Patterns belong to one layer: ask spotlight[layer].effects(per="pattern").')
        left = self.outside()
        inside = [layer for name, layer in self.layers.items() if name not in left]
        if not inside:
            raise QueryError(f"No layer of the linear family is asked about. Outside it: {', '.join(left) or 'none'}.")
        found = [layer._effects_at(by, per, STRENGTHS if spread else STRENGTHS[:1]) for layer in inside]
        return combine_strengths(list(zip(*found, strict=True)), left)

    @in_own_dtype
    def path_contributions(
        self,
        by: By | None = None,
        *,
        per: PathPer | None = None,
        against: Any = None,
        over: Bins | None = None,
        tolerance: float = 0.02,
    ) -> PathContributions:
        """Say what each group of training patterns, or each sample, added to a quantity of the whole network's output.

        The parts, the start and the rest add up to the output. They account for this training and predict no other.
        Needs `memory.attend(model, inputs, targets=..., quantity=...)`; ask for a difference, such as
        `quantity=dualform.contrast(9, 7)`, and against reference inputs: the parts of one logit alone are large, cancel
        each other, and name the logit's own class whatever the input.

        Args:
            by: a column, `dualform.bins(column, width=...)`, or several of these.
            per: in place of `by`: "sample" for the parts of single samples, which are found backwards through the steps
                and cost more, or "layer" for the parts of all training through each layer.
            against: reference inputs (R, ...): every number is then that of the input less their mean.
            over: `dualform.bins("step", width=...)`: also the parts of each bin of steps.
            tolerance: how much parts may change when the path is followed twice as finely, and how large the residual
                may be, both relative. What was reached is in the answer.
        """
        first, name = self._path_question(by=by, per=per, against=against, over=over, tolerance=tolerance)
        if (kept := find_kept(self.cache, name)) is not None:
            return kept
        assert self.asked is not None, "checked above"
        found = find_path_contributions(
            first._table,
            self.asked,
            by,
            per=per,
            against=against,
            over=over,
            tolerance=tolerance,
            known_state=self.known_state(),
        )
        return keep_path(self.cache, name, found)

    @in_own_dtype
    def kept_path_contributions(
        self,
        by: By | None = None,
        *,
        per: PathPer | None = None,
        against: Any = None,
        over: Bins | None = None,
        tolerance: float = 0.02,
    ) -> PathContributions | None:
        """Return the path contributions to the same question if it was asked before and its answer is kept."""
        _, name = self._path_question(by=by, per=per, against=against, over=over, tolerance=tolerance)
        return find_kept(self.cache, name)

    def _path_question(self, **options: Any) -> tuple[LayerSpotlight, tuple[Any, ...] | None]:
        """Return a layer's spotlight, which has the view, and the name of a question with these options."""
        first, asked = self._asked_first("Path contributions are those to")
        table = first._table
        named = None
        if not table.conditions:  # a mask is refused
            covered = table.run.description.parameters
            named = name_path(asked, table.horizon, covered, known_state=self.known_state(), **options)
        return first, named

    def _asked_first(self, what: str) -> tuple[LayerSpotlight, Asked]:
        """Return a layer's spotlight, which has the view, and what was asked; raise where no quantity was."""
        if self.asked is None:
            raise QueryError(
                f'{what} a quantity of the output: ask memory.attend(model, inputs, targets=..., quantity="logit").'
            )
        return next(iter(self.layers.values())), self.asked

    def outside(self) -> dict[str, str]:
        """Return the layers that contribute nothing to effects, and why."""
        reasons = {name: outside(layer._table.run, name) for name, layer in self.layers.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}
