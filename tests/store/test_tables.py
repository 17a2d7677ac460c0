"""The arithmetic of pattern addresses, and tables that are made column by column."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from dualform.engine.addresses import addresses
from dualform.engine.fingerprints import fingerprint
from dualform.recording.annotations import Binding, bind
from dualform.recording.sinks import ParameterFacts, StepCall
from dualform.store import tables
from dualform.store.taken_steps import TakenStep


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


def plain_calls(steps: list[TakenStep], sizes: list[list[str | None]]) -> list[dict[str, Any]]:
    """Return the rows of the calls table, one after the other."""
    rows: list[dict[str, Any]] = []
    offsets: dict[str, int] = {}
    annotation_rows = 0
    for step, sizes_of_step in zip(steps, sizes, strict=True):
        first_rows: dict[int, int] = {}
        for (layer, call), size in zip(step.places, sizes_of_step, strict=True):
            binding = call.binding if call.rows * call.positions else None
            if binding is not None and id(binding) not in first_rows:
                first_rows[id(binding)] = annotation_rows
                annotation_rows += binding.size
            row = {
                "layer": layer,
                "step": step.step,
                "micro": call.micro,
                "call": call.call,
                "rows": call.rows,
                "positions": call.positions,
                "inner": call.inner,
                "offset": offsets.get(layer, 0),
                "annotation_offset": None if binding is None else first_rows[id(binding)],
                "annotation_rows": None if binding is None else binding.rows,
                "annotation_positions": None if binding is None else binding.positions,
                "layout": call.layout,
                "sizes": size,
            }
            offsets[layer] = offsets.get(layer, 0) + call.rows * call.positions
            rows.append(
                row if any(any(of_step) for of_step in sizes) else {k: v for k, v in row.items() if k != "sizes"}
            )
    return rows


def plain_columns(bindings: list[Binding]) -> list[dict[str, Any]]:
    """Return the rows of the annotation table, one after the other; a column that a batch lacks has no value."""
    rows = []
    for binding in bindings:
        for i in range(binding.size):
            gone = binding.missing is not None and binding.missing[i]
            rows.append({name: None if gone else column[i].item() for name, column in binding.flat().items()})
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def taken(step: int, calls: list[tuple[str, StepCall]], **more: Any) -> TakenStep:
    return TakenStep(step, (), calls, 0, more.pop("facts", ()), more.pop("samples", {}), {}, None, **more)


@pytest.mark.parametrize("sized", [False, True])
def test_the_calls_table_is_that_of_rows(sized: bool) -> None:
    constants = [bind({"turn": i, "name": "ab"[: i % 3], "part": i / 4}) for i in range(4)]
    others = [bind({"turn": 9, "late": True}), bind({"turn": 10, "late": False})]  # constants of another kind
    batch = bind({"turn": [1, 2, 3], "name": ["x", "yy", ""], "part": 0.5})
    holes = Binding(batch.flat(), 3, 0, missing=np.array([False, True, False]))
    steps = [
        taken(0, [("b", StepCall(i, 0, i, 1, 1, 1, one)) for i, one in enumerate([*constants, *others, constants[0]])]),
        taken(1, []),
        taken(
            4,
            [
                ("a", StepCall(0, 0, 0, 3, 2, 1, batch, "3,2:2,1")),
                ("b", StepCall(1, 0, 0, 2, 5, 5, None)),
                ("a", StepCall(2, 1, 0, 0, 1, 1, batch)),
                ("a", StepCall(3, 1, 1, 3, 1, 1, holes)),
            ],
        ),
        taken(5, [("a", StepCall(0, 0, 0, 3, 1, 1, batch))]),
    ]
    sizes = [["3x4" if sized and layer == "a" else None for layer, _ in step.places] for step in steps]
    for step, of_step in zip(steps, sizes, strict=True):
        step.sizes = of_step
    expected = plain_calls(steps, sizes)
    for step in steps:
        step.compact()
    calls, annotations = tables.call_tables(steps)
    assert calls.schema == (tables.CALLS.append(tables.SIZES) if sized else tables.CALLS)
    assert calls.to_pylist() == expected
    assert annotations.to_pylist() == plain_columns([*constants, *others, batch, holes, batch])


def test_the_tables_of_no_calls() -> None:
    step = taken(0, [])
    step.compact()
    calls, annotations = tables.call_tables([step])
    assert (calls.schema, calls.num_rows, annotations.num_rows) == (tables.CALLS, 0, 0)
    assert tables.steps_table([step]).column_names == list(tables.STEPS)


def test_the_steps_table_is_that_of_rows() -> None:
    """Of two optimizers with settings of their own, of which some are set to nothing."""
    settings: list[dict[str, Any]] = [
        {"lr": 0.1, "nesterov": False},
        {"lr": 0.2, "nesterov": True, "betas": 3, "note": None},
        {"eps": 1e-8},
    ]
    facts = [
        ParameterFacts(f"p{i}", "SGD" if i else "Adam", i != 1, mine, [0.5] * i) for i, mine in enumerate(settings)
    ]
    samples = {fact.parameter: torch.full((3,), float(i)) for i, fact in enumerate(facts)}
    steps = [taken(step, [], facts=facts[step:], samples=samples) for step in range(3)]
    rows = [
        {
            "step": step.step,
            "parameter": fact.parameter,
            "optimizer": fact.optimizer,
            "updated": fact.updated,
            "factors": fact.factors,
            "fingerprint": fingerprint(samples[fact.parameter]),
            **fact.settings,
        }
        for step in steps
        for fact in step.facts
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    expected = pa.table({name: pa.array([row.get(name) for row in rows], tables.STEPS.get(name)) for name in names})
    assert tables.steps_table(steps).equals(expected)
