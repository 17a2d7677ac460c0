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
    steps: dict[tuple[str, int], ParameterSteps] = {}  # by parameter and horizon
    followings: list[dict[str, Following[Any]]] = []
    onlookers: list[tuple[int, Onlooker] | None] = []  # each fold's, with its horizon
    for fold in folds:
        horizon = min(fold.horizon, source.steps)
        for name in fold.parameters:
            if (name, horizon) not in steps:
                steps[name, horizon] = ParameterSteps(source, name)
        mine = {name: steps[name, horizon].follow(fold.follower, fold.groups) for name in fold.parameters}
        followings.append(mine)
        onlookers.append(None if fold.onlooker is None else (horizon, fold.onlooker(mine)))
    reader = StepReader(source, {name for name, _ in steps})
    total = max((horizon for _, horizon in steps), default=0)
    with bar("replaying", total=total) as advance:
        for step in range(total):
            calls = reader.calls(step)
            for (_, horizon), parameter in steps.items():
                if step < horizon:
                    parameter.take(step, calls)
            for horizon, onlooker in filter(None, onlookers):
                if step < horizon:
                    onlooker.after_step(step)
            advance(1)
    return [
        {name: following.result() for name, following in mine.items()} if looking is None else looking[1].result()
        for mine, looking in zip(followings, onlookers, strict=True)
    ]
