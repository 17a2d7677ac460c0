"""What torch's own steps on the rebuilt gradients make of the parameters of a run."""

from collections.abc import Collection

from dualform.engine.plain import PlainExecutor
from dualform.engine.shares import FoldedShares, fold_shares
from dualform.engine.source import PatternSource


def folded(source: PatternSource, layers: Collection[str], *, horizon: int) -> dict[str, FoldedShares]:
    """Return the parameters of these layers that need a fold, after `horizon` steps; no group is followed."""
    found: dict[str, FoldedShares] = PlainExecutor().run(
        source, [fold_shares(source, layers, horizon=horizon, groups=0)]
    )[0]
    return found
