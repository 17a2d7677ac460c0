"""Charts as SVG text, for pages that must do without scripts. Takes plain numbers; everything else is escaped."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from dualform.show.png import png

POSITIVE = (0, 114, 178)  # #0072B2
NEGATIVE = (178, 69, 0)  # #B24500
ROW = 18


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a name, a number, and a mark for the target or the output."""

    label: str
    value: float
    mark: str = ""


def figures(value: float) -> str:
    """Return a number with four significant digits, as people read it.

    >>> figures(12345.6), figures(-0.0001234), figures(11510744.0), figures(1e-7)
    ('12,350', '−0.0001234', '11.51 M', '1e-07')
    """
    size = abs(value)
    sign = "−" if value < 0 else ""
    for least, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= least:
            return f"{sign}{size / least:.4g} {letter}"
    if size and size < 1e-4:
        return f"{sign}{size:.4g}"
    digits = 3 - math.floor(math.log10(size)) if size else 0
    text = f"{round(size, digits):,.{max(digits, 0)}f}"
    return sign + (text.rstrip("0").rstrip(".") if "." in text else text)


def bars(rows: Sequence[Bar], *, title: str, width: int = 220) -> str:
    """Draw signed horizontal bars; the side of the axis says the sign."""
    label, number = 66, 56
    extent = max((abs(row.value) for row in rows), default=0.0)
    signed = any(row.value < 0 for row in rows)
    space = width - label - number
    zero = label + space / 2 if signed else label
    unit = (space / 2 if signed else space) / extent if extent else 0.0
    parts = []
    for i, row in enumerate(rows):
        y = i * ROW + 2
        length = abs(row.value) * unit
        x = zero - length if row.value < 0 else zero
        kind = "n" if row.value < 0 else "p"
        name = _short(f"{row.label} {row.mark}".strip(), 11)
        strong = ' class="b"' if row.mark else ""
        parts.append(
            f'<text x="{label - 5}" y="{y + 12}" text-anchor="end"{strong}>{escape(name)}</text>'
            f'<rect class="{kind}" x="{x:.1f}" y="{y + 2}" width="{length:.1f}" height="{ROW - 5}"/>'
            f'<text class="t" x="{width - 1}" y="{y + 12}" text-anchor="end">{figures(row.value)}</text>'
        )
    height = len(rows) * ROW + 4
    axis = f'<line class="a" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}"/>'
    return _svg(width, height, title, "".join(parts) + axis)


@dataclass(frozen=True, slots=True)
class Line:
    """A sorted curve: its name, its values from the first rank on, and what it is (target, output or nothing)."""

    label: str
    values: Sequence[float]
    role: str = ""
    dashed: bool = False


def lines(series: Sequence[Line], *, title: str, width: int = 340, height: int = 190) -> str:
    """Draw sorted curves against their rank, on a logarithmic axis."""
    left, bottom, top = 56, 26, 18
    values = [value for line in series for value in line.values]
    if not values:
        return ""
    high, low = max(values), min(values)
    span = (high - low) or 1.0
    longest = max(max(len(line.values) for line in series), 2)

    def x(rank: int) -> float:
        return left + math.log(rank) / math.log(longest) * (width - left - 8)

    def y(value: float) -> float:
        return top + (high - value) / span * (height - top - bottom)

    parts = [
        f'<line class="g" x1="{left}" x2="{width - 8}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="t" x="{left - 5}" y="{y(v) + 4:.1f}" text-anchor="end">{figures(v)}</text>'
        for v in (low, (low + high) / 2, high)
    ]
    for rank in (1, 10, 100, 500):
        if rank <= longest:
            anchor = "end" if rank == longest else "middle"
            parts.append(f'<text class="t" x="{x(rank):.1f}" y="{height - 10}" text-anchor="{anchor}">{rank}</text>')
    for line in sorted(series, key=lambda line: bool(line.role)):
        points = " ".join(f"{x(rank):.1f},{y(line.values[rank - 1]):.1f}" for rank in ranks(len(line.values)))
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        parts.append(f'<polyline class="l {line.role}" points="{points}"{dash}/>')
        if line.role and line.values:
            at = y(line.values[0]) + (-4 if line.role == "target" else 13)
            parts.append(
                f'<text class="{line.role}" x="{left + 3}" y="{at:.1f}">{escape(_short(line.label, 14))}</text>'
            )
    return _svg(width, height, title, "".join(parts))


def ranks(count: int, *, points: int = 48) -> list[int]:
    """Return some ranks from 1 to `count`, evenly spaced on a logarithmic axis.

    >>> ranks(100, points=5)
    [1, 3, 10, 32, 100]
    """
    if count < 1:
        return []
    wanted = np.rint(np.geomspace(1, count, min(points, count))).astype(int)
    return sorted({int(rank) for rank in wanted})


def strip(grid: Sequence[Sequence[float]], names: Sequence[str], *, title: str, steps: int) -> str:
    """Draw steps × groups as an image: hue says the sign, strength the size."""
    values = np.asarray(grid, dtype=np.float64).reshape(len(names), -1)
    largest = np.abs(values).max() if values.size else 0.0
    strength = np.abs(values / largest if largest else values)[..., None]  # (G, B, 1)
    hue = np.where(values[..., None] < 0, np.array(NEGATIVE), np.array(POSITIVE))
    pixels = np.rint(255 + strength * (hue - 255)).astype(np.uint8)
    left, width = 66, 420
    height = len(names) * 14
    parts = [
        f'<text class="t" x="{left - 5}" y="{i * 14 + 11}" text-anchor="end">{escape(_short(name, 11))}</text>'
        for i, name in enumerate(names)
    ]
    parts.append(
        f'<image x="{left}" y="0" width="{width - left}" height="{height}" preserveAspectRatio="none" '
        f'href="{data_uri(pixels)}" style="image-rendering:pixelated"/>'
        f'<text class="t" x="{left}" y="{height + 13}">step 0</text>'
        f'<text class="t" x="{width}" y="{height + 13}" text-anchor="end">{steps:,}</text>'
    )
    return _svg(width, height + 18, title, "".join(parts))


def data_uri(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> str:
    """Return an image as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")


def _svg(width: int, height: float, title: str, content: str) -> str:
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{label}" width="{width}">{content}</svg>'


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
