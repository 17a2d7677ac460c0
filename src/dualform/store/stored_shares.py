"""Shares by group in a run folder, opened for reading.

A file holds the shares after one step. Its tensors are named by numbers: of the grouping, of the layer and its use, and
of the group, in the order of the manifest (docs/format.md). Names, shapes and dtypes are compared with the manifest
when a file is first read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualform.binning import Bins, label_order
from dualform.engine.share_source import GroupKeySums, ParameterShares, ShareSource
from dualform.errors import CorruptError, QueryError
from dualform.identity.row_division import own_rows
from dualform.printable import cut
from dualform.recording.group_labels import rest_label
from dualform.store.format import shares_file, shares_state_file
from dualform.store.label_text import label_value
from dualform.store.manifest import GroupingEntry, SharesEntry
from dualform.store.tensors import TensorFile

if TYPE_CHECKING:
    from dualform.store.reader import Run

Expected = tuple[tuple[int, ...], torch.dtype]


class StoredShares(ShareSource):
    """The shares by group that a run folder keeps; of divided parameters those of one process's rows."""

    def __init__(self, run: "Run", kept: SharesEntry, *, processes: int = 1) -> None:
        """Open the shares of a run, or of one of several processes that recorded one."""
        self._run = run
        self._shapes = {name: entry.shape for name, entry in run.manifest.parameters.items()}
        if run.published.divided:
            for name, shape in self._shapes.items():
                rows = own_rows(shape[0], run.published.rank, processes)
                self._shapes[name] = (rows.stop - rows.start, *shape[1:])
        self._kept = kept
        self._files: dict[int, TensorFile] = {}
        self._by = {grouping_names(grouping): place for place, grouping in enumerate(kept.groupings)}
        self._stored_labels = {by: stored_labels(kept.groupings[place]) for by, place in self._by.items()}
        # Groups are numbered as they came, and shown sorted.
        self._order = {
            by: sorted(range(len(labels)), key=lambda group: label_order(labels[group]))
            for by, labels in self._stored_labels.items()
        }

    @property
    def groupings(self) -> tuple[tuple[str, ...], ...]:
        """The groupings that are kept, each as the names of its columns."""
        return tuple(self._by)

    @property
    def horizons(self) -> tuple[int, ...]:
        """After how many steps the shares are kept, ascending."""
        return self._kept.horizons

    def labels(self, by: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the groups of a grouping, sorted."""
        self._grouping(by)
        return tuple(self._stored_labels[by][group] for group in self._order[by])

    def numbered_labels(self, by: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the groups of a grouping in the order of their numbers."""
        self._grouping(by)
        return self._stored_labels[by]

    def rest_place(self, by: tuple[str, ...]) -> int | None:
        """Return the place of the group of all patterns whose own groups are not kept; None where all are."""
        kept = self._kept.groupings[self._grouping(by)]
        return self._order[by].index(len(kept.labels) - 1) if kept.rest else None

    def shares(
        self, parameter: str, by: tuple[str, ...], *, layer: str | None = None, horizon: int | None = None
    ) -> ParameterShares:
        """Return a parameter's shares; those of one layer's patterns alone where several layers use it."""
        file = self._file(horizon)
        total = self.shares_of(parameter, by, layer, horizon)
        at = list(self._run.manifest.parameters).index(parameter)
        zeros = torch.zeros(self._shapes[parameter], dtype=total.dtype)
        return ParameterShares(
            self.labels(by),
            total,
            self._start(file, parameter, at),
            file.tensor(f"unexplained.{at}") if f"unexplained.{at}" in file.places else zeros,
            file.tensor(f"rounding.{at}")
            if f"rounding.{at}" in file.places
            else self._closing(file, parameter, by, horizon),
        )

    def _closing(self, file: TensorFile, parameter: str, by: tuple[str, ...], horizon: int | None) -> Tensor:
        """Return the rounding that a file leaves out at the end: the final parameter less all other parts."""
        at = list(self._run.manifest.parameters).index(parameter)
        ended = horizon in (None, self._run.steps) and f"unexplained.{at}" in file.places  # else never updated
        final = None
        if ended:
            final = self._run.own_rows("final") if self._run.published.divided else self._run.final
        if final is None:
            return torch.zeros(self._shapes[parameter], dtype=torch.float64)
        total = self._start(file, parameter, at) + file.tensor(f"unexplained.{at}").double()
        for place, layer in enumerate(self._run.manifest.layers.values()):
            for number, use in enumerate(layer.uses):
                if use.parameter == parameter:
                    for group in self._order[by]:
                        name = f"share.{self._grouping(by)}.{place}.{number}.{group}"
                        total += file.tensor(name).double() if name in file.places else 0.0
        return final[parameter].double() - total

    def explained(self, parameter: str, *, horizon: int) -> Tensor:
        """Return what all groups together made of a parameter, in float64."""
        by = self.groupings[0]
        return self.shares_of(parameter, by, None, horizon).double().sum(0)

    def shares_of(self, parameter: str, by: tuple[str, ...], layer: str | None, horizon: int | None) -> Tensor:
        """Return each group's share of a parameter, (G, ...), of the patterns of one layer or of all."""
        file, grouping = self._file(horizon), self._grouping(by)
        entry = self._run.manifest.parameters[parameter]
        total = torch.zeros(len(self._order[by]), *self._shapes[parameter], dtype=_fold_dtype(entry.dtype))
        for place, (name, layer_entry) in enumerate(self._run.manifest.layers.items()):
            if layer not in (None, name):
                continue
            for number, use in enumerate(layer_entry.uses):
                if use.parameter == parameter:
                    self._add(total, file, by, (grouping, place, number))
        return total

    def _add(self, total: Tensor, file: TensorFile, by: tuple[str, ...], use: tuple[int, int, int]) -> None:
        for place, group in enumerate(self._order[by]):
            name = ".".join(["share", *map(str, use), str(group)])
            if name in file.places:
                total[place] += file.tensor(name)

    def _start(self, file: TensorFile, parameter: str, at: int) -> Tensor:
        if f"start.{at}" in file.places:
            return file.tensor(f"start.{at}").double()
        left = float(file.tensor(f"start_number.{at}")) if f"start_number.{at}" in file.places else 1.0
        divided = self._run.published.divided
        initial = self._run.own_rows("initial") if divided else self._run.initial
        assert initial is not None, "every run has its parameters at the start"
        return left * initial[parameter].double()

    def key_sums(self, layer: str, by: tuple[str, ...], *, horizon: int | None = None) -> GroupKeySums:
        """Return a layer's key sums by group."""
        file, grouping = self._file(horizon), self._grouping(by)
        place = list(self._run.manifest.layers).index(layer)
        groups = len(self._order[by])
        sums = torch.zeros(groups, self._run.manifest.layers[layer].d_in, dtype=torch.float64)
        counts = torch.zeros(groups, dtype=torch.int64)
        if (name := f"keys.{grouping}.{place}") in file.places:
            found = file.tensor(name)
            sums[: len(found)], counts[: len(found)] = found, file.tensor(f"counts.{grouping}.{place}")
        lowest = float(file.tensor(f"lowest.{place}")) if f"lowest.{place}" in file.places else 0.0
        return GroupKeySums(self.labels(by), sums[self._order[by]], counts[self._order[by]], lowest)

    def stored_bytes(self, layer: str) -> int:
        """Return how many bytes the shares of a layer take, over all horizons."""
        place = str(list(self._run.manifest.layers).index(layer))
        total = 0
        for horizon in self.horizons:
            for name, found in self._file(horizon).places.items():
                what, *numbers = name.split(".")
                if (what == "share" and numbers[1] == place) or (what == "keys" and numbers[1] == place):
                    total += torch.Size(found.shape).numel() * found.dtype.itemsize
        return total

    def expected_noise(self, parameter: str, *, horizon: int | None = None) -> float:
        """Return the size that the optimizer's own coarse rounding is expected to have in a parameter."""
        file, at = self._file(horizon), list(self._run.manifest.parameters).index(parameter)
        return float(file.tensor(f"noise.{at}")) if f"noise.{at}" in file.places else 0.0

    def gradient_spread(self, parameter: str, *, horizon: int | None = None) -> Tensor | None:
        """Return how far rounding of the gradients may have carried each element of a parameter; None if unknown."""
        file, at = self._file(horizon), list(self._run.manifest.parameters).index(parameter)
        return file.tensor(f"spread.{at}") if f"spread.{at}" in file.places else None

    def _grouping(self, by: tuple[str, ...]) -> int:
        if by not in self._by:
            known = ", ".join(map(repr, self._by))
            raise QueryError(f"{self._run.name} keeps no shares by {by!r}. There are shares by {known}.")
        return self._by[by]

    def _file(self, horizon: int | None) -> TensorFile:
        """Return the file of the shares after a step, checked."""
        step = self._run.steps if horizon is None else horizon
        if step not in self.horizons:
            known = ", ".join(map(str, self.horizons)) or "no step yet"
            raise QueryError(
                f"{self._run.name} keeps no shares after {step} steps, but after {known}. Shares are published at "
                "flush(), at the end, and after the steps of Shares(at=[...]); choose one of these with at(step=...)."
            )
        if step not in self._files:
            file = TensorFile(self._run.blob(shares_file(step)))
            check_shares(file, self._run, self._kept, self._shapes)
            self._files[step] = file
        return self._files[step]

    def resume_tensors(self, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the shares after a step and what a recording of them goes on from; None where it is not kept."""
        if step not in self._kept.states:
            return None
        shares = self._file(step).tensors()
        return shares, TensorFile(self._run.blob(shares_state_file(step))).tensors()


def grouping_names(grouping: GroupingEntry) -> tuple[str, ...]:
    """Return a grouping as the names of its columns, as `ShareSource.groupings` has it."""
    return tuple(part.column if part.width is None else str(Bins(part.column, part.width)) for part in grouping.columns)


def stored_labels(grouping: GroupingEntry) -> tuple[Any, ...]:
    """Return the groups of a grouping in the order in which they came; that of all others has a label of its own."""
    several = len(grouping.columns) > 1
    parts = [tuple(label_value(*part) for part in label) for label in grouping.labels]
    found: list[Any] = parts if several else [label[0] for label in parts]
    if grouping.rest and found[-1] in found[:-1]:  # a run of an earlier version, and a user's own value "rest"
        found[-1] = rest_label(found[:-1], len(grouping.columns))
    return tuple(found)


def check_shares(file: TensorFile, run: "Run", kept: SharesEntry, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `CorruptError` where a file of shares holds a tensor that the manifest does not know or shape otherwise.

    Args:
        file: the file.
        run: the run, or the part of one process.
        kept: what the manifest says of the shares.
        shapes: of each parameter, as far as the file has it.
    """
    for name, place in file.places.items():
        expected = _expected(name, run, kept, shapes)
        if expected is None:
            raise _bad_shares(file, f"it holds {cut(repr(name))}, which the manifest does not know")
        shape, dtype = expected
        if shape[:1] == (-1,):
            fits = (
                len(place.shape) == len(shape)
                and place.shape[1:] == shape[1:]
                and place.shape[0] <= _groups(name, kept)
            )
        else:
            fits = place.shape == shape
        if not fits or place.dtype != dtype:
            raise _bad_shares(file, f"{cut(repr(name))} is {place.shape} of {place.dtype}; expected {shape} of {dtype}")


def _expected(name: str, run: "Run", kept: SharesEntry, shapes: Mapping[str, tuple[int, ...]]) -> Expected | None:
    """Return shape and dtype of a tensor of shares, with -1 for at most the number of groups; None if unknown."""
    what, *texts = name.split(".")
    if not all(text.isascii() and text.isdigit() and str(int(text)) == text for text in texts):
        return None
    numbers = [int(text) for text in texts]
    layers = list(run.manifest.layers.values())
    parameters = [(shapes[name], _fold_dtype(entry.dtype)) for name, entry in run.manifest.parameters.items()]
    match what, numbers:
        case "share", [grouping, layer, use, group] if (
            grouping < len(kept.groupings)
            and group < len(kept.groupings[grouping].labels)
            and layer < len(layers)
            and layers[layer].store != "keys"
            and use < len(layers[layer].uses)
        ):
            parameter = layers[layer].uses[use].parameter
            return shapes[parameter], _fold_dtype(run.manifest.parameters[parameter].dtype)
        case (("start" | "unexplained" | "rounding"), [place]) if place < len(parameters):
            return parameters[place]
        case "spread", [place] if place < len(parameters):
            return parameters[place][0], torch.float64
        case (("start_number" | "noise"), [place]) if place < len(parameters):
            return (), torch.float64
        case "keys", [grouping, layer] if grouping < len(kept.groupings) and layer < len(layers):
            return (-1, layers[layer].d_in), torch.float64
        case "counts", [grouping, layer] if grouping < len(kept.groupings) and layer < len(layers):
            return (-1,), torch.int64
        case "lowest", [layer] if layer < len(layers):
            return (), torch.float64
    return None


def _groups(name: str, kept: SharesEntry) -> int:
    return len(kept.groupings[int(name.split(".")[1])].labels)


def _fold_dtype(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


def _bad_shares(file: TensorFile, problem: str) -> CorruptError:
    return CorruptError(f"{file.blob}: {problem}. Restore the file from a copy of the run.")
