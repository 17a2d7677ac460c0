"""What the patterns of a run do not explain of the change between checkpoints, as a file after each checkpoint.

A run that `dualform.from_checkpoints` made has one file for each checkpoint but the first: for each parameter the
checkpoint less what the recorded steps make of the first one, and the sizes of the last interval's rest and change.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualform.engine.explanation import Explanation, IntervalRest
from dualform.errors import CorruptError, SelectionError
from dualform.printable import cut
from dualform.store.blobs import Blobs, FileEntry
from dualform.store.format import unexplained_file
from dualform.store.tensors import TensorFile, publish_tensors

if TYPE_CHECKING:
    from dualform.store.reader import Run

SIZES = ("interval_rest", "interval_change", "whole_rest", "whole_change")
"""Tensors (P,) of a file, by the order of the manifest's parameters: norms of the rest and of the change."""


def publish_rests(
    blobs: Blobs, step: int, unexplained: Mapping[str, Tensor], interval: IntervalRest, whole: IntervalRest
) -> FileEntry:
    """Publish what is not explained after a checkpoint.

    Args:
        blobs: where the run is kept.
        step: the number of steps at the checkpoint.
        unexplained: parameter -> the checkpoint less what the steps make of the start, in the manifest's order.
        interval: the sizes of rest and change since the checkpoint before.
        whole: the sizes of rest and change since the first checkpoint.
    """
    tensors = {f"unexplained.{place}": tensor for place, tensor in enumerate(unexplained.values())}
    sizes = (interval.rest, interval.change, whole.rest, whole.change)
    for name, size in zip(SIZES, sizes, strict=True):
        tensors[name] = torch.tensor([size[parameter] for parameter in unexplained], dtype=torch.float64)
    return publish_tensors(blobs, unexplained_file(step), tensors)


class StoredRests:
    """What no pattern explains, read from the files of a run that was made from checkpoints."""

    def __init__(self, run: "Run", steps: tuple[int, ...]) -> None:
        """Take a run and the numbers of steps at its checkpoints but the first, ascending."""
        self._run = run
        self._steps = steps
        self._places = {name: place for place, name in enumerate(run.manifest.parameters)}
        self._files: dict[int, TensorFile] = {}

    def unexplained(self, parameter: str, step: int) -> Tensor:
        """Return what no pattern explains of a parameter at a checkpoint, float64; zeros at the first one."""
        if step == 0:
            return torch.zeros(self._run.manifest.parameters[parameter].shape, dtype=torch.float64)
        if step not in self._steps:
            raise SelectionError(
                f"{self._run.name} was made from checkpoints, and the weights between two of them are not known. Ask "
                f"after step {', '.join(map(str, (0, *self._steps)))}, and not after {step}."
            )
        return self._file(step).tensor(f"unexplained.{self._places[parameter]}").double()

    def explanation(self) -> Explanation:
        """Return the sizes of what is not explained, per interval and layer."""
        run = self._run
        before = (0, *self._steps)
        intervals = tuple(self._rest("interval", *ends) for ends in zip(before, self._steps, strict=False))
        nothing = IntervalRest(0, 0, dict.fromkeys(self._places, 0.0), dict.fromkeys(self._places, 0.0))
        whole = self._rest("whole", 0, self._steps[-1]) if self._steps else nothing
        layers = {name: tuple(entry.parameters.values()) for name, entry in run.layers.items()}
        return Explanation(layers, intervals, whole)

    def _rest(self, what: str, start: int, stop: int) -> IntervalRest:
        file = self._file(stop)
        rest, change = (
            dict(zip(self._places, file.tensor(f"{what}_{name}").tolist(), strict=True)) for name in ("rest", "change")
        )
        return IntervalRest(start, stop, rest, change)

    def _file(self, step: int) -> TensorFile:
        if step not in self._files:
            file = TensorFile(self._run.blob(unexplained_file(step)))
            expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                f"unexplained.{place}": (entry.shape, getattr(torch, entry.dtype))
                for place, entry in enumerate(self._run.manifest.parameters.values())
            }
            expected |= dict.fromkeys(SIZES, ((len(self._places),), torch.float64))
            found = {name: (tuple(place.shape), place.dtype) for name, place in file.places.items()}
            if wrong := [name for name in {**expected, **found} if expected.get(name) != found.get(name)]:
                name = wrong[0]
                raise CorruptError(
                    f"{file.blob}: {cut(repr(name))} is {found.get(name, 'missing')}; expected "
                    f"{expected.get(name, 'no such tensor')}. Restore the file from a copy of the run."
                )
            self._files[step] = file
        return self._files[step]
