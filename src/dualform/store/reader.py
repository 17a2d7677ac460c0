"""Read a run folder: its manifest, the patterns of a layer shard by shard, and the tables beside them.

Everything is read where it lies and when it is asked for. A listed file that is missing or
cut short is an error at opening; changed bytes are found by `dualform.store.audit`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from dualform.errors import CorruptError, FormatError
from dualform.identity.families import Facts
from dualform.lazy import compute as pc
from dualform.recording.rowcheck import SEVERITY
from dualform.store.blobs import Blob, Blobs, Tag
from dualform.store.derived_sums import StoredSums
from dualform.store.format import FINAL, INITIAL, MANIFEST, SHARES, STATE, UNEXPLAINED, rank_folder
from dualform.store.joined_ranks import cut_shards, join_columns_of, join_shards, published_steps
from dualform.store.manifest import Manifest
from dualform.store.parameter_check import join_parameters
from dualform.store.places import Place, as_blobs
from dualform.store.shard_reading import CallColumns, Shard
from dualform.store.tables import MARKS
from dualform.store.tensors import OpenFiles, TensorFile

if TYPE_CHECKING:
    from dualform.store.joined_shares import JoinedShares
    from dualform.store.run_files import StoredFiles
    from dualform.store.stored_rests import StoredRests
    from dualform.store.stored_shares import StoredShares

Others = tuple["Run | None", ...] | None
"""The runs of the processes after the first."""
MAX_OPEN_FILES = 100
MAX_FACTOR_SPARSITY = (
    64  # entries of the dense table (steps, micros) for each factor that is there; honest steps have 1
)
FREE_FACTORS = 1 << 16  # factors that are added to those of the run before the sparsity is looked at
MAPPED_RUN_BYTES = 5 << 28  # size of a run up to which all of its files are mapped at once


class Run(PatternSource):
    """A recorded run, opened for reading: a folder by its path, or wherever else it is kept."""

    def __init__(
        self, place: Place, *, known: tuple[Manifest, Tag] | None = None, rank: int = 0, others: "Others" = None
    ) -> None:
        """Open a run.

        Args:
            place: where it is kept.
            known: its manifest and the manifest's tag, where they were read already.
            rank: of which process of several these are the files; 0 for the whole run.
            others: the other processes of the run as they were opened elsewhere; by default they are opened now.
        """
        self.blobs = as_blobs(place)
        self.published, self.manifest_tag = Manifest.read_tagged(self.blobs) if known is None else known
        if self.published.rank != rank:
            raise FormatError(
                f"{self.blobs.location} has the patterns of process {self.published.rank} of a run; expected process "
                f"{rank}. Open the folder of the whole run."
            )
        self._check_sizes()
        self.others = self._opened_others() if others is None else others
        self.manifest = self._joined_manifest()
        size = sum(entry.bytes for shard in self.manifest.shards for entry in shard.files.values())
        files = OpenFiles(
            MAX_OPEN_FILES, keep_mapped=size <= MAPPED_RUN_BYTES and len(self.manifest.shards) <= MAX_OPEN_FILES
        )
        shards: list[Shard] = []
        for entry in self.manifest.shards:
            if entry.stop > entry.start:
                shards.append(Shard(self.blobs, entry, self.manifest, tuple(shards), files=files))
        self.shards = tuple(shards)
        self._parts: Sequence[PatternPart] = self.shards
        if self.others:
            by_rank = [self.shards, *(() if one is None else one.shards for one in self.others)]
            self._parts = join_shards(by_rank, self.manifest.processes, self.manifest.steps)
        self._facts: dict[str, tuple[Facts, Factors]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process open the run as it is seen here, whatever was published since."""
        return _opened_elsewhere, (self.blobs, self.published, self.manifest_tag, self.published.rank, self.others)

    def _opened_others(self) -> "tuple[Run | None, ...]":
        """Return the runs of the processes after the first, in the order of ranks, up to one that has begun none: None.

        The steps before its part hold for fewer processes, and those from there on were not published by all.
        """
        found: list[Run | None] = []
        for rank in range(1, max((count for _, count in self.published.processes), default=1)):
            place = self.blobs.within(rank_folder(rank))
            if place.size(MANIFEST) is None:
                begins = min(step for step, count in self.published.processes if count > rank)
                if self.published.steps > begins:  # no step is made before every process has begun its part
                    raise CorruptError(
                        f"{Blob(place, MANIFEST)} is missing, and process {rank} took part from step {begins} on. "
                        "Restore the folder from a copy of the run."
                    )
                found.append(None)
                break
            other = Run(place, rank=rank)
            for what in ("layers", "parameters"):
                if getattr(other.published, what) != getattr(self.published, what):
                    raise FormatError(
                        f"{Blob(place, MANIFEST)} has other {what} than the manifest of the run. Restore both from one "
                        "copy of the run."
                    )
            found.append(other)
        return tuple(found)

    def _joined_manifest(self) -> Manifest:
        """Return the manifest as far as all processes have published what it lists."""
        if not self.others:
            return self.published
        others = [None if one is None else one.published for one in self.others]
        steps = published_steps([self.published, *others])
        last = others[: self.published.processes[-1][1] - 1]  # those that recorded up to the end
        whole = steps == self.published.steps and all(one is not None and one.closed for one in last)
        known = [one for one in others if one is not None]
        rows = dict(self.published.rows)
        for name, check in [entry for one in known for entry in one.rows.items()]:
            if name not in rows or SEVERITY[check.outcome] > SEVERITY[rows[name].outcome]:
                rows[name] = check
        cut = cut_shards(self.published, steps)
        shares = cut.shares
        if shares is not None:
            kept = [set() if one is None or one.shares is None else set(one.shares.horizons) for one in others]
            both = tuple(step for step in shares.horizons if all(step in horizons for horizons in kept))
            shares = dataclasses.replace(shares, horizons=both)
        return dataclasses.replace(
            cut,
            shares=shares,
            closed=self.published.closed and whole,
            no_final=next((one.no_final for one in [self.published, *last] if one is not None and one.no_final), ""),
            columns=join_columns_of([self.published, *known]),
            rows=rows,
        )

    def last_others(self) -> "list[Run]":
        """Return the runs of the processes after the first that recorded the last steps."""
        count = self.published.processes[-1][1] if self.others else 1
        return [one for one in self.others[: count - 1] if one is not None]

    def all_shards(self) -> list[Shard]:
        """Return the shards of all processes."""
        return [*self.shards, *(shard for one in self.others if one is not None for shard in one.shards)]

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
            uncovered={**manifest.uncovered, **_trained_later(manifest)},
            rows=manifest.rows,
            closed=manifest.closed,
            no_final=manifest.no_final,
            created=manifest.created,
            versions=manifest.versions,
            factory=manifest.factory,
            factory_arguments=manifest.factory_arguments,
            training=manifest.training,
            processes=max((count for _, count in manifest.processes), default=1),
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
        if self.others:
            each = [None if one is None else one.digest for one in self.others]
            parts = (*parts, manifest.processes, each)  # type: ignore[assignment]
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
    def kept_shares(self) -> "StoredShares | JoinedShares | None":
        """The shares by group that the run keeps; None where it keeps none."""
        from dualform.store.stored_shares import StoredShares  # which reads this run

        if self.manifest.shares is None:
            return None
        if not self.others:
            return StoredShares(self, self.manifest.shares)
        from dualform.store.joined_shares import JoinedRows, JoinedShares  # which read this run

        count = 1 + len(self.others)
        others = [one for one in self.others if one is not None]
        kept = [(one, one.manifest.shares) for one in (self, *others)]
        each = [StoredShares(one, shares, processes=count) for one, shares in kept if shares is not None]
        return JoinedRows(self, each) if self.published.divided else JoinedShares(self, each)

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

    def parts(self) -> Sequence[PatternPart]:
        """Return the published shards in the order of steps; of several processes, joined."""
        return self._parts

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
        if (called := max((shard.most_micros() for shard in self.all_shards()), default=0)) > micros:
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
        return join_parameters(self._parameter_files(FINAL), self.manifest, states=False)

    def own_rows(self, which: Literal["initial", "final"]) -> dict[str, Tensor] | None:
        """Return the rows that one process keeps of the parameters, with the optimizer's warm state at the start."""
        if which == "final" and (not self.published.closed or self.published.no_final):
            return None
        return TensorFile(Blob(self.blobs, INITIAL if which == "initial" else FINAL)).tensors()

    def _start(self) -> dict[str, Tensor]:
        """Return the parameters at the start, and the optimizers' state that was warm then."""
        return join_parameters(self._parameter_files(INITIAL), self.manifest, states=True)

    def _parameter_files(self, name: str) -> list[TensorFile]:
        """Return the file of process 0 with parameters, and those of processes that keep rows of them."""
        theirs = self.last_others() if name == FINAL else self.others
        others = [one for one in theirs if one is not None and name in one.published.files]
        return [TensorFile(Blob(self.blobs, name)), *(TensorFile(Blob(one.blobs, name)) for one in others)]

    def require_values(self, layer: str) -> LayerEntry:
        """Return a layer's entry if its values are stored, or raise."""
        _ = self.initial  # whose shapes are those of everything that is rebuilt
        return super().require_values(layer)

    @cached_property
    def initial_states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer state that was warm at the start: parameter -> entry -> tensor."""
        return self.states_in(self._start())

    def states_in(self, start: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state among the tensors of the start: parameter -> entry -> tensor."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in start.items():
            if name not in self.manifest.parameters:
                entry, _, parameter = name.partition(STATE)
                states.setdefault(parameter, {})[entry] = tensor
        return states

    def files(self) -> dict[str, Any]:
        """Return every listed file with its entry, by the name that it lies under."""
        listed = self._own_files()
        for rank, one in enumerate(self.others, start=1):
            if one is not None:
                listed |= {f"{rank_folder(rank)}/{name}": entry for name, entry in one.files().items()}
        return listed

    def _own_files(self) -> dict[str, Any]:
        """Return the listed files of process 0."""
        listed = {entry.at or name: entry for name, entry in self.published.files.items()}
        for shard in self.published.shards:
            listed |= shard.files
        return listed

    def blob(self, name: str) -> Blob:
        """Return the file that the manifest lists under a name."""
        return Blob(self.blobs, self.manifest.files[name].at or name)

    def _check_sizes(self) -> None:
        listed = self._own_files()
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


def _trained_later(manifest: Manifest) -> dict[str, int]:
    """Return the uncovered parameters that an optimizer held at the end, with their numbers of elements."""
    return {
        name: math.prod(entry.shape)
        for name, entry in (manifest.uncovered_state or {}).items()
        if entry.kind == "trained" and not entry.reason
    }


def _opened_elsewhere(blobs: Blobs, manifest: Manifest, tag: Tag, rank: int, others: Others) -> Run:
    """Open a run that another process has opened."""
    return Run(blobs, known=(manifest, tag), rank=rank, others=others)
