"""A file that is written without a buffer and summed on the way, so that its checksum costs no second reading."""

import io

import xxhash

WRITE_BYTES = 1 << 20  # bytes that are summed and written while they are in the processor's cache


class SummedFile(io.RawIOBase):
    """Writes to a file without a buffer, and takes the checksum on the way."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.digest = xxhash.xxh3_64()
        self.count = 0

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def write(self, content: bytes | memoryview) -> int:  # type: ignore[override]
        """Write all of a content, and add it to the checksum."""
        whole = memoryview(content)
        if not whole.nbytes:
            return 0
        whole = whole.cast("B")
        for start in range(0, len(whole), WRITE_BYTES):
            rest = whole[start : start + WRITE_BYTES]
            self.digest.update(rest)
            while rest:
                rest = rest[self._file.write(rest) :]
        self.count += len(whole)
        return len(whole)
