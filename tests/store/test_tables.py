"""The arithmetic of pattern addresses."""

import numpy as np

from dualform.engine.addresses import addresses


def test_addresses_of_some_patterns_are_those_of_all() -> None:
    calls = {
        name: np.array(column)
        for name, column in {
            "rows": [3, 0, 2, 4],
            "positions": [2, 1, 3, 1],
            "inner": [2, 1, 1, 1],
            "step": [0, 0, 1, 2],
            "micro": [0, 1, 0, 0],
            "call": [0, 0, 0, 1],
            "annotation_offset": [0, -1, -1, 6],
            "annotation_rows": [3, -1, -1, 4],
            "annotation_positions": [2, -1, -1, 0],
            "batch_axis": [0, 0, 0, 0],
        }.items()
    }
    every = addresses(calls)
    some = np.array([15, 0, 5, 6, 11, 12])
    for name, column in addresses(calls, some).items():
        assert column.tolist() == every[name][some].tolist()
