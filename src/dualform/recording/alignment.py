"""Alignment: when a recording tries which rows its layers have, and what it knows of them so far.

The trial itself is `dualform.recording.row_trials`. It is made at the first annotated forward, for input shapes that
are new (a bounded number of times), and again whenever the number of steps has doubled: rows that were all equal may
differ by then, and a model may do to one batch's rows what it did not do to another's. Where the first trial left
nothing open, a few rows of the batch are tried again, and all of them if the few show anything else, or when the number
of steps has grown by `WHOLE_EVERY_DOUBLINGS` doublings.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dualform.errors import AnnotationError
from dualform.recording.annotations import Binding
from dualform.recording.argument_tensors import input_tensors
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.row_evidence import NO_ROW
from dualform.recording.row_trials import check_rows, other_axes, still_holds
from dualform.recording.rowcheck import SEVERITY, RowCheck
from dualform.recording.watch import Watched

MAX_SHAPES = 8  # input shapes that are tried before the second step
MORE_SHAPES = 2  # that are tried in addition for every doubling of the number of steps
WHOLE_EVERY_DOUBLINGS = 7  # of the number of steps: then a whole batch is tried again, and not a few of its rows


class Alignment:
    """Which layers of a recorded model have the rows of the batch."""

    def __init__(self, model: nn.Module, layers: Sequence[Watched], batch_axis: int | None, *, enabled: bool) -> None:
        self.batch_axis = 0 if batch_axis is None else batch_axis
        self.outcomes: dict[str, RowCheck] = {}  # layer -> the worst that was found of it
        self.enabled = enabled
        self._model = model
        self._layers = layers
        self._memory = BufferPool()
        self._settled = batch_axis is not None  # whether no other axis of the inputs can be meant
        self._tried: dict[Any, dict[str, RowCheck]] = {}  # input shapes -> what was found
        self._latest: dict[str, RowCheck] = {}
        self._looked_again: set[int] = set()
        self._news: dict[str, RowCheck] = {}  # not said yet

    def before_forward(
        self,
        binding: Binding,
        called: tuple[str, nn.Module],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        step: int,
    ) -> None:
        """Tell a binding which rows each layer has in the forward that begins now, by a trial if need be.

        Args:
            binding: the annotations that the forward will take.
            called: the name of the module whose forward begins, "" for the whole model, and the module.
            args: its arguments.
            kwargs: its keyword arguments.
            step: how many steps were recorded so far.
        """
        if not self.enabled or binding.rows < 2:
            return
        tensors = input_tensors(args, kwargs)
        described = (_describe(tensor, binding.rows, self.batch_axis) for tensor in tensors)
        shapes = (called[0], binding.rows, called[1].training, *described)
        known = self._tried.get(shapes)
        doubled = step > 0 and not step & (step + 1)  # 1, 3, 7, 15, ... steps were taken
        if known is not None and doubled and step not in self._looked_again and _may_change(known):
            self._looked_again.add(step)
            known = self._confirmed(known, called, args, kwargs, rows=binding.rows, step=step)
        elif known is None and len(self._tried) >= MAX_SHAPES + MORE_SHAPES * math.log2(step + 1):
            known = {name: dataclasses.replace(check, shapes=frozenset()) for name, check in self._latest.items()}
        if known is None:
            known = self.look(args, kwargs, rows=binding.rows, called=called)
            _refuse_transposed(binding, tensors, self.batch_axis)
            self._tried[shapes] = self._latest = known
        binding.learn(known)

    def _confirmed(
        self,
        known: dict[str, RowCheck],
        called: tuple[str, nn.Module],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        rows: int,
        step: int,
    ) -> dict[str, RowCheck] | None:
        """Return what is known of a batch's rows where a few of them show the same; None where all have to be tried."""
        if step.bit_length() % WHOLE_EVERY_DOUBLINGS == 0:
            return None
        name, module = called
        with _own_saved_tensors():
            same = still_holds(
                known,
                module,
                self._layers,
                args,
                kwargs,
                rows=rows,
                axis=self.batch_axis,
                prefix=name,
                memory=self._memory,
            )
        return known if same else None

    def look(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        rows: int,
        called: tuple[str, nn.Module] | None = None,
    ) -> dict[str, RowCheck]:
        """Try a batch, and remember what is found of each layer below the called module, by default of all."""
        with _own_saved_tensors():
            return self._look(args, kwargs, rows=rows, called=called)

    def _look(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, rows: int, called: tuple[str, nn.Module] | None
    ) -> dict[str, RowCheck]:
        name, module = ("", self._model) if called is None else called

        def found_on(axis: int, *, plainly: bool) -> dict[str, RowCheck]:
            return check_rows(
                module,
                self._layers,
                args,
                kwargs,
                rows=rows,
                axis=axis,
                prefix=name,
                plainly=plainly,
                memory=self._memory,
            )

        found = found_on(self.batch_axis, plainly=False)
        proved = {name for name, check in found.items() if check.outcome == "proved"}
        others = other_axes(args, kwargs, rows=rows, axis=self.batch_axis)
        tried = any(check.outcome == "not aligned" for check in found.values()) or bool(proved)
        if others and tried and (not proved or not self._settled):
            for axis in others:
                there = {n for n, check in found_on(axis, plainly=True).items() if check.outcome == "proved"}
                self._check_axis(proved, there, axis, rows)
        elif proved:
            self._settled = True
        for name, check in found.items():
            if check.outcome != "assumed":  # those are noted where annotations rely on them
                self.note(name, check)
        return found

    def _check_axis(self, proved: set[str], there: set[str], axis: int, rows: int) -> None:
        """Raise where the rows lie on another axis of the inputs, or could."""
        mine = self.batch_axis
        if there and not proved:
            raise AnnotationError(
                f"The rows of this batch are on axis {axis} of the inputs, not on axis {mine}: layer "
                f"{min(there)!r} follows them there. Pass batch_axis={axis} to dualform.record."
            )
        if there & proved:
            raise AnnotationError(
                f"Axes {mine} and {axis} of the inputs both have {rows} entries, and layer {min(there & proved)!r} "
                f"treats both alike, so nothing tells which are the rows that are annotated. Pass batch_axis={mine} or "
                f"batch_axis={axis} to dualform.record."
            )

    def note(self, layer: str, check: RowCheck) -> None:
        """Remember what was found of a layer, the worst of it; an outcome that was open is replaced."""
        before = self.outcomes.get(layer)
        if before is None or before.undecided or SEVERITY[check.outcome] > SEVERITY[before.outcome]:
            self.outcomes[layer] = check
            told = before is not None and before.outcome == check.outcome and not before.undecided
            if check.outcome != "proved" and not check.undecided and not told:
                self._news[layer] = check

    def warnings(self) -> list[str]:
        """Return what the user should know and was not told yet."""
        news, self._news = self._news, {}
        texts = []
        apart = {name: check for name, check in news.items() if check.outcome == "not aligned"}
        assumed = {name: check for name, check in news.items() if check.outcome == "assumed"}
        if apart:
            mixed = [name for name, check in apart.items() if check.reason != NO_ROW]
            remedy = "A table that is looked up once for all rows (positions) learns from all of them at once. "
            remedy = ("" if mixed else remedy) + (
                "If you know the batch's row of each of their patterns, as where the model sorts rows, give it: "
                f"annotate(..., rows={{{(mixed or list(apart))[0]!r}: rows}})."
            )
            texts.append(
                f"Columns per row are left out (null) in {_listed(apart)}; a permuted batch showed it. {remedy}"
            )
        if assumed:
            texts.append(
                f"Whether the rows of {_listed(assumed)} are those of the batch could not be tried; annotations are "
                "matched by row number. recorder.check_rows(*inputs) tries a batch of your choice."
            )
        return texts


def _describe(tensor: Tensor, rows: int, axis: int) -> tuple[tuple[int, ...], bool]:
    """Return a tensor's shape, and whether it is one of lengths, masks or the like that are equal in all rows.

    Equal lengths do not show that a model sorts its rows by them, nor a full mask which positions it picks. Tensors on
    a GPU are not looked into, since every forward would wait for it.
    """
    shape = tuple(tensor.shape)
    steers = tensor.dim() == axis + 1 or not (tensor.is_floating_point() or tensor.is_complex())
    if not steers or tensor.dim() <= axis or shape[axis] != rows or not tensor.numel() or tensor.device.type != "cpu":
        return shape, False
    return shape, bool((tensor == tensor.narrow(axis, 0, 1)).all())


def _may_change(known: Mapping[str, RowCheck]) -> bool:
    """Say whether another batch could tell something else of any layer than this."""
    return any(check.undecided or check.outcome == "proved" for check in known.values())


def _refuse_transposed(binding: Binding, inputs: Iterable[Tensor], axis: int) -> None:
    """Raise where a column holds an input of the model as (positions, rows), and equal sizes hide the mistake."""
    columns = {
        name: column for name, column in binding.columns.items() if column.ndim == 2 and column.dtype.kind in "iu"
    }
    for tensor in inputs if columns else ():
        if tensor.shape != (binding.rows, binding.rows) or tensor.is_floating_point() or axis > 1:
            continue
        values = tensor.detach().cpu().numpy()
        right, wrong = (values, values.T) if axis == 0 else (values.T, values)
        for name, column in columns.items():
            if np.array_equal(column, wrong) and not np.array_equal(column, right):
                raise AnnotationError(
                    f"Column {name!r} is laid out as (positions, rows): it holds an input of the model, whose rows are "
                    f"on axis {axis}. Columns are (rows, positions), whatever batch_axis is: transpose all such."
                )


def _listed(checks: Mapping[str, RowCheck], most: int = 4) -> str:
    """Name layers by reason: `layers 'a', 'b' (reason); ...`."""
    by_reason: dict[str, list[str]] = {}
    for name, check in checks.items():
        by_reason.setdefault(check.reason, []).append(name)
    return "; ".join(f"{_names(names, most)} ({reason})" for reason, names in by_reason.items())


def _names(names: Iterable[str], most: int) -> str:
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return f"layer{'s' if len(every) > 1 else ''} {', '.join(map(repr, every[:most]))}{more}"


def batch_rows(args: Sequence[Any], kwargs: Mapping[str, Any], axis: int) -> int:
    """Return how many rows a batch has: the size of its first tensor with enough axes; 0 without one."""
    tensors: Iterable[Tensor] = input_tensors(args, kwargs)
    return next((int(tensor.shape[axis]) for tensor in tensors if tensor.dim() > axis), 0)


@contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Let autograd keep tensors as ever while the context lasts, whatever hooks for them the caller has put on.

    Activation checkpointing around a model counts the tensors that are saved in its forward; a trial must not add any.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # where such hooks are forbidden, none can be on
            stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield
