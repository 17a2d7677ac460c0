"""How rows of keys and values are laid down as tensors: in their own dtype, or row-scaled float16.

Values are far below float16's normal range, so a float16 row is divided by a power of two that brings its largest
element into [0.5, 1): the division is exact, and the stored exponent brings it back.
"""

import torch
from torch import Tensor

from dualform.engine.reading import decode as decode

SCALE = ".scale"  # suffix of the name of a row-scaled tensor's scales


def encode(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return rows as they are stored, (T, d), and their scales, (T,) float32, where the dtype is float16.

    >>> stored, scales = encode(torch.tensor([[3e-9, 1e-9]]), torch.float16)
    >>> bool((decode(stored, scales, torch.float32) / torch.tensor([[3e-9, 1e-9]]) - 1).abs().max() < 5e-4)
    True
    """
    if not rows.is_floating_point():
        return rows, None  # integer keys are what they are
    if dtype != torch.float16:
        return rows.to(dtype), None
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))
    _, exponent = torch.frexp(largest.double())
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)  # (T,)
    # 2^-126 is float32's smallest normal number; what is far below it is as good as zero.
    scales = scales.clamp(min=2.0**-126, max=2.0**127)
    return (rows / scales[:, None].to(rows.dtype)).to(torch.float16), scales.float()
