"""Do stored inputs of a convolution make as many keys as its calls have? Arithmetic alone; no tensor is made.

A layer's `unfolding` and the sizes of each call's inputs come from a run folder that may be anybody's. Keys take up to
`MAX_REPETITION` times the memory of the inputs that are there, and no more.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dualform.engine.description import LayerEntry
from dualform.identity.unfolding import Unfolding
from dualform.printable import cut

MAX_AXES = 3
INPUT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_SPAN = 1 << 40
"""Elements of an axis that a kernel may cover, above which an unfolding is refused."""
_SIZES = re.compile(r"\d{1,12}(?:,\d{1,12}){0,2}", re.ASCII)


def unfolding_problem(layer: LayerEntry, dtype: torch.dtype) -> str:
    """Say why a layer cannot have its unfolding, with inputs of a dtype; empty where it can."""
    found = layer.unfolding
    assert found is not None, "asked of layers that have one"
    axes = len(found.kernel)
    if not 1 <= axes <= MAX_AXES or {len(found.stride), len(found.dilation)} != {axes}:
        return "its unfolding has not one kernel size, stride and dilation for each of up to three axes"
    if min(*found.kernel, *found.stride, *found.dilation) < 1 or max(*found.extents, *found.stride) > MAX_SPAN:
        return f"its unfolding has kernel {cut(str(found.kernel), 60)}, stride {cut(str(found.stride), 60)} and " + (
            f"dilation {cut(str(found.dilation), 60)}; expected numbers from 1 on, of a kernel in memory"
        )
    if layer.d_in % math.prod(found.kernel) or not layer.d_in:
        return f"keys of width {layer.d_in} are no patches under a kernel of {found.kernel}"
    if layer.store not in ("keys", "keys+values") or dtype not in INPUT_DTYPES:
        return f"its inputs cannot be stored in place of keys where it is stored as {layer.store}, {dtype}"
    if any(use.parameter_map.takes_ids for use in layer.uses):
        return "it has an unfolding, but its keys are whole numbers"
    return ""


def parsed_sizes(text: str) -> tuple[int, ...] | None:
    """Return the sizes that the text of a call gives, its inputs' padded ones; None where it is no such text."""
    return tuple(int(part) for part in text.split(",")) if _SIZES.fullmatch(text) else None


def sizes_text(sizes: Sequence[int]) -> str:
    """Return the sizes of a call's inputs as they are written.

    >>> sizes_text((30, 30)), parsed_sizes("30,30")
    ('30,30', (30, 30))
    """
    return ",".join(map(str, sizes))


def count_elements(unfolding: Unfolding, d_in: int, text: str | None, patterns: int) -> int | None:
    """Return how many elements a call of so many patterns has stored; None where it cannot have so many.

    Args:
        unfolding: the layer's.
        d_in: the width of a key.
        text: the sizes of the call's inputs; None where its keys are stored.
        patterns: the number of keys.
    """
    if text is None:
        return patterns * d_in
    sizes = parsed_sizes(text)
    if sizes is None or len(sizes) != len(unfolding.kernel) or not unfolding.is_smaller(sizes):
        return None
    images, rest = divmod(patterns, math.prod(unfolding.locations(sizes)))
    return None if rest else images * d_in // math.prod(unfolding.kernel) * math.prod(sizes)


def stored_elements(
    unfolding: Unfolding, d_in: int, sizes: Sequence[str | None], patterns: npt.NDArray[np.int64]
) -> int | str:
    """Return how many elements the calls of a layer have stored, or a text of sizes that a call cannot have."""
    totals: dict[tuple[str | None, int], int] = {}
    for key in zip(sizes, patterns.tolist(), strict=True):
        totals[key] = totals.get(key, 0) + 1
    total = 0
    for (text, count), calls in totals.items():
        found = count_elements(unfolding, d_in, text, count)
        if found is None:
            return str(text)
        total += calls * found
    return total
