"""The identity of a linear layer, as pure functions; `identity/parameter_maps.py` has those of other parameters.

A linear layer `z = W q + b` that was trained by gradient descent is a sum over its training patterns:

    W = start + sum_t c_t · e_t x_tᵀ          z = start(q) + sum_t (c_t · (x_tᵀ q) + c'_t) · e_t

with keys `x`, values `e`, weight coefficients `c` and bias coefficients `c'` (a bias is the same sum with a constant
key of 1). Nothing here knows where patterns come from or how coefficients are derived.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

MAX_BATCHED_QUERIES = 4  # queries at most whose products are faster in a batch of two
MIN_BATCHED_KEYS = 64  # keys at least
MAX_REUSED_SCORES = 1 << 22  # scores at most for which an allocator uses the same memory again


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
    if keys.device.type != "cpu":
        return torch.mm(queries, keys.T)  # the operator @ spends more time before the launch
    if len(queries) <= MAX_BATCHED_QUERIES and len(keys) >= MIN_BATCHED_KEYS:
        return _attend_few(queries, keys)
    # Row by row of the keys: sums over keys, which come next, read that in order and are several times faster.
    # Which product it is goes by the largest chunk of a pass: equal keys get equal scores in the last chunk too.
    product, count = _product(), len(queries) * len(keys)
    most, plain = count if out is None else len(out), queries.dtype == keys.dtype == torch.float32
    if product is not None and plain and most <= MAX_REUSED_SCORES and keys.shape[1]:
        return product(keys, queries).T
    if out is None:
        return (keys @ queries.T).T
    return torch.mm(keys, queries.T, out=out[:count].view(len(keys), len(queries))).T


def _attend_few(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply with two halves of the keys in a batch: a product with a vector or two runs at half of its speed."""
    half = len(keys) // 2
    width, count = keys.shape[1], len(queries)
    both = torch.bmm(keys[: 2 * half].view(2, half, width), queries.T.expand(2, width, count)).view(2 * half, count)
    found = both if 2 * half == len(keys) else torch.cat([both, keys[-1:] @ queries.T])
    return found.T.contiguous()


@functools.cache
def _product() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return oneDNN's product A Bᵀ where it is faster than MKL's, or nothing.

    MKL, which torch's own products go to, keeps its widest instructions for Intel's processors; oneDNN asks what a
    processor can. With 16 queries that is half as fast again.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()
    if not (wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return None
    try:
        linear = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None
    return lambda rows, columns: linear(rows.detach(), columns.detach(), None, "none", [], "")


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # not known: torch's own product


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
