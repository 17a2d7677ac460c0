"""Read a run folder: its manifest, the patterns of a layer shard by shard, and the tables beside them.

Everything is read where it lies and when it is asked for. A listed file that is missing or
cut short is an error at opening; changed bytes are found by `dualform.store.audit`.
"""

import os
import stat
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from dualform.coefficients import Coefficients, Facts, derive, kinds
from dualform.coefficients.family import Of
from dualform.errors import CorruptError, KeysOnlyError, UnknownLayerError
from dualform.lazy import compute as pc
from dualform.lazy import parquet as pq
from dualform.store.format import FINAL, INITIAL, STATE, opened_tensors, shard_files
from dualform.store.manifest import LayerEntry, Manifest, ShardEntry
from dualform.store.pool import DIGESTS, REFERENCES
from dualform.store.resident import Resident
from dualform.store.rows import FileRows, PooledRows
from dualform.store.tables import CALLS, addresses
from dualform.store.tensors import OpenFiles, TensorFile

Columns = dict[str, npt.NDArray[Any]]
Factors = npt.NDArray[np.float64]
OPEN = 100  # files that stay open at most
MAPPED = 5 << 28  # bytes of a run whose files may all be mapped at once


class Shard:
    """One published shard, of which only steps before `stop` belong to the memory."""

    def __init__(
        self,
        folder: Path,
        entry: ShardEntry,
        batch_axis: int,
        before: Sequence["Shard"] = (),
        *,
        files: OpenFiles,
    ) -> None:
        self.folder = folder
        self._before = before  # where the keys of a pool may lie
        self.entry = entry
        self._files = files
        self._batch_axis = batch_axis
        self._names = shard_files(entry.index)
        self._calls: dict[str, Columns] = {}
        self._counts: dict[str, int] = {}

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer are here."""
        if layer not in self._counts:
            calls = self.calls(layer)
            self._counts[layer] = int((calls["rows"] * calls["positions"]).sum())
        return self._counts[layer]

    def calls(self, layer: str) -> Columns:
        """Return the calls of a layer, as columns."""
        if layer not in self._calls:
            table = self._calls_table.filter(pc.field("layer") == layer)
            numbers = [field.name for field in CALLS if field.type != pa.string()]
            columns: Columns = {name: np.asarray(table[name].fill_null(-1), dtype=np.int64) for name in numbers}
            known = "layout" in table.column_names  # which the first runs did not have
            columns["layout"] = np.asarray(table["layout"] if known else [None] * table.num_rows, dtype=object)
            columns["batch_axis"] = np.full(table.num_rows, self._batch_axis)
            self._calls[layer] = columns
        return self._calls[layer]

    def addresses(self, layer: str, patterns: npt.NDArray[np.int64] | None = None) -> dict[str, npt.NDArray[np.int64]]:
        """Return step, micro, call, row, position and row in the annotation table of all patterns, or of some."""
        return addresses(self.calls(layer), patterns)

    def rows(self, layer: str, what: str) -> FileRows | PooledRows:
        """Return the keys or values of a layer, as they are stored, to be read where they are used."""
        count = self.count(layer)
        if what != "keys" or layer not in self.entry.pools:
            return self._stored(f"{layer}/{what}", count)
        shards = [shard for shard in (*self._before, self) if layer in shard.entry.pools]
        return PooledRows(
            references=self.references(layer),
            bases=[shard.entry.pools[layer][0] for shard in shards],
            sources=[shard.pool(layer) for shard in shards],
        )

    def references(self, layer: str) -> Tensor:
        """Return the number of each pattern's key in the layer's pool, (n,)."""
        return self._stored(f"{layer}/{REFERENCES}", self.count(layer)).take(slice(None))[0]

    def pool(self, layer: str) -> FileRows:
        """Return the keys of a layer's pool that lie in this shard."""
        return self._stored(f"{layer}/keys", self.entry.pools[layer][1])

    def digests(self, layer: str) -> Tensor:
        """Return the digests of those keys, (n, 2)."""
        return self._stored(f"{layer}/{DIGESTS}", self.entry.pools[layer][1]).take(slice(None))[0]

    def _stored(self, name: str, count: int) -> FileRows:
        return FileRows(self._tensors, name, count)

    def _tensors(self) -> TensorFile:
        return self._files.get(self.path("patterns"))

    def stored_bytes(self, layer: str) -> int:
        """Return the bytes of a layer's patterns in this shard's file, those that were cut off included."""
        places = self._tensors().places
        names = [name for name in places if name.startswith(f"{layer}/")]
        mine = [places[name] for name in names if "/" not in name.removeprefix(f"{layer}/")]
        return sum(place.shape[0] * place.row_bytes for place in mine)

    @cached_property
    def annotations(self) -> pa.Table:
        """The user's columns in this shard."""
        return self._read("annotations")

    def annotation(self, name: str) -> pa.ChunkedArray | None:
        """Read one of the user's columns alone, without keeping it; nothing where this shard does not have it."""
        if name not in pq.read_schema(self.path("annotations")).names:
            return None
        return self._read("annotations", [name])[name]

    def annotated_rows(self) -> int:
        """Return how many rows of the annotation table belong to steps before `stop`."""
        calls = self._calls_table.filter(pc.field("annotation_offset").is_valid())
        names = ("annotation_offset", "annotation_rows", "annotation_positions")
        offset, rows, positions = (np.asarray(calls[name], dtype=np.int64) for name in names)
        return int((offset + np.maximum(rows, 1) * np.maximum(positions, 1)).max(initial=0))

    @cached_property
    def steps(self) -> pa.Table:
        """The optimizer facts in this shard."""
        return self._kept(self._read("steps"))

    @cached_property
    def _calls_table(self) -> pa.Table:
        return self._kept(self._read("calls"))

    def path(self, what: str) -> Path:
        """Return the path of one of the shard's files."""
        return self.folder / self._names[what]

    def _kept(self, table: pa.Table) -> pa.Table:
        return table.filter(pc.field("step") < self.entry.stop)

    def _read(self, what: str, columns: list[str] | None = None) -> pa.Table:
        try:
            return pq.read_table(self.path(what), columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise CorruptError(f"{self.path(what)} cannot be read: {error}. Restore the file from a copy.") from error


class Run:
    """A run folder, opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._check_sizes()
        size = sum(entry.bytes for shard in self.manifest.shards for entry in shard.files.values())
        files = OpenFiles(OPEN, keep_mapped=size <= MAPPED and len(self.manifest.shards) <= OPEN)
        shards: list[Shard] = []
        for entry in self.manifest.shards:
            if entry.stop > entry.start:
                shards.append(Shard(folder, entry, self.manifest.batch_axis, tuple(shards), files=files))
        self.shards = tuple(shards)
        self.resident = Resident()
        self._facts: dict[str, tuple[Facts, Factors]] = {}

    @property
    def steps(self) -> int:
        """The number of published steps."""
        return self.manifest.steps

    @cached_property
    def layers(self) -> dict[str, LayerEntry]:
        """The layers of the run, without those that only might have been used."""
        every = self.manifest.layers
        return {name: entry for name, entry in every.items() if not entry.optional or self.count(name)}

    def layer(self, name: str) -> LayerEntry:
        """Return a layer's entry, or raise with the names there are."""
        try:
            return self.layers[name]
        except KeyError:
            known = ", ".join(map(repr, self.layers))
            raise UnknownLayerError(f"Layer {name!r} was not recorded in {self.folder}. There are: {known}.") from None

    def count(self, layer: str) -> int:
        """Return how many patterns of a layer are stored."""
        return sum(shard.count(layer) for shard in self.shards)

    def key_range(self, layer: str) -> tuple[float, float]:
        """Return the least and greatest element over all of a layer's keys; (0, 0) without patterns."""
        ranges = [s.entry.key_range[layer] for s in self.shards if layer in s.entry.key_range]
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0.0, 0.0)

    @cached_property
    def steps_table(self) -> pa.Table:
        """The optimizer facts of every (step, parameter)."""
        tables = [shard.steps for shard in self.shards if shard.steps.num_rows]
        return pa.concat_tables(tables or [pa.table({})], promote_options="permissive")

    def facts(self, parameter: str) -> tuple[Facts, Factors]:
        """Return a parameter's facts, and its gradient's factor in each step and micro, (S, micros)."""
        if parameter not in self._facts:
            table = self.steps_table
            if table.num_rows:
                table = table.filter((pc.field("parameter") == parameter) & pc.field("updated"))
            dtype = self.manifest.parameters[parameter].dtype
            columns: Columns = {
                name: np.asarray(table[name])
                for name in table.column_names
                if name not in ("parameter", "optimizer", "factors", "fingerprint")
            }
            step = columns.pop("step", np.zeros(0)).astype(np.int64)
            optimizer = table["optimizer"][0].as_py() if table.num_rows else self.manifest.optimizers[0]
            factors = self._factors(table, step) if table.num_rows else np.zeros((self.steps, self._micros))
            self._facts[parameter] = (Facts(optimizer, dtype, step, columns), factors)
        return self._facts[parameter]

    @cached_property
    def _micros(self) -> int:
        """The most backwards that any step had."""
        table = self.steps_table
        return (pc.max(pc.list_value_length(table["factors"])).as_py() or 1) if table.num_rows else 1

    def _factors(self, table: pa.Table, step: npt.NDArray[np.int64]) -> Factors:
        lists = table["factors"].combine_chunks()
        lengths = np.asarray(pc.list_value_length(lists), dtype=np.int64)
        dense = np.zeros((self.steps, self._micros))
        flat = np.asarray(pc.list_flatten(lists), dtype=np.float64)
        row = np.repeat(step, lengths)
        column = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        dense[row, column] = flat
        return dense

    def coefficients(self, parameter: str, horizon: int, of: Of = "parameter") -> tuple[Coefficients, Factors]:
        """Return a parameter's coefficients after `horizon` steps, and its factor per (step, micro)."""
        facts, factors = self.facts(parameter)
        if not len(facts.step):  # never updated: what it was, whatever the optimizer
            start, buffer = (1.0, 0.0) if of == "parameter" else (0.0, 1.0)
            return Coefficients(np.zeros(horizon), start, buffer), factors
        return derive(facts, horizon=horizon, of=of), factors

    def is_replayed(self, parameter: str) -> bool:
        """Say whether a parameter was updated by an optimizer that has no coefficients, and must be replayed."""
        facts, _ = self.facts(parameter)
        return facts.optimizer in kinds() and len(facts.step) > 0

    def require_values(self, layer: str) -> LayerEntry:
        """Return a layer's entry if its values are stored, or raise."""
        entry = self.layer(layer)
        if entry.store == "keys":
            raise KeysOnlyError(
                f"Layer {layer!r} was recorded with its keys only: attention works, but weights, contributions and "
                'outputs need values. Record it with layers={...: "keys+values"}.'
            )
        return entry

    def exact_parameters(self) -> tuple[str, ...]:
        """Return the parameters that can be rebuilt: those of layers whose values are stored."""
        layers = [entry for entry in self.layers.values() if entry.store != "keys"]
        return tuple(dict.fromkeys(parameter for entry in layers for parameter in entry.parameters.values()))

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """The parameters at the start."""
        return {name: tensor for name, tensor in self._tensors(INITIAL).items() if name in self.manifest.parameters}

    @cached_property
    def initial_states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state that was warm at the start: parameter -> entry -> tensor."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._tensors(INITIAL).items():
            if name not in self.manifest.parameters:
                entry, _, parameter = name.partition(STATE)
                states.setdefault(parameter, {})[entry] = tensor
        return states

    @cached_property
    def final(self) -> dict[str, Tensor] | None:
        """The parameters after the last step, if the recording was closed and they were still there."""
        return self._tensors(FINAL) if self.manifest.closed and not self.manifest.no_final else None

    def _tensors(self, name: str) -> dict[str, Tensor]:
        with opened_tensors(self.folder / name) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)

    def files(self) -> dict[str, Any]:
        """Return every listed file with its entry, by where it lies in the run folder."""
        listed = {entry.at or name: entry for name, entry in self.manifest.files.items()}
        for shard in self.manifest.shards:
            listed |= shard.files
        return listed

    def place(self, name: str) -> Path:
        """Return where a file lies that the manifest lists under a name."""
        return self.folder / (self.manifest.files[name].at or name)

    def _check_sizes(self) -> None:
        for name, entry in self.files().items():
            path = f"{self.folder}/{name}"
            try:
                found = os.stat(path)  # noqa: PTH116 (a Path for each of thousands of files takes longer than the look)
            except OSError:
                found = None
            if found is None or not stat.S_ISREG(found.st_mode):
                raise CorruptError(f"{path} is listed in the manifest but missing. Restore it from a copy of the run.")
            if found.st_size != entry.bytes:
                raise CorruptError(
                    f"{path} has {found.st_size} bytes, but {entry.bytes} were published: it was cut short or changed. "
                    "Restore it from a copy of the run."
                )
