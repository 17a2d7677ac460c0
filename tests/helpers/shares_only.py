"""A run as if only shares of it were kept: sums in dictionaries, and a source without patterns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dualform.attend.memory import Memory
from dualform.binning import By
from dualform.engine.addresses import Calls
from dualform.engine.description import RunDescription
from dualform.engine.share_source import GroupKeySums, ParameterShares, ShareSource
from dualform.engine.source import Factors, PatternPart, PatternSource, Rows, RunFiles, Which
from dualform.identity.families import Facts


class DictionaryShares(ShareSource):
    """The sums of a memory of patterns by some groupings and after some steps, computed at once."""

    def __init__(self, memory: Memory, groupings: Sequence[By], horizons: Sequence[int]) -> None:
        self._horizons = tuple(horizons)
        self._labels: dict[tuple[str, ...], tuple[Any, ...]] = {}
        self._shares: dict[Any, ParameterShares] = {}
        self._keys: dict[Any, GroupKeySums] = {}
        for grouping in groupings:
            source = memory.share_source(grouping)
            by = source.groupings[0]
            self._labels[by] = labels = source.labels(by)
            for step in self._horizons:
                for layer, entry in memory.layers.items():
                    self._keys[layer, by, step] = _spread_keys(source.key_sums(layer, by, horizon=step), labels)
                    for parameter in entry.parameters.values():
                        for which in (layer, None):
                            found = source.shares(parameter, by, layer=which, horizon=step)
                            self._shares[parameter, by, which, step] = _spread(found, labels)

    @property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._labels)

    @property
    def horizons(self) -> tuple[int, ...]:
        return self._horizons

    def labels(self, by: tuple[str, ...]) -> tuple[Any, ...]:
        return self._labels[by]

    def shares(
        self, parameter: str, by: tuple[str, ...], *, layer: str | None = None, horizon: int | None = None
    ) -> ParameterShares:
        return self._shares[parameter, by, layer, self._horizons[-1] if horizon is None else horizon]

    def key_sums(self, layer: str, by: tuple[str, ...], *, horizon: int | None = None) -> GroupKeySums:
        return self._keys[layer, by, self._horizons[-1] if horizon is None else horizon]


def _spread(found: ParameterShares, labels: tuple[Any, ...]) -> ParameterShares:
    """Return shares of all groups; those that are not there yet have none."""
    total = found.shares.new_zeros(len(labels), *found.shares.shape[1:])
    total[[labels.index(label) for label in found.labels]] = found.shares
    return dataclasses.replace(found, labels=labels, shares=total)


def _spread_keys(found: GroupKeySums, labels: tuple[Any, ...]) -> GroupKeySums:
    places = [labels.index(label) for label in found.labels]
    sums, counts = found.sums.new_zeros(len(labels), found.sums.shape[1]), found.counts.new_zeros(len(labels))
    sums[places], counts[places] = found.sums, found.counts
    return GroupKeySums(labels, sums, counts, found.lowest)


class EmptyPart(PatternPart):
    """A part of which no pattern is kept."""

    def __init__(self, part: PatternPart) -> None:
        self.index, self.start, self.stop, self._part = part.index, part.start, part.stop, part

    def calls(self, layer: str) -> Calls:
        return {name: column[:0] for name, column in self._part.calls(layer).items()}

    def rows(self, layer: str, what: Any) -> Rows:
        raise AssertionError("no pattern is kept")

    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray | None:
        return None


class SharesOnly(PatternSource):
    """A run whose patterns are not kept (those of the layers in `patterns` are), but shares of them."""

    def __init__(self, run: PatternSource, kept: ShareSource, *, patterns: Sequence[str] = ()) -> None:
        self._run, self._kept, self._patterns = run, kept, tuple(patterns)

    @property
    def description(self) -> RunDescription:
        found = self._run.description
        layers = {
            name: entry if name in self._patterns else dataclasses.replace(entry, store="shares")
            for name, entry in found.layers.items()
        }
        return dataclasses.replace(found, layers=layers)

    @property
    def digest(self) -> str:
        return f"shares of {self._run.digest}"

    @property
    def name(self) -> str:
        return self._run.name

    def parts(self) -> Sequence[PatternPart]:
        return self._run.parts() if self._patterns else [EmptyPart(part) for part in self._run.parts()]

    def facts(self, parameter: str) -> tuple[Facts, Factors]:
        return self._run.facts(parameter)

    def tensors(self, which: Which) -> Mapping[str, Tensor] | None:
        return self._run.tensors(which)

    @property
    def initial_states(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._run.initial_states

    @property
    def run_files(self) -> RunFiles | None:
        return self._run.run_files

    @property
    def kept_shares(self) -> ShareSource:
        return self._kept

    @property
    def steps_table(self) -> pa.Table:
        return self._run.steps_table


def shares_only(memory: Memory, *groupings: By, at: Sequence[int] = (), patterns: Sequence[str] = ()) -> Memory:
    """Return a memory that keeps only these shares of a memory of patterns."""
    kept = DictionaryShares(memory, groupings, [*at, memory.step])
    return Memory(SharesOnly(memory._run, kept, patterns=patterns))


def planted(memory: Memory, parameter: str, by: By, extra: Tensor, *, rounding: bool = False) -> Memory:
    """Return a memory of shares in which some part of a parameter is no pattern's: taken from the first group."""
    kept = DictionaryShares(memory, [by], [memory.step])
    for at, found in kept._shares.items():
        if at[0] == parameter:
            shares = found.shares.clone()
            shares[0] -= extra
            rest = {"rounding": found.rounding, "unexplained": found.unexplained}
            rest["rounding" if rounding else "unexplained"] = extra.double()
            kept._shares[at] = ParameterShares(found.labels, shares, found.start, **rest)
    return Memory(SharesOnly(memory._run, kept))


def groups_by_hand(memory: Memory, layer: str, column: str) -> dict[Any, Tensor]:
    """Return the numbers of a layer's patterns by their value in a column."""
    values = memory.patterns(layer, columns=[column])[column].to_pylist()
    rows = np.arange(len(values))
    return {value: torch.from_numpy(rows[[v == value for v in values]]) for value in dict.fromkeys(values)}
