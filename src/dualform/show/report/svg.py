"""Charts as SVG, for pages without scripts. This module computes the geometry; the templates hold the markup."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dualform.show.png import png
from dualform.show.templating import render

if TYPE_CHECKING:
    from markupsafe import Markup

POSITIVE = (0, 114, 178)  # #0072B2
NEGATIVE = (178, 69, 0)  # #B24500
BAR_ROW = 18  # pixels
STRIP_ROW = 14  # pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart: a name, a number, and a mark for the target or the output."""

    label: str
    value: float
    mark: str = ""
    aside: bool = False  # drawn in grey: no group's, such as the start or the residual


def figures(value: float) -> str:
    """Return a number with four significant digits, as people read it.

    >>> figures(12345.6), figures(-0.0001234), figures(11510744.0), figures(1e-7), figures(math.nan)
    ('12,350', '−0.0001234', '11.51 M', '1e-07', 'not a number')
    """
    if math.isnan(value):
        return "not a number"
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


def bars(rows: Sequence[Bar], *, title: str, width: int = 220) -> "Markup":
    """Draw signed horizontal bars; the side of the axis says the sign."""
    label, number = 66, 56
    extent = max((abs(row.value) for row in rows if math.isfinite(row.value)), default=0.0)
    signed = any(row.value < 0 for row in rows)
    space = width - label - number
    zero = label + space / 2 if signed else label
    unit = (space / 2 if signed else space) / extent if extent else 0.0
    drawn = []
    for i, row in enumerate(rows):
        length = abs(row.value) * unit if math.isfinite(row.value) else 0.0
        drawn.append(
            {
                "name": _short(f"{row.label} {row.mark}".strip(), 11),
                "strong": bool(row.mark),
                "value": figures(row.value),
                "sign": "n" if row.value < 0 else "p",
                "x": zero - length if row.value < 0 else zero,
                "y": i * BAR_ROW + 2,
                "length": length,
            }
        )
    return render(
        "bars.svg",
        bars=drawn,
        title=title,
        width=width,
        height=len(rows) * BAR_ROW + 4,
        bar_height=BAR_ROW - 5,
        label=label,
        zero=zero,
    )


def waterfall_svg(rows: Sequence[Bar], total: Bar, *, title: str, width: int = 520) -> "Markup":
    """Draw bars of which each begins where the one above it ended, and below them their sum."""
    label, number, row_height = 130, 60, 20
    reached = [0.0]
    for row in rows:
        reached.append(reached[-1] + row.value)
    low, high = min(*reached, total.value), max(*reached, total.value)
    unit = (width - label - number) / ((high - low) or 1.0)
    drawn: list[dict[str, str | float | None]] = [
        {
            "name": _short(row.label, 20),
            "value": ("+" if row.value > 0 else "") + figures(row.value),
            "sign": "o" if row.aside else "n" if row.value < 0 else "p",
            "x": label + (min(begin, end) - low) * unit,
            "end": label + (end - low) * unit,
            "length": max(abs(end - begin) * unit, 1.0),
        }
        for row, begin, end in zip(rows, reached[:-1], reached[1:], strict=True)
    ]
    left, right = min(0.0, total.value), max(0.0, total.value)
    drawn.append(
        {
            "name": total.label,
            "value": figures(total.value),
            "sign": "sum",
            "x": label + (left - low) * unit,
            "end": None,
            "length": max((right - left) * unit, 1.0),
        }
    )
    height = len(drawn) * row_height + 4
    zero = label - low * unit
    return render(
        "waterfall.svg", bars=drawn, title=title, width=width, height=height, label=label, zero=zero, row=row_height
    )


@dataclass(frozen=True, slots=True)
class Line:
    """A sorted curve: its name, its values from the first rank on, and its role ("target", "output" or "")."""

    label: str
    values: Sequence[float]
    role: str = ""
    dashed: bool = False


def lines(series: Sequence[Line], *, title: str, width: int = 340, height: int = 190) -> "Markup | None":
    """Draw sorted curves against their rank, on a logarithmic axis; None where there are no values."""
    left, bottom, top = 56, 26, 18
    values = [value for line in series for value in line.values]
    if not values:
        return None
    high, low = max(values), min(values)
    span = (high - low) or 1.0
    longest = max(max(len(line.values) for line in series), 2)

    def x(rank: int) -> float:
        return left + math.log(rank) / math.log(longest) * (width - left - 8)

    def y(value: float) -> float:
        return top + (high - value) / span * (height - top - bottom)

    drawn = []
    for line in sorted(series, key=lambda line: bool(line.role)):
        points = " ".join(f"{x(rank):.1f},{y(line.values[rank - 1]):.1f}" for rank in ranks(len(line.values)))
        named = bool(line.role and line.values)
        drawn.append(
            {
                "role": line.role,
                "points": points,
                "dashed": line.dashed,
                "name": _short(line.label, 14),
                "name_y": y(line.values[0]) + (-4 if line.role == "target" else 13) if named else None,
            }
        )
    return render(
        "lines.svg",
        lines=drawn,
        levels=[(y(value), figures(value)) for value in (low, (low + high) / 2, high)],
        ranks=[
            (x(rank), rank, "end" if rank == longest else "middle") for rank in (1, 10, 100, 500) if rank <= longest
        ],
        title=title,
        width=width,
        height=height,
        left=left,
    )


def ranks(count: int, *, points: int = 48) -> list[int]:
    """Return some ranks from 1 to `count`, evenly spaced on a logarithmic axis.

    >>> ranks(100, points=5)
    [1, 3, 10, 32, 100]
    """
    if count < 1:
        return []
    wanted = np.rint(np.geomspace(1, count, min(points, count))).astype(int)
    return sorted({int(rank) for rank in wanted})


def strip(grid: Sequence[Sequence[float]], names: Sequence[str], *, title: str, steps: int) -> "Markup":
    """Draw steps × groups as an image: hue says the sign, strength the size."""
    values = np.asarray(grid, dtype=np.float64).reshape(len(names), -1)
    largest = np.abs(values).max() if values.size else 0.0
    strength = np.abs(values / largest if largest else values)[..., None]  # (G, B, 1)
    hue = np.where(values[..., None] < 0, np.array(NEGATIVE), np.array(POSITIVE))
    pixels = np.rint(255 + strength * (hue - 255)).astype(np.uint8)
    return render(
        "strip.svg",
        names=[_short(name, 11) for name in names],
        uri=data_uri(pixels),
        steps=f"{steps:,}",
        title=title,
        width=420,
        height=len(names) * STRIP_ROW,
        row_height=STRIP_ROW,
        left=66,
    )


def data_uri(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> str:
    """Return an image as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
