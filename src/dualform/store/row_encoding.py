"""How rows of keys and values are laid down as tensors: in their own dtype, row-scaled float16, or row-scaled int8.

Values are far below float16's normal range, so a float16 row is divided by a power of two that brings its largest
element into [0.5, 1): the division is exact, and the stored exponent brings it back.

An int8 row is divided by 1/127 of its largest element, and each quotient is rounded up or down at random, with the
probability that makes the stored number right on average (stochastic rounding): errors of many rows average out in
their sums. The noise is a hash of the pattern's address and the column. It is integer arithmetic alone, so the same
pattern is rounded in the same way on every machine and device, and in whatever order patterns are written.
"""

import functools

import torch
import xxhash
from torch import Tensor

from dualform.engine.reading import decode as decode

SCALE = ".scale"  # suffix of the name of a row-scaled tensor's scales
ROW_SCALED = (torch.float16, torch.int8)
"""The stored dtypes whose rows have scales."""
LARGEST_INT8 = 127
MIN_SCALE = 2.0**-126
"""Float32's smallest normal number; a row whose scale would be far below it is as good as zero."""
MAX_CHUNK_ELEMENTS = 1 << 17
"""Elements that are rounded at once on a CPU, so that the noise stays in its cache."""
_COLUMNS_SEED = 0x5BD1E995


def encode(rows: Tensor, dtype: torch.dtype, *, seed: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Return rows as they are stored, (T, d), and their scales, (T,) float32, where the dtype is float16 or int8.

    Both are on the device of the rows, and no number is read back from it.

    Args:
        rows: (T, d), all rows of one call, in the order of their addresses.
        dtype: the dtype to store in. Integer rows are token numbers or the like, and are stored as they are.
        seed: of the noise that int8 is rounded with: `address_seed` of the call. Other dtypes need none.

    >>> stored, scales = encode(torch.tensor([[3e-9, 1e-9]]), torch.float16)
    >>> bool((decode(stored, scales, torch.float32) / torch.tensor([[3e-9, 1e-9]]) - 1).abs().max() < 5e-4)
    True
    """
    if not rows.is_floating_point():
        return rows, None
    if dtype not in ROW_SCALED:
        return rows.to(dtype), None
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))
    if dtype == torch.float16:
        return _encode_float16(rows, largest)
    assert seed is not None, "noise that is the same in all calls would not average out"
    return _encode_int8(rows, largest, seed)


def address_seed(layer: str, what: str, step: int, micro: int, call: int, rank: int = 0) -> int:
    """Return the seed of the noise for one call's keys or values, from what the patterns' addresses have in common.

    Args:
        layer: the layer's name.
        what: "keys" or "values".
        step: the number of the step.
        micro: which backward of the step.
        call: which call of the layer in that backward.
        rank: the number of the process, of several.
    """
    return xxhash.xxh3_64_intdigest(f"{layer}/{what} {step} {micro} {call}{f' {rank}' if rank else ''}".encode())


def stored_dtypes(dtype: torch.dtype, *, pooled: bool) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which a layer's keys and values are stored, from the dtype of the layer.

    A pooled key is stored once and used in every epoch, so that the errors of its uses do not average out: where the
    layer is stored as int8, pooled keys are float16.
    """
    return torch.float16 if pooled and dtype == torch.int8 else dtype, dtype


def _encode_float16(rows: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows divided by powers of two, in float16, and these powers."""
    _, exponent = torch.frexp(largest.double())
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)  # (T,)
    scales = scales.clamp(min=MIN_SCALE, max=2.0**127)
    return (rows / scales[:, None].to(rows.dtype)).to(torch.float16), scales.float()


def _encode_int8(rows: Tensor, largest: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows divided by their scales and rounded at random, in int8, and the scales.

    The scale of a row that is not finite is not finite either, and then no element of the row is when it is read.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32  # quotients of bfloat16 would be rounded
    # A product: a GPU divides by a number in Python as it pleases, and scales have to be the same everywhere.
    scales = (largest.to(wide) * (1 / LARGEST_INT8)).float().clamp(min=MIN_SCALE)  # (T,)
    stored = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    width = rows.shape[1]
    columns = _column_numbers(width, rows.device)
    places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    numbers = _mixed(places ^ _as_int32(seed)) ^ _as_int32(seed >> 32)  # (T,)
    size = len(rows) if rows.device.type != "cpu" else max(1, MAX_CHUNK_ELEMENTS // max(width, 1))
    for start in range(0, len(rows), max(size, 1)):
        part = slice(start, start + size)
        noise = _mixed(numbers[part, None] ^ columns).view(torch.int16)[:, :width]  # (n, d), -32768 to 32767
        quotients = (rows[part].to(wide) / scales[part, None]).float()
        # floor(x + u), u in the middle of one of 65,536 equal parts of (0, 1): whole numbers stay what they are.
        quotients += noise.to(torch.float32).add_(32768.5).mul_(2.0**-16)
        stored[part] = quotients.floor_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    return stored, scales


@functools.lru_cache(maxsize=256)
def _column_numbers(width: int, device: torch.device) -> Tensor:
    """Return a fixed random number of 32 bits for each two columns of rows of a width; each takes 16 bits of a hash."""
    return _mixed(torch.arange(-(-width // 2), dtype=torch.int32, device=device) ^ _COLUMNS_SEED)


def _mixed(numbers: Tensor) -> Tensor:
    """Return 32-bit numbers whose bits all depend on all bits of the given numbers (MurmurHash3's last step).

    The numbers are changed in place. Products wrap around; a shift is made one of unsigned numbers by its mask.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        numbers ^= (numbers >> shift) & ((1 << (32 - shift)) - 1)
        numbers *= _as_int32(factor)
    numbers ^= (numbers >> 16) & 0xFFFF
    return numbers


def _as_int32(number: int) -> int:
    """Return the signed number with the same last 32 bits."""
    return ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
