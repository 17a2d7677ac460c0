"""Path contributions: a quantity of the network's output as a sum over what it was trained on, through all layers.

Along the path of weights that the training took, the quantity f of a test input changed by

    f(W_S) − f(W_0)  =  sum over steps of the integral of ⟨grad f, dW⟩ along the step

and W is, at every step, the sum of what is left of the start and of each group's share. So the change is a sum over
groups: part_g = sum over segments of ⟨mean gradient on the segment, change of share_g⟩. What is left of the start
changes too (decay), and belongs to the start's part.

A segment of several steps is replaced by its chord (`path_walk.py`). How much that matters is seen by comparing two
segments with one chord over both: the finer ones count, and the difference steers how long the next segments are. The
mean gradient is taken at a few points of each chord (Gauss and Legendre's); how much that matters is the residual, the
change of f that the parts do not add up to.

It is an account of this training, not a prediction of another one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dualform.effects.path_probe import PathProbe, State
from dualform.effects.path_samples import interpolate
from dualform.effects.path_shares import PathFollowing, PathShares, takes_decay
from dualform.effects.path_walk import PathParts, PathSettings, PathWalk
from dualform.engine.jobs import Fold
from dualform.engine.parameter_steps import Following, GroupsByPart, Onlooker
from dualform.engine.source import PatternSource

FEWEST_SEGMENTS = 32
"""The fewest segments that a path is cut into, so that what happens along it is seen."""


class _Path(Onlooker):
    """Looks at all parameters together wherever a segment ends."""

    def __init__(
        self,
        followings: Mapping[str, Following[Tensor]],
        probe: PathProbe,
        settings: PathSettings,
        state_at: Callable[[int], State],
        horizon: int,
        bins: Callable[[int], int] | None,
        final: Mapping[str, Tensor] | None,
    ) -> None:
        self._followings: dict[str, PathFollowing] = {}
        for name, following in followings.items():
            assert isinstance(following, PathFollowing), "a path is looked at through the shares that follow it"
            self._followings[name] = following
        self._state_at = state_at
        self._horizon = horizon
        self._final = final
        start = {name: each.result() for name, each in self._followings.items()}
        self._walk = PathWalk(probe, settings, start, state_at(0), bins)

    def after_step(self, step: int) -> None:
        """Integrate where a segment is complete."""
        done = step + 1
        last = done == self._horizon or self._walk.is_forced(done)
        if not last and not self._walk.is_due(done):
            return
        looks = {name: following.look() for name, following in self._followings.items()}
        weights = {name: look.parameter for name, look in looks.items()}
        changes = {name: look.changes for name, look in looks.items()}
        self._walk.go_to(done, weights, self._state_at(done), changes, alone=last)

    def result(self) -> PathParts:
        """Return the parts."""
        return self._walk.result(self._final)


def state_between(known: Sequence[tuple[int, State]]) -> Callable[[int], State]:
    """Return the uncovered state after any number of steps, each tensor linear between those after which it is known.

    Before the first and after the last it is as there. Whole numbers are those of the later one.
    """
    entries: dict[str, list[tuple[int, Tensor]]] = {}
    for steps, state in known:
        for name, tensor in state.items():
            entries.setdefault(name, []).append((steps, tensor))
    return lambda steps: {name: _tensor_between(found, steps) for name, found in entries.items()}


def _tensor_between(known: Sequence[tuple[int, Tensor]], steps: int) -> Tensor:
    """Return one tensor after a number of steps, from what is known of it."""
    after = [entry for entry in known if entry[0] >= steps]
    before = [entry for entry in known if entry[0] < steps]
    if not after or not before:
        return (after[0] if after else before[-1])[1]
    (early, first), (late, last) = before[-1], after[0]
    return interpolate({"": first}, {"": last}, (steps - early) / (late - early))[""]


def path_fold(
    source: PatternSource,
    probe: PathProbe,
    *,
    horizon: int,
    by: GroupsByPart | None,
    settings: PathSettings,
    known_state: Sequence[tuple[int, State]] = (),
    bins: Callable[[int], int] | None = None,
) -> Fold[Tensor]:
    """Return the fold that finds path contributions; its result is `PathParts`.

    Args:
        source: the source of the patterns.
        probe: the model and the inputs.
        horizon: how many steps.
        by: the group of each pattern.
        settings: how many groups there are, and how finely the path is followed.
        known_state: the uncovered state, and after how many steps it was so.
        bins: the bin of each step, where parts are wanted by bins of steps.
    """
    parameters = tuple(dict.fromkeys(p for entry in source.layers.values() for p in entry.parameters.values()))
    state_at = state_between(known_state)
    final = source.final if horizon == source.steps else None
    longest = max(settings.shortest, min(settings.longest, horizon // FEWEST_SEGMENTS))
    settings = replace(settings, longest=longest)
    return Fold(
        parameters,
        horizon,
        PathShares(settings.groups, any(takes_decay(source, name) for name in parameters), probe.device),
        by,
        lambda followings: _Path(followings, probe, settings, state_at, horizon, bins, final),
        from_settings=True,
    )


def step_bins(width: float) -> Callable[[int], int]:
    """Return the bin of each step, for bins of one width."""
    return lambda step: math.floor(step / width)
