"""One published shard of a run: its calls, keys and values, and the tables beside them, read when asked for."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from dualform.engine.source import PatternPart
from dualform.errors import CorruptError, ReplayError
from dualform.identity.unfolding import Unfolding
from dualform.lazy import compute as pc
from dualform.store.blobs import Blob, Blobs
from dualform.store.checked_tables import (
    BUDGET_RATIO,
    MIN_BUDGET,
    SchemaCheck,
    column_names,
    count_rows,
    read_checked_table,
)
from dualform.store.format import shard_files
from dualform.store.manifest import Manifest, ShardEntry
from dualform.store.pool import DIGESTS, REFERENCES
from dualform.store.shard_check import (
    INPUTS,
    annotations_columns_problem,
    calls_columns_problem,
    calls_problem,
    steps_columns_problem,
    steps_problem,
    texts_of_calls,
)
from dualform.store.stored_rows import FileRows, PooledRows
from dualform.store.tables import CALLS, SIZES
from dualform.store.tensors import OpenFiles, TensorFile
from dualform.store.unfolded_rows import InputBlocks, UnfoldedRows

CallColumns = dict[str, npt.NDArray[Any]]


class Shard(PatternPart):
    """One published shard, of which only steps before `stop` belong to the memory."""

    def __init__(
        self,
        blobs: Blobs,
        entry: ShardEntry,
        manifest: Manifest,
        before: Sequence["Shard"] = (),
        *,
        files: OpenFiles,
    ) -> None:
        self._blobs = blobs
        self._before = before  # earlier shards, in which keys of a pool may lie
        self.entry = entry
        self.index, self.start, self.stop = entry.index, entry.start, entry.stop
        self._files = files
        self._manifest = manifest
        self._names = shard_files(entry.index)
        self._calls: dict[str, CallColumns] = {}
        self._counts: dict[str, int] = {}
        self._inputs: dict[str, InputBlocks] = {}

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer this shard holds."""
        if layer not in self._counts:
            calls = self.calls(layer)
            self._counts[layer] = int((calls["rows"] * calls["positions"]).sum())
        return self._counts[layer]

    def calls(self, layer: str) -> CallColumns:
        """Return the calls of a layer, as columns."""
        if layer not in self._calls:
            table = self._calls_table.filter(pc.field("layer") == layer)
            whole_columns = [field.name for field in CALLS if field.type != pa.string()]
            columns: CallColumns = {
                name: np.asarray(table[name].fill_null(-1), dtype=np.int64) for name in whole_columns
            }
            layouts = texts_of_calls(table, "layout")
            columns["layout"] = np.full(table.num_rows, None, dtype=object) if layouts is None else layouts
            columns["batch_axis"] = np.full(table.num_rows, self._manifest.batch_axis)
            self._calls[layer] = columns
        return self._calls[layer]

    def rows(self, layer: str, what: Literal["keys", "values"]) -> FileRows | PooledRows | UnfoldedRows:
        """Return the stored keys or values of a layer; they are read from the file when some of them are taken."""
        if self._manifest.layers[layer].store == "steps":
            raise ReplayError(
                f"The patterns of layer {layer!r} are not stored: they come back when the training is replayed. Open "
                "the run with its training function, dualform.open(path, train=train), and ask with its own executor."
            )
        count = self.count(layer)
        unfolding = self._manifest.layers[layer].unfolding
        if what == "keys" and layer not in self.entry.pools and unfolding is not None:
            return UnfoldedRows(self._tensors, f"{layer}/{INPUTS}", self._blocks(layer, unfolding))
        if what == "keys" and layer not in self.entry.pools:
            return self._stored(f"{layer}/keys", count, below=self._table_rows(layer))
        if what != "keys":
            return self._stored(f"{layer}/{what}", count)
        shards = [shard for shard in (*self._before, self) if layer in shard.entry.pools]
        return PooledRows(
            references=self.references(layer),
            bases=[shard.entry.pools[layer][0] for shard in shards],
            sources=[shard.pool(layer) for shard in shards],
        )

    def _blocks(self, layer: str, unfolding: Unfolding) -> InputBlocks:
        """Return where the inputs of a layer's calls lie."""
        if layer not in self._inputs:
            mine = self._calls_table.filter(pc.field("layer") == layer)
            texts = texts_of_calls(mine, SIZES.name)
            found = [None] * mine.num_rows if texts is None else texts.tolist()
            counts = self.calls(layer)["rows"] * self.calls(layer)["positions"]
            d_in = self._manifest.layers[layer].d_in
            self._inputs[layer] = InputBlocks.of_calls(unfolding, d_in, found, counts.tolist())
        return self._inputs[layer]

    def references(self, layer: str) -> Tensor:
        """Return the key id of each pattern's key in the layer's pool, (n,)."""
        base, count = self.entry.pools[layer]
        return self._stored(f"{layer}/{REFERENCES}", self.count(layer), below=base + count).take(slice(None))[0]

    def key_ids(self, layer: str) -> Tensor | None:
        """Return the key id of each pattern's key in the layer's pool, (n,); None where the layer has no pool here."""
        return self.references(layer) if layer in self.entry.pools else None

    def key_range(self, layer: str) -> tuple[float, float] | None:
        """Return the least and the greatest element of a layer's keys, as the manifest has it."""
        return self.entry.key_range.get(layer)

    def own_keys(self, layer: str) -> tuple[int, FileRows] | None:
        """Return the key id of the first key of a layer's pool that lies in this shard, and the keys that do."""
        return (self.entry.pools[layer][0], self.pool(layer)) if layer in self.entry.pools else None

    def pool(self, layer: str) -> FileRows:
        """Return the keys of a layer's pool that lie in this shard."""
        return self._stored(f"{layer}/keys", self.entry.pools[layer][1])

    def digests(self, layer: str) -> Tensor:
        """Return the digests of the keys of a layer's pool that lie in this shard, (n, 2)."""
        return self._stored(f"{layer}/{DIGESTS}", self.entry.pools[layer][1]).take(slice(None))[0]

    def _stored(self, name: str, count: int, *, below: int | None = None) -> FileRows:
        return FileRows(self._tensors, name, count, below)

    def _table_rows(self, layer: str) -> int | None:
        """Return the number of rows of the table that a layer's keys are looked up in; None for other layers."""
        tables = [use.parameter for use in self._manifest.layers[layer].uses if use.parameter_map.takes_ids]
        return min((math.prod(self._manifest.parameters[table].shape[:-1]) for table in tables), default=None)

    def key_bytes(self, layer: str) -> int:
        """Return the bytes that a layer's keys take in memory: more than their inputs in the file, where these are."""
        entry = self._manifest.layers[layer]
        if entry.unfolding is None or layer in self.entry.pools:
            return super().key_bytes(layer)
        return self.count(layer) * entry.d_in * self._manifest.inputs_dtype(layer).itemsize

    def _tensors(self) -> TensorFile:
        return self._files.get(self.blob("patterns"))

    def stored_bytes(self, layer: str) -> int:
        """Return the bytes of a layer's patterns in this shard's file, patterns from step `stop` on included."""
        places = self._tensors().places
        names = [name for name in places if name.startswith(f"{layer}/")]
        mine = [places[name] for name in names if "/" not in name.removeprefix(f"{layer}/")]
        return sum(place.shape[0] * place.row_bytes for place in mine)

    @cached_property
    def annotations(self) -> pa.Table:
        """The user's columns in this shard."""
        return self._read("annotations", self._columns_problem)

    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray | None:
        """Return one of the user's columns, None where this shard does not have it; unless `keep`, read it alone."""
        if keep:
            return self.annotations[name] if name in self.annotations.column_names else None
        if name not in column_names(self.blob("annotations")):
            return None
        return self._read("annotations", self._columns_problem, [name])[name]

    def _columns_problem(self, schema: pa.Schema) -> str:
        return annotations_columns_problem(schema, self._manifest.columns)

    def annotated_rows(self) -> int:
        """Return how many rows of the annotation table belong to steps before `stop`."""
        calls = self._calls_table.filter(pc.field("annotation_offset").is_valid())
        names = ("annotation_offset", "annotation_rows", "annotation_positions")
        offset, rows, positions = (np.asarray(calls[name], dtype=np.int64) for name in names)
        return int((offset + np.maximum(rows, 1) * np.maximum(positions, 1)).max(initial=0))

    @cached_property
    def steps(self) -> pa.Table:
        """The optimizer facts in this shard."""
        table = self._read("steps", steps_columns_problem)
        calls = count_rows(self.blob("calls"))
        self._require(steps_problem(table, self.entry, self._manifest, calls), "steps")
        return self._kept(table)

    @cached_property
    def _calls_table(self) -> pa.Table:
        table = self._read("calls", calls_columns_problem)
        annotated = count_rows(self.blob("annotations"))
        places = self._tensors().places
        self._require(calls_problem(table, self.entry, self._manifest, places, annotated), "calls")
        return self._kept(table)

    def most_micros(self) -> int:
        """Return the largest number of backwards that the calls of this shard have in one step."""
        micro: int | None = pc.max(self._calls_table["micro"]).as_py()
        return 0 if micro is None else micro + 1

    def _require(self, problem: str, what: str) -> None:
        if problem:
            raise CorruptError(f"{self.blob(what)}: {problem}. Restore the run's files from a copy.")

    def blob(self, what: str) -> Blob:
        """Return one of the shard's files."""
        return Blob(self._blobs, self._names[what])

    def _kept(self, table: pa.Table) -> pa.Table:
        return table.filter(pc.field("step") < self.entry.stop)

    def _read(self, what: str, check: SchemaCheck, columns: list[str] | None = None) -> pa.Table:
        size = sum(entry.bytes for entry in self.entry.files.values())
        budget = max(MIN_BUDGET, BUDGET_RATIO * size)
        return read_checked_table(self.blob(what), check, budget=budget, columns=columns)
