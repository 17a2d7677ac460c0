"""The order in which autograd added up a bias's errors, found by trying.

A sum of floating-point numbers depends on its order, and torch chooses the order by how the error lies in memory, in
another way for each version and each path through `F.linear`. Where the true gradient of a bias is zero (the bias of
an attention's key projection) rounding is all there is of it, and Adam makes much of that. So the recorder adds up an
error that does not lie row by row in each way that torch has been seen to use, compares each sum with the gradient
that autograd really found, and logs the layout that gives it to the bit.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dualform.identity.parameter_maps import ParameterMap
from dualform.torch_modes import without_gradients

if TYPE_CHECKING:
    from dualform.recording.hooks import Arrival


def describe_layout(error: Tensor) -> str | None:
    """Return the shape and strides of an error as SHAPE:STRIDES, or None if it lies row by row."""
    if error.dim() < 2 or error.is_contiguous():
        return None
    return f"{','.join(map(str, error.shape))}:{','.join(map(str, error.stride()))}"


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return values (T, d_out) with the shape and strides of the error that they were, given as SHAPE:STRIDES."""
    shape, strides = ([int(number) for number in part.split(",")] for part in layout.split(":"))
    values = values.reshape(shape)
    for axis, stride in enumerate(strides):
        if stride == 0:  # expanded: all the same along this axis
            values = values.narrow(axis, 0, 1)
    lying = torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)
    return lying.expand(shape)


def bias_gradient(bias_map: ParameterMap, error: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of a bias from an error (..., d_out), added up in the order in which the error lies.

    Args:
        bias_map: the parameter map of the bias.
        error: (..., d_out)
        shape: the parameter's shape.
    """
    summed = error.sum(dim=tuple(range(error.dim() - 1))) if error.dim() > 1 else error  # (d_out,)
    return bias_map.gradient(summed[None], summed[None], shape)


@without_gradients
def settle(arrivals: Sequence["Arrival"], parameter: nn.Parameter, increment: Tensor) -> None:
    """Set the layout of each call whose errors autograd did not add up row by row.

    Args:
        arrivals: the errors that one backward brought to all calls that use the parameter, in the order of arrival.
        parameter: a bias; nothing is done for other parameters.
        increment: the gradient that this backward is about to add to the parameter's.
    """
    biased = [
        (arrival, use.parameter_map)
        for arrival in arrivals
        for use, (_, used) in arrival.call.layer.parameters.items()
        if used is parameter and use.parameter_map.is_bias
    ]
    strided = [arrival for arrival, _ in biased if arrival.strided is not None]
    if not strided:
        return
    for errors in _readings([arrival for arrival, _ in biased]):
        total: Tensor | None = None
        for (_, bias_map), error in zip(biased, errors, strict=True):
            one = bias_gradient(bias_map, error, parameter.shape)
            total = one if total is None else total + one
        if total is not None and torch.equal(total, increment):
            for (arrival, _), error in zip(biased, errors, strict=True):
                arrival.layout = describe_layout(error)
            break
    for arrival in strided:
        arrival.strided = None


def _readings(arrivals: Sequence["Arrival"]) -> Iterator[list[Tensor]]:
    """Yield the calls' errors in each layout that torch may have added them up in, but for row by row."""
    as_they_lie: list[Tensor] = []
    for arrival in arrivals:
        error = arrival.errors[0] if arrival.strided is None else arrival.strided
        assert error is not None, "an error that arrived is kept"
        as_they_lie.append(error)
    yield as_they_lie
    # Rows of two axes are a view of the error where its strides allow that, and a copy row by row elsewhere.
    yield [error.reshape(-1, error.shape[-1]) for error in as_they_lie]
