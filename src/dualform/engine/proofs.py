"""Marks of a step by which a second run of the same training is proved to be the first.

Of each parameter after a step: a checksum of all of its bits, which says whether two parameters are equal, and four
random projections, which say how far apart they are where they are not. Of the step's calls and annotations: a digest
each. A mark takes no more than one reading of the parameter, on the device where it is.
"""

import functools
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from dualform.recording.sinks import StepCall
from dualform.torch_modes import call_without_autocast, without_gradients

PROJECTIONS = 4
"""Number of random projections of each parameter."""
STACKED_BYTES = 256 << 20
"""Size of parameters of one shape on a GPU that are marked together: a kernel for each of them costs more to start."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """A parameter after a step, in a few numbers.

    Attributes:
        checksum: of all of its bits. It is made where the parameter is, so that only marks from the same kind of device
            can be compared.
        projections: the sums of its elements with the random signs and sizes of `PROJECTIONS` rank-one matrices.
    """

    checksum: int
    projections: tuple[float, ...]

    def distance(self, other: "ParameterMark") -> float:
        """Return about how far apart two parameters are, ‖a − b‖: the root mean square over the projections.

        Each projection of a difference D is uᵀ D v with standard normal u and v, whose square is ‖D‖² on average.
        """
        apart = np.subtract(self.projections, other.projections)
        return float(np.sqrt(np.mean(np.square(apart)))) if len(apart) else 0.0


class ParameterMarker:
    """Marks parameters; keeps the random vectors of each of them, on its device."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[str, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._stacked: dict[tuple[tuple[str, ...], torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @without_gradients
    def measure(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the packed mark of each parameter, (1 + PROJECTIONS,) of float64, on its device; see `unpack_mark`."""
        kinds = sorted({parameter.device.type for parameter in parameters.values()})
        found = call_without_autocast(
            kinds, lambda: [one for some in _alike(parameters) for one in self._measured(some).items()]
        )
        marks = dict(found)
        return {name: marks[name] for name in parameters}

    def _measured(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the marks of parameters of one shape, dtype and device."""
        if len(parameters) == 1:
            ((name, whole),) = parameters.items()
            matrix = _as_matrix(whole)
            wide = _widened(matrix)
            left, right = self._random(name, wide)
            projections = ((left @ wide) * right).sum(dim=1)
            return {name: torch.cat([checksum(matrix).view(torch.float64), projections.double()])}
        stacked = torch.stack([_as_matrix(whole) for whole in parameters.values()])  # (N, rows, columns)
        wide = _widened(stacked)
        left, right = self._stacked_random(tuple(parameters), wide)
        projections = (torch.bmm(left, wide) * right).sum(dim=2)
        marks = torch.cat([sum_checksums(stacked).view(torch.float64), projections.double()], dim=1)
        return dict(zip(parameters, marks.unbind(), strict=True))

    def _stacked_random(self, names: tuple[str, ...], stacked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of several parameters of one shape, (N, P, rows) and (N, P, columns)."""
        place = (names, stacked.device, stacked.dtype)
        if place not in self._stacked:
            each = [self._random(name, matrix) for name, matrix in zip(names, stacked, strict=True)]
            self._stacked[place] = torch.stack([left for left, _ in each]), torch.stack([right for _, right in each])
        return self._stacked[place]

    def _random(self, name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors that a parameter is multiplied with, (P, rows) and (P, columns)."""
        place = (name, matrix.device, matrix.dtype)
        if place not in self._vectors:
            generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
            left, right = (
                torch.randn(PROJECTIONS, size, generator=generator, dtype=torch.float64, device="cpu").to(matrix)
                for size in matrix.shape
            )
            self._vectors[place] = (left, right)
        return self._vectors[place]


def _alike(parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return parameters in sets that are marked together: on a GPU those of one shape and dtype, else each alone."""
    sets: dict[Hashable, list[dict[str, Tensor]]] = {}
    for name, parameter in parameters.items():
        place = (parameter.device, parameter.dtype, parameter.shape)
        alone = parameter.device.type == "cpu" or not parameter.numel()
        mine = sets.setdefault((name,) if alone else place, [{}])
        if (len(mine[-1]) + 1) * parameter.nbytes > STACKED_BYTES and mine[-1]:
            mine.append({})
        mine[-1][name] = parameter.detach()
    return [some for mine in sets.values() for some in mine]


def _as_matrix(whole: Tensor) -> Tensor:
    return whole.reshape(whole.shape[0] if whole.dim() > 1 else 1, -1) if whole.numel() else whole.reshape(1, 0)


def _widened(matrix: Tensor) -> Tensor:
    return matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()


@without_gradients
def mark_checksum(parameter: Tensor) -> int:
    """Return the checksum in the mark of a parameter in the CPU's memory, without its projections."""
    return int(checksum(_as_matrix(parameter.detach())))


@without_gradients
def tensor_checksum(whole: Tensor) -> Tensor:
    """Return the checksum of the bits of a tensor of any shape, (1,) of int64; see `checksum`."""
    return checksum(whole.detach().flatten(0, -2) if whole.dim() > 1 else whole.detach().reshape(1, -1))


@without_gradients
def checksum(matrix: Tensor) -> Tensor:
    """Return the checksum of a matrix's bits, (1,) of int64: xxh3 on a CPU, sums of rows and columns elsewhere."""
    if matrix.device.type == "cpu":
        bits = matrix.view(_BITS[matrix.element_size()])
        (signed,) = struct.unpack("<q", xxhash.xxh3_64_digest(bits.contiguous().numpy().data))
        return torch.tensor([signed], dtype=torch.int64, device="cpu")
    return sum_checksums(matrix[None])[0]


def sum_checksums(matrices: Tensor) -> Tensor:
    """Return the checksum of each of several matrices (N, rows, columns) from sums of rows and columns, (N, 1)."""
    bits = matrices.view(_BITS[matrices.element_size()])
    rows, columns = bits.sum(dim=2, dtype=torch.int64), bits.sum(dim=1, dtype=torch.int64)
    return (_weighted(rows) + 3 * _weighted(columns))[:, None]


def _weighted(sums: Tensor) -> Tensor:
    """Return the sums (N,) of numbers (N, n) with a different odd weight each, modulo 2⁶⁴.

    Two numbers that change places change their sum.
    """
    return (sums * _weights(sums.shape[1], sums.device)).sum(dim=1)


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, device=device, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1


def unpack_mark(packed: Tensor) -> ParameterMark:
    """Return a mark as numbers; its tensor is in the CPU's memory."""
    return ParameterMark(int(packed[:1].view(torch.int64)), tuple(packed[1:].tolist()))


def digest_calls(calls: Sequence[tuple[str, StepCall]]) -> str:
    """Return the digest of a step's calls, each with its layer: their order, sizes and layouts."""
    text = repr([(layer, c.micro, c.call, c.rows, c.positions, c.inner, c.layout) for layer, c in calls])
    return xxhash.xxh3_64_hexdigest(text.encode())


def digest_annotations(calls: Sequence[tuple[str, StepCall]]) -> str:
    """Return the digest of the annotations of a step's calls."""
    digest = xxhash.xxh3_64()
    seen: dict[int, int] = {}
    for _, call in calls:
        binding = call.binding if call.rows * call.positions else None
        if binding is not None and id(binding) not in seen:
            seen[id(binding)] = len(seen)
            for name, column in binding.flat().items():
                flat = np.ascontiguousarray(column)
                digest.update(f"{name} {flat.dtype} {flat.shape}".encode())
                digest.update(flat.tobytes())
            if binding.missing is not None:
                digest.update(binding.missing.tobytes())
        digest.update(f"{-1 if binding is None else seen[id(binding)]} ".encode())
    return digest.hexdigest()
