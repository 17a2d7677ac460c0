"""Safetensors files in parts: written as their rows come, read where rows are asked for.

The safetensors library saves tensors that are whole in memory, and maps files. A shard's rows come in hundreds of parts
and should be copied once, into the file, their checksum taken on the way; and a pass over more than memory holds should
read them into a buffer. The format is the library's: eight bytes of length, a header in JSON, the bytes.
"""

import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from dualform.engine.description import Count
from dualform.errors import CorruptError
from dualform.printable import cut
from dualform.store.documents import parse_json

ALIGNED = 64  # the first tensor begins at a multiple of so many bytes, as processors like it
BLOCK = 1 << 20  # bytes that are summed and written while they are in the cache
MAX_HEADER_BYTES = 100 << 20
"""Size above which a header is refused, as the safetensors library does."""
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def write_parts(path: Path, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    """Write each tensor as the rows of its parts, one part after the other; return the file's xxh3 checksum.

    Parts of a tensor are contiguous, and alike but for their first axis.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name))  # keeps each one aligned
    header, end = {}, 0
    for name in names:
        parts = tensors[name]
        begin, end = end, end + sum(part.nbytes for part in parts)
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        header[name] = {"dtype": _CODES[parts[0].dtype], "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head)) % ALIGNED)
    digest = xxhash.xxh3_64()
    with path.open("wb", buffering=0) as file:
        first = memoryview(len(head).to_bytes(8, "little") + head)
        for part in [first, *(_bytes(part) for name in names for part in tensors[name])]:
            for start in range(0, len(part), BLOCK):
                rest = part[start : start + BLOCK]
                digest.update(rest)
                while rest:
                    rest = rest[file.write(rest) :]
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def row_bytes(self) -> int:
        """The bytes of one entry of the first axis."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]  # of its first byte, and behind its last, counted from the end of the header


def _read_header(file: int) -> dict[str, Place]:
    """Return where the tensors of an open file lie; raise `ValueError` unless they fill it, one behind the other."""
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"its header is said to have {length} bytes, in a file of {size}")
    header = parse_json(os.pread(file, length, 8))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    try:
        entries = msgspec.convert(header, dict[str, _HeaderEntry])
    except msgspec.ValidationError as error:
        raise ValueError(f"its header is mangled ({error})") from None
    found, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(f"{cut(repr(name))} has the unknown dtype {cut(repr(entry.dtype))}")
        if begin != end or stop - begin != math.prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"{cut(repr(name))} does not lie behind the tensor before it, in the size of its shape")
        found[name] = Place(dtype, entry.shape, 8 + length + begin)
        end = stop
    if 8 + length + end > size:
        raise ValueError(f"its tensors do not lie within the file of {size} bytes")
    if 8 + length + end < size:
        raise ValueError(f"there are {size - 8 - length - end} bytes behind its tensors")
    return found


class TensorFile:
    """A published safetensors file, open for reading. Any number of threads may read from it."""

    def __init__(self, path: Path, *, keep_mapped: bool = False) -> None:
        self.path = path
        self.keep_mapped = keep_mapped  # whether it may be mapped as a whole for as long as it is open
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CorruptError(f"{path} cannot be read: {error}. Restore the file from a copy of the run.") from error
        weakref.finalize(self, os.close, self._file)
        self.places = self._places()
        self._map: mmap.mmap | None = None

    def _places(self) -> dict[str, Place]:
        try:
            return _read_header(self._file)
        except (OSError, ValueError) as error:
            raise CorruptError(f"{self.path} cannot be read: {error}. Restore the file from a copy.") from error

    def place(self, name: str) -> Place:
        """Return where a tensor lies; raise `CorruptError` where it is not there."""
        if name not in self.places:
            raise CorruptError(f"{self.path} does not hold {name!r}. Restore the file from a copy.")
        return self.places[name]

    def read(self, place: Place, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        """Return rows of a tensor, read into memory: new, or the first bytes of a buffer (uint8)."""
        shape = (stop - start, *place.shape[1:])
        size = (stop - start) * place.row_bytes
        buffer = torch.empty(size, dtype=torch.uint8) if into is None else into[:size]
        rest, at = buffer.numpy().data, place.offset + start * place.row_bytes
        while rest:
            count = os.preadv(self._file, [rest], at)
            if not count:
                raise CorruptError(f"{self.path} ends too early. Restore the file from a copy of the run.")
            rest, at = rest[count:], at + count
        return buffer.view(place.dtype).view(shape)

    def mapped(self, place: Place) -> Tensor:
        """Return a tensor as a map of the file, which is read where it is used."""
        if not math.prod(place.shape):
            return torch.empty(place.shape, dtype=place.dtype)
        if self._map is None:  # private and writable, because torch warns of memory that is not; nobody writes
            self._map = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        count = math.prod(place.shape)
        return torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)

    def drop(self) -> None:
        """Let the system take back what is mapped; it is read again where it is used again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


class OpenFiles:
    """Files that were read lately, open; a system allows so many only. Those in use stay open until they are not."""

    def __init__(self, most: int, *, keep_mapped: bool) -> None:
        self._most = most
        self._keep_mapped = keep_mapped
        self._files: dict[Path, TensorFile] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> TensorFile:
        """Return a file, opened if it is not open already."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is None:
                file = TensorFile(path, keep_mapped=self._keep_mapped)
            self._files[path] = file  # the latest last
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]
            return file
