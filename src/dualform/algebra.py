"""The identity of a linear layer, as pure functions; `forms.py` has those of other parameters.

A linear layer `z = W q + b` that was trained by gradient descent is a sum over its training patterns:

    W = start + sum_t c_t · e_t x_tᵀ          z = start(q) + sum_t (c_t · (x_tᵀ q) + c'_t) · e_t

with keys `x`, values `e`, weight coefficients `c` and bias coefficients `c'` (a bias is the same sum with a constant
key of 1). Nothing here knows where patterns come from or how coefficients are derived.
"""

import torch
from torch import Tensor

FEW = 4  # queries at most whose products are faster in a batch of two
MANY = 64  # keys at least


def attend(queries: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the attention of each query to each key: their dot products, signed, without a softmax.

    Integer keys stand for one-hot vectors: their attention is 1 where they are equal, else 0.

    Args:
        queries: (Q, d_in)
        keys: (T, d_in)
        out: memory for at least Q · T numbers that may be used.

    Returns:
        (Q, T)

    >>> attend(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, -1.0]]))
    tensor([[ 3., -2.]])
    """
    if not keys.is_floating_point():
        return (queries == keys.T).to(torch.get_default_dtype())
    if len(queries) <= FEW and len(keys) >= MANY and keys.device.type == "cpu":
        return _attend_few(queries, keys)
    if out is None:
        return queries @ keys.T
    return torch.mm(queries, keys.T, out=out[: len(queries) * len(keys)].view(len(queries), len(keys)))


def _attend_few(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply with two halves of the keys in a batch: a product with a vector or two runs at half of its speed."""
    half = len(keys) // 2
    width, count = keys.shape[1], len(queries)
    both = torch.bmm(keys[: 2 * half].view(2, half, width), queries.T.expand(2, width, count)).view(2 * half, count)
    found = both if 2 * half == len(keys) else torch.cat([both, keys[-1:] @ queries.T])
    return found.T.contiguous()


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
