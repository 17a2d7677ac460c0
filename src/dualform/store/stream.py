"""A layer's patterns, chunk by chunk: decoded, masked, with their coefficients, in bounded memory.

Every pass over a memory goes through here; what is done with a chunk is up to the caller.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.coefficients.family import Of
from dualform.store.encoding import decode
from dualform.store.reader import Run, Shard
from dualform.store.rows import Source

CHUNK = 8192
Keep = Callable[[Shard, str], npt.NDArray[np.bool_] | None]
"""Which patterns of a shard and layer to keep; nothing for all of them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some patterns of one layer.

    Attributes:
        patterns: (n,) their numbers in the layer, counted over all shards.
        keys: (n, d_in)
        values: (n, d_out), where asked for.
        coefficients: role -> (n,) of each of the layer's parameters whose optimizer has them, where asked for.
        scales: (n,) what each key has still to be multiplied with; nothing where keys are whole.
    """

    patterns: npt.NDArray[np.int64]
    keys: Tensor
    values: Tensor | None = None
    coefficients: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Tensor | None = None

    @property
    def numbers(self) -> Tensor:
        """The patterns' numbers, where the keys are."""
        device = self.keys.device
        if device.type != "cpu" and len(self.patterns) == self.patterns[-1] - self.patterns[0] + 1:
            return torch.arange(int(self.patterns[0]), int(self.patterns[-1]) + 1, device=device)
        return torch.from_numpy(self.patterns).to(device)


def everything(shard: Shard, layer: str) -> None:
    """Keep every pattern."""


def stream(
    run: Run,
    layer: str,
    *,
    horizon: int,
    keep: Keep = everything,
    values: bool = False,
    of: Of = "parameter",
    size: int = CHUNK,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    scaled: bool = True,
    reuse: bool = False,
) -> Iterator[Chunk]:
    """Yield a layer's patterns of the first `horizon` steps in order.

    Args:
        run: the run to read.
        layer: the layer's name.
        horizon: patterns of later steps are left out, and coefficients are those after this many steps.
        keep: which patterns to yield.
        values: whether to give values and coefficients too.
        of: coefficients of the parameter, or of its momentum buffer.
        size: patterns per chunk at most.
        device: where chunks are put.
        dtype: what chunks are computed in; by default float64 where that is stored, else float32.
        scaled: multiply row-scaled keys with their scales. A scale is a power of two, so it may as well multiply what
            becomes of the key later, which is cheaper.
        reuse: read every chunk into the same memory: one is valid until the next is asked for.
    """
    reader = Reader(run, layer, horizon=horizon, values=values, of=of, device=device, dtype=dtype, scaled=scaled)
    entry = run.layer(layer)
    largest = min(size, max((shard.count(layer) for shard in run.shards), default=0))
    keys, errors = (
        torch.empty(8 * largest * width, dtype=torch.uint8) if reuse and width else None
        for width in (entry.d_in, entry.d_out if values else 0)
    )
    for piece in pieces(run, layer, horizon=horizon, keep=keep, size=size):
        yield reader.read(piece, keys, errors)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some patterns of one layer, still to be read."""

    shard: Shard | None  # where they lie, or nothing where they may lie anywhere
    rows: npt.NDArray[np.int64]  # their places in the shard (or numbers in the layer), ascending
    start: int  # patterns of the shard that earlier pieces keep
    before: int  # patterns in earlier shards, kept or not
    kept: int  # patterns in earlier shards that are kept
    pooled: bool = False  # whether they are keys of the layer's pool, which patterns refer to, and no patterns

    def __len__(self) -> int:
        return len(self.rows)


def pieces(run: Run, layer: str, *, horizon: int, keep: Keep = everything, size: int = CHUNK) -> Iterator[Piece]:
    """Yield a layer's kept patterns of the first `horizon` steps in pieces of at most `size`, none across shards."""
    for shard, kept, before, done in _kept(run, layer, horizon, keep):
        for start in range(0, len(kept), size):
            yield Piece(shard, kept[start : start + size], start, before, done)


def pool_pieces(run: Run, layer: str, numbers: npt.NDArray[np.int64], *, size: int = CHUNK) -> Iterator[Piece]:
    """Yield the keys of a layer's pool with these numbers, ascending, in pieces of at most `size`."""
    for shard in run.shards:
        base, count = shard.entry.pools.get(layer, (0, 0))
        first, last = np.searchsorted(numbers, [base, base + count]).tolist()
        rows = numbers[first:last] - base
        for start in range(0, len(rows), size):
            yield Piece(shard, rows[start : start + size], start, base, first, pooled=True)


def references_kept(run: Run, layer: str, *, horizon: int, keep: Keep = everything) -> npt.NDArray[np.int64] | None:
    """Return the number of each kept pattern's key in the layer's pool; nothing where it has none."""
    found = [np.zeros(0, dtype=np.int64)]
    for shard, kept, _, _ in _kept(run, layer, horizon, keep):
        if len(kept) and layer not in shard.entry.pools:
            return None
        if len(kept):
            found.append(shard.references(layer).numpy()[kept].astype(np.int64))
    return np.concatenate(found)


def long_pieces(numbers: npt.NDArray[np.int64], *, size: int) -> Iterator[Piece]:
    """Yield patterns with these numbers in pieces that go across shards."""
    for start in range(0, len(numbers), size):
        yield Piece(None, numbers[start : start + size], start, 0, 0)


def numbers_kept(run: Run, layer: str, *, horizon: int, keep: Keep = everything) -> npt.NDArray[np.int64]:
    """Return the number of each kept pattern of a layer, counted over all shards."""
    found = [kept + before for _, kept, before, _ in _kept(run, layer, horizon, keep)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def count_kept(run: Run, layer: str, *, horizon: int, keep: Keep = everything) -> int:
    """Return how many patterns of a layer are kept."""
    total = 0
    for shard in run.shards:
        within, mask = _within(shard, layer, horizon), keep(shard, layer)
        total += within if mask is None else int(np.count_nonzero(mask[:within]))
    return total


@functools.lru_cache(maxsize=2)
def first_numbers(count: int) -> npt.NDArray[np.int64]:
    """Return the first whole numbers; to make millions of them for every question would take longer than the answer."""
    return np.arange(count)


def _kept(run: Run, layer: str, horizon: int, keep: Keep) -> Iterator[tuple[Shard, npt.NDArray[np.int64], int, int]]:
    """Yield each shard, its kept patterns, and how many there are before it: all, and kept."""
    before = done = 0
    for shard in run.shards:
        if shard.entry.start >= horizon:
            break
        kept = selected(shard, layer, horizon, keep) if shard.count(layer) else np.zeros(0, dtype=np.int64)
        yield shard, kept, before, done
        before += shard.count(layer)
        done += len(kept)


def resident_keys(run: Run, layer: str, device: torch.device, dtype: torch.dtype | None) -> Tensor | None:
    """Return all keys of a layer on a device, (T, d_in), where they fit; they stay there."""
    entry = run.layer(layer)
    dtype = dtype or (torch.float64 if entry.dtype == "float64" else torch.float32)
    count = run.count(layer)

    def make() -> Tensor:
        whole: Tensor | None = None
        for chunk in stream(run, layer, horizon=run.steps, device=device, dtype=dtype, reuse=True):
            whole = chunk.keys.new_empty(count, chunk.keys.shape[1]) if whole is None else whole
            whole[int(chunk.patterns[0]) : int(chunk.patterns[-1]) + 1] = chunk.keys
        assert whole is not None, "a layer with patterns"
        return whole

    return run.resident.get((layer, dtype), count * entry.d_in * 8, device, make) if count else None


class Reader:
    """Reads pieces. Several threads may, each with a buffer of its own; the options are those of `stream`."""

    def __init__(
        self,
        run: Run,
        layer: str,
        *,
        horizon: int,
        values: bool = False,
        of: Of = "parameter",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        scaled: bool = True,
    ) -> None:
        entry = run.require_values(layer) if values else run.layer(layer)
        self._layer = layer
        self._values = values
        self._coefficients = {
            role: run.coefficients(parameter, horizon, of)
            for role, parameter in entry.parameters.items()
            if values and not run.is_replayed(parameter)
        }
        self._device = device
        self._dtype = dtype or (torch.float64 if entry.dtype == "float64" else torch.float32)
        self._scaled = scaled

    def read(self, piece: Piece, into: Tensor | None = None, errors_into: Tensor | None = None) -> Chunk:
        """Return a piece's patterns; with buffers (uint8) keys and values may lie in them until they are used again."""
        shard, rows, layer, dtype = piece.shard, piece.rows, self._layer, self._dtype
        assert shard is not None, "a piece across shards is read from a device"
        source = shard.pool(layer) if piece.pooled else shard.rows(layer, "keys")
        stored, scales = _taken(source, rows, self._device, into)
        values, coefficients = None, {}
        if self._values:
            values = decode(*_taken(shard.rows(layer, "values"), rows, self._device, errors_into), dtype)
            steps = _repeat(shard, layer, rows)
            coefficients = {
                role: torch.from_numpy(found.step[steps[0]] * factors[steps]).to(self._device, dtype)
                for role, (found, factors) in self._coefficients.items()
            }
        return Chunk(
            patterns=rows + piece.before,
            keys=decode(stored, scales if self._scaled else None, dtype),
            values=values,
            coefficients=coefficients,
            scales=None if self._scaled or scales is None else scales.to(dtype),
        )


def selected(shard: Shard, layer: str, horizon: int, keep: Keep) -> npt.NDArray[np.int64]:
    """Return the kept patterns' places in a shard, ascending."""
    within, mask = _within(shard, layer, horizon), keep(shard, layer)
    return np.arange(within) if mask is None else np.flatnonzero(mask[:within])


def _within(shard: Shard, layer: str, horizon: int) -> int:
    """Return how many of a shard's patterns are of the first `horizon` steps; calls are in the order of steps."""
    if shard.entry.stop <= horizon:
        return shard.count(layer)
    calls = shard.calls(layer)
    return int((calls["rows"] * calls["positions"])[calls["step"] < horizon].sum())


def _repeat(
    shard: Shard, layer: str, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the step and the micro of each row."""
    calls = shard.calls(layer)
    ends = np.cumsum(calls["rows"] * calls["positions"])
    at = np.searchsorted(ends, rows, side="right")
    return calls["step"][at], calls["micro"][at]


def take(source: Source, rows: npt.NDArray[np.int64], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return stored rows, decoded, on a device."""
    return decode(*_taken(source, rows, device), dtype)


def _taken(
    source: Source, rows: npt.NDArray[np.int64], device: torch.device | str, into: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return rows as they are stored, and their scales where they have some, on a device."""
    contiguous = int(rows[-1]) - int(rows[0]) + 1 == len(rows)
    index: slice | Tensor = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else torch.from_numpy(rows)
    stored, scales = source.take(index, into)
    return stored.to(device), None if scales is None else scales.to(device)
