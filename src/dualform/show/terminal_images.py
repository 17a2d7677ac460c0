"""Draw small grey images with characters, so that a terminal (or a log file) can show them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SHADES = " ░▒▓█"
MAX_IMAGE_ROWS = 14  # an image that is taller is shrunk


def draw(image: npt.NDArray[np.generic], *, height: int = MAX_IMAGE_ROWS) -> list[str]:
    """Return an image (H, W) or (H, W, C) as lines of text, two characters a pixel.

    >>> draw(np.array([[0, 4], [2, 4]]))
    ['  ██', '▒▒██']
    """
    grey = np.asarray(image, dtype=np.float64)
    if grey.ndim == 3:
        grey = grey.mean(axis=2)
    factor = -(-grey.shape[0] // height)
    if factor > 1:
        grey = grey[: grey.shape[0] // factor * factor, : grey.shape[1] // factor * factor]
        grey = grey.reshape(grey.shape[0] // factor, factor, -1, factor).mean(axis=(1, 3))
    top = grey.max()
    levels = np.zeros(grey.shape, dtype=int) if top <= 0 else np.rint(grey / top * (len(SHADES) - 1)).astype(int)
    return ["".join(SHADES[level] * 2 for level in row) for row in levels]


def join_blocks(blocks: Sequence[tuple[str, Sequence[str]]], *, gap: int = 3) -> str:
    """Return captioned blocks of lines next to each other."""
    widths = [max(len(caption), *(len(line) for line in lines)) for caption, lines in blocks]
    height = max(len(lines) for _, lines in blocks)
    columns = [[caption, *lines, *[""] * (height - len(lines))] for caption, lines in blocks]
    return "\n".join(
        (" " * gap).join(column[row].ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip()
        for row in range(height + 1)
    )
