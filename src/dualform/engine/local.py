"""The executor for one machine: threads on a CPU, or one GPU. All tuning of passes lives here.

    block sizes      as many patterns at once as fit a processor's cache, or a GPU's memory
    threads          read and measure blocks side by side; a reducer takes them in order
    one reading      of the patterns for all passes of one layer and view
    device keys      keys that fit stay in a GPU's memory; all attention to them is one product
    distinct keys    are measured once, however many patterns have them (`distinct.py`)
    racing           finds the best of many patterns (`racing.py`)
    remembering      measures of all patterns, where they are few, for the next question about the same queries

`plain.py` gives the same answers without any of it.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.distinct import DistinctKeys, distinct_ranges, find_distinct
from dualform.engine.fold import run_folds
from dualform.engine.jobs import Fold, Job, Pass, Sweep
from dualform.engine.measures import PatternMeasure
from dualform.engine.racing import RacingBest
from dualform.engine.reading import BLOCK_PATTERNS, BlockReader, PatternRange, pattern_ranges, read_blocks
from dualform.engine.reducers import FEW_GROUPS, Best, Everything, GroupSums, Reducer, one_group
from dualform.engine.source import PatternSource
from dualform.engine.sweep import sweep_blocks
from dualform.identity.products import MAX_BATCHED_QUERIES, attend
from dualform.progress import bar
from dualform.threads import side_by_side

MAX_BLOCK_MEASURES = 1 << 24  # elements of a block's matrix of measures on a CPU
MAX_BLOCK_MEASURES_GPU = 1 << 26
MIN_BLOCK_PATTERNS_GPU = 1 << 14  # a GPU's launches cost more than few patterns
MAX_BLOCK_PATTERNS_FROM_FILES = 1 << 16
BLOCK_PATTERNS_MULTIPLE = 256  # products with other numbers of keys are up to a third slower
MAX_BLOCK_KEY_ELEMENTS = 1 << 21  # on a CPU: larger blocks leave its cache
MAX_QUERIES_READING_ONCE = 32  # up to so many queries read every key about once, in the cache or not
MAX_FREE_GPU_SHARE = 0.5  # of a GPU's free memory that keys of one layer may stay in
MAX_REMEMBERED_DISTINCT = 8  # views and layers whose distinct keys are remembered
MAX_REMEMBERED_MEASURES_BYTES = 64 << 20  # of the measures of one layer's patterns for some queries
MAX_REMEMBERED_BYTES = 256 << 20  # of all measures that are remembered
FIRST_SLICE_PATTERNS = 1 << 12  # remembered measures that are reduced at first: all of these are ranked
MAX_SLICE_PATTERNS = 1 << 16


class RunningReducer(Protocol):
    """A reducer at work: threads prepare blocks side by side, and one at a time is taken, in order."""

    def prepare(self, block: Block, measures: Tensor, groups_of: Tensor) -> Any:
        """Make of a block what `take` needs. It is taken before the same thread reads another block."""

    def take(self, prepared: Any) -> None:
        """Take in what was prepared of the next block."""

    def result(self) -> Any:
        """Return the answer."""


class LocalExecutor:
    """Runs jobs on this machine, passes of one layer and view together."""

    def __init__(self) -> None:
        self._device_keys: dict[Hashable, Tensor] = {}
        self._distinct: dict[Hashable, DistinctKeys | None] = {}
        self._remembered: OrderedDict[Hashable, tuple[weakref.ref[Tensor], Tensor]] = OrderedDict()
        self._lock = threading.Lock()  # of all three, which several threads may ask for; held for no work

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        """Return the result of each job."""
        if len(jobs) == 1 and (found := self._at_once(source, jobs[0])) is not None:
            return [found]
        folds = [job for job in jobs if isinstance(job, Fold)]
        folded = iter(run_folds(source, folds) if folds else ())
        passed = iter(self._run_passes(source, [job for job in jobs if not isinstance(job, Fold)]))
        return [next(folded if isinstance(job, Fold) else passed) for job in jobs]

    def _at_once(self, source: PatternSource, job: Job) -> Tensor | None:
        """Return the attention to all patterns of a layer, (Q, T), by one product with its keys on a GPU.

        None where something else is asked, where the keys do not lie on the GPU, or where the answer is known or large.
        Python that runs before the product is launched adds to the time of the answer; `_run_passes` runs more of it.
        """
        if type(job) is not Pass or type(job.reducer) is not Everything or type(job.measure) is not PatternMeasure:
            return None
        queries, layer = job.queries, job.layer
        if job.measure.of != "attention" or queries is None or job.groups is not None or job.values:
            return None
        keys = self._device_keys.get((source.digest, layer, job.like.device, job.dtype))
        if keys is None or job.rows is not None or job.block_patterns is not None:
            return None
        count = job.view.count(layer)
        if count != len(keys) or len(queries) * count > MAX_BLOCK_MEASURES_GPU:
            return None
        place = (source.digest, layer, job.view.key, "attention", None, id(queries))
        known = self._remembered.get(place)
        if known is not None and known[0]() is queries:  # not others: an `id` is used again when its tensor is gone
            return None
        measures = attend(queries, keys)
        if not job.again or measures.nbytes > MAX_REMEMBERED_MEASURES_BYTES:
            return measures
        self._remember(place, job, measures)
        return measures.clone()  # the remembered tensor stays ours

    def _run_passes(self, source: PatternSource, jobs: Sequence[Pass[Any]]) -> list[Any]:
        """Return the result of each pass and sweep, from remembered measures where there are any."""
        known: dict[Hashable, Tensor] = {}  # measures of all patterns, by name
        wanted: dict[Hashable, Pass[Any]] = {}  # jobs that find the measures that are not known yet
        places: list[Hashable | None] = []
        passes: list[Pass[Any]] = []
        for job in jobs:
            found = self._remembering(source, job)
            places.append(None if found is None else found[0])
            if found is None:
                passes.append(job)
            elif (measures := self._recall(*found)) is not None:
                known[found[0]] = measures
            else:
                wanted[found[0]] = found[1]
        results = self._run_together(source, [*passes, *wanted.values()])
        for (place, job), measures in zip(wanted.items(), results[len(passes) :], strict=True):
            known[place] = measures
            self._remember(place, job, measures)
        own = iter(results)
        return [
            next(own) if place is None else _reduce_known(job, known[place])
            for job, place in zip(jobs, places, strict=True)
        ]

    def _run_together(self, source: PatternSource, jobs: Sequence[Pass[Any]]) -> list[Any]:
        """Return the result of each job; jobs of one layer and view share one reading."""
        together: dict[Hashable, list[int]] = {}
        results: dict[int, Any] = {}
        for i, job in enumerate(jobs):
            place = (type(job), job.layer, job.view.key, job.like.device, job.dtype, job.coefficients_of)
            together.setdefault(place, []).append(i)
        for members in together.values():
            mine = [jobs[i] for i in members]
            sweeps = [job for job in mine if isinstance(job, Sweep)]
            found = _run_sweeps(source, sweeps) if sweeps else self._read_once(source, mine)
            results |= dict(zip(members, found, strict=True))
        return [results[i] for i in range(len(jobs))]

    def _read_once(self, source: PatternSource, passes: Sequence[Pass[Any]]) -> list[Any]:
        """Run passes of one layer and view over one reading of its patterns."""
        first = passes[0]
        layer, view, device = first.layer, first.view, first.like.device
        keys_only = not any(job.needs_values for job in passes)
        resident = self._keys_on_device(source, layer, device, first.dtype) if keys_only else None
        size = min(job.block_patterns or block_patterns(job) for job in passes)
        if resident is None:
            size = min(size, MAX_BLOCK_PATTERNS_FROM_FILES)
        distinct = self._usable_distinct(source, passes)
        running = [_running(job, distinct) for job in passes]
        if distinct is not None:
            ranges = list(distinct_ranges(source, layer, distinct.ids, size=size))
        elif resident is None or any(job.groups is not None and job.groups.known_by_part for job in passes):
            ranges = list(pattern_ranges(source, layer, horizon=view.horizon, mask=view.mask, size=size))
        else:
            every = view.patterns(layer)
            ranges = [PatternRange(None, every[s : s + size], s, 0) for s in range(0, len(every), size)]
        read: _ReadsFiles | _ReadsDevice = (
            _ReadsFiles(source, passes, size, keys_only=keys_only) if resident is None else _ReadsDevice(resident)
        )
        buffers = threading.local()

        def prepare(wanted: PatternRange) -> tuple[list[Any], int]:
            block = read(wanted)
            prepared = []
            for i, (job, reducer) in enumerate(zip(passes, running, strict=True)):
                measures = _measures(job, block, buffers, f"measures{i}", size)
                if job.groups is None or distinct is not None:
                    groups_of = one_group(len(wanted), device)
                else:
                    groups_of = job.groups.of(wanted, device)
                prepared.append(reducer.prepare(block, measures, groups_of))
            return prepared, len(wanted)

        total = view.count(layer) if distinct is None else len(distinct.ids)
        with bar(f"attending {layer}", total=total) as advance:

            def take(prepared: tuple[list[Any], int]) -> None:
                for reducer, one in zip(running, prepared[0], strict=True):
                    reducer.take(one)
                advance(prepared[1])

            if device.type == "cpu" and not any(job.reducer.needs_all_threads for job in passes):
                side_by_side(ranges, prepare, take)
            else:
                for wanted in ranges:
                    take(prepare(wanted))
        return [reducer.result() for reducer in running]

    def _remembering(self, source: PatternSource, job: Pass[Any]) -> tuple[Hashable, Pass[Any]] | None:
        """Return the job that finds the measures of all of a job's patterns, (Q, T), and the name of these measures.

        None where there are too many of them to be remembered, or where the job needs more than them.
        """
        measure, queries = job.measure, job.queries
        if job.block_patterns is not None or not isinstance(measure, PatternMeasure) or queries is None:
            return None
        if not job.again:
            return None
        if job.values or job.rows is not None or (job.groups is not None and job.groups.known_by_part):
            return None
        if measure.needs_values and measure.units is None:
            return None
        itemsize = torch.float32.itemsize if job.dtype is None else job.dtype.itemsize
        size = itemsize * len(queries) * job.view.count(job.layer)
        if not 0 < size <= MAX_REMEMBERED_MEASURES_BYTES:
            return None
        if measure.of == "magnitude":  # the absolute of attention
            measure = PatternMeasure("attention")
        units = None if measure.units is None else tuple(measure.units.tolist())
        place = (source.digest, job.layer, job.view.key, measure.of, units, id(queries))
        if type(job.reducer) is Everything and job.groups is None and measure is job.measure:
            return place, job
        return place, replace(job, measure=measure, groups=None, reducer=Everything())

    def _recall(self, place: Hashable, job: Pass[Any]) -> Tensor | None:
        """Return remembered measures, if they are of these very queries."""
        with self._lock:
            known = self._remembered.get(place)
        return known[1] if known is not None and known[0]() is job.queries else None

    def _remember(self, place: Hashable, job: Pass[Any], measures: Tensor) -> None:
        assert job.queries is not None, "measures are of queries"
        with self._lock:
            self._remembered[place] = (weakref.ref(job.queries), measures)
            for at in [at for at, (of, _) in self._remembered.items() if of() is None]:
                del self._remembered[at]
            while sum(kept.nbytes for _, kept in self._remembered.values()) > MAX_REMEMBERED_BYTES:
                self._remembered.popitem(last=False)

    def _keys_on_device(
        self, source: PatternSource, layer: str, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor | None:
        """Return all keys of a layer on a GPU, (T, d_in), where they fit; they stay there."""
        entry = source.layer(layer)
        dtype = dtype or (torch.float64 if entry.dtype == "float64" else torch.float32)
        place = (source.digest, layer, device, dtype)
        found = self._device_keys.get(place)
        if found is not None:
            return found
        count = source.count(layer)
        if count and fits_on_device(8 * count * entry.d_in, device):
            whole: Tensor | None = None
            for block in read_blocks(source, layer, horizon=source.steps, device=device, dtype=dtype):
                whole = block.keys.new_empty(count, block.keys.shape[1]) if whole is None else whole
                whole[int(block.patterns[0]) : int(block.patterns[-1]) + 1] = block.keys
            assert whole is not None, "a layer with patterns"
            self._device_keys[place] = whole
        return self._device_keys.get(place)

    def _usable_distinct(self, source: PatternSource, passes: Sequence[Pass[Any]]) -> DistinctKeys | None:
        """Return the layer's distinct keys where every pass can be answered from them."""
        job = passes[0]
        if job.like.device.type != "cpu" or not all(_can_be_distinct(job) for job in passes):
            return None
        place = (source.digest, job.layer, job.view.key)
        with self._lock:
            if place in self._distinct:
                return self._distinct[place]
        found = find_distinct(source, job.layer, job.view)
        with self._lock:
            while len(self._distinct) >= MAX_REMEMBERED_DISTINCT:
                self._distinct.pop(next(iter(self._distinct)))
            self._distinct[place] = found
        return found


def _reduce_known(job: Pass[Any], measures: Tensor) -> Any:
    """Return a pass's result from the measures of all its patterns, (Q, T): attention for magnitude."""
    if isinstance(job.measure, PatternMeasure) and job.measure.of == "magnitude":
        measures = measures.abs()
    if type(job.reducer) is Everything:
        return measures.clone()  # the remembered tensor stays ours
    patterns, device = job.view.patterns(job.layer), job.like.device
    running = _running(job, None)
    for part in _slices(len(patterns)) if device.type == "cpu" else [slice(0, len(patterns))]:
        block = Block(patterns[part], measures.new_empty(0, 0))
        if job.groups is None:
            groups_of = one_group(len(block.patterns), device)
        else:
            groups_of = job.groups.of(PatternRange(None, patterns[part], part.start, 0), device)
        running.take(running.prepare(block, measures[:, part], groups_of))
    return running.result()


def _slices(count: int) -> Iterator[slice]:
    """Yield slices of all patterns, each as long as all slices before it: few of each can then be among the best."""
    start = 0
    while start < count:
        stop = min(count, start + min(max(FIRST_SLICE_PATTERNS, start), MAX_SLICE_PATTERNS))
        yield slice(start, stop)
        start = stop


def _run_sweeps(source: PatternSource, jobs: Sequence[Sweep[Any]]) -> list[Any]:
    """Return the results of sweeps of one layer and view, each block taken by the fastest reducer."""
    running = [_running(job, None) for job in jobs]
    for place, block, measures, groups_of in sweep_blocks(source, jobs):
        running[place].take(running[place].prepare(block, measures, groups_of))
    return [reducer.result() for reducer in running]


def fits_on_device(size: int, device: torch.device) -> bool:
    """Say whether so many bytes may stay on a device. A CPU reads keys where they lie."""
    return device.type == "cuda" and size <= MAX_FREE_GPU_SHARE * torch.cuda.mem_get_info(device)[0]


def block_patterns(job: Pass[Any]) -> int:
    """Return how many patterns to measure at once: what memory allows, and on a CPU what its cache holds."""
    if job.queries is None:
        return BLOCK_PATTERNS
    count, width = job.queries.shape
    multiple = BLOCK_PATTERNS_MULTIPLE
    if job.queries.device.type != "cpu":
        return max(MIN_BLOCK_PATTERNS_GPU, MAX_BLOCK_MEASURES_GPU // max(count, 1) // multiple * multiple)
    times = 1 if count > MAX_QUERIES_READING_ONCE else 2 if count > MAX_BATCHED_QUERIES else 4
    most = min(times * BLOCK_PATTERNS, times * MAX_BLOCK_KEY_ELEMENTS // max(width, 1))
    size = min(most, MAX_BLOCK_MEASURES // max(count, 1))
    return max(multiple, size // multiple * multiple)


def _measures(job: Pass[Any], block: Block, buffers: threading.local, name: str, size: int) -> Tensor:
    """Return a block's measures, on a CPU in the calling thread's own memory, since new memory is slow to fill."""
    if job.measure is None or job.queries is None:
        return job.like.new_zeros(0)
    if job.queries.device.type != "cpu":
        return job.measure(job.queries, block)
    buffer = getattr(buffers, name, None)
    if buffer is None:
        buffer = torch.empty(size * len(job.queries), dtype=block.keys.dtype)
        setattr(buffers, name, buffer)
    return job.measure(job.queries, block, buffer)


class _ReadsFiles:
    """Reads ranges from the source, on a CPU into the calling thread's own memory."""

    def __init__(self, source: PatternSource, passes: Sequence[Pass[Any]], size: int, *, keys_only: bool) -> None:
        job = passes[0]
        entry = source.layer(job.layer)
        size = min(size, max((part.count(job.layer) for part in source.parts()), default=0))
        self._bytes = (8 * size * entry.d_in, 0 if keys_only else 8 * size * entry.d_out)
        self._device = job.like.device
        self._buffers = threading.local()
        self._reader = BlockReader(
            source,
            job.layer,
            horizon=job.view.horizon,
            values=not keys_only,
            of=job.coefficients_of,
            device=self._device,
            dtype=job.dtype,
            scaled=any(job.needs_whole_keys for job in passes),
        )

    def __call__(self, wanted: PatternRange) -> Block:
        if self._device.type != "cpu":
            return self._reader.read(wanted)
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = [torch.empty(count, dtype=torch.uint8) if count else None for count in self._bytes]
        return self._reader.read(wanted, *self._buffers.memory)


@dataclass(frozen=True, slots=True, eq=False)
class _ReadsDevice:
    """Cuts ranges out of keys that lie on a device."""

    keys: Tensor  # (T, d_in)

    def __call__(self, wanted: PatternRange) -> Block:
        patterns = wanted.rows + wanted.count_before if wanted.count_before else wanted.rows
        if len(patterns) == len(self.keys):
            return Block(patterns, self.keys)
        first, last = int(patterns[0]), int(patterns[-1])
        if last - first + 1 == len(patterns):
            return Block(patterns, self.keys[first : last + 1])
        return Block(patterns, self.keys[torch.from_numpy(patterns).to(self.keys.device)])


def _can_be_distinct(job: Pass[Any]) -> bool:
    """Say whether a pass needs nothing of a pattern but its key, its group and how many patterns share the key."""
    plain = type(job.reducer) is Everything or (type(job.reducer) is GroupSums and job.reducer.groups <= FEW_GROUPS)
    groups = job.groups is None or not job.groups.known_by_part
    return plain and groups and job.measure is not None and not job.needs_values and job.like.device.type == "cpu"


def _running(job: Pass[Any], distinct: DistinctKeys | None) -> RunningReducer:
    """Return the fastest way to reduce a pass; a reducer that is derived from one of ours has methods of its own."""
    reducer = job.reducer
    view = job.view
    if type(reducer) is Everything:
        if distinct is not None:
            return _RepeatedEverything(job, distinct)
        return _InPlaceEverything(job, view.patterns(job.layer))
    if type(reducer) is GroupSums and distinct is not None:
        every = PatternRange(None, np.arange(view.count(job.layer)), 0, 0)
        groups_of = one_group(len(every), torch.device("cpu"))
        if job.groups is not None:
            groups_of = job.groups.of(every, torch.device("cpu"))
        return _CountedSums(job.new_state(), distinct, distinct.counts(groups_of, reducer.groups, torch.float32))
    if type(reducer) is Best:
        return RacingBest(reducer, job.new_state())
    return _Merging(job) if reducer.is_small else _Adding(job)


class _Merging:
    """Reduces each block by itself, side by side, and merges the small states in order."""

    def __init__(self, job: Pass[Any]) -> None:
        self._job = job
        self._reducer: Reducer[Any, Any] = job.reducer
        self._state = job.new_state()

    def prepare(self, block: Block, measures: Tensor, groups_of: Tensor) -> Any:
        return self._reducer.add(self._job.new_state(), block, measures, groups_of)

    def take(self, prepared: Any) -> None:
        self._state = self._reducer.merge(self._state, prepared)

    def result(self) -> Any:
        return self._reducer.result(self._state)


class _Adding(_Merging):
    """Adds each block to one large state, in order."""

    def prepare(self, block: Block, measures: Tensor, groups_of: Tensor) -> Any:
        return block, measures.contiguous(), groups_of

    def take(self, prepared: Any) -> None:
        self._state = self._reducer.add(self._state, *prepared)


class _InPlaceEverything:
    """`reducers.Everything`, with each block's measures put in their place at once."""

    def __init__(self, job: Pass[Any], patterns: npt.NDArray[np.int64]) -> None:
        self._rows = len(job.queries) if job.queries is not None and job.rows is None else job.rows or 0
        self._patterns = patterns  # (T,) of all blocks that will come, ascending
        self._measures: Tensor | None = None
        self._lock = threading.Lock()

    def prepare(self, block: Block, measures: Tensor, groups_of: Tensor) -> None:
        if len(block.patterns) == len(self._patterns) and measures.device.type != "cpu":
            self._measures = measures  # all there is, in memory that is not used again
            return
        start = int(np.searchsorted(self._patterns, block.patterns[0]))
        with self._lock:
            if self._measures is None:
                self._measures = measures.new_empty(self._rows, len(self._patterns))
        self._measures[:, start : start + len(block.patterns)] = measures

    def take(self, prepared: None) -> None:
        pass

    def result(self) -> Tensor:
        return torch.zeros(self._rows, 0) if self._measures is None else self._measures


class _RepeatedEverything(_InPlaceEverything):
    """`reducers.Everything` over distinct keys: each pattern has the measure of its key."""

    def __init__(self, job: Pass[Any], distinct: DistinctKeys) -> None:
        super().__init__(job, distinct.ids)
        self._places = torch.from_numpy(distinct.places)

    def result(self) -> Tensor:
        return super().result()[:, self._places]


class _CountedSums:
    """`reducers.GroupSums` over distinct keys: a measure counts as often as patterns of a group have its key."""

    def __init__(self, state: Tensor, distinct: DistinctKeys, counts: Tensor) -> None:
        self._state = state  # (Q, G)
        self._ids = distinct.ids
        self._counts = counts  # (G, U)

    def prepare(self, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        start = int(np.searchsorted(self._ids, block.patterns[0]))
        counts = self._counts[:, start : start + len(block.patterns)].to(measures.dtype)
        return (counts @ measures.T).T

    def take(self, prepared: Tensor) -> None:
        self._state += prepared

    def result(self) -> Tensor:
        return self._state
