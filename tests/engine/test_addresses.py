"""Addresses of patterns: the rows of their annotations, found for calls of one shape together."""

import numpy as np
import pytest

from dualform.engine.addresses import SHAPE_COLUMNS, addresses, annotation_rows

SHAPES = {  # rows, positions, inner, annotation_rows, annotation_positions, batch_axis
    "batch first": (3, 4, 4, 3, 4, 0),
    "batch last": (3, 4, 1, 3, 4, 1),
    "flattened": (12, 1, 1, 3, 4, 0),
    "flattened, batch last": (12, 1, 1, 3, 4, 1),
    "no positions": (3, 4, 4, 3, 0, 0),
    "constants": (3, 4, 4, 0, 0, 0),
}


def calls_of(shapes, offsets):
    columns = dict(zip(SHAPE_COLUMNS, np.array(shapes, dtype=np.int64).T, strict=True))
    numbers = np.arange(len(shapes))
    return {
        **columns,
        "step": numbers,
        "micro": numbers * 0,
        "call": numbers * 0,
        "annotation_offset": np.array(offsets),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_calls_of_one_shape_are_those_of_each(shape):
    calls = calls_of([SHAPES[shape]] * 3, [0, 12, 40])
    assert annotation_rows(calls).tolist() == addresses(calls)["annotation"].tolist()


@pytest.mark.parametrize(
    ("shapes", "offsets"),
    [
        ([SHAPES["batch first"], SHAPES["batch last"]], [0, 12]),
        ([SHAPES["batch first"]] * 2, [0, -1]),
        ([SHAPES["batch first"]], [7]),
        ([], []),
    ],
)
def test_rows_of_other_calls(shapes, offsets):
    calls = calls_of(shapes or np.zeros((0, 6)), np.array(offsets, dtype=np.int64))
    assert annotation_rows(calls).tolist() == addresses(calls)["annotation"].tolist()
