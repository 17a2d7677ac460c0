"""From calls to patterns: a pattern has no row of its own, and its address follows from its call's row by arithmetic.

A call is one forward of a layer whose gradient was accumulated. Its leading axes are (outer, rows, inner), with the
batch axis in the middle, and it has rows × positions patterns, positions = outer × inner.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Calls = Mapping[str, npt.NDArray[Any]]
"""The calls of a layer in one part, in the order of steps, as columns: step, micro, call, rows, positions, inner,
offset (of the call's first pattern), annotation_offset (-1: none), annotation_rows, annotation_positions, layout,
batch_axis; and where several processes recorded, rank, the number of the call's process. Calls of one step are in the
order of ranks."""


def addresses(calls: Calls, patterns: npt.NDArray[np.int64] | None = None) -> dict[str, npt.NDArray[np.int64]]:
    """Return the address of each pattern, or of those with these places, from its layer's calls in one part.

    Columns: which call row it belongs to (`at`), rank where several processes recorded, step, micro, call, row,
    position, and `annotation`, its row in the part's annotation table or -1.
    """
    sizes = calls["rows"] * calls["positions"]
    ends = np.cumsum(sizes)
    if patterns is None:
        at = np.repeat(np.arange(len(sizes)), sizes)
        local = np.arange(len(at)) - (ends - sizes)[at]
    else:
        at = np.searchsorted(ends, patterns, side="right")
        local = patterns - (ends - sizes)[at]
    rows, inner = calls["rows"][at], calls["inner"][at]
    row = (local // np.maximum(inner, 1)) % np.maximum(rows, 1)
    position = (local // np.maximum(inner * rows, 1)) * inner + local % np.maximum(inner, 1)
    return {
        "at": at,
        **({"rank": calls["rank"][at]} if "rank" in calls else {}),
        "step": calls["step"][at],
        "micro": calls["micro"][at],
        "call": calls["call"][at],
        "row": row,
        "position": position,
        "annotation": _annotation_rows(calls, at, row, position),
    }


SHAPE_COLUMNS = ("rows", "positions", "inner", "annotation_rows", "annotation_positions", "batch_axis")
"""The columns of calls that say how the patterns of a call lie among the rows of its annotations."""


def annotation_rows(calls: Calls) -> npt.NDArray[np.int64]:
    """Return each pattern's row in the part's annotation table, or -1: `addresses(calls)["annotation"]`.

    Calls of one shape, such as those of a training with batches of one size, differ in their offsets alone; the rows of
    the first are found for all of them.
    """
    offsets = calls["annotation_offset"]
    uniform = len(offsets) > 1 and all((calls[name] == calls[name][0]).all() for name in SHAPE_COLUMNS)
    if not uniform or (offsets < 0).any():
        return addresses(calls)["annotation"]
    first = addresses({name: column[:1] for name, column in calls.items()})["annotation"] - offsets[0]
    rows: npt.NDArray[np.int64] = (offsets[:, None] + first[None]).reshape(-1)
    return rows


def _annotation_rows(
    calls: Calls,
    at: npt.NDArray[np.int64],
    row: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    offset = calls["annotation_offset"][at]  # -1 where there is none
    rows, positions = calls["annotation_rows"][at], calls["annotation_positions"][at]
    seen_rows = calls["rows"][at]
    batch_last = calls["batch_axis"][at] > 0
    local = row * np.maximum(positions, 1) + np.where(positions > 0, position, 0)
    # A layer that saw the batch flattened to (B · L) rows: its row number runs over both axes.
    flattened = (positions > 0) & (seen_rows == rows * positions) & (seen_rows != rows)
    in_order = np.where(batch_last, (row % np.maximum(rows, 1)) * positions + row // np.maximum(rows, 1), row)
    local = np.where(flattened, in_order, local)
    local = np.where(rows == 0, 0, local)
    return np.where(offset < 0, -1, offset + local)
