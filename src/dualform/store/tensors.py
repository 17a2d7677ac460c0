"""Safetensors files in parts: written as their rows come, read where rows are asked for.

The safetensors library saves tensors that are whole in memory, and maps files. A shard's rows come in hundreds of parts
and should be copied once, into the file; a pass over more than memory holds should read them into a buffer; and a blob
need not be a file. The format is the library's: eight bytes of length, a header in JSON, the bytes.
"""

import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from dualform.engine.description import Count
from dualform.errors import CorruptError, RemoteError
from dualform.printable import cut
from dualform.store.blobs import Blob, Blobs, FileEntry
from dualform.store.documents import parse_json

HEADER_ALIGNMENT = 64  # the first tensor begins at a multiple of this many bytes, as processors like it
MAX_GAP_ROWS = 4  # rows that are at most this far apart are read with the rows between them
MAX_HEADER_BYTES = 100 << 20
"""Size above which a header is refused, as the safetensors library does."""
JOINED_BYTES = 1 << 18
"""Bytes of small parts of a tensor that are written together: to write each by itself takes longer than to copy it."""
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def write_parts(file: BinaryIO, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Write each tensor as the rows of its parts, one part after the other; small parts are written together.

    Parts of a tensor are in the CPU's memory, and alike but for their first axis.
    """
    shapes = {name: [sum(map(len, parts)), *parts[0].shape[1:]] for name, parts in tensors.items()}
    names = _write_header(file, tensors, shapes, {})
    scratch = torch.empty(JOINED_BYTES, dtype=torch.uint8)
    for name in names:
        for piece in _joined_parts(tensors[name], scratch):
            file.write(tensor_bytes(piece))


def _joined_parts(parts: Sequence[Tensor], scratch: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a tensor: a large one as it is, small ones together, one behind the other in one axis.

    Small ones lie in `scratch` (uint8) until the next tensor is asked for.
    """
    most = len(scratch) // parts[0].element_size()
    waiting: list[Tensor] = []
    count = 0
    for part in parts:
        size = part.numel()
        if waiting and count + size > most:
            yield _joined_piece(waiting, count, scratch)
            waiting, count = [], 0
        if 2 * size <= most:
            waiting.append(part)
            count += size
            continue
        if waiting:
            yield _joined_piece(waiting, count, scratch)
            waiting, count = [], 0
        yield part
    if count:
        yield _joined_piece(waiting, count, scratch)


def _joined_piece(parts: list[Tensor], count: int, scratch: Tensor) -> Tensor:
    """Return the elements of parts one behind the other, in the first bytes of `scratch` if they are several."""
    if len(parts) == 1:
        return parts[0]
    into = scratch[: count * parts[0].element_size()].view(parts[0].dtype)
    torch.cat(parts, out=into.view(-1, *parts[0].shape[1:]))
    return into


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, and texts about them; a dtype that the format does not have is an `OSError`."""
    if other := [name for name, tensor in tensors.items() if tensor.dtype not in _CODES]:
        raise OSError(f"{other[0]!r} is of {tensors[other[0]].dtype}, which safetensors cannot hold")
    whole = {name: [tensor] for name, tensor in tensors.items()}
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in _write_header(file, whole, shapes, metadata or {}):
        file.write(tensor_bytes(tensors[name]))


def publish_tensors(
    blobs: Blobs, name: str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Publish tensors as a safetensors file."""
    return blobs.publish(name, lambda file: write_tensors(file, tensors, metadata))


def _write_header(
    file: BinaryIO,
    tensors: Mapping[str, Sequence[Tensor]],
    shapes: Mapping[str, Sequence[int]],
    metadata: Mapping[str, str],
) -> list[str]:
    """Write the header of a file, and return the names of its tensors in the order in which they have to follow."""
    names = sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name))  # keeps each one aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + sum(part.nbytes for part in tensors[name])
        header[name] = {
            "dtype": _CODES[tensors[name][0].dtype],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head)) % HEADER_ALIGNMENT)
    file.write(len(head).to_bytes(8, "little") + head)
    return names


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in their order, whatever its device and strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    if plain.stride(0) != 1:  # torch calls a single element contiguous whatever its stride, and views it only by 1
        plain = torch.empty_like(plain, memory_format=torch.contiguous_format).copy_(plain)
    return plain.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of the tensor's first byte, counted from the file's first

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


def _read_header(content: "_Bytes") -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Return where the tensors of a file lie, and the texts about them.

    Raise `ValueError` unless the tensors fill the file, one behind the other.
    """
    size = content.size
    length = int.from_bytes(content.read(0, min(8, size)), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"its header is said to have {length} bytes, in a file of {size}")
    header = parse_json(content.read(8, length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    texts = header.pop("__metadata__", None)
    try:
        metadata = msgspec.convert(texts or {}, dict[str, str])
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
        found[name] = TensorPlace(dtype, entry.shape, 8 + length + begin)
        end = stop
    if 8 + length + end > size:
        raise ValueError(f"its tensors do not lie within the file of {size} bytes")
    if 8 + length + end < size:
        raise ValueError(f"there are {size - 8 - length - end} bytes behind its tensors")
    return found, metadata


class _Bytes(Protocol):
    """The content of a safetensors file, read where it is asked for."""

    size: int

    def read(self, offset: int, count: int) -> bytes:
        """Return a part of the content."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with a part of the content; raise `EOFError` where it ends too early."""


class _FileBytes:
    """The content of a file of this machine, which can be mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size
        self._map: mmap.mmap | None = None

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._file, count, offset)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        rest = buffer
        while rest:
            count = os.preadv(self._file, [rest], offset)
            if not count:
                raise EOFError
            rest, offset = rest[count:], offset + count

    def mapped(self) -> mmap.mmap:
        """Return the whole file as memory that is read where it is used."""
        if self._map is None:  # private and writable, because torch warns of memory that is not; nobody writes
            self._map = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return self._map

    def drop(self) -> None:
        """Let the system take back what is mapped; it is read again where it is used again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


class _BlobBytes:
    """The content of a blob that is no file of this machine: every look asks for a range."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self.size = blob.size()

    def read(self, offset: int, count: int) -> bytes:
        return bytes(self._blob.ranges([(offset, count)])[0])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if len(buffer):
            buffer[:] = self._blob.ranges([(offset, len(buffer))])[0]


class TensorFile:
    """A published safetensors file, open for reading. Any number of threads may read from it.

    Attributes:
        blob: where it lies.
        places: where its tensors lie in it, by name.
        metadata: the texts that were written with them.
        keep_mapped: whether it may be mapped as a whole for as long as it is open, and can be.
    """

    def __init__(self, blob: Blob, *, keep_mapped: bool = False) -> None:
        self.blob = blob
        path = blob.local_path()
        try:
            self._content: _FileBytes | _BlobBytes = _BlobBytes(blob) if path is None else _FileBytes(path)
            self.places, self.metadata = _read_header(self._content)
        except RemoteError:
            raise  # which says nothing of the file
        except (OSError, ValueError) as error:
            raise CorruptError(f"{blob} cannot be read: {error}. Restore the file from a copy of the run.") from error
        self.keep_mapped = keep_mapped and path is not None

    def place(self, name: str) -> TensorPlace:
        """Return where a tensor lies; raise `CorruptError` where it is not there."""
        if name not in self.places:
            raise CorruptError(f"{self.blob} does not hold {name!r}. Restore the file from a copy.")
        return self.places[name]

    def read(self, place: TensorPlace, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        """Return rows of a tensor, read into memory: new, or the first bytes of a buffer (uint8)."""
        shape = (stop - start, *place.shape[1:])
        size = (stop - start) * place.row_bytes
        buffer = torch.empty(size, dtype=torch.uint8) if into is None else into[:size]
        self._read_into(buffer, place.offset + start * place.row_bytes)
        return buffer.view(place.dtype).view(shape)

    def read_parts(self, name: str, begins: Sequence[int], size: int) -> Tensor:
        """Return parts of a tensor, each of `size` rows and given by its first, (parts, size, ...), in new memory."""
        place = self.place(name)
        width = place.row_bytes
        if isinstance(self._content, _FileBytes):
            buffer = torch.empty(len(begins) * size, *place.shape[1:], dtype=place.dtype)
            for i, begin in enumerate(begins):
                self.read(place, begin, begin + size, buffer[i * size :][:size].view(torch.uint8).view(-1))
        else:
            found = self.blob.ranges([(place.offset + begin * width, size * width) for begin in begins])
            joined = np.concatenate([np.frombuffer(content, dtype=np.uint8) for content in found])
            buffer = torch.from_numpy(joined).view(place.dtype)
        return buffer.view(len(begins), size, *place.shape[1:])

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor: as a map of the file, which is read where it is used, or read into memory."""
        place = self.place(name)
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        if isinstance(self._content, _FileBytes):
            content = self._content.mapped()
            return torch.frombuffer(content, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)
        buffer = torch.empty(count * place.dtype.itemsize, dtype=torch.uint8)
        self._read_into(buffer, place.offset)
        return buffer.view(place.dtype).view(place.shape)

    def scattered(self, name: str, index: Tensor) -> Tensor:
        """Return some rows of a tensor: from a map of the file, or, where it is none, read with few between them."""
        if isinstance(self._content, _FileBytes):
            return self.tensor(name)[index]
        place = self.place(name)
        wanted, inverse = np.unique(index.numpy(), return_inverse=True)
        breaks = np.flatnonzero(np.diff(wanted) > MAX_GAP_ROWS) + 1
        groups = np.split(wanted, breaks)
        spans = [(int(group[0]), int(group[-1]) + 1) for group in groups if len(group)]
        width = place.row_bytes
        found = self.blob.ranges([(place.offset + low * width, (high - low) * width) for low, high in spans])
        rows = torch.empty(len(wanted) * width, dtype=torch.uint8).view(len(wanted), width)
        at = 0
        for group, (low, _), content in zip(groups, spans, found, strict=True):
            held = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
            rows[at : at + len(group)] = torch.from_numpy(held[group - low])
            at += len(group)
        return rows.view(-1).view(place.dtype).view(-1, *place.shape[1:])[torch.from_numpy(inverse)]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the file by name."""
        return {name: self.tensor(name) for name in self.places}

    def drop(self) -> None:
        """Let the system take back what is mapped; it is read again where it is used again."""
        if isinstance(self._content, _FileBytes):
            self._content.drop()

    def _read_into(self, buffer: Tensor, offset: int) -> None:
        try:
            self._content.read_into(buffer.numpy().data, offset)
        except RemoteError:
            raise
        except (OSError, EOFError) as error:
            raise CorruptError(f"{self.blob} ends too early. Restore the file from a copy of the run.") from error


class OpenFiles:
    """The files that were read last, kept open, at most a number of them. A file that is in use stays open anyway."""

    def __init__(self, most: int, *, keep_mapped: bool) -> None:
        self._most = most
        self._keep_mapped = keep_mapped
        self._files: dict[str, TensorFile] = {}
        self._lock = threading.Lock()

    def get(self, blob: Blob) -> TensorFile:
        """Return a file, opened if it is not open already."""
        with self._lock:
            file = self._files.pop(blob.name, None)
            if file is None:
                file = TensorFile(blob, keep_mapped=self._keep_mapped)
            self._files[blob.name] = file  # the latest last
            while len(self._files) > self._most:
                del self._files[next(iter(self._files))]
            return file
