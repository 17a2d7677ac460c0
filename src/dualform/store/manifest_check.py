"""The cross references of a manifest: names that must exist elsewhere in it, numbers that must agree.

Types and ranges of single entries are checked before (`manifest.py`). Each check here is one plain condition; the first
that fails is the reason why the manifest is refused. No file is looked at.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dualform.identity.parameter_maps import PARAMETER_MAPS
from dualform.printable import cut
from dualform.recording.annotations import RANK, RESERVED
from dualform.store.blobs import FileEntry
from dualform.store.format import (
    FINAL,
    FROZEN,
    INITIAL,
    SHARES,
    STARTING,
    STORABLE_DTYPES,
    UNCOVERED,
    UNEXPLAINED,
    shard_files,
    shares_file,
    shares_state_file,
    unexplained_file,
)
from dualform.store.label_text import label_problem
from dualform.store.unfolding_check import unfolding_problem
from dualform.store.use_check import use_problem

if TYPE_CHECKING:
    from dualform.engine.description import LayerEntry
    from dualform.store.manifest import Manifest, ShardEntry

COLUMN_TYPES = ("bool", "int64", "double", "string")
"""The Arrow types that a user's column may have."""
EXACT_DTYPES = ("float32", "float64")
"""The dtypes of parameters that are rebuilt; others are recorded with keys only."""
MAX_INDEX = 999_999
"""The largest number of a shard: file names have six digits."""
_OWN_ROWS = (INITIAL, FINAL, FROZEN, UNCOVERED)
"""The files that may hold rows of what is divided among processes."""
_OWN_FILES = (INITIAL, FINAL, FROZEN, UNCOVERED, STARTING)
_ATTACHED = re.compile(r"media/([a-z]+)\.(safetensors|json)")


def problems(manifest: "Manifest") -> Iterator[str]:
    """Yield a sentence about each contradiction in a manifest."""
    yield from _parameter_problems(manifest)
    yield from _file_problems(manifest)
    for name, layer in manifest.layers.items():
        yield from _layer_problems(manifest, name, layer)
    for name, kind in manifest.columns.items():
        if kind not in COLUMN_TYPES:
            yield f"column {name!r} holds {kind!r}; known are {', '.join(COLUMN_TYPES)}"
        if name in RESERVED:
            yield f"{name!r} cannot be a user's column: every pattern has one of that name"
    for name in manifest.rows:
        if name not in manifest.layers:
            yield f"'rows' names {name!r}, which is no layer"
    for name in (*manifest.uncovered, *(manifest.uncovered_state or ())):
        if name in manifest.parameters:
            yield f"parameter {name!r} is listed as covered and as uncovered"
    yield from _shares_problems(manifest)
    yield from _checkpoint_problems(manifest)
    yield from _shards_problems(manifest)
    yield from _processes_problems(manifest)
    for name, layer in manifest.layers.items():
        if layer.store == "steps" and manifest.training is None:
            yield f"the patterns of layer {name!r} come with a replay, but 'training' says nothing of one"


def _parameter_problems(manifest: "Manifest") -> Iterator[str]:
    used = {use.parameter for layer in manifest.layers.values() for use in layer.uses}
    for name, entry in manifest.parameters.items():
        if name not in used:
            yield f"no layer has the parameter {name!r}"
        if not _is_dtype(entry.dtype):
            yield f"parameter {name!r} has dtype {entry.dtype!r}, which torch does not know"
    for name in used - manifest.parameters.keys():
        yield f"a layer has the parameter {name!r}, which is not in 'parameters'"


def _layer_problems(manifest: "Manifest", name: str, layer: "LayerEntry") -> Iterator[str]:
    if len({use.name for use in layer.uses}) < len(layer.uses) or not layer.uses:
        yield f"layer {name!r} has no uses of parameters, or two of one name"
    if layer.dtype != "int8" and not (_is_dtype(layer.dtype) and getattr(torch, layer.dtype).is_floating_point):
        yield f"layer {name!r} is stored as {layer.dtype!r}; expected a dtype of floating-point numbers, or 'int8'"
    if layer.unfolding is not None and (problem := unfolding_problem(layer, manifest.inputs_dtype(name))):
        yield f"layer {name!r}: {problem}"
    for use in layer.uses:
        parameter = use.parameter
        entry = manifest.parameters.get(parameter)
        if entry is None:
            continue  # named above
        if problem := use_problem(use, layer.d_in, layer.d_out, entry.shape):
            yield f"layer {name!r}, parameter {parameter!r}: {problem}"
        if layer.store not in ("keys", "shares") and entry.dtype not in EXACT_DTYPES:
            yield f"parameter {parameter!r} is {entry.dtype}; with values only {' or '.join(EXACT_DTYPES)} is recorded"


def _file_problems(manifest: "Manifest") -> Iterator[str]:
    for name, entry in manifest.files.items():
        attached = _ATTACHED.fullmatch(name)
        if name not in _OWN_FILES and attached is None and not name.startswith((SHARES, UNEXPLAINED)):
            yield f"'files' lists {name!r}, which is no name of a run's file"
        elif entry.at and (attached is None or entry.at != f"media/{attached[1]}-{entry.xxh3}.{attached[2]}"):
            yield f"{name!r} lies at {entry.at!r}; expected a name after its content"
    if manifest.rank:
        for name in manifest.files:
            if not name.startswith(SHARES) and not (manifest.divided and name in _OWN_ROWS):
                yield f"'files' of process {manifest.rank} lists {name!r}, which process 0 has"
        return
    if INITIAL not in manifest.files:
        yield f"'files' does not list {INITIAL!r}"
    if manifest.closed and not manifest.no_final and FINAL not in manifest.files:
        yield f"the run is closed, but 'files' does not list {FINAL!r}"
    if manifest.closed and not manifest.no_final and UNCOVERED not in manifest.files:
        for name, part in (manifest.uncovered_state or {}).items():
            if part.kind != "frozen" and not part.reason and getattr(torch, part.dtype, None) in STORABLE_DTYPES:
                yield f"{name!r} was kept when the run was closed, but 'files' does not list {UNCOVERED!r}"


def _shares_problems(manifest: "Manifest") -> Iterator[str]:
    kept = manifest.shares
    listed = {name for name in manifest.files if name.startswith(SHARES)}
    if kept is None:
        for name in listed:
            yield f"'files' lists {name!r}, but the run keeps no shares"
        for name, layer in manifest.layers.items():
            if layer.store == "shares":
                yield f"layer {name!r} keeps shares, but the run keeps none"
        return
    expected = {shares_file(step) for step in kept.horizons}
    expected |= {shares_state_file(step) for step in kept.states}
    for name in listed ^ expected:
        yield f"{name!r} is listed among the files or among the shares, but not among both"
    if list(kept.horizons) != sorted(set(kept.horizons)) or any(step > manifest.steps for step in kept.horizons):
        yield f"shares are kept after steps {list(kept.horizons)[:8]}; expected ascending steps up to {manifest.steps}"
    for step in kept.states:
        if step not in kept.horizons:
            yield f"a state of shares is kept after step {step}, but no shares are"
    if not kept.groupings:
        yield "'shares' has no grouping"
    for grouping in kept.groupings:
        if not grouping.columns or any(len(label) != len(grouping.columns) for label in grouping.labels):
            yield "a group of 'shares' has not one value for each column of its grouping"
        for part in (part for label in grouping.labels for part in label):
            if label_problem(*part):
                yield f"a group of 'shares' has the value {cut(repr(part[1]))}, which is no {part[0]}"


def _checkpoint_problems(manifest: "Manifest") -> Iterator[str]:
    listed = {name for name in manifest.files if name.startswith(UNEXPLAINED)}
    steps = list(manifest.checkpoints or ())
    for name in listed ^ {unexplained_file(step) for step in steps}:
        yield f"{name!r} is listed among the files or among the checkpoints, but not among both"
    if steps != sorted(set(steps)) or any(not 0 < step <= manifest.steps for step in steps):
        yield f"there are checkpoints after steps {steps[:8]}; expected ascending steps from 1 to {manifest.steps}"
    if manifest.checkpoints is not None and any(layer.store != "keys+values" for layer in manifest.layers.values()):
        yield "the run was made from checkpoints, but does not keep the patterns of all layers"


def _processes_problems(manifest: "Manifest") -> Iterator[str]:
    firsts = [first for first, _ in manifest.processes]
    if firsts and (firsts[0] != 0 or firsts != sorted(set(firsts))):
        yield f"numbers of processes hold from steps {firsts[:8]} on; expected ascending steps from 0 on"
    if manifest.rank and firsts:
        yield f"process {manifest.rank} says how many there are, which process 0 does"
    if (manifest.rank or firsts) and RANK in manifest.columns:
        yield f"{RANK!r} cannot be a user's column of several processes: every pattern has one of that name"


def _shards_problems(manifest: "Manifest") -> Iterator[str]:
    index, step = -1, 0
    pooled: dict[str, int] = {}  # layer -> keys in its pool so far
    for shard in manifest.shards:
        if not index < shard.index <= MAX_INDEX:
            yield f"shard {shard.index} follows shard {index}; expected ascending numbers up to {MAX_INDEX}"
        gap = shard.start > step and manifest.rank > 0  # a process may have taken no part for a while
        if (shard.start != step and not gap) or shard.stop < shard.start:
            yield f"shard {shard.index} has steps {shard.start} to {shard.stop}; expected its start at {step}"
        index, step = shard.index, shard.stop
        yield from _shard_problems(manifest, shard)
        for layer, (first, count) in shard.pools.items():
            if first != pooled.get(layer, 0):
                yield f"shard {shard.index}: the pool of {layer!r} goes on at {first}, not at {pooled.get(layer, 0)}"
            pooled[layer] = first + count


def _shard_problems(manifest: "Manifest", shard: "ShardEntry") -> Iterator[str]:
    names = shard_files(shard.index)
    uncovered = names.pop("uncovered")
    if shard.files.keys() - {uncovered} != set(names.values()):
        yield f"shard {shard.index} lists {_named(shard.files)}; expected {', '.join(names.values())}"
    if any(entry.at for entry in shard.files.values()):
        yield f"shard {shard.index} has a file that lies elsewhere"
    if uncovered in shard.files and shard.state_after is None:
        yield f"shard {shard.index} has uncovered state, but not the step of it"
    for what, found in (("key_range", shard.key_range), ("pools", shard.pools)):
        for layer in found.keys() - manifest.layers.keys():
            yield f"shard {shard.index}: {what!r} names {layer!r}, which is no layer"
    for name in shard.parameters.keys() - manifest.parameters.keys():
        yield f"shard {shard.index} has a checksum of {name!r}, which is not in 'parameters'"
    for layer in shard.pools:
        entry = manifest.layers.get(layer)
        if entry is not None and entry.store == "steps":
            yield f"layer {layer!r} has a pool, but its patterns are not stored"
        if entry is not None and any(PARAMETER_MAPS[use.map].takes_ids for use in entry.uses):
            yield f"layer {layer!r} has a pool, but its keys are whole numbers"


def _named(files: dict[str, FileEntry]) -> str:
    return ", ".join(sorted(files)[:8]) or "no files"


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
