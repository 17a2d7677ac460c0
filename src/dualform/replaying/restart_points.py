"""Restart points of a training, kept beside its run: safetensors whose header says how they are put together.

A point may be deleted at any time; one that cannot be read, or that another run or version wrote, is as good as
missing. A replay proves the parameters of a point, and every step from there on, before any pattern counts.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dualform._version import __version__
from dualform.errors import CorruptError, StoreError
from dualform.store.blobs import Blob
from dualform.store.format import RESTART, rank_folder, restart_file
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile, publish_tensors

STALE_SECONDS = 3600.0  # after which a point that is not published yet belongs to a replay that is gone
LAYOUT = "layout"
"""The entry of a file's metadata that says how its tensors make a point, as JSON."""


class RestartPoints:
    """The restart points of one run; of several processes each has its own, beside its patterns."""

    def __init__(self, run: Run, every: int | None = None, *, rank: int = 0) -> None:
        """Take a run, and the number of steps between two points; by default the root of the number of steps.

        Args:
            run: the run.
            every: the number of steps between two points.
            rank: the number of the process, of several.
        """
        self.every = max(1, math.isqrt(run.steps)) if every is None else every
        self._blobs = run.blobs.within(rank_folder(rank)) if rank else run.blobs
        self._digest = run.digest
        self._known: dict[int, bool] = {}

    def before(self, step: int) -> tuple[int, Mapping[str, Any] | None]:
        """Return the last point at or before a step that can be read, and its number of steps; 0 and None for none."""
        for at in range(step - step % self.every, 0, -self.every):
            point = self._load(at)
            if point is not None:
                return at, point
        return 0, None

    def is_at(self, step: int) -> bool:
        """Say whether a point belongs before a step."""
        return step > 0 and step % self.every == 0

    def keep(self, step: int, take: Callable[[], Mapping[str, Any]]) -> None:
        """Keep the state before a step, where a point belongs there and is not kept yet.

        Args:
            step: the number of the step.
            take: returns the state.
        """
        if not self.is_at(step) or self._is_kept(step):
            return
        tensors: dict[str, Tensor] = {}
        layout = json.dumps(_taken_apart(take(), tensors))
        with contextlib.suppress(OSError, StoreError):  # a run that cannot be written to can be replayed all the same
            self._blobs.remove_unpublished(RESTART, older_than_seconds=STALE_SECONDS)
            if self._blobs.size(restart_file(step)) is not None:
                self._blobs.remove(restart_file(step))
            publish_tensors(self._blobs, restart_file(step), tensors, metadata={LAYOUT: layout, **self._stamp()})
            self._known[step] = True

    def _is_kept(self, step: int) -> bool:
        if step not in self._known:
            self._known[step] = self._load(step) is not None
        return self._known[step]

    def _stamp(self) -> dict[str, str]:
        return {"run": self._digest, "dualform": __version__}

    def _load(self, step: int) -> dict[str, Any] | None:
        if self._blobs.size(restart_file(step)) is None:
            return None
        try:
            file = TensorFile(Blob(self._blobs, restart_file(step)))
            if any(file.metadata.get(name) != text for name, text in self._stamp().items()):
                return None
            point = _put_together(json.loads(file.metadata[LAYOUT]), file.tensors())
            return point if isinstance(point, dict) else None
        except (OSError, CorruptError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with the names of its tensors, which are collected."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _taken_apart(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_taken_apart(entry, tensors) for entry in value]}
    return {"value": value}


def _put_together(layout: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was taken apart."""
    ((kind, content),) = layout.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "dict":
        return {key: _put_together(entry, tensors) for key, entry in content}
    if kind in ("list", "tuple"):
        entries = [_put_together(entry, tensors) for entry in content]
        return tuple(entries) if kind == "tuple" else entries
    return content
