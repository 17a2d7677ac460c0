"""Rows: find out which row of the batch each pattern of a layer belongs to, by permuting a batch.

Annotations come per row of the batch. A layer's own rows need not be those rows: a position table sees positions, a
table of prototypes sees prototypes, and a model may sort, roll, flatten or join rows. Shapes cannot tell; a trial can.
It runs a copy of the model forward and backward on a batch, and again on the same batch with its rows permuted, with
dropout off and a loss that is a sum over rows. A layer whose keys and values move as the rows do has those rows, and
on that axis. Nothing here touches the model that is trained, or the generators of random numbers.
"""

import dataclasses
import itertools
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils.rnn import PackedSequence

from dualform.recording.argument_tensors import input_tensors, leaves, mapped, tensors_in
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.generators import untouched_generators
from dualform.recording.layer_hooks import CaughtCall, catch_calls
from dualform.recording.layers import LayerKind
from dualform.recording.model_copies import NoDropout, Untried, check_copyable, copied_parameters, frozen, not_called
from dualform.recording.row_evidence import FEW_ROWS, NO_ROW, SeenCall, all_move_as, joint_check, judge, row_order
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sharded_modules import original_type, plain_copy
from dualform.recording.watch import Watched, find_candidates
from dualform.torch_modes import (
    call_without_autocast,
    end_function_modes,
    function_modes,
    with_gradients,
    without_gradients,
)

RETRIED_ROWS = 8  # of a batch, in a trial that asks whether an earlier one still holds

Axes = list[tuple[int, ...]]
"""Which axes of each input tensor to permute, in the order of `input_tensors`."""


def check_rows(
    model: nn.Module,
    layers: Sequence[Watched],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rows: int,
    axis: int,
    prefix: str = "",
    plainly: bool = False,
    memory: BufferPool | None = None,
) -> dict[str, RowCheck]:
    """Find out which layers have the rows of a batch, by trials on a copy of the model.

    Args:
        model: the model that is trained; it stays as it is.
        layers: the layers to look at.
        args: the arguments of its forward.
        kwargs: its keyword arguments.
        rows: how many rows the batch has.
        axis: which axis of the inputs holds them.
        prefix: the name of the model in the one whose layers these are, where it is a child of that.
        plainly: whether to permute that axis of every input that has so many rows there, and try no other way.
        memory: holds the copies of parameters, from one trial to the next; by default they get new memory.
    """
    layers = [layer for layer in layers if not prefix or f"{layer.name}.".startswith(f"{prefix}.")]
    names = [layer.name for layer in layers]
    if rows < 2:
        return dict.fromkeys(names, RowCheck("assumed", "a batch of one row cannot be permuted", undecided=True))
    try:
        ways = list(_ways(args, kwargs, rows, axis, plainly=plainly))
        best = _best(_Trial(model, prefix, layers, args, kwargs, memory=memory), ways, rows)
        if not plainly and not _is_clear(best):
            # A difference that float64 does not show is rounding; most models can be run in it.
            with suppress(Untried):
                again = _best(_Trial(model, prefix, layers, args, kwargs, double=True), ways, rows)
                best = again if _proofs(again) > _proofs(best) else best
    except Untried as error:
        return dict.fromkeys(names, RowCheck("assumed", str(error)))
    return best


def still_holds(
    known: Mapping[str, RowCheck],
    model: nn.Module,
    layers: Sequence[Watched],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rows: int,
    axis: int,
    prefix: str = "",
    memory: BufferPool | None = None,
) -> bool:
    """Say whether a trial on a few rows of a batch finds the same of every layer as an earlier one on a whole batch.

    It looks at keys only, which needs no backward. Where it finds anything else, or the few keys cannot tell, a trial
    on the whole batch has to.

    Args:
        known: what the earlier trial found of each layer.
        model: as in `check_rows`, as are the others.
        layers: the layers to look at.
        args: the arguments of the model's forward.
        kwargs: its keyword arguments.
        rows: how many rows the batch has.
        axis: which axis of the inputs holds them.
        prefix: the name of the model in the one whose layers these are, where it is a child of that.
        memory: as in `check_rows`.
    """
    if rows < 2 * RETRIED_ROWS:
        return False
    layers = [layer for layer in layers if layer.name in known]
    chosen = torch.linspace(0, rows - 1, RETRIED_ROWS).long()
    batch = (tuple(args), dict(kwargs))
    with suppress(Untried):
        for axes in _ways(args, kwargs, rows, axis, plainly=False):
            few = _permuted(batch, axes, chosen)
            if not _tells_as_much(input_tensors(args, kwargs), input_tensors(*few), axes):
                return False
            with suppress(Untried):
                trial = _Trial(model, prefix, layers, *few, keys_only=True, memory=memory)
                if trial.confirms(known, axes, RETRIED_ROWS):
                    return True
    return False


def _tells_as_much(whole: Sequence[Tensor], few: Sequence[Tensor], axes: Axes) -> bool:
    """Say whether lengths, masks and the like that differ from row to row of a batch also do among its few rows."""
    for batch, part, where in zip(whole, few, axes, strict=True):
        for axis in where if not batch.is_floating_point() or batch.dim() == 1 else ():
            if _all_equal(part, axis) and not _all_equal(batch, axis):
                return False
    return True


def _all_equal(tensor: Tensor, axis: int) -> bool:
    return bool((tensor == tensor.narrow(axis, 0, 1)).all())


def _is_same(before: RowCheck, now: RowCheck) -> bool:
    same = before.outcome == now.outcome and before.placement == now.placement
    return same and (not now.undecided or before.reason == now.reason == UNCALLED)


def _best(trial: "_Trial", ways: Sequence[Axes], rows: int) -> dict[str, RowCheck]:
    """Return what the way of permuting shows that proves most layers, or the first that leaves none unclear."""
    best: dict[str, RowCheck] | None = None
    for axes in ways:
        found = trial.find(axes, rows)
        if best is None or _proofs(found) > _proofs(best):
            best = found
        if _is_clear(found):
            break
    assert best is not None, "there is at least one way to permute a batch"
    return best


def _is_clear(found: Mapping[str, RowCheck]) -> bool:
    """Say whether every layer either has the batch's rows or belongs to none of them."""
    return all(check.outcome != "not aligned" or check.reason == NO_ROW for check in found.values())


UNCALLED = "it was not called in the trial"

EXCHANGED = "the model exchanges rows before it"


def other_axes(args: Sequence[Any], kwargs: Mapping[str, Any], *, rows: int, axis: int) -> list[int]:
    """Return the other axes, up to the third, that could hold the rows by their size alone."""
    tensors = input_tensors(args, kwargs)
    shapes = [tensor.shape for tensor in tensors if tensor.dim() > axis and tensor.shape[axis] == rows]
    return sorted({i for shape in shapes for i, size in enumerate(shape[:3]) if size == rows and i != axis})


def _proofs(found: Mapping[str, RowCheck]) -> int:
    return sum(check.outcome == "proved" for check in found.values())


def _ways(args: Sequence[Any], kwargs: Mapping[str, Any], rows: int, axis: int, *, plainly: bool) -> Iterator[Axes]:
    """Yield ways to permute the rows of all input tensors, the likeliest first.

    A tensor whose size on the batch axis is the number of rows may still be none of the batch (a mask of (L, L)
    positions), one that has its rows elsewhere may be (the state of a recurrent layer), and one may have them twice
    (a graph's neighbours).
    """
    tensors = input_tensors(args, kwargs)
    sized = [tuple(i for i, size in enumerate(tensor.shape) if size == rows) for tensor in tensors]
    plain: Axes = [(axis,) if axis in found else () for found in sized]
    if not any(plain):
        raise Untried(f"no input of the model has {rows} rows on axis {axis}")
    first = next(i for i, found in enumerate(plain) if found)
    wide: Axes = [p or (found if len(found) == 1 else ()) for p, found in zip(plain, sized, strict=True)]
    twice: Axes = [p if i == first else found for i, (p, found) in enumerate(zip(plain, sized, strict=True))]
    alone: Axes = [p if i == first else () for i, p in enumerate(plain)]
    tried: list[Axes] = []
    for way in (plain,) if plainly else (wide, twice, plain, alone):
        if way not in tried:
            tried.append(way)
            yield way


class _Trial:
    """Runs of a copy of the model on one batch, permuted in several ways."""

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        layers: Sequence[Watched],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        double: bool = False,
        keys_only: bool = False,
        memory: BufferPool | None = None,
    ) -> None:
        self._double = double
        self._memory = memory
        self._keys_only = keys_only  # whether to run no backward, and look at no values
        self._prefix = prefix
        _check_permutable(args, kwargs)
        self._model = getattr(model, "_orig_mod", model)  # as it was before torch.compile
        self._layers = layers
        self._batch = (tuple(args), dict(kwargs))
        check_copyable(self._model)
        self._copy: _Copy | None = None
        self._plain = self._run(self._batch)

    def find(self, axes: Axes, rows: int) -> dict[str, RowCheck]:
        """Return what permuting these axes of the input tensors says of each layer."""
        order = row_order(rows)
        moved = self._run(_permuted(self._batch, axes, order))
        found = {layer.name: _judged(self._plain[layer.name], moved[layer.name], order) for layer in self._layers}
        if rows <= FEW_ROWS and _proofs(found):
            self._look_closer(found, axes, rows)
        elif rows == FEW_ROWS + 1 and _proofs(found):
            self._roll(found, axes, rows)
        return found

    def confirms(self, known: Mapping[str, RowCheck], axes: Axes, rows: int) -> bool:
        """Say whether permuting these axes of more than a few rows says of each layer what is known of it already."""
        order = row_order(rows)
        moved = self._run(_permuted(self._batch, axes, order))
        for layer in self._layers:
            before, after, check = self._plain[layer.name], moved[layer.name], known[layer.name]
            if before and not check.undecided and all_move_as(before, after, check, order):
                continue  # as known; where else its rows could be, an earlier trial has told
            if not _is_same(check, _judged(before, after, order)):
                return False
        return True

    def _roll(self, found: dict[str, RowCheck], axes: Axes, rows: int) -> None:
        """Permute a batch of four rows in a second way, since each way commutes with some exchange of pairs of rows.

        Only a model that leaves all rows where they are commutes with both.
        """
        order = torch.arange(rows).roll(1)
        moved = self._run(_permuted(self._batch, axes, order))
        for name, check in found.items():
            if check.outcome == "proved" and not all_move_as(self._plain[name], moved[name], check, order):
                found[name] = RowCheck("not aligned", EXCHANGED)

    def _look_closer(self, found: dict[str, RowCheck], axes: Axes, rows: int) -> None:
        """Tell rows that are where they were from rows that the model exchanged: put one row in another's place.

        A model that swaps the two rows of a batch swaps them after a permutation too, and moves as the rows do.
        """
        taken = torch.tensor([1, 1, 2][:rows])
        moved = self._run(_permuted(self._batch, axes, taken))
        for name, check in found.items():
            if check.outcome != "proved" or check.placement is None:
                continue
            fits = []
            for places in itertools.permutations(range(rows)):  # row i of the layer is row places[i] of the batch
                expected = torch.tensor([places.index(int(taken[place])) for place in places])
                if all_move_as(self._plain[name], moved[name], check, expected):
                    fits.append(places)
            if fits and fits[0] != tuple(range(rows)):
                found[name] = RowCheck("not aligned", EXCHANGED)
            elif not fits:
                reason = f"a batch of {rows} rows is too small to tell, since its rows depend on each other"
                found[name] = RowCheck("assumed", reason, undecided=True)

    def _run(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, list[SeenCall]]:
        """Return the keys and values of every call of each layer, from one forward and backward of a fresh copy.

        With `keys_only` there is no backward, and there are no values.
        """
        try:
            with untouched_generators() as moved, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self._copy is None or not self._copy.is_as_made():
                    self._copy = None  # the next one may have its memory
                    self._copy = self._copied()
                cloned = _cloned_double if self._double else _cloned
                seen = self._catch(self._copy, mapped(batch, cloned))
                if moved():
                    raise Untried("the model draws random numbers")
        except Untried:
            raise
        except Exception as error:
            text = str(error).strip().splitlines()
            raise Untried(f"the trial raised {type(error).__name__}{': ' + text[0] if text else ''}") from error
        return seen

    def _copied(self) -> "_Copy":
        """Return a copy of the model, its watched layers by name, and no dropout inside of its layers."""
        twins = {} if self._memory is None else copied_parameters(self._model, self._memory)
        model = plain_copy(self._model, twins)
        if self._double:
            model = model.double()
        elif any(p.dtype in _COARSE for p in model.parameters()):
            model = model.float()  # rows that move must differ by more than rounding
        watched = {layer.name: twin for layer in self._layers if (twin := _twin(layer, twins)) is not None}
        if len(watched) < len(self._layers):  # the model has other modules now, or copies some in a way of its own
            candidates = {".".join(filter(None, (self._prefix, n))): c for n, c in find_candidates(model).items()}
            watched = {
                layer.name: dataclasses.replace(layer, module=found.module, kind=found.kind)
                for layer in self._layers
                if (found := candidates.get(layer.name)) is not None
            }
        for module in model.modules():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                module.dropout = 0.0
        return _Copy(model, watched, keys_only=self._keys_only)

    def _catch(self, made: "_Copy", batch: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, list[SeenCall]]:
        model = made.model
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        mode, depth = NoDropout(), function_modes()
        edges: list[GradientEdge] = []

        @(without_gradients if self._keys_only else with_gradients)
        def compute() -> None:
            try:
                # Not by `with`: its end raises another error where torch has taken the mode off and was interrupted.
                cast("Any", mode).__enter__()  # torch has no type for it
                args, kwargs = batch
                outputs = model(*args, **kwargs)
                if not self._keys_only:
                    _go_back(_summed(outputs), [*edges, *_read_parameters(made.watched.values())])
            except BaseException as error:
                # Where an interrupt kept torch from putting a mode back, that happens when its frame is cleared: now,
                # and not when somebody drops the exception.
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                try:
                    mode.put_back()
                    end_function_modes(depth)
                finally:
                    mode.put_back()
                    end_function_modes(depth)

        # Outside of the mode, through which each look at a parameter would go. What a closure of the model refers to is
        # no copy, and frozen.
        with catch_calls(made.watched, edges) as calls, not_called(self._model), frozen(self._model):
            call_without_autocast([device], compute)
        return {layer.name: [_seen(call) for call in calls.get(layer.name, ())] for layer in self._layers}


def _go_back(total: Tensor, wanted: Sequence[GradientEdge | Tensor]) -> None:
    """Let a backward bring the errors to these places in its graph, and compute no other gradient of a parameter.

    A function that is written in Python may call layers in its backward, or refuse all but a whole one (reentrant
    checkpointing does both), so with any such function in the graph the backward is whole.
    """
    if _has_python_function(total.grad_fn):
        total.backward()  # into the gradients of the copy, which goes
    elif wanted:
        torch.autograd.grad(total, cast("Any", wanted), allow_unused=True)


def _has_python_function(end: Node | None) -> bool:
    """Say whether a graph has a node whose backward is Python code."""
    nodes: list[Any] = [end]
    seen: set[Any] = {end, None}  # None stands for what needs no gradient
    while nodes:
        node = nodes.pop()
        if isinstance(node, BackwardCFunction):
            return True
        before = {found for found, _ in node.next_functions} - seen
        nodes += before
        seen |= before
    return False


def _read_parameters(layers: Iterable[Watched]) -> list[Tensor]:
    """Return the parameters to which a backward has to come so that these layers find their errors.

    A kind with an `errors` of its own may read them where the backward through its module left them.
    """
    modules = [layer.module for layer in layers if type(layer.kind).errors is not LayerKind.errors]
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())


def _twin(layer: Watched, twins: Mapping[int, Any]) -> Watched | None:
    """Return a layer of a copied model, given the copies by their originals' ids; None where it has none."""
    module = twins.get(id(layer.module))
    if type(module) is not original_type(layer.module):
        return None
    return dataclasses.replace(layer, module=module, kind=layer.kind.for_module(module))


def _seen(call: CaughtCall) -> SeenCall:
    keys = call.keys().detach()
    return SeenCall(call.leading, keys, call.values(keys) if call.reached else None)


class _Copy:
    """A copy of the model for a trial.

    Attributes:
        model: the copy.
        watched: its layers that are looked at, by name.
    """

    def __init__(self, model: nn.Module, watched: Mapping[str, Watched], *, keys_only: bool) -> None:
        self.model = model
        self.watched = watched
        self._tensors = [*model.parameters(), *model.buffers()] if keys_only else None
        self._writes = [tensor._version for tensor in self._tensors or ()]

    def is_as_made(self) -> bool:
        """Say whether the copy may run once more: no run made gradients, or wrote to a parameter or a buffer."""
        tensors = self._tensors
        if tensors is None or [tensor._version for tensor in tensors] != self._writes:
            return False
        now = [*self.model.parameters(), *self.model.buffers()]
        return len(now) == len(tensors) and all(map(is_, now, tensors))


def _judged(before: Sequence[SeenCall], after: Sequence[SeenCall], order: Tensor) -> RowCheck:
    """Return what the calls of a layer show whose batch was permuted."""
    if not before:
        return RowCheck("assumed", UNCALLED, undecided=True)
    if len(before) != len(after):
        return RowCheck("not aligned", "it is called another number of times when rows move")
    return joint_check([judge(*pair, order) for pair in zip(before, after, strict=True)])


def _check_permutable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `Untried` where inputs are no plain tensors, so that not all of their rows could be permuted."""
    for part in itertools.chain(*map(leaves, args), *map(leaves, kwargs.values())):
        if isinstance(part, PackedSequence) or (
            isinstance(part, Tensor) and (part.is_nested or part.layout != torch.strided)
        ):
            raise Untried("an input is packed, nested or sparse")
        if not isinstance(part, Tensor | int | float | complex | str | None | torch.dtype | torch.device):
            raise Untried(f"an input is a {type(part).__name__}, whose rows cannot be permuted")
        if isinstance(part, str) and part not in kwargs.values() and part not in args:
            raise Untried("an input holds strings, whose rows cannot be permuted")


def _summed(outputs: Any) -> Tensor:
    """Return a number that is a sum over all elements of a model's outputs, so that no row is singled out."""
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type | Mapping):
        outputs = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
    found = [t for t in tensors_in(outputs) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise Untried("the model's outputs hold no tensor with a gradient")
    return torch.stack([(t * t / 2 + t / 3).sum() for t in found]).sum()


def _permuted(batch: Any, axes: Axes, order: Tensor) -> Any:
    """Return a batch whose tensors have these axes permuted, in the order in which `tensors_in` yields them."""
    remaining = iter(axes)

    def permute(tensor: Tensor) -> Tensor:
        for axis in next(remaining):
            tensor = tensor.index_select(axis, order.to(tensor.device))
        return tensor

    return mapped(batch, permute)


_COARSE = (torch.float16, torch.bfloat16)


def _cloned_double(tensor: Tensor) -> Tensor:
    wide = tensor.double() if tensor.is_floating_point() else tensor
    return wide.detach().clone().requires_grad_(tensor.requires_grad)


def _cloned(tensor: Tensor) -> Tensor:
    tensor = tensor.float() if tensor.dtype in _COARSE else tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
