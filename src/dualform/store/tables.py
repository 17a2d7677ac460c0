"""The Parquet tables beside the patterns: calls, annotations, steps. Rows in, Arrow tables out, and back.

A pattern has no row of its own. A call's row says how many patterns it has and where they start; a pattern's address
follows by arithmetic, and so does its place in the annotation table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dualform.engine.fingerprints import fingerprint
from dualform.engine.proofs import unpack_mark
from dualform.errors import AnnotationError
from dualform.recording.annotations import Binding
from dualform.store.taken_steps import StepMarks, TakenStep, join_columns

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
    sized = any(row[-1] is not None for record in records for row in record.call_rows)
    schema = CALLS.append(SIZES)
    rows: dict[str, list[Any]] = {name: [] for name in schema.names}
    offsets: dict[str, int] = {}
    before = 0  # rows of the annotation table that earlier steps take
    for record in records:
        for layer, micro, call, count, positions, inner, annotation, *more in record.call_rows:
            offset = offsets.get(layer, 0)
            first = None if annotation is None else before + annotation
            values = (layer, record.step, micro, call, count, positions, inner, offset, first, *more)
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
            offsets[layer] = offset + count * positions
        before += sum(len(next(iter(columns.columns.values()))) for columns in record.columns)
    annotations = pa.concat_tables(
        [
            pa.table({name: pa.array(column, mask=part.missing) for name, column in part.columns.items()})
            for part in join_columns([columns for record in records for columns in record.columns])
        ]
        or [pa.table({})],
        promote_options="permissive",
    )
    calls = pa.table(rows, schema=schema)
    return calls if sized else calls.drop_columns([SIZES.name]), annotations


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
    rows = [
        {
            "step": record.step,
            "parameter": fact.parameter,
            "optimizer": fact.optimizer,
            "updated": fact.updated,
            **fact.settings,
            "factors": list(fact.factors),
            "fingerprint": fingerprint(record.samples[fact.parameter]),
            **({} if record.marks is None else _marked(record.marks, fact.parameter)),
        }
        for record in records
        for fact in record.facts
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table(
        {
            name: pa.array([row.get(name) for row in rows], type=(STEPS | MARKS).get(name))
            for name in dict.fromkeys([*STEPS, *names])
        }
    )


def _marked(marks: StepMarks, parameter: str) -> dict[str, Any]:
    """Return the cells of a row of the steps table that mark a parameter after a step."""
    mark = unpack_mark(marks.parameters[parameter])
    return {
        "checksum": mark.checksum,
        "projections": list(mark.projections),
        "inputs": [int(one) for one in marks.inputs],
        "backwards": [int(one) for one in marks.backwards],
        "calls_digest": marks.calls,
        "annotations_digest": marks.annotations,
    }
