"""Copies of keys and values, out of the user's reach: of large calls one by one, of many small calls all at once.

A policy that is called once for each moment of an episode makes hundreds of patterns of one row in a backward. Copying
each by itself takes longer than training on it; their rows are put together into one tensor instead, of which each
call has its part.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualform.identity.unfolding import Unfolding
from dualform.recording.buffer_pool import BufferPool, as_rows, lending
from dualform.recording.layers import LayerKind
from dualform.recording.sole_ownership import is_owned_alone
from dualform.recording.watch import What
from dualform.threads import one_thread
from dualform.torch_modes import without_filling, without_gradients

if TYPE_CHECKING:
    from dualform.recording.hooks import Arrival

MAX_JOINED_BYTES = 1 << 16
"""Bytes of a call's rows up to which they are copied together with those of other calls."""
NO_UNFOLDINGS: Mapping[str, Any] = MappingProxyType({})
CUDA_GRAPHS_OF_COMPILED = "torch._inductor.cudagraph_trees"
"""The module that torch imports when a compiled program is to use CUDA graphs."""
SEQUENTIAL_ELEMENTS = 1 << 15
"""Elements up to which torch copies on one thread in any case (`at::internal::GRAIN_SIZE`)."""


@without_gradients
def copy_patterns(
    arrivals: Sequence["Arrival"],
    pool: BufferPool,
    wants_values: Callable[[str], bool],
    needed: Mapping[str, What] | None = None,
    unfoldings: Mapping[str, Unfolding] = NO_UNFOLDINGS,
) -> None:
    """Copy the keys and values of calls that one backward has just accumulated; values only where they are kept.

    Args:
        arrivals: calls of the layers that use one parameter, none of them copied yet.
        pool: gives the memory for large copies.
        wants_values: says whether anybody wants the values of a layer now. To find those of a recurrent layer takes
            longer than its backward.
        needed: layers whose rows the sink needs, and which; None for all rows of all layers. Of other layers it gets
            no rows, but for keys that owe nothing to the parameters.
        unfoldings: layers whose keys are patches of their inputs, and of which the inputs are copied in their place.
    """
    if needed is not None:
        with lending(pool):
            without_filling(lambda: _copy_all_needed(arrivals, pool, needed))
        return
    if len(arrivals) == 1:
        with lending(pool):
            _copy_one(arrivals[0], pool, wants_values, unfoldings)
        return
    by_layer: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        by_layer.setdefault(id(arrival.call.layer), []).append(arrival)
    with lending(pool):
        for mine in by_layer.values():
            if len(mine) == 1:
                _copy_one(mine[0], pool, wants_values, unfoldings)
            else:
                _copy_several(mine, pool, wants_values, unfoldings)


@without_gradients
def find_late_values(arrival: "Arrival") -> Tensor | None:
    """Return the values (T, d_out) of a call whose values nobody wanted when it was accumulated, before its step.

    None where the layer's keys alone are recorded.
    """
    return _rows(arrival)[1]


def _copy_one(
    arrival: "Arrival", pool: BufferPool, wants_values: Callable[[str], bool], unfoldings: Mapping[str, Unfolding]
) -> None:
    layer = arrival.call.layer
    name, wanted = layer.name, wants_values(layer.name)
    if _has_plain_rows(type(layer.kind)) and _copy_plain_one(arrival, pool, values=wanted and not layer.keys_only):
        return
    keys, values = _rows(arrival, values=wanted, unfolding=unfoldings.get(name))
    arrival.keys = _own(keys, [arrival.call.inputs], pool)
    arrival.values = None if values is None else _own(values, arrival.errors, pool)
    arrival.accumulated = True


def _copy_all_needed(arrivals: Sequence["Arrival"], pool: BufferPool, needed: Mapping[str, What]) -> None:
    for arrival in arrivals:
        _copy_needed(arrival, pool, needed.get(arrival.call.layer.name))


def _copy_needed(arrival: "Arrival", pool: BufferPool, what: What | None) -> None:
    """Copy the rows of a call that a sink needs."""
    layer = arrival.call.layer
    arrival.accumulated = True
    if what is None and not arrival.call.raw:
        keys = layer.kind.keys(layer.module, arrival.call.inputs)
        arrival.leading = keys.shape[:-1]
        arrival.keys = keys.new_empty(0, layer.d_in)
        layer.kind.release(arrival.call.inputs)
        return
    keys, values = _rows(arrival, values=what == "keys+values", widened=arrival.call.raw)
    arrival.keys = _own_needed(keys, [arrival.call.inputs], pool)
    arrival.values = None if values is None else _own_needed(values, arrival.errors, pool)


def _own_needed(rows: Tensor, others: Sequence[Any], pool: BufferPool) -> Tensor:
    """Return rows that share no memory with others'; on a GPU by its own allocator, which gives memory at no cost."""
    if not rows.is_cuda:
        return _own(rows, others, pool)
    shared = any(isinstance(other, Tensor) and torch._C._is_alias_of(rows, other) for other in others)  # type: ignore[attr-defined]
    return rows.clone() if shared or not rows.is_contiguous() else rows


def _copy_several(
    arrivals: list["Arrival"],
    pool: BufferPool,
    wants_values: Callable[[str], bool],
    unfoldings: Mapping[str, Unfolding],
) -> None:
    """Copy the calls of one layer: together where they are small, in the order of their forwards."""
    arrivals.sort(key=_number)
    layer = arrivals[0].call.layer
    wanted, unfolding = wants_values(layer.name), unfoldings.get(layer.name)
    if _has_plain_rows(type(layer.kind)) and _copy_plain(arrivals, values=wanted and not layer.keys_only):
        return
    rows = [_rows(arrival, values=wanted, unfolding=unfolding) for arrival in arrivals]
    keys = _joined([keys for keys, _ in rows])
    values = _joined([values for _, values in rows if values is not None])
    for i, (arrival, (key, value)) in enumerate(zip(arrivals, rows, strict=True)):
        arrival.keys = _own(key, [arrival.call.inputs], pool) if keys is None else keys[i]
        if value is not None:
            arrival.values = _own(value, arrival.errors, pool) if values is None else values[i]
        arrival.accumulated = True


@functools.cache
def _has_plain_rows(kind: type[LayerKind]) -> bool:
    """Say whether keys and values of a kind of layer are the input and the error of a call themselves."""
    own = [kind.keys, kind.values, kind.errors, kind.release]
    return own == [LayerKind.keys, LayerKind.values, LayerKind.errors, LayerKind.release]


def _copy_plain(arrivals: Sequence["Arrival"], *, values: bool) -> bool:
    """Copy small calls of a layer together whose rows are the input and the error themselves, as `_copy_several` would.

    False, and nothing is done, where any of them is large, has other axes, or another dtype than the parameters.
    """
    dtype = next(iter(arrivals[0].call.layer.parameters.values()))[1].dtype
    keys = [arrival.call.inputs for arrival in arrivals]
    errors = [arrival.errors[0] for arrival in arrivals] if values else []
    for rows in (*keys, *errors):
        if rows is None or rows.dim() != 2 or rows.dtype is not dtype or rows.nbytes > MAX_JOINED_BYTES:
            return False
    if [arrival for arrival in arrivals if arrival.call.coarse is not None]:
        return False
    counts = [one.shape[0] for one in keys]
    copied = torch.cat(keys).split(counts)
    of_values: Sequence[Tensor | None] = torch.cat(errors).split(counts) if values else [None] * len(counts)  # type: ignore[arg-type]
    for arrival, count, key, value in zip(arrivals, counts, copied, of_values, strict=True):
        arrival.leading = (count,)
        arrival.keys = key
        if value is not None:
            arrival.values = value
        arrival.accumulated = True
    return True


def _copy_plain_one(arrival: "Arrival", pool: BufferPool, *, values: bool) -> bool:
    """Copy a call whose rows are its input and its error themselves, as `_copy_one` would, with fewer questions.

    False, and nothing is done, where they are not in the CPU's memory, row by row, in the dtype of the parameters.
    """
    call = arrival.call
    keys, error = call.inputs, arrival.errors[0]
    dtype = next(iter(call.layer.parameters.values()))[1].dtype
    size = 0
    for rows in (keys, error) if values else (keys,):
        if rows is None or not rows.is_cpu or _may_keep(rows):
            return False
        if rows.dim() != 2 or rows.dtype is not dtype or not rows.is_contiguous():
            return False
        size = max(size, rows.nbytes)
    if call.coarse is not None:
        return False
    with one_thread(bytes_read=size):
        arrival.leading = keys.shape[:1]
        arrival.keys = pool.copy(keys)
        if values and error is not None:
            arrival.values = pool.copy(error)
    arrival.accumulated = True
    return True


def _number(arrival: "Arrival") -> int:
    return arrival.call.number


def _rows(
    arrival: "Arrival", *, values: bool = True, widened: bool = True, unfolding: Unfolding | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the keys (T, d_in) and the values (T, d_out) of a call, which may be views of the user's tensors.

    With an unfolding return the inputs, (B, channels, ...), in place of the keys, where these have more elements.

    Args:
        arrival: the call.
        values: whether values are wanted, where the layer's are kept.
        widened: whether rows that autocast computed coarsely come in the parameters' dtype, and not in its own.
        unfolding: how keys are taken from inputs, where these may come in their place.
    """
    call = arrival.call
    layer = call.layer
    dtype = next(iter(layer.parameters.values()))[1].dtype
    if call.coarse is not None and (layer.shares_only or not widened):
        dtype = call.coarse  # sums of such rows are computed in autocast's own dtype
    inputs = None
    if unfolding is not None and layer.kind.unfolding(layer.module) == unfolding:  # else the module was changed since
        inputs = layer.kind.repeated_inputs(layer.module, call.inputs)
    if inputs is not None and unfolding is not None and unfolding.is_smaller(inputs.shape[2:]):
        keys, arrival.unfolding = inputs, unfolding
        arrival.leading = len(inputs), *unfolding.locations(inputs.shape[2:])
    else:
        keys = layer.kind.keys(layer.module, call.inputs)
        arrival.leading = keys.shape[:-1]
    if keys.is_floating_point():
        if call.coarse is not None:
            keys = keys.to(call.coarse)  # as the layer saw them
        keys = keys if keys.dtype is dtype else keys.to(dtype)
    if arrival.unfolding is None:
        keys = as_rows(keys, layer.d_in)
    if layer.keys_only or not values:
        layer.kind.release(call.inputs)
        return keys, None
    errors = as_rows(layer.kind.errors(layer.module, call.inputs, arrival.errors), layer.d_out)
    return keys, errors if errors.dtype is dtype else errors.to(dtype)


def _joined(rows: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Return copies of several small tensors (t, ...), all parts of one new tensor; None where any is not small.

    None too where they differ in more than their number of rows: inputs of a convolution may.
    """
    if not rows or any(one.nbytes > MAX_JOINED_BYTES or one.shape[1:] != rows[0].shape[1:] for one in rows):
        return None
    return torch.cat(tuple(rows)).split([len(one) for one in rows])  # type: ignore[no-any-return]


def _shares_memory(rows: Tensor, others: Sequence[Any]) -> bool:
    """Say whether rows lie in the memory of any other tensor."""
    base = rows._base
    for other in others:
        if other is rows or (base is not None and other is base):
            return True
    place = rows.untyped_storage().data_ptr()
    return any(isinstance(other, Tensor) and other.untyped_storage().data_ptr() == place for other in others)


def _own(rows: Tensor, others: Sequence[Any], pool: BufferPool) -> Tensor:
    """Return rows that only the recording refers to: themselves where that is so, else a copy.

    Args:
        rows: keys or values; maybe a view of one of the others.
        others: what the call took, or the errors at its outputs, as tensors of the recording's own.
        pool: gives the memory for a copy.
    """
    if not _shares_memory(rows, others):
        if rows.is_contiguous():
            return rows
    elif _may_keep(rows) and is_owned_alone(rows, others):
        return rows
    if rows.numel() <= SEQUENTIAL_ELEMENTS:
        return pool.copy(rows)
    with one_thread(bytes_read=rows.nbytes, device=rows.device):
        return pool.copy(rows)


def _may_keep(rows: Tensor) -> bool:
    """Say whether rows that the recording owns alone are better kept than copied: on a GPU.

    In the CPU's memory a copy into memory that was used before takes less time than the training needs to get new
    memory for what it would have used again. Where torch.compile keeps CUDA graphs (mode="reduce-overhead"), a graph
    writes to the memory of its results again, whoever refers to it.
    """
    return rows.is_cuda and CUDA_GRAPHS_OF_COMPILED not in sys.modules
