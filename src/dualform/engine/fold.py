"""Run folds: from the first step to the last, every parameter's steps are taken again, and each fold follows its own.

Folds that are run together share one reading of the patterns, and folds of one parameter and horizon the replay of its
optimizer too: a following only looks on.
"""

from collections.abc import Sequence
from typing import Any

from dualform.engine.jobs import Fold
from dualform.engine.parameter_steps import Following, Onlooker, ParameterSteps
from dualform.engine.source import PatternSource
from dualform.engine.stored_calls import StepReader
from dualform.progress import bar


def run_folds(source: PatternSource, folds: Sequence[Fold[Any]]) -> list[Any]:
    """Return the result of each fold: parameter -> what its follower found; or what its onlooker found."""
    running = RunningFolds(source, folds)
    with bar("replaying", total=running.steps) as advance:
        for step in range(running.steps):
            running.take(step)
            advance(1)
    return running.results()


class RunningFolds:
    """Folds at work: takes the steps in their order.

    Attributes:
        steps: how many steps there are to take.
    """

    def __init__(self, source: PatternSource, folds: Sequence[Fold[Any]]) -> None:
        # by parameter, horizon, and whether steps that follow from settings are not taken again
        self._parameters: dict[tuple[str, int, bool], ParameterSteps] = {}
        self._followings: list[dict[str, Following[Any]]] = []
        self._onlookers: list[tuple[int, Onlooker] | None] = []  # each fold's, with its horizon
        for fold in folds:
            horizon = min(fold.horizon, source.steps)
            mine = {}
            for name in fold.parameters:
                at = (name, horizon, fold.from_settings)
                if at not in self._parameters:
                    self._parameters[at] = ParameterSteps(source, name, from_settings=fold.from_settings)
                mine[name] = self._parameters[at].follow(fold.follower, fold.groups)
            self._followings.append(mine)
            self._onlookers.append(None if fold.onlooker is None else (horizon, fold.onlooker(mine)))
        self._reader = StepReader(source, {name for name, *_ in self._parameters})
        self.steps = max((horizon for _, horizon, _ in self._parameters), default=0)

    def take(self, step: int) -> None:
        """Take a step of every parameter again."""
        calls = self._reader.calls(step)
        for (_, horizon, _), parameter in self._parameters.items():
            if step < horizon:
                parameter.take(step, calls)
        for horizon, onlooker in filter(None, self._onlookers):
            if step < horizon:
                onlooker.after_step(step)

    def results(self) -> list[Any]:
        """Return the result of each fold: parameter -> what its follower found; or what its onlooker found."""
        return [
            {name: following.result() for name, following in mine.items()} if looking is None else looking[1].result()
            for mine, looking in zip(self._followings, self._onlookers, strict=True)
        ]
