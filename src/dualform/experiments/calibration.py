"""Do the effects of one run predict retraining? A few retrainings of the user's own training say how far to trust them.

Networks are trained again on random halves of the samples. What effects predict of a half is the sum over its samples;
what happened is the margin of each test input after the retraining.

    slope   of what happened on what was predicted, over all tests, each less its mean over the halves. 1: the sizes of
            sums of effects are right. Below 1: they are too large.
    LDS     the rank correlation of the two over the halves, averaged over the tests. 1: the order is right.

Errors are those of the jackknife over the retrainings: with few of them they are wide.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attend.answers import Effects
from dualform.attend.memory import Memory
from dualform.effects.output_gradients import measure_quantity
from dualform.errors import QueryError
from dualform.experiments.retraining import correlate
from dualform.modes import evaluating
from dualform.progress import bar

FEWEST_RETRAININGS = 4
MOST_TESTS = 100
SLOPES = (0.5, 2.0)
"""Slopes between which sums over half the data are right within a factor of 2; outside, they are far from additive."""
LOWEST_LDS = 0.2
"""Below this score, less its error, effects say little about this training."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """How well effects predicted some retrainings.

    Attributes:
        retrainings: how many.
        tests: test inputs.
        samples: of the training.
        slope: with its standard error.
        lds: the linear datamodeling score, with its standard error.
        shuffled: the score of effects whose samples are shuffled: a control.
        cautions: reasons to trust effects less, those of the effects included.
    """

    retrainings: int
    tests: int
    samples: int
    slope: tuple[float, float]
    lds: tuple[float, float]
    shuffled: float
    cautions: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the calibration as text."""
        return [
            f"{self.retrainings} retrainings on random halves of {self.samples:,} samples, {self.tests} test inputs",
            f"slope {self.slope[0]:.2f} ± {self.slope[1]:.2f} (1: sums of effects have the right size)",
            f"LDS   {self.lds[0]:.2f} ± {self.lds[1]:.2f} (1: they have the right order; samples shuffled: "
            f"{self.shuffled:.2f})",
            *(f"caution: {reason}" for reason in self.cautions),
        ]


def calibrate_effects(
    memory: Memory,
    retrain: Callable[[Sequence[int]], nn.Module],
    *,
    retrainings: int = 10,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    seed: int = 0,
) -> Calibration:
    """Retrain on random halves of a run's samples, and compare the margins with what effects predict.

    Args:
        memory: of the run.
        retrain: trains on the samples with some ids alone, and returns the model.
        retrainings: how many halves.
        inputs: test inputs; by default the first of those that the run keeps.
        targets: their classes.
        seed: of the halves.
    """
    if retrainings < FEWEST_RETRAININGS:
        raise QueryError(f"{retrainings} retrainings say nothing; expected at least {FEWEST_RETRAININGS}.")
    if inputs is None:
        inputs, targets = memory.tests()
    if targets is None:
        raise QueryError("The run keeps no targets of its tests; add them with memory.add_tests(inputs, targets).")
    inputs, targets = inputs[:MOST_TESTS], targets[:MOST_TESTS]
    samples = _samples(memory)
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(len(samples), generator=generator)[: len(samples) // 2] for _ in range(retrainings)]
    halves = [samples[chosen.sort().values] for chosen in rows]
    margins: list[Tensor] = []
    model: nn.Module | None = None
    with bar("retraining", total=retrainings) as advance:
        for half in halves:
            model = retrain(half.tolist())
            margins.append(_margins(model, inputs, targets))
            advance(1)
    assert model is not None, "there is at least one retraining"
    spotlight = memory.attend(memory.trained(model), inputs, targets=targets, quantity="margin")
    effects = spotlight.effects(spread=False)
    place = {sample: i for i, sample in enumerate(effects.groups)}
    members = torch.zeros(retrainings, len(place), dtype=torch.float64)
    for row, half in zip(members, halves, strict=True):
        row[[place[sample] for sample in half.tolist()]] = 1.0
    return compare_with_retrainings(effects, members, torch.stack(margins).double())


def compare_with_retrainings(effects: Effects, members: Tensor, actual: Tensor) -> Calibration:
    """Compare effects with what retraining gave.

    Args:
        effects: of every sample.
        members: (K, N) 1 where a retraining used a sample.
        actual: (K, M) the margins after each retraining.
    """
    values = effects.values.cpu()
    predicted = members @ values.T
    slope, lds = ((f(predicted, actual), _jackknife(f, predicted, actual)) for f in (slope_of, score_of))
    order = torch.randperm(members.shape[1], generator=torch.Generator().manual_seed(0))
    shuffled = score_of(members[:, order] @ values.T, actual)
    return Calibration(
        len(members), values.shape[0], members.shape[1], slope, lds, shuffled, (*effects.cautions, *_doubts(slope, lds))
    )


def _doubts(slope: tuple[float, float], lds: tuple[float, float]) -> list[str]:
    """Say what a calibration found that speaks against trusting effects."""
    found = []
    if lds[0] - lds[1] < LOWEST_LDS:
        found.append("effects hardly predicted the order of these retrainings: do not rely on them here")
    elif not SLOPES[0] <= slope[0] <= SLOPES[1]:
        size = "large" if slope[0] < 1 else "small"
        factor = 1 / slope[0] if 0 < slope[0] < 1 else slope[0]
        found.append(
            f"sums of effects over half the data are about {factor:.1f} times too {size}: groups that large are "
            "far from additive; trust their order, not their size"
        )
    return found


def slope_of(predicted: Tensor, actual: Tensor) -> float:
    """Return the slope of what happened on what was predicted, (K, M) each, each test input less its mean."""
    x, y = (each - each.mean(dim=0) for each in (predicted, actual))
    return float((x * y).sum() / x.square().sum().clamp(min=1e-300))


def score_of(predicted: Tensor, actual: Tensor) -> float:
    """Return the linear datamodeling score of predictions, (K, M)."""
    return float(correlate(predicted, actual).mean())


def _jackknife(f: Callable[[Tensor, Tensor], float], predicted: Tensor, actual: Tensor) -> float:
    """Return the standard error of a statistic of the retrainings, by leaving each of them out."""
    count = len(predicted)
    rows = torch.arange(count)
    without = torch.tensor([f(predicted[rows != k], actual[rows != k]) for k in range(count)], dtype=torch.float64)
    return math.sqrt((count - 1) * float((without - without.mean()).square().mean()))


def _margins(model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    device = next((parameter.device for parameter in model.parameters()), targets.device)
    with torch.no_grad(), evaluating(model):
        return measure_quantity(model(inputs.to(device)), targets.to(device), "margin").cpu()


def _samples(memory: Memory) -> Tensor:
    """Return the ids of all samples of a run, in order."""
    if "sample" not in memory.columns:
        raise QueryError(
            'A calibration leaves samples out, by their column "sample": record with annotate(sample=ids). '
            f"There are: {', '.join(memory.columns)}."
        )
    found: set[Any] = set()
    for layer in memory.layers:
        found |= set(memory._table.group(layer, "sample").labels)
    if any(not isinstance(sample, int) for sample in found):
        raise QueryError("Some patterns have no sample, or one that is no whole number; expected an id for each.")
    return torch.tensor(sorted(found))


def calibration_row(found: Calibration) -> Mapping[str, Any]:
    """Return a calibration as plain values, for JSON."""
    return {
        "retrainings": found.retrainings,
        "tests": found.tests,
        "samples": found.samples,
        "slope": found.slope[0],
        "slope error": found.slope[1],
        "lds": found.lds[0],
        "lds error": found.lds[1],
        "shuffled": found.shuffled,
        "cautions": list(found.cautions),
    }
