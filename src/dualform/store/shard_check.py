"""Do the files of a shard agree with each other and with the manifest? Asked of its tables before they are used.

Sums over calls are compared with the shapes of the tensors that they speak of, so that no number in a table can ask for
memory, or for rows, that are not there. Keys and values themselves are not read here. Every function returns what is
wrong in words, and nothing where all is well.
"""

import math
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from dualform.engine.description import LayerEntry
from dualform.engine.proofs import PROJECTIONS
from dualform.engine.reading import PLACE_DTYPES
from dualform.identity.families.naming import same_optimizer
from dualform.identity.parameter_use import takes_ids
from dualform.lazy import compute as pc
from dualform.printable import cut
from dualform.store.manifest import Manifest, ShardEntry
from dualform.store.pool import DIGESTS, REFERENCES
from dualform.store.row_encoding import ROW_SCALED, SCALE, stored_dtypes
from dualform.store.tables import CALLS, LATER_MARKS, MARKS, SIZES, STEPS
from dualform.store.tensors import TensorPlace
from dualform.store.unfolding_check import stored_elements

MAX_CALL_PATTERNS = 1 << 40
"""Number of rows, positions or patterns of one call, above which a table of calls is refused: sums stay in 64 bits."""
MAX_EMPTY_STEPS = 100_000
"""Number of steps without any record, above which a shard is refused."""
LARGEST_LAYOUT = (1 << 20, 4096)
"""Elements that an error may have reached over in memory: this many, or this many times its own elements."""
SETTING_TYPES = (pa.bool_(), pa.int64(), pa.float64(), pa.string())
INPUTS = "inputs"
"""What follows a layer's name in that of the tensor of its inputs."""
_LAYOUT = re.compile(r"(\d{1,12}(?:,\d{1,12})*):(\d{1,12}(?:,\d{1,12})*)", re.ASCII)

Ints = npt.NDArray[np.int64]


def calls_columns_problem(schema: pa.Schema) -> str:
    """Say what is wrong with the columns of a table of calls; the first runs had no layouts."""
    expected = {field.name: field.type for field in CALLS}
    found = {field.name: field.type for field in schema}
    known = {name: kind for name, kind in found.items() if (name, kind) != (SIZES.name, SIZES.type)}
    if len(found) != len(schema) or known not in (expected, {k: v for k, v in expected.items() if k != "layout"}):
        return f"its columns are {_column_names_text(schema)}; expected those of a table of calls"
    return ""


def steps_columns_problem(schema: pa.Schema) -> str:
    """Say what is wrong with the columns of a table of steps: our own, and the settings of any optimizer."""
    found = {field.name: field.type for field in schema}
    marks = {name: kind for name, kind in MARKS.items() if name in found or name not in LATER_MARKS}
    known = STEPS | (marks if found.keys() & MARKS.keys() else {})
    wrong = [name for name, kind in known.items() if found.get(name) != kind]
    odd = [name for name, kind in found.items() if name not in known and kind not in SETTING_TYPES]
    if len(found) != len(schema) or wrong or odd:
        return f"its columns are {_column_names_text(schema)}; expected those of a table of steps"
    return ""


def annotations_columns_problem(schema: pa.Schema, columns: Mapping[str, str]) -> str:
    """Say which column of a table of annotations the manifest does not know, or knows with another type."""
    found = {field.name: str(field.type) for field in schema}
    if len(found) != len(schema):
        return f"its columns are {_column_names_text(schema)}; expected each once"
    for name, kind in found.items():
        if columns.get(name) != kind and (columns.get(name), kind) != ("double", "int64"):
            return (
                f"its column {cut(repr(name))} holds {kind}, but the manifest says {columns.get(name, 'nothing of it')}"
            )
    return ""


def _column_names_text(schema: pa.Schema) -> str:
    return ", ".join(f"{cut(field.name, 30)} ({cut(str(field.type), 30)})" for field in list(schema)[:20]) or "none"


def calls_problem(
    table: pa.Table, shard: ShardEntry, manifest: Manifest, places: Mapping[str, TensorPlace], annotated: int
) -> str:
    """Say what cannot be in a shard's calls.

    Args:
        table: all calls of the shard's file, those that were cut off included.
        shard: the shard's entry.
        manifest: the run's manifest.
        places: the tensors of the shard's patterns.
        annotated: the number of rows of the shard's annotations.
    """
    needed = ("layer", "step", "micro", "call", "rows", "positions", "inner", "offset")
    if any(table[name].null_count for name in needed):
        return "a call has no value in a column that needs one"
    encoded = table["layer"].combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if unknown := [name for name in names if name not in manifest.layers]:
        return f"there are calls of {cut(repr(unknown[0]))}, which is no layer"
    column = {name: np.asarray(table[name], dtype=np.int64) for name in needed[1:]}
    if problem := _address_problem(column, shard):
        return problem
    if problem := _annotation_problem(table, column, annotated):
        return problem
    layers = np.asarray(encoded.indices)
    layouts, input_sizes = texts_of_calls(table, "layout"), texts_of_calls(table, SIZES.name)
    expected: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {}
    for i, name in enumerate(names):
        here = np.flatnonzero(layers == i)
        sizes = column["rows"][here] * column["positions"][here]
        if (column["offset"][here] != np.cumsum(sizes) - sizes).any():
            return f"the calls of layer {name!r} do not lie one behind the other"
        entry, count = manifest.layers[name], int(sizes.sum())
        if entry.store != "steps":
            if count and entry.d_in and name not in shard.key_range:
                return f"the manifest has no range of the keys of layer {name!r}"
            expected |= _expected(name, entry, count, shard.pools.get(name))
            if entry.unfolding is not None and name not in shard.pools:
                texts = [None] * len(here) if input_sizes is None else input_sizes[here].tolist()
                stored = stored_elements(entry.unfolding, entry.d_in, texts, sizes)
                if isinstance(stored, str):
                    return f"{cut(repr(stored))} are no sizes of inputs that make the keys of a call of layer {name!r}"
                expected[f"{name}/{INPUTS}"] = ((stored,), (manifest.inputs_dtype(name),))
                for gone in (f"{name}/keys", f"{name}/keys{SCALE}"):
                    expected.pop(gone, None)
            elif input_sizes is not None and any(text is not None for text in input_sizes[here]):
                return f"a call of layer {name!r} has sizes of inputs, but its keys are stored"
        known = set() if layouts is None else set(zip(layouts[here].tolist(), sizes.tolist(), strict=True))
        for layout, size in known:
            if layout is not None and not _is_layout(layout, size, entry.d_out):
                return f"{cut(repr(layout))} is no layout of the errors of layer {name!r}"
    return _tensors_problem(places, expected) or _pools_problem(shard, names)


def texts_of_calls(table: pa.Table, column: str) -> npt.NDArray[np.object_] | None:
    """Return each call's entry in a column of texts, None for none; None where no call has any."""
    if column not in table.column_names or table[column].null_count == table.num_rows:
        return None
    return np.asarray(table[column].to_pylist(), dtype=object)


def _address_problem(column: Mapping[str, Ints], shard: ShardEntry) -> str:
    """Return a sentence about a call whose address is impossible, or an empty text if there is none."""
    rows, positions, inner, step = (column[name] for name in ("rows", "positions", "inner", "step"))
    for name in ("micro", "call", "rows", "positions", "inner", "offset"):
        if len(step) and not (column[name].min() >= 0 and column[name].max() <= MAX_CALL_PATTERNS):
            return f"a call has {name} {int(column[name].min())} to {int(column[name].max())}"
    if (rows.astype(np.float64) * positions > MAX_CALL_PATTERNS).any():
        return f"a call has more than {MAX_CALL_PATTERNS} patterns"
    if float((rows * positions).sum(dtype=np.float64)) > MAX_CALL_PATTERNS:
        return f"there are more than {MAX_CALL_PATTERNS} patterns"
    if (positions % np.maximum(inner, 1) != 0).any() or ((inner == 0) & (positions > 0)).any():
        return "the positions of a call are no multiple of its inner ones"
    if len(step) and (step[0] < shard.start or (step[1:] < step[:-1]).any()):
        return f"its steps do not ascend from {shard.start}"
    return ""


def _annotation_problem(table: pa.Table, column: Mapping[str, Ints], annotated: int) -> str:
    """Say which call would read annotations that are not there."""
    names = ("annotation_offset", "annotation_rows", "annotation_positions")
    known = np.asarray(table[names[0]].is_valid())
    if any((np.asarray(table[name].is_valid()) != known).any() for name in names[1:]):
        return "a call has half an address of its annotations"
    offset, rows, positions = (np.asarray(table[name].fill_null(0), dtype=np.int64)[known] for name in names)
    if not len(offset):
        return ""
    if min(found.min() for found in (offset, rows, positions)) < 0:
        return "a call has annotations before the first"
    sizes = np.maximum(rows, 1).astype(np.float64) * np.maximum(positions, 1)
    if (offset + sizes > annotated).any():
        return f"a call has annotations behind the last, of {annotated}"
    seen, places = column["rows"][known], column["positions"][known]
    flattened = (positions > 0) & (seen == rows * positions)
    within = (seen <= rows) & ((positions == 0) | (places <= positions))
    if not ((rows == 0) | flattened | within).all():
        return "a call has more rows or positions than its annotations"
    return ""


def _expected(
    name: str, layer: LayerEntry, count: int, pool: tuple[int, int] | None
) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
    """Return the tensors that a layer with calls has in a shard: shape, and the dtypes that it may have."""
    stored_key, stored = stored_dtypes(getattr(torch, layer.dtype), pooled=pool is not None)
    whole = takes_ids(layer.uses)
    keys = count if pool is None else pool[1]
    found: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        f"{name}/keys": ((keys, layer.d_in), PLACE_DTYPES if whole else (stored_key,))
    }
    if layer.store == "keys+values":
        found[f"{name}/values"] = ((count, layer.d_out), (stored,))
    if stored in ROW_SCALED:
        scaled = [name for name in found if not (whole and name.endswith("/keys"))]
        found |= {f"{name}{SCALE}": (found[name][0][:1], (torch.float32,)) for name in scaled}
    if pool is not None:
        found[f"{name}/{REFERENCES}"] = ((count,), (torch.int32,))
        found[f"{name}/{DIGESTS}"] = ((pool[1], 2), (torch.int64,))
    return found


def _tensors_problem(
    places: Mapping[str, TensorPlace], expected: Mapping[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
) -> str:
    """Say which tensor of a shard's patterns is missing, has another shape or dtype, or belongs to no call."""
    for name, (shape, dtypes) in expected.items():
        place = places.get(name)
        if place is None:
            return f"the shard's file of patterns does not hold {name!r}"
        if place.shape != shape or place.dtype not in dtypes:
            return f"{name!r} is {place.shape} of {place.dtype} in the patterns; the calls say {shape} of {dtypes[0]}"
    if more := [name for name in places if name not in expected]:
        return f"the patterns hold {cut(repr(more[0]))}, which belongs to no call"
    return ""


def _pools_problem(shard: ShardEntry, called: list[str]) -> str:
    for name in shard.pools:
        if name not in called:
            return f"the manifest has a pool of layer {name!r}, which has no calls"
    return ""


def _is_layout(text: str, patterns: int, d_out: int) -> bool:
    """Say whether a text is the layout, SHAPE:STRIDES, of the errors of so many patterns, (..., d_out)."""
    match = _LAYOUT.fullmatch(text)
    if match is None:
        return False
    shape, strides = ([int(number) for number in part.split(",")] for part in match.groups())
    elements = math.prod(shape)
    reached = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False) if size)
    most = max(LARGEST_LAYOUT[0], LARGEST_LAYOUT[1] * elements)
    return len(shape) == len(strides) and shape[-1] == d_out and elements == patterns * d_out and reached <= most


def steps_problem(table: pa.Table, shard: ShardEntry, manifest: Manifest, calls: int) -> str:
    """Say what cannot be in a shard's facts.

    Args:
        table: all facts of the shard's file, those that were cut off included.
        shard: the shard's entry.
        manifest: the run's manifest.
        calls: the number of calls in the shard.
    """
    if any(table[name].null_count for name in (*STEPS, *MARKS) if name in table.column_names):
        return "a step has no value in a column that needs one"
    names = pc.unique(table["parameter"]).to_pylist()
    if unknown := [name for name in names if name not in manifest.parameters]:
        return f"there are steps of {cut(repr(unknown[0]))}, which is no parameter of the run"
    optimizers = pc.unique(table["optimizer"]).to_pylist()
    if unknown := [n for n in optimizers if not any(same_optimizer(n, known) for known in manifest.optimizers)]:
        return f"there are steps of the optimizer {cut(repr(unknown[0]))}, which the manifest does not know"
    step = np.asarray(table["step"], dtype=np.int64)
    if len(step) and (step[0] < shard.start or (step[1:] < step[:-1]).any()):
        return f"its steps do not ascend from {shard.start}"
    if shard.stop - shard.start > len(step) + calls + MAX_EMPTY_STEPS:
        return f"it has {len(step)} facts, for {shard.stop - shard.start} steps"
    lists = table["factors"].combine_chunks()
    if pc.list_flatten(lists).null_count:
        return "a factor has no value"
    if "projections" in table.column_names:
        marks = table["projections"].combine_chunks()
        if (np.asarray(pc.list_value_length(marks)) != PROJECTIONS).any() or pc.list_flatten(marks).null_count:
            return f"a parameter has other than {PROJECTIONS} projections"
        for name in ("inputs", "backwards"):
            if name in table.column_names and pc.list_flatten(table[name].combine_chunks()).null_count:
                return f"a checksum of {name} has no value"
    return ""
