"""Several recordings of one recipe, asked together: effects averaged over them, with their spread.

What is exact of a recording (shares, masks, contributions, path contributions) is a fact about that one training, and
is never averaged: it is asked of each memory.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualform.attend.answers import Effects
from dualform.attend.memory import Memory
from dualform.attend.path import PathContributions
from dualform.attend.spotlight import Spotlight
from dualform.binning import By
from dualform.effects.output_gradients import Quantity
from dualform.engine.share_source import ParameterShares
from dualform.errors import QueryError


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble:
    """Memories of several trainings of one recipe that differ only by chance: their start, their order, their draws.

    Attributes:
        memories: two or more.
        names: how each is called in messages.
    """

    memories: tuple[Memory, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.memories) < 2:
            raise QueryError(f"An ensemble needs two recordings or more; {len(self.memories)} came. dualform.open one.")
        first, *others = self.memories
        for name, other in zip(self.names[1:], others, strict=True):
            if (difference := _difference(first, other)) is not None:
                raise QueryError(
                    f"{self.names[0]} and {name} are not two recordings of one recipe: {difference}. Give recordings "
                    "that differ by their random seeds only."
                )

    def __len__(self) -> int:
        return len(self.memories)

    def __repr__(self) -> str:
        return f"Ensemble of {len(self)} recordings: {', '.join(self.names)}"

    def where(self, sql: str | None = None, /, **equal: Any) -> "Ensemble":
        """Keep only some patterns, in every memory: see `Memory.where`."""
        return self._each(lambda memory: memory.where(sql, **equal))

    def without(self, sql: str | None = None, /, **equal: Any) -> "Ensemble":
        """Leave some patterns out, in every memory: see `Memory.without`."""
        return self._each(lambda memory: memory.without(sql, **equal))

    def _each(self, view: Callable[[Memory], Memory]) -> "Ensemble":
        return dataclasses.replace(self, memories=tuple(view(memory) for memory in self.memories))

    def shares(self, by: By) -> tuple[dict[str, ParameterShares], ...]:
        """Return each memory's shares by group: see `Memory.shares`. They are never averaged."""
        return tuple(memory.shares(by) for memory in self.memories)

    def attend(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        targets: Tensor | None = None,
        quantity: Quantity | None = None,
        layers: str | Collection[str] | None = None,
    ) -> "EnsembleSpotlight":
        """Ask what inputs attend to in every memory, each with its own trained weights.

        Args:
            model: a model of the same structure; each memory's weights are put into a copy of it.
            inputs: as in `Memory.attend`.
            targets: for effects; as in `Memory.attend`. Without them every memory's own model decides.
            quantity: for effects; as in `Memory.attend`.
            layers: the layers to look at; by default all that were recorded.
        """
        inputs = inputs if isinstance(inputs, Tensor | tuple | dict) else list(inputs)
        spotlights = [
            memory.attend(memory.trained(model), inputs, targets=targets, quantity=quantity, layers=layers)
            for memory in self.memories
        ]
        return EnsembleSpotlight(tuple(spotlights))


@dataclass(frozen=True, slots=True, eq=False)
class EnsembleSpotlight:
    """What some inputs attend to in each of several recordings.

    Attributes:
        spotlights: each memory's own, for everything but effects.
    """

    spotlights: tuple[Spotlight, ...]

    def __len__(self) -> int:
        return len(self.spotlights)

    def __getitem__(self, number: int) -> Spotlight:
        return self.spotlights[number]

    def effects(self, by: By | None = None) -> Effects:
        """Return the effects of samples, or of groups, averaged over the recordings, and their standard deviation.

        The standard deviation says how much an effect depends on the chance of one training. The mean is a better
        prediction of an average retraining than one recording's effects are (docs/results.md).

        Args:
            by: a column (or columns, or bins) to sum over, instead of samples.
        """
        found = [spotlight.effects(by, spread=False) for spotlight in self.spotlights]
        groups = tuple(dict.fromkeys(group for each in found for group in each.groups))
        if any(set(each.groups) != set(groups) for each in found):
            raise QueryError(
                f"The recordings do not have the same groups by {', '.join(found[0].by)}; group by a column that says "
                "the same of every recording, as the label of a sample does."
            )
        place = {group: i for i, group in enumerate(groups)}
        values = torch.zeros(len(found), len(found[0].values), len(groups), dtype=torch.float64)
        for number, each in enumerate(found):
            values[number][:, [place[group] for group in each.groups]] = each.values.cpu()
        return dataclasses.replace(
            found[0],
            groups=groups,
            values=values.mean(dim=0),
            spread=values.std(dim=0),
            spread_over=f"the standard deviation over {len(found)} recordings",
            cautions=tuple(dict.fromkeys(reason for each in found for reason in each.cautions)),
        )

    def path_contributions(self, by: By | None = None, **options: Any) -> tuple[PathContributions, ...]:
        """Return each recording's path contributions: see `Spotlight.path_contributions`. They are never averaged."""
        return tuple(spotlight.path_contributions(by, **options) for spotlight in self.spotlights)


def _difference(first: Memory, other: Memory) -> str | None:
    """Say how two recordings differ by more than chance; None where they do not."""
    run, another = first._run, other._run
    if run.digest == another.digest:
        return "they are the same recording"
    for what, mine, theirs in (
        ("layers", _layer_shapes(first), _layer_shapes(other)),
        ("optimizers", run.description.optimizers, another.description.optimizers),
        ("steps", run.steps, another.steps),
        ("columns", sorted(first.columns), sorted(other.columns)),
    ):
        if mine != theirs:
            return f"their {what} differ, {_shortened(mine)} and {_shortened(theirs)}"
    for name in run.description.parameters:
        settings, others = run.facts(name)[0].settings, another.facts(name)[0].settings
        for setting in settings:
            if not _same_numbers(settings[setting], others.get(setting)):
                return f"the optimizer's {setting} differs for {name!r}"
    for layer in first.layers:
        if "sample" in first.columns and run.count(layer):
            samples = [memory._table.group(layer, "sample").labels for memory in (first, other)]
            if set(samples[0]) != set(samples[1]):
                only = set(samples[0]) ^ set(samples[1])
                return f"{len(only):,} samples are in one of them only"
            break
    return None


def _layer_shapes(memory: Memory) -> dict[str, tuple[Any, ...]]:
    return {name: (entry.kind, entry.d_in, entry.d_out, entry.store) for name, entry in memory.layers.items()}


def _same_numbers(mine: Any, theirs: Any) -> bool:
    if theirs is None:
        return False
    return bool(np.array_equal(np.asarray(mine), np.asarray(theirs), equal_nan=np.asarray(mine).dtype.kind == "f"))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
