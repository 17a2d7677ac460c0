"""The identity, as three pure functions.

A linear layer `z = W q + b` that was trained by gradient descent is a sum over its training patterns:

    W = start + sum_t c_t · e_t x_tᵀ          z = start(q) + sum_t (c_t · (x_tᵀ q) + c'_t) · e_t

with keys `x`, values `e`, weight coefficients `c` and bias coefficients `c'` (a bias is the same sum with a constant
key of 1). Nothing here knows where patterns come from or how coefficients are derived.
"""

import torch
from torch import Tensor


def attend(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the attention of each query to each key: their dot products, signed, without a softmax.

    Args:
        queries: (Q, d_in)
        keys: (T, d_in)

    Returns:
        (Q, T)

    >>> attend(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, -1.0]]))
    tensor([[ 3., -2.]])
    """
    return queries @ keys.T


def contribute(attention: Tensor, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what each pattern adds to the layer's output, `(c_t · a_t + c'_t) · e_t`.

    Args:
        attention: (Q, T)
        values: (T, d_out)
        weight: (T,) the coefficients c of the layer's weight
        bias: (T,) the coefficients c' of its bias, where it has one

    Returns:
        (Q, T, d_out)

    >>> contribute(torch.tensor([[2.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([-0.5]))
    tensor([[[-1.,  1.]]])
    """
    return scale(attention, weight, bias)[:, :, None] * values


def scale(attention: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the number that multiplies each pattern's value, `c_t · a_t + c'_t`.

    Args:
        attention: (Q, T)
        weight: (T,)
        bias: (T,) or nothing

    Returns:
        (Q, T)
    """
    scaled = attention * weight
    return scaled if bias is None else scaled + bias


def rebuild(values: Tensor, keys: Tensor, coefficients: Tensor) -> Tensor:
    """Return the patterns' share of the weight, `sum_t c_t · e_t x_tᵀ`.

    Args:
        values: (T, d_out)
        keys: (T, d_in)
        coefficients: (T,)

    Returns:
        (d_out, d_in)

    >>> rebuild(torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0, 2.0]]), torch.tensor([-0.5]))
    tensor([[-1.5000, -1.0000],
            [ 1.5000,  1.0000]])
    """
    return (values * coefficients[:, None]).T @ keys


def rebuild_bias(values: Tensor, coefficients: Tensor) -> Tensor:
    """Return the patterns' share of the bias, `sum_t c'_t · e_t`, in float64.

    Values of many signs nearly cancel here, and a vector costs little to add up well.

    Args:
        values: (T, d_out)
        coefficients: (T,)

    Returns:
        (d_out,)
    """
    return coefficients.double() @ values.double()


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 where any tensor is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
