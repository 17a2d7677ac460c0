"""Turn recorded steps into published shards: encode patterns, write the files of a shard, list them in the manifest.

The writer's thread takes the steps (looks up which keys came before, encodes); a thread for each shard then writes its
files, while the next steps are taken and the shard before is still on its way to the disk. Nothing here knows of queues
or of the training thread; `writer.py` calls it on the writer's thread.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from dualform.engine.description import RowsEntry
from dualform.engine.fingerprints import fingerprint
from dualform.lazy import parquet as pq
from dualform.recording.media import Files
from dualform.recording.rowcheck import SEVERITY
from dualform.store.attach import publish_files, remove_replaced
from dualform.store.blobs import Blobs, FileEntry, Tag, changed_error
from dualform.store.element_range import RangeOfParts, joined_ranges
from dualform.store.format import MANIFEST, shard_files
from dualform.store.kept_state import ShardState
from dualform.store.manifest import Manifest, ShardEntry
from dualform.store.pool import DIGESTS, REFERENCES, Pool
from dualform.store.reader import Run
from dualform.store.resume import read_pools
from dualform.store.row_encoding import SCALE, address_seed, encode, stored_dtypes
from dualform.store.shard_check import INPUTS
from dualform.store.tables import call_tables, merge_columns, steps_table
from dualform.store.taken_steps import PooledLayers, TakenCall, TakenRows, TakenStep
from dualform.store.tensors import publish_tensors, write_parts
from dualform.threads import Background


@dataclasses.dataclass(slots=True)
class OpenShard:
    """What the steps taken so far make of the next shard.

    Attributes:
        steps: the steps, consecutive, without their patterns.
        tensors: name -> the parts of a tensor of the shard, as they are stored.
        key_range: layer -> the least and the greatest element of its keys.
        bases: layer with a pool -> how many keys its pool held before.
    """

    steps: list[TakenStep] = dataclasses.field(default_factory=list)
    tensors: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)
    key_range: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    bases: dict[str, int] = dataclasses.field(default_factory=dict)


class ShardWriter:
    """Writes the shards of one recording, and the manifest that lists them.

    Attributes:
        manifest: as it was last published, or will first be.
    """

    def __init__(self, blobs: Blobs, manifest: Manifest) -> None:
        self._blobs = blobs
        self.manifest = manifest
        self._tag: Tag | None = None  # of the manifest as it was last published; None before it first is
        self._next = 0  # number of the next shard
        self._began = time.monotonic()
        self._earlier_rows: dict[str, RowsEntry] = {}  # of the patterns that a resumed run holds already
        self._publishing: Background | None = None  # writes the last shard, and publishes it after the one before
        self._earlier: Background | None = None  # of the shard before that one
        self._pools: dict[str, Pool] = {}  # of layers that see the same keys again and again
        self._open = OpenShard()

    def continue_from(self, manifest: Manifest, tag: Tag) -> PooledLayers:
        """Write behind the shards of a run whose manifest has a tag; return which of its layers have pools."""
        self.manifest, self._tag = manifest, tag
        self._next = manifest.shards[-1].index + 1 if manifest.shards else 0
        self._earlier_rows = dict(manifest.rows)
        seen, self._pools = read_pools(Run(self._blobs, rank=manifest.rank))
        return PooledLayers(seen, self._pools)

    def attach(self, files: Files) -> None:
        """Publish files beside the patterns, in place of earlier ones of the same names."""
        self.settle()
        self.publish_manifest(files={**self.manifest.files, **publish_files(self._blobs, files)})
        remove_replaced(self._blobs, self.manifest)

    def take(self, step: TakenStep) -> None:
        """Take a step into the shard that is open: encode its patterns, and look up which keys came before.

        So that is done as the steps come, and a shard that ends has only to be written. Raises the error of the last
        shard, if it could not be written.
        """
        if self._publishing is not None and self._publishing.failed:
            self._publishing.result()
        for call in step.calls:
            if self.manifest.layers[call.layer].store != "steps":
                self._take_call(step.step, call)
        step.release()
        self._open.steps.append(step)

    def write(self, parameters: Mapping[str, Tensor], state: ShardState | None) -> None:
        """Begin to write the steps taken so far as a shard, and to publish it once the shard before is published.

        Waits until no more than one shard is being written, so that memory is taken for few of them. Does nothing where
        no step was taken.

        Args:
            parameters: the parameters after the last step; nothing where they are not known.
            state: the uncovered state after the last step, where it is known.
        """
        ended, self._open = self._open, OpenShard()
        if not ended.steps:
            return
        if self._earlier is not None:
            self._earlier.result()
        before, index = self._publishing, self._next
        self._next += 1
        pools = {layer: (base, self._pools[layer].size - base) for layer, base in ended.bases.items()}
        write = functools.partial(self._write_shard, index, ended, pools, parameters, state, before)
        self._earlier, self._publishing = before, Background(write)

    def drop(self) -> None:
        """Let go of the steps taken so far: nothing more will be written."""
        self._open = OpenShard()

    def settle(self) -> None:
        """Wait until all shards that are being written are published."""
        earlier, self._earlier = self._earlier, None
        publishing, self._publishing = self._publishing, None
        try:
            if earlier is not None:
                earlier.result()
        finally:
            if publishing is not None:
                publishing.result()

    def _write_shard(
        self,
        index: int,
        ended: OpenShard,
        pools: dict[str, tuple[int, int]],
        parameters: Mapping[str, Tensor],
        state: ShardState | None,
        before: Background | None,
    ) -> None:
        """Write the files of a shard, and publish it once the shard before is published.

        Args:
            index: the shard's number.
            ended: its steps.
            pools: layer with a pool -> how many keys the pool held before, and how many are new.
            parameters: the parameters after the last step.
            state: the uncovered state after the last step.
            before: writes the shard before.
        """
        names, records, key_range = shard_files(index), ended.steps, ended.key_range
        calls, annotations = call_tables(records)
        write = functools.partial(write_parts, tensors=ended.tensors)
        staged = self._blobs.stage(names["patterns"], write)
        try:
            tables = {"calls": calls, "annotations": annotations, "steps": steps_table(records)}
            ended.tensors.clear()
            if before is not None:
                before.result()
            self.check_alone()
        except BaseException:
            staged.discard()
            raise
        start, stop = records[0].step, records[-1].step + 1
        rows, written_at = records[-1].rows, time.monotonic()
        files = {names["patterns"]: staged.publish()}
        for what, table in tables.items():
            files[names[what]] = _publish_table(self._blobs, names[what], table)
        if state is not None and state.values:
            files[names["uncovered"]] = publish_tensors(self._blobs, names["uncovered"], state.values)
        marks = {name: fingerprint(tensor) for name, tensor in parameters.items()}
        shard = ShardEntry(index, start, stop, files, key_range, marks, pools)
        if state is not None:
            shard = dataclasses.replace(shard, state_after=stop, stale=state.stale)
        columns = merge_columns(self.manifest.columns, annotations.schema)
        known = {name: RowsEntry(check.outcome, check.reason) for name, check in rows.items()}
        for name, held in self._earlier_rows.items():  # of the patterns that a resumed run holds already
            if name not in known or SEVERITY[held.outcome] > SEVERITY[known[name].outcome]:
                known[name] = held
        training = self.manifest.training
        if training is not None:
            training = dataclasses.replace(training, seconds=written_at - self._began)
        self.publish_manifest(shards=(*self.manifest.shards, shard), columns=columns, rows=known, training=training)

    def _take_call(self, step: int, call: TakenCall) -> None:
        """Add the patterns of a call to the shard that is open."""
        shard, entry, keys = self._open, self.manifest.layers[call.layer], call.keys
        stored: torch.dtype = getattr(torch, entry.dtype)
        key_dtype, value_dtype = stored_dtypes(stored, pooled=call.pooled)
        parts = RangeOfParts() if call.pooled and keys.range_is_of_rows else None
        if call.pooled:
            pool = self._pools.setdefault(call.layer, Pool())
            shard.bases.setdefault(call.layer, pool.size)
            key_ids, new, digests = pool.place(keys.rows, None if parts is None else parts.look)
            _append(shard.tensors, f"{call.layer}/{REFERENCES}", key_ids)
            _append(shard.tensors, f"{call.layer}/{DIGESTS}", digests)
        joined = joined_ranges(shard.key_range.get(call.layer), keys.ends() if parts is None else parts.ends())
        if joined is not None:
            shard.key_range[call.layer] = joined
        if call.pooled and len(new) < len(keys.rows):
            keys = TakenRows(keys.rows[new])
        if call.pooled or entry.unfolding is None:
            self._add(shard.tensors, step, call, "keys", keys, key_dtype)
        else:
            self._add(shard.tensors, step, call, INPUTS, keys, self.manifest.inputs_dtype(call.layer))
        if call.values is not None:
            self._add(shard.tensors, step, call, "values", call.values, value_dtype)

    def _add(
        self,
        tensors: dict[str, list[Tensor]],
        step: int,
        call: TakenCall,
        what: str,
        rows: TakenRows,
        dtype: torch.dtype,
    ) -> None:
        """Add keys or values of a call to the parts of a tensor, encoded if they are not, and their scales if any."""
        stored, scales = rows.rows, rows.scales
        if not rows.encoded:
            seed = 0
            if dtype is torch.int8:
                seed = address_seed(call.layer, what, step, call.micro, call.call, self.manifest.rank)
            stored, scales = encode(stored, dtype, seed=seed)
        name = f"{call.layer}/{what}"
        if not stored.is_contiguous():
            stored = stored.contiguous()
        _append(tensors, name, stored)
        if scales is not None:
            _append(tensors, f"{name}{SCALE}", scales)

    def check_alone(self) -> None:
        """Raise `StoreError` where somebody else has replaced the manifest, before files of the same names are."""
        try:
            tag: Tag | None = self._blobs.load(MANIFEST)[1]
        except FileNotFoundError:
            tag = None
        if tag != self._tag:
            raise changed_error(self._blobs, MANIFEST)

    def publish_manifest(self, **changes: Any) -> None:
        """Change entries of the manifest, and publish it."""
        self.manifest = dataclasses.replace(self.manifest, **changes)
        self._tag = self.manifest.publish(self._blobs, was=self._tag)


def _append(tensors: dict[str, list[Tensor]], name: str, part: Tensor) -> None:
    """Add a part to those of a tensor; one without rows only where it is the first, and says how wide rows are."""
    parts = tensors.get(name)
    if parts is None:
        tensors[name] = [part]
    elif len(part):
        parts.append(part)


def _publish_table(blobs: Blobs, name: str, table: pa.Table) -> FileEntry:
    content = pa.BufferOutputStream()
    pq.write_table(table, content)
    return blobs.publish(name, lambda file: file.write(content.getvalue()))
