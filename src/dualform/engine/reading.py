"""Reading a layer's patterns: which of them a view keeps, cut into ranges, and each range decoded into a block.

Executors and folds read through here, so that all of them decode patterns and derive coefficients in one way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.source import PatternPart, PatternSource, Rows
from dualform.identity.families.optimizer_facts import CoefficientsOf

PartMask = Callable[[PatternPart, str], npt.NDArray[np.bool_] | None]
"""Which patterns of a part and layer a view keeps, (n,); None for all of them."""
BLOCK_PATTERNS = 8192
PLACE_DTYPES = (torch.int64, torch.int32)
"""The dtypes of stored rows that are places, such as token numbers: one-hot keys, which are not scaled."""


def keep_all(part: PatternPart, layer: str) -> None:
    """Keep every pattern: the mask of a whole run."""


def decode(stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return stored rows, (T, d), in the dtype to compute in; rows of places (token numbers) stay as they are.

    Rows of int8 are row-scaled numbers. Without their scales they come as the whole numbers that are stored.
    """
    rows = stored if stored.dtype in PLACE_DTYPES else stored.to(dtype)
    return rows if scales is None else rows * scales.to(dtype)[:, None]


@dataclass(frozen=True, slots=True)
class PatternRange:
    """Some patterns of one layer, still to be read.

    Attributes:
        part: the part that holds them; None where they are numbers in the whole layer, for keys that lie on a device.
        rows: their places in the part (or numbers in the layer), ascending.
        kept_before: how many patterns that the view keeps come before them, over all parts.
        count_before: how many patterns lie in earlier parts, kept or not.
        distinct: whether the rows are not patterns but distinct keys that patterns refer to.
    """

    part: PatternPart | None
    rows: npt.NDArray[np.int64]
    kept_before: int
    count_before: int
    distinct: bool = False

    def __len__(self) -> int:
        return len(self.rows)


def kept_rows(part: PatternPart, layer: str, horizon: int, mask: PartMask) -> npt.NDArray[np.int64]:
    """Return the places in a part of the patterns that a view keeps, ascending."""
    within, kept = _count_within(part, layer, horizon), mask(part, layer)
    return np.arange(within) if kept is None else np.flatnonzero(kept[:within])


def _count_within(part: PatternPart, layer: str, horizon: int) -> int:
    """Return how many of a part's patterns are of the first `horizon` steps; calls are in the order of steps."""
    if part.stop <= horizon:
        return part.count(layer)
    calls = part.calls(layer)
    return int((calls["rows"] * calls["positions"])[calls["step"] < horizon].sum())


def kept_by_part(
    source: PatternSource, layer: str, *, horizon: int, mask: PartMask = keep_all
) -> Iterator[tuple[PatternPart, npt.NDArray[np.int64], int, int]]:
    """Yield each part within the horizon, its kept rows, and how many patterns come before: all, and kept ones."""
    source.require_patterns(layer)
    before = kept_before = 0
    for part in source.parts():
        if part.start >= horizon:
            break
        rows = kept_rows(part, layer, horizon, mask) if part.count(layer) else np.zeros(0, dtype=np.int64)
        yield part, rows, before, kept_before
        before += part.count(layer)
        kept_before += len(rows)


def pattern_ranges(
    source: PatternSource, layer: str, *, horizon: int, mask: PartMask = keep_all, size: int = BLOCK_PATTERNS
) -> Iterator[PatternRange]:
    """Yield a layer's kept patterns in ranges of at most `size`, none of them across parts."""
    for part, rows, before, kept_before in kept_by_part(source, layer, horizon=horizon, mask=mask):
        for start in range(0, len(rows), size):
            yield PatternRange(part, rows[start : start + size], kept_before + start, before)


def count_kept(source: PatternSource, layer: str, *, horizon: int, mask: PartMask = keep_all) -> int:
    """Return how many patterns of a layer a view keeps."""
    source.require_patterns(layer)
    total = 0
    for part in source.parts():
        within, kept = _count_within(part, layer, horizon), mask(part, layer)
        total += within if kept is None else int(np.count_nonzero(kept[:within]))
    return total


def kept_patterns(source: PatternSource, layer: str, *, horizon: int, mask: PartMask) -> npt.NDArray[np.int64]:
    """Return the number of each kept pattern of a layer, counted over all parts."""
    found = [rows + before for _, rows, before, _ in kept_by_part(source, layer, horizon=horizon, mask=mask)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def kept_key_ids(
    source: PatternSource, layer: str, *, horizon: int, mask: PartMask = keep_all
) -> npt.NDArray[np.int64] | None:
    """Return the number of each kept pattern's key among the layer's distinct keys; None where it is not known."""
    found = [np.zeros(0, dtype=np.int64)]
    for part, rows, _, _ in kept_by_part(source, layer, horizon=horizon, mask=mask):
        if len(rows):
            ids = part.key_ids(layer)
            if ids is None:
                return None
            found.append(ids.numpy()[rows].astype(np.int64))
    return np.concatenate(found)


class BlockReader:
    """Reads ranges of one layer's patterns into blocks. Several threads may, each with buffers of its own.

    Args:
        source: the source to read.
        layer: the layer's name.
        horizon: coefficients are those after this many steps.
        values: whether blocks have values and coefficients too.
        of: coefficients of the parameter, or of its momentum buffer.
        device: where blocks are put.
        dtype: what blocks are computed in; by default float64 where that is stored, else float32.
        scaled: multiply row-scaled keys with their scales. A scale may as well multiply a measure of the key, which is
            cheaper, and the same to the bit where scales are powers of two (float16).
    """

    def __init__(
        self,
        source: PatternSource,
        layer: str,
        *,
        horizon: int,
        values: bool = False,
        of: CoefficientsOf = "parameter",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        scaled: bool = True,
    ) -> None:
        entry = source.require_values(layer) if values else source.layer(layer)
        self._layer = layer
        self._values = values
        self._coefficients = {
            use: source.coefficients(use.parameter, horizon, of)
            for use in entry.uses
            if values and not source.is_replayed(use.parameter)
        }
        self._device = device
        self._dtype = dtype or (torch.float64 if entry.dtype == "float64" else torch.float32)
        self._scaled = scaled

    def read(self, wanted: PatternRange, into: Tensor | None = None, values_into: Tensor | None = None) -> Block:
        """Return a range's patterns; with buffers (uint8) keys and values are valid until the buffers' next use."""
        part, rows, layer, dtype = wanted.part, wanted.rows, self._layer, self._dtype
        assert part is not None, "a range across parts is read from a device"
        stored, scales = _take(_keys(part, layer, distinct=wanted.distinct), rows, self._device, into)
        values, coefficients = None, {}
        if self._values:
            values = decode(*_take(part.rows(layer, "values"), rows, self._device, values_into), dtype)
            calls = part.calls(layer)
            at = np.searchsorted(np.cumsum(calls["rows"] * calls["positions"]), rows, side="right")
            step, micro = calls["step"][at], calls["micro"][at]
            coefficients = {
                use: torch.from_numpy(found.step[step] * factors[step, micro]).to(self._device, dtype)
                for use, (found, factors) in self._coefficients.items()
            }
        return Block(
            patterns=rows + wanted.count_before,
            keys=decode(stored, scales if self._scaled else None, dtype),
            values=values,
            coefficients=coefficients,
            scales=None if self._scaled or scales is None else scales.to(dtype),
        )


def read_blocks(
    source: PatternSource,
    layer: str,
    *,
    horizon: int,
    mask: PartMask = keep_all,
    values: bool = False,
    size: int = BLOCK_PATTERNS,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[Block]:
    """Yield a layer's kept patterns in order, in blocks of at most `size`; options as for `BlockReader`."""
    reader = BlockReader(source, layer, horizon=horizon, values=values, device=device, dtype=dtype)
    for wanted in pattern_ranges(source, layer, horizon=horizon, mask=mask, size=size):
        yield reader.read(wanted)


def read_rows(rows: Rows, places: npt.NDArray[np.int64], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return some rows of keys or values, decoded, on a device."""
    return decode(*_take(rows, places, device), dtype)


def _keys(part: PatternPart, layer: str, *, distinct: bool) -> Rows:
    if not distinct:
        return part.rows(layer, "keys")
    own = part.own_keys(layer)
    assert own is not None, "a range of distinct keys lies in a part that has some"
    return own[1]


def _take(
    rows: Rows, places: npt.NDArray[np.int64], device: torch.device | str, into: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return rows as they are stored, and their scales where they have some, on a device."""
    contiguous = int(places[-1]) - int(places[0]) + 1 == len(places)
    index: slice | Tensor = slice(int(places[0]), int(places[-1]) + 1) if contiguous else torch.from_numpy(places)
    stored, scales = rows.take(index, into)
    return stored.to(device), None if scales is None else scales.to(device)
