"""Small images as PNG bytes, by the standard library alone."""

import struct
import zlib

import numpy as np
import numpy.typing as npt


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return an image (H, W), or (H, W, 3) in colour, as a PNG file.

    >>> png(np.zeros((2, 3), dtype=np.uint8))[1:4]
    b'PNG'
    """
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(height, -1)
    filtered = np.concatenate([np.zeros((height, 1), dtype=np.uint8), rows], axis=1)  # no filter in any row
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    body = zlib.compress(filtered.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def shrunk(pixels: npt.NDArray[np.uint8], *, side: int) -> npt.NDArray[np.uint8]:
    """Return an image at most `side` pixels high and wide, by averaging whole blocks."""
    factor = -(-max(pixels.shape[:2]) // side)
    if factor <= 1:
        return pixels
    height, width = (size // factor * factor for size in pixels.shape[:2])
    blocks = pixels[:height, :width].reshape(height // factor, factor, width // factor, factor, *pixels.shape[2:])
    means: npt.NDArray[np.uint8] = blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    return means


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
