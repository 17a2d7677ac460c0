"""The Parquet tables beside the patterns: calls, annotations, steps. Rows in, Arrow tables out, and back.

A pattern has no row of its own. A call's row says how many patterns it has and where they start; a pattern's address
follows by arithmetic, and so does its place in the annotation table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dualform.engine.fingerprints import fingerprint
from dualform.engine.proofs import unpack_mark
from dualform.errors import AnnotationError
from dualform.recording.annotations import Binding
from dualform.store.arrow_columns import column_of, column_of_array, inferred_column
from dualform.store.taken_steps import CALL_CELLS, TakenStep, join_columns

CALLS = pa.schema(
    [
        ("layer", pa.string()),
        ("step", pa.int64()),
        ("micro", pa.int32()),
        ("call", pa.int32()),
        ("rows", pa.int64()),
        ("positions", pa.int64()),
        ("inner", pa.int64()),
        ("offset", pa.int64()),  # of the call's first pattern among the layer's patterns in this shard
        ("annotation_offset", pa.int64()),  # of its first row in this shard's annotation table; null: none
        ("annotation_rows", pa.int64()),  # 0: constants only
        ("annotation_positions", pa.int64()),  # 0: no column has positions
        ("layout", pa.string()),  # SHAPE:STRIDES in which its errors were added up; null: row by row
    ]
)

SIZES = pa.field("sizes", pa.string())
"""In a run with layers whose inputs are stored: the sizes of a call's inputs, padded; null where keys are stored."""

COMPACTED = [name for name in (*CALLS.names, SIZES.name) if name not in ("step", "offset")]
"""The columns of the cells of a compacted step, in their order: `CALL_CELLS` of them."""

COLUMN_TYPES = {"b": "bool", "i": "int64", "f": "double", "U": "string"}
"""The kind of a numpy array -> the type of a column, by Arrow's name for it."""

STEPS = {  # and the optimizer's settings by name
    "step": pa.int64(),
    "parameter": pa.string(),
    "optimizer": pa.string(),
    "updated": pa.bool_(),
    "factors": pa.list_(pa.float64()),  # per micro, what the gradient was multiplied with between backward and step
    "fingerprint": pa.string(),  # of a sample of the parameter after the step
}


MARKS = {  # beside the others in a run whose training is to be run again
    "checksum": pa.int64(),  # of all bits of the parameter after the step
    "projections": pa.list_(pa.float64()),  # of the parameter after the step
    "inputs": pa.list_(pa.int64()),  # checksums of the step's keys that owe nothing to parameters, call by call
    "backwards": pa.list_(pa.int64()),  # checksums of what the first call of each backward took, and of its errors
    "calls_digest": pa.string(),  # of the step's calls, the same for all of its parameters
    "annotations_digest": pa.string(),  # of their annotations
}
LATER_MARKS = ("backwards",)
"""Marks that the first runs whose training can be run again do not have."""


def call_tables(records: Sequence[TakenStep]) -> tuple[pa.Table, pa.Table]:
    """Return the calls table and the annotations table of a shard, of steps that are compacted."""
    cells: list[Any] = [cell for record in records for cell in record.call_cells]
    columns = {name: cells[i::CALL_CELLS] for i, name in enumerate(COMPACTED)}
    calls_of_steps = [len(record.call_cells) // CALL_CELLS for record in records]
    steps = np.repeat(np.array([record.step for record in records], dtype=np.int64), calls_of_steps)
    before = _before(np.array([_annotated_rows(record) for record in records], dtype=np.int64))
    placed = np.repeat(before, calls_of_steps).tolist()  # rows of the annotation table that earlier steps take
    offsets = columns["annotation_offset"]
    columns["annotation_offset"] = [
        None if row is None else first + row for first, row in zip(placed, offsets, strict=True)
    ]
    patterns = np.array(columns["rows"], dtype=np.int64) * np.array(columns["positions"], dtype=np.int64)
    counted = {"step": steps, "offset": _offsets(columns["layer"], patterns)}
    schema = CALLS.append(SIZES) if any(size is not None for size in columns[SIZES.name]) else CALLS
    calls = [
        column_of_array(counted[field.name]) if field.name in counted else column_of(columns[field.name], field.type)
        for field in schema
    ]
    annotations = pa.concat_tables(
        [
            pa.table({name: column_of_array(column, part.missing) for name, column in part.columns.items()})
            for part in join_columns([columns for record in records for columns in record.columns])
        ]
        or [pa.table({})],
        promote_options="permissive",
    )
    return pa.Table.from_arrays(calls, schema=schema), annotations


def _annotated_rows(record: TakenStep) -> int:
    """Return how many rows of the annotation table a step takes."""
    return sum(len(next(iter(columns.columns.values()))) for columns in record.columns)


def _before(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the sum of the counts before each."""
    return np.cumsum(counts) - counts


def _offsets(layers: Sequence[str], patterns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many patterns of a call's layer come before it: those of the calls of this layer before."""
    names = {layer: i for i, layer in enumerate(dict.fromkeys(layers))}
    which = np.fromiter(map(names.__getitem__, layers), dtype=np.int64, count=len(layers))
    found = np.empty_like(patterns)
    for i in range(len(names)):
        mine = np.flatnonzero(which == i)
        found[mine] = _before(patterns[mine])
    return found


def check_columns(known: dict[str, str], binding: Binding) -> None:
    """Raise where a column has changed its type since it was first seen; integers may become floats."""
    merged = {}
    for name, column in binding.columns.items():
        kind = COLUMN_TYPES[column.dtype.kind]
        before = known.get(name)
        if before == kind or not column.size:  # an empty batch says nothing about its columns
            continue
        before = kind if before is None else before
        if before != kind and {before, kind} != {"int64", "double"}:
            raise AnnotationError(
                f"Column {name!r} held {before} so far and now holds {kind}. Keep one type, or use another column."
            )
        merged[name] = "double" if "double" in (before, kind) else kind
    if merged:
        known |= merged


def merge_columns(known: Mapping[str, str], schema: pa.Schema) -> dict[str, str]:
    """Return the columns of the run after a shard whose annotations have this schema: a float stays a float."""
    merged = dict(known)
    for field in schema:
        merged[field.name] = "double" if "double" in (known.get(field.name), str(field.type)) else str(field.type)
    return merged


def steps_table(records: Sequence[TakenStep]) -> pa.Table:
    """Return the steps table of a shard: a row per (step, parameter)."""
    facts = [fact for record in records for fact in record.facts]
    columns: dict[str, list[Any]] = {
        "step": [record.step for record in records for _ in record.facts],
        "parameter": [fact.parameter for fact in facts],
        "optimizer": [fact.optimizer for fact in facts],
        "updated": [fact.updated for fact in facts],
        "factors": [fact.factors for fact in facts],
        "fingerprint": [fingerprint(record.samples[fact.parameter]) for record in records for fact in record.facts],
    }
    marks = _mark_columns(records) if any(record.marks is not None for record in records) else {}
    kinds = dict.fromkeys(tuple(fact.settings) for fact in facts)
    names = dict.fromkeys(name for settings in kinds for name in (*settings, *marks))
    columns |= {name: marks[name] if name in marks else [fact.settings.get(name) for fact in facts] for name in names}
    types = STEPS | MARKS
    return pa.table(
        {
            name: column_of(column, types[name]) if name in types else inferred_column(column)
            for name, column in columns.items()
        }
    )


def _mark_columns(records: Sequence[TakenStep]) -> dict[str, list[Any]]:
    """Return the columns of the steps table that mark each parameter after a step."""
    columns: dict[str, list[Any]] = {name: [] for name in MARKS}
    for record in records:
        marks, count = record.marks, len(record.facts)
        of_step: dict[str, Any] = dict.fromkeys(MARKS)
        if marks is not None:
            each = [unpack_mark(marks.parameters[fact.parameter]) for fact in record.facts]
            columns["checksum"] += [mark.checksum for mark in each]
            columns["projections"] += [mark.projections for mark in each]
            of_step = {
                "inputs": list(map(int, marks.inputs)),
                "backwards": list(map(int, marks.backwards)),
                "calls_digest": marks.calls,
                "annotations_digest": marks.annotations,
            }
        for name, cell in of_step.items():
            columns[name] += [cell] * count
    return columns
