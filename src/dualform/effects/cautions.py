"""Reasons to trust effects less: a training, or groups, unlike those whose effects were compared with retraining.

docs/results.md has these comparisons (“Do effects predict retraining?”); the limits below are what they cover.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualform.engine.source import PatternSource

FEWEST_STEPS = 75
"""Steps of the shortest training whose effects were compared with retraining (digits-5 of benchmarks/truth)."""
SMALLEST_CHANGE = 0.1
"""Change of the weights, of their size at the start, below which a training is more like a fine-tuning."""
ONE_STEP_SHARE = 0.25
"""Share of an unrolled derivative in one step above which it foretells little: the fine-tunings of `dualform reproduce
tuning` have 0.52 where it fails, 0.11 where it is as good as others, and at most 0.05 where it leads."""
LARGEST_GROUP = 0.5
"""Share of the patterns in a group: halves of the data are the largest groups that were left out and retrained."""


def regime_cautions(steps: int, change: float | None) -> list[str]:
    """Say where a training is unlike those whose effects were compared with retraining.

    Args:
        steps: how many it took.
        change: of all weights, of their size at the start; None where it is not known.
    """
    found = []
    if steps < FEWEST_STEPS:
        found.append(
            f"the training has {steps} steps; effects were compared with retraining from {FEWEST_STEPS} steps on"
        )
    if change is not None and change < SMALLEST_CHANGE:
        found.append(
            f"the training changed the weights by {change:.1%} of their size, like a fine-tuning; effects were "
            "compared with retraining from scratch only"
        )
    return found


def step_cautions(sizes: Mapping[int, float]) -> list[str]:
    """Say where one step makes much of an unrolled derivative.

    Args:
        sizes: step -> the sum of the absolute derivatives by the weights of its batch.
    """
    total = sum(sizes.values())
    if not total:
        return []
    step = max(sizes, key=lambda one: sizes[one])
    share = sizes[step] / total
    if share <= max(ONE_STEP_SHARE, 4 / len(sizes)):
        return []
    return [
        f"step {step} alone makes {share:.0%} of the derivative: it turns on something finer than leaving samples out, "
        "as an optimizer does that begins anew and divides tiny gradients by tiny roots. A larger eps makes a smoother "
        "training; compare with a few trainings without some samples"
    ]


def weight_change(run: PatternSource) -> float | None:
    """Return the change of all recorded weights over the training, of their size at its start; None if not known."""
    final = run.final
    if final is None:
        return None
    initial = run.initial
    both = [(initial[name].double(), final[name].double()) for name in initial if name in final]
    size = sum(float(before.square().sum()) for before, _ in both)
    moved = sum(float((after - before).square().sum()) for before, after in both)
    return float(np.sqrt(moved / size)) if size else None


def size_cautions(labels: Sequence[Any], codes: npt.NDArray[np.int64]) -> list[str]:
    """Say which groups are larger than any that was left out and retrained."""
    if not len(codes):
        return []
    shares = np.bincount(codes, minlength=len(labels)) / len(codes)
    return [
        f"group {label!r} holds {share:.0%} of the patterns; effects add up over samples, which was compared with "
        f"retraining for groups of at most {LARGEST_GROUP:.0%}"
        for label, share in zip(labels, shares.tolist(), strict=True)
        if share > LARGEST_GROUP
    ]
