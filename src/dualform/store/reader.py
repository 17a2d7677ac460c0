"""Read a run folder: its manifest, the patterns of a layer shard by shard, and the tables beside them.

Everything is read where it lies and when it is asked for. A listed file that is missing or
cut short is an error at opening; changed bytes are found by `dualform.store.audit`.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from torch import Tensor

from dualform.engine.description import LayerEntry, RunDescription
from dualform.engine.explanation import Explanation
from dualform.engine.facts_check import facts_problem
from dualform.engine.source import Factors, PatternPart, PatternSource, Which
from dualform.errors import CorruptError, ReplayError
from dualform.identity.families import Facts
from dualform.lazy import compute as pc
from dualform.store.blobs import Blob, Blobs, Tag
from dualform.store.checked_tables import (
    BUDGET_RATIO,
    MIN_BUDGET,
    SchemaCheck,
    column_names,
    count_rows,
    read_checked_table,
)
from dualform.store.derived_sums import StoredSums
from dualform.store.format import FINAL, INITIAL, SHARES, STATE, UNEXPLAINED, shard_files
from dualform.store.manifest import Manifest, ShardEntry
from dualform.store.parameter_check import check_parameters
from dualform.store.places import Place, as_blobs
from dualform.store.pool import DIGESTS, REFERENCES
from dualform.store.shard_check import (
    annotations_columns_problem,
    calls_columns_problem,
    calls_problem,
    steps_columns_problem,
    steps_problem,
)
from dualform.store.stored_rows import FileRows, PooledRows
from dualform.store.tables import CALLS, MARKS
from dualform.store.tensors import OpenFiles, TensorFile

if TYPE_CHECKING:
    from dualform.store.run_files import StoredFiles
    from dualform.store.stored_rests import StoredRests
    from dualform.store.stored_shares import StoredShares

CallColumns = dict[str, npt.NDArray[Any]]
MAX_OPEN_FILES = 100
MAX_FACTOR_SPARSITY = (
    64  # entries of the dense table (steps, micros) for each factor that is there; honest steps have 1
)
FREE_FACTORS = 1 << 16  # factors that are added to those of the run before the sparsity is looked at
MAPPED_RUN_BYTES = 5 << 28  # size of a run up to which all of its files are mapped at once


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
            known = "layout" in table.column_names  # which the first runs did not have
            columns["layout"] = np.asarray(table["layout"] if known else [None] * table.num_rows, dtype=object)
            columns["batch_axis"] = np.full(table.num_rows, self._manifest.batch_axis)
            self._calls[layer] = columns
        return self._calls[layer]

    def rows(self, layer: str, what: Literal["keys", "values"]) -> FileRows | PooledRows:
        """Return the stored keys or values of a layer; they are read from the file when some of them are taken."""
        if self._manifest.layers[layer].store == "steps":
            raise ReplayError(
                f"The patterns of layer {layer!r} are not stored: they come back when the training is replayed. Open "
                "the run with its training function, dualform.open(path, train=train), and ask with its own executor."
            )
        count = self.count(layer)
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


class Run(PatternSource):
    """A recorded run, opened for reading: a folder by its path, or wherever else it is kept."""

    def __init__(self, place: Place, *, known: tuple[Manifest, Tag] | None = None) -> None:
        self.blobs = as_blobs(place)
        self.manifest, self.manifest_tag = Manifest.read_tagged(self.blobs) if known is None else known
        self._check_sizes()
        size = sum(entry.bytes for shard in self.manifest.shards for entry in shard.files.values())
        files = OpenFiles(
            MAX_OPEN_FILES, keep_mapped=size <= MAPPED_RUN_BYTES and len(self.manifest.shards) <= MAX_OPEN_FILES
        )
        shards: list[Shard] = []
        for entry in self.manifest.shards:
            if entry.stop > entry.start:
                shards.append(Shard(self.blobs, entry, self.manifest, tuple(shards), files=files))
        self.shards = tuple(shards)
        self._facts: dict[str, tuple[Facts, Factors]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process open the run as it is seen here, whatever was published since."""
        return _opened_elsewhere, (self.blobs, self.manifest, self.manifest_tag)

    @cached_property
    def description(self) -> RunDescription:
        """What was trained, from the manifest."""
        manifest = self.manifest
        return RunDescription(
            layers=manifest.layers,
            parameters=manifest.parameters,
            optimizers=manifest.optimizers,
            columns=manifest.columns,
            steps=manifest.steps,
            batch_axis=manifest.batch_axis,
            uncovered=manifest.uncovered,
            rows=manifest.rows,
            closed=manifest.closed,
            no_final=manifest.no_final,
            created=manifest.created,
            versions=manifest.versions,
            factory=manifest.factory,
            factory_arguments=manifest.factory_arguments,
            training=manifest.training,
        )

    @cached_property
    def digest(self) -> str:
        """A digest of everything in the run that derived sums depend on."""
        manifest = self.manifest
        parts = (
            [shard.entry for shard in self.shards],
            manifest.files.get(INITIAL),
            manifest.layers,
            manifest.parameters,
            manifest.optimizers,
            manifest.batch_axis,
            manifest.columns,
        )
        if manifest.shares is not None:
            files = [entry for name, entry in manifest.files.items() if name.startswith(SHARES)]
            parts = (*parts, manifest.shares, files)  # type: ignore[assignment]
        if manifest.checkpoints is not None:
            files = [entry for name, entry in manifest.files.items() if name.startswith(UNEXPLAINED)]
            parts = (*parts, manifest.checkpoints, files)  # type: ignore[assignment]
        return xxhash.xxh3_128_hexdigest(repr(parts).encode())

    @property
    def name(self) -> str:
        """The path of the run folder, or how its place is called."""
        return self.blobs.location

    @property
    def run_files(self) -> "StoredFiles":
        """The files of the run that are no patterns."""
        from dualform.store.run_files import StoredFiles  # which reads this run

        return StoredFiles(self)

    @cached_property
    def kept_shares(self) -> "StoredShares | None":
        """The shares by group that the run keeps; None where it keeps none."""
        from dualform.store.stored_shares import StoredShares  # which reads this run

        return None if self.manifest.shares is None else StoredShares(self, self.manifest.shares)

    @cached_property
    def _rests(self) -> "StoredRests | None":
        """What no pattern explains at each checkpoint; None where the run was recorded."""
        from dualform.store.stored_rests import StoredRests  # which reads this run

        return None if self.manifest.checkpoints is None else StoredRests(self, self.manifest.checkpoints)

    def unexplained(self, parameter: str, horizon: int) -> Tensor | None:
        """Return what no pattern explains of a parameter at a checkpoint, float64; None where the run was recorded."""
        return None if self._rests is None else self._rests.unexplained(parameter, horizon)

    def explanation(self) -> Explanation | None:
        """Return how much of the change between checkpoints patterns explain; None where the run was recorded."""
        return None if self._rests is None else self._rests.explanation()

    @property
    def derived_sums(self) -> StoredSums:
        """The sums that are kept beside the run's patterns."""
        return StoredSums(self.blobs)

    def parts(self) -> Sequence[Shard]:
        """Return the published shards in the order of steps."""
        return self.shards

    @cached_property
    def steps_table(self) -> pa.Table:
        """The optimizer facts of every (step, parameter)."""
        tables = [shard.steps for shard in self.shards if shard.steps.num_rows]
        try:
            return pa.concat_tables(tables or [pa.table({})], promote_options="permissive")
        except pa.ArrowException as error:  # a setting that is a number in one shard and a text in another
            raise CorruptError(f"{Blob(self.blobs, 'steps')}: {error}. Restore the run's files from a copy.") from error

    def facts(self, parameter: str) -> tuple[Facts, Factors]:
        """Return a parameter's facts, and its gradient's factor in each step and micro, (S, micros)."""
        if parameter not in self._facts:
            table = self.steps_table
            if table.num_rows:
                table = table.filter((pc.field("parameter") == parameter) & pc.field("updated"))
            dtype = self.manifest.parameters[parameter].dtype
            columns: CallColumns = {
                name: np.asarray(table[name])
                for name in table.column_names
                if name not in ("parameter", "optimizer", "factors", "fingerprint", *MARKS)
            }
            step = columns.pop("step", np.zeros(0)).astype(np.int64)
            optimizer = table["optimizer"][0].as_py() if table.num_rows else "none"
            if problem := facts_problem(optimizer, step, columns):
                raise CorruptError(
                    f"{Blob(self.blobs, 'steps')}: the facts of parameter {parameter!r} cannot be: {problem}. Restore "
                    "the run's files from a copy."
                )
            factors = self._factors(table, step) if table.num_rows else np.zeros((self.steps, self._micros))
            self._facts[parameter] = (Facts(optimizer, dtype, step, columns), factors)
        return self._facts[parameter]

    @cached_property
    def _micros(self) -> int:
        """The largest number of backwards of a step."""
        table = self.steps_table
        lengths = pc.list_value_length(table["factors"]) if table.num_rows else pa.array([], pa.int32())
        micros: int = pc.max(lengths).as_py() or 1
        if micros * self.steps > MAX_FACTOR_SPARSITY * ((pc.sum(lengths).as_py() or 0) + FREE_FACTORS):
            raise CorruptError(
                f"{Blob(self.blobs, 'steps')}: one step has {micros} factors, and most of {self.steps} steps have "
                "none. Restore the run's files from a copy."
            )
        if (called := max((shard.most_micros() for shard in self.shards), default=0)) > micros:
            raise CorruptError(
                f"{Blob(self.blobs, 'calls')}: a call is of backward {called - 1} of its step, but no step had more "
                f"than {micros}. Restore the run's files from a copy."
            )
        return micros

    def _factors(self, table: pa.Table, step: npt.NDArray[np.int64]) -> Factors:
        lists = table["factors"].combine_chunks()
        lengths = np.asarray(pc.list_value_length(lists), dtype=np.int64)
        dense = np.zeros((self.steps, self._micros))
        flat = np.asarray(pc.list_flatten(lists), dtype=np.float64)
        row = np.repeat(step, lengths)
        column = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        dense[row, column] = flat
        return dense

    def tensors(self, which: Which) -> dict[str, Tensor] | None:
        """Return the parameters at the start, or after the last step if the recording was closed with them."""
        if which == "initial":
            return {name: found for name, found in self._start().items() if name in self.manifest.parameters}
        if not self.manifest.closed or self.manifest.no_final:
            return None
        file = TensorFile(Blob(self.blobs, FINAL))
        check_parameters(file, self.manifest, states=False)
        return file.tensors()

    def _start(self) -> dict[str, Tensor]:
        """Return the parameters at the start, and the optimizers' state that was warm then."""
        file = TensorFile(Blob(self.blobs, INITIAL))
        check_parameters(file, self.manifest, states=True)
        return file.tensors()

    def require_values(self, layer: str) -> LayerEntry:
        """Return a layer's entry if its values are stored, or raise."""
        _ = self.initial  # whose shapes are those of everything that is rebuilt
        return super().require_values(layer)

    @cached_property
    def initial_states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state that was warm at the start: parameter -> entry -> tensor."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._start().items():
            if name not in self.manifest.parameters:
                entry, _, parameter = name.partition(STATE)
                states.setdefault(parameter, {})[entry] = tensor
        return states

    def files(self) -> dict[str, Any]:
        """Return every listed file with its entry, by the name that it lies under."""
        listed = {entry.at or name: entry for name, entry in self.manifest.files.items()}
        for shard in self.manifest.shards:
            listed |= shard.files
        return listed

    def blob(self, name: str) -> Blob:
        """Return the file that the manifest lists under a name."""
        return Blob(self.blobs, self.manifest.files[name].at or name)

    def _check_sizes(self) -> None:
        listed = self.files()
        sizes = self.blobs.sizes(list(listed))
        for name, entry in listed.items():
            found = sizes[name]
            if found == entry.bytes:
                continue
            blob = Blob(self.blobs, name)
            if found is None:
                raise CorruptError(f"{blob} is listed in the manifest but missing. Restore it from a copy of the run.")
            raise CorruptError(
                f"{blob} has {found} bytes, but {entry.bytes} were published: it was cut short or changed. "
                "Restore it from a copy of the run."
            )


def _opened_elsewhere(blobs: Blobs, manifest: Manifest, tag: Tag) -> Run:
    """Open a run that another process has opened."""
    return Run(blobs, known=(manifest, tag))
