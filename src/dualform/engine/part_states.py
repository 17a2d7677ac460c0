"""A pass in pieces for executors of several processes: what one part adds to a question, and the merging of parts.

Every executor that uses this file cuts a pass in the same way, whoever computes a piece: one state per part, from
blocks whose size follows from the pass alone, merged from the first part to the last. So an answer is the same to the
bit for any number of workers, as long as their processors compute alike.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import Tensor

from dualform.engine.addresses import Calls
from dualform.engine.fold import run_folds
from dualform.engine.jobs import Fold, Groups, Job, Pass, Sweep
from dualform.engine.reading import BlockReader, PatternRange, kept_by_part, kept_rows
from dualform.engine.reducers import one_group
from dualform.engine.source import PatternPart, PatternSource, Rows
from dualform.engine.sweep import run_sweep
from dualform.errors import QueryError

MAX_PIECE_MEASURES = 1 << 22  # elements of a block's matrix of measures
MAX_PIECE_KEY_ELEMENTS = 1 << 21  # elements of a block's keys: larger blocks leave a processor's cache
MIN_PIECE_PATTERNS = 256
SOURCE = "source"  # stands for the source in a job that is sent


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a pass.

    Attributes:
        index: names the part.
        count_before: how many patterns lie in earlier parts, kept or not.
        kept_before: how many of them the view keeps.
        codes: (n,) the group of each kept pattern of the part; None where the pass has no groups, or finds them itself.
    """

    index: int
    count_before: int
    kept_before: int
    codes: Tensor | None


def pieces_of(source: PatternSource, job: Pass[Any]) -> list[Piece]:
    """Return the parts of a pass that have kept patterns."""
    groups = None if job.groups is None or job.groups.known_by_part else job.groups
    cpu = torch.device("cpu")
    found = []
    for part, rows, before, kept_before in kept_by_part(
        source, job.layer, horizon=job.view.horizon, mask=job.view.mask
    ):
        if len(rows):
            wanted = PatternRange(part, rows, kept_before, before)
            codes = None if groups is None else groups.of(wanted, cpu).to(torch.int32, copy=True)
            found.append(Piece(part.index, before, kept_before, codes))
    return found


def without_codes(job: Pass[Any]) -> Pass[Any]:
    """Return a pass whose groups travel with its pieces."""
    known = job.groups is None or job.groups.known_by_part
    return job if known else replace(job, groups=None)


class HeldKeys:
    """Keys of parts that stay in memory between questions, within a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._held: dict[tuple[str, int, str], tuple[_HeldRows, int]] = {}

    def rows(self, source: str, part: PatternPart, layer: str) -> Rows:
        """Return a layer's keys in a part: held, or, where they do not fit, as the part reads them."""
        at, rows = (source, part.index, layer), part.rows(layer, "keys")
        if at not in self._held:
            size = part.key_bytes(layer)
            if self._bytes + size > self._limit:
                return rows
            self._held[at] = _HeldRows(*rows.take(slice(None))), size
            self._bytes += size
        return self._held[at][0]

    def forget(self, source: str) -> None:
        """Let go of the keys of a source."""
        for at in [at for at in self._held if at[0] == source]:
            self._bytes -= self._held.pop(at)[1]


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """Rows in memory, with their scales where they are row-scaled."""

    stored: Tensor
    scales: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def __len__(self) -> int:
        return len(self.stored)

    def take(self, index: slice | Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.stored[index], None if self.scales is None else self.scales[index]


class _HeldPart(PatternPart):
    """A part whose keys may be held."""

    def __init__(self, source: str, part: PatternPart, held: HeldKeys) -> None:
        self.index, self.start, self.stop = part.index, part.start, part.stop
        self._source, self._part, self._held = source, part, held

    def calls(self, layer: str) -> Calls:
        return self._part.calls(layer)

    def rows(self, layer: str, what: Literal["keys", "values"]) -> Rows:
        return self._held.rows(self._source, self._part, layer) if what == "keys" else self._part.rows(layer, what)

    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray | None:
        return self._part.annotation(name, keep=keep)


def part_states(
    source: PatternSource, job: Pass[Any], pieces: Sequence[Piece], held: HeldKeys
) -> Iterator[tuple[int, Any]]:
    """Yield the reducer's state of each piece, with the index of its part; on the CPU."""
    reader = BlockReader(
        source,
        job.layer,
        horizon=job.view.horizon,
        values=job.needs_values,
        of=job.coefficients_of,
        dtype=job.dtype,
    )
    size = _piece_patterns(source, job)
    parts = {part.index: part for part in source.parts()}
    for piece in pieces:
        part = _HeldPart(source.digest, parts[piece.index], held)
        rows = kept_rows(parts[piece.index], job.layer, job.view.horizon, job.view.mask)
        state = job.new_state()
        for start in range(0, len(rows), size):
            wanted = PatternRange(part, rows[start : start + size], piece.kept_before + start, piece.count_before)
            block = reader.read(wanted)
            measured = torch.empty(0)
            if job.measure is not None and job.queries is not None:
                measured = job.measure(job.queries, block)
            groups_of = _groups_of(job.groups, piece, wanted, start)
            state = job.reducer.add(state, block, measured, groups_of)
        yield piece.index, state


def merged(job: Pass[Any], states: Mapping[int, Any]) -> Any:
    """Return the result of a pass from the states of its parts, merged from the first part to the last."""
    total = job.new_state()
    for index in sorted(states):
        total = job.reducer.merge(total, states[index])
    return job.reducer.result(total)


def require_cpu(jobs: Sequence[Job]) -> None:
    """Raise where a job wants to be computed on a GPU: workers compute on processors."""
    for job in jobs:
        if isinstance(job, Pass) and job.like.device.type != "cpu":
            raise QueryError(
                f"The queries are on {job.like.device}, but workers of other processes compute on CPUs. Move the model "
                'to the CPU, or ask with executor="local".'
            )


def _piece_patterns(source: PatternSource, job: Pass[Any]) -> int:
    """Return how many patterns are measured at once, which follows from the pass and the layer alone."""
    if job.block_patterns:
        return job.block_patterns
    rows = job.rows if job.rows is not None else 0 if job.queries is None else len(job.queries)
    most = min(MAX_PIECE_MEASURES // max(rows, 1), MAX_PIECE_KEY_ELEMENTS // max(source.layer(job.layer).d_in, 1))
    return max(MIN_PIECE_PATTERNS, most)


def _groups_of(groups: Groups | None, piece: Piece, wanted: PatternRange, start: int) -> Tensor:
    if piece.codes is not None:
        return piece.codes[start : start + len(wanted)].long()
    cpu = torch.device("cpu")
    return one_group(len(wanted), cpu) if groups is None else groups.of(wanted, cpu)


# Jobs that travel -----------------------------------------------------------------------------------------------------


class _Sender(pickle.Pickler):
    """Writes a job, with a word instead of the source, which the receiver has."""

    def __init__(self, file: BytesIO, source: PatternSource) -> None:
        super().__init__(file, protocol=5)
        self._source = source

    def persistent_id(self, found: Any) -> str | None:
        return SOURCE if found is self._source else None


class _Receiver(pickle.Unpickler):
    """Reads a job that is about the receiver's own source."""

    def __init__(self, file: BytesIO, source: PatternSource) -> None:
        super().__init__(file)
        self._source = source

    def persistent_load(self, found: Any) -> PatternSource:
        assert found == SOURCE, "nothing else is left out of a job"
        return self._source


def send_job(source: PatternSource, job: Job) -> bytes:
    """Return a job as bytes for another process of ours that has opened the same source."""
    file = BytesIO()
    try:
        _Sender(file, source).dump(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise QueryError(
            f"A question of {source.name} cannot be sent to another process: {error}. Ask it with "
            'executor="local", or define its classes in a module.'
        ) from error
    return file.getvalue()


def receive_job(source: PatternSource, content: bytes) -> Any:
    """Return a job that another process of ours has sent."""
    return _Receiver(BytesIO(content), source).load()


def send_source(source: PatternSource) -> bytes:
    """Return a source as bytes, by which another process can open it."""
    try:
        return pickle.dumps(source, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise QueryError(
            f"{source.name} cannot be opened by other processes ({error}). Keep the run in a folder that all of them "
            'see, or in object storage, or ask with executor="local".'
        ) from error


# Folds and sweeps, by parameter ---------------------------------------------------------------------------------------


def folds_by_parameter(jobs: Sequence[Job]) -> dict[str, list[Fold[Any]]]:
    """Return for each parameter the folds about it alone, in the order of the jobs that name it."""
    found: dict[str, list[Fold[Any]]] = {}
    for job in jobs:
        if isinstance(job, Fold):
            for name in job.parameters:
                found.setdefault(name, []).append(replace(job, parameters=(name,)))
    return found


def folds_joined(jobs: Sequence[Job], found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the result of each fold from those of `folds_by_parameter`."""
    rest = {name: iter(results) for name, results in found.items()}
    for job in jobs:
        if isinstance(job, Fold):
            yield {name: next(rest[name])[name] for name in job.parameters}


def run_onlookers_here(
    run: Callable[[PatternSource, Sequence[Job]], list[Any]], source: PatternSource, jobs: Sequence[Job]
) -> list[Any]:
    """Return the result of each job: folds with an onlooker run in this process, the other jobs by `run`.

    An onlooker sees all parameters together after each step, so that its fold cannot be cut by parameters.
    """
    here = [isinstance(job, Fold) and job.onlooker is not None for job in jobs]
    other = iter(run(source, [job for job, mine in zip(jobs, here, strict=True) if not mine]))
    folds = [job for job in jobs if isinstance(job, Fold) and job.onlooker is not None]
    folded = iter(run_folds(source, folds) if folds else ())
    return [next(folded if mine else other) for mine in here]


def run_whole(source: PatternSource, jobs: Sequence[Fold[Any] | Sweep[Any]]) -> list[Any]:
    """Return the results of folds and sweeps, which cannot be cut by parts."""
    folds = [job for job in jobs if isinstance(job, Fold)]
    folded = iter(run_folds(source, folds) if folds else ())
    return [next(folded) if isinstance(job, Fold) else run_sweep(source, job) for job in jobs]
