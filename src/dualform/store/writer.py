"""The disk sink: a background thread that turns steps into published shards.

The training thread only queues; encoding and checksums happen on the writer's thread, and while it writes a shard
another one waits for the disk to have the shard before. A shard always ends between two steps, so what the manifest
lists is a whole number of steps. Resuming is prepared elsewhere (`dualform.store.resume`).
"""

import contextlib
import datetime
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dualform._version import __version__
from dualform.engine.description import LayerEntry, ParameterEntry, Stored, TrainingEntry
from dualform.engine.proofs import ParameterMarker
from dualform.errors import CorruptError, RefusedError, ResumeError, RunExistsError, StoreError
from dualform.identity.unfolding import Unfolding
from dualform.recording.annotations import Binding
from dualform.recording.estimate import size_text
from dualform.recording.keep import Keep, Patterns, Steps, keeps_patterns
from dualform.recording.media import Files
from dualform.recording.sinks import CallRecord, LayerStart, PreparedStep, Start, StepFacts
from dualform.recording.surroundings import find_surroundings
from dualform.recording.watch import Dtype, StoredDtype, stored_dtype, stores_inputs
from dualform.store.blobs import Blob, Blobs, FileEntry
from dualform.store.format import FINAL, FROZEN, INITIAL, MANIFEST, STARTING, STATE, rank_folder
from dualform.store.host_copy import HostCopier, HostCopy
from dualform.store.kept_state import ShardState, StateKeeper
from dualform.store.manifest import Manifest, SharesEntry
from dualform.store.queue import MAX_WAIT_SECONDS, ByteQueue
from dualform.store.reader import Run
from dualform.store.resume import as_stored, count_updates, find_step, join_at, resume_at
from dualform.store.shard_writing import ShardWriter
from dualform.store.tables import check_columns
from dualform.store.taken_steps import AccumulatedCalls, PooledLayers, TakenRows, TakenStep
from dualform.store.tensors import TensorFile, publish_tensors
from dualform.threads import start_alone

Snapshot = dict[str, Tensor]

PUBLISH_SECONDS = 30.0
"""How long steps may wait to be published: a program that is killed loses no more than these."""

WAIT_SECONDS = 60.0
"""How long a new recording waits for an interrupted one of this process, whose thread is still publishing."""


@dataclass(frozen=True, slots=True)
class _Seal:
    """Publish what was taken so far; the parameters as they were then."""

    parameters: Snapshot
    state: ShardState | None  # the uncovered state as it was then, where that is known
    wait: bool  # whether it has to be on the disk before the next item is looked at
    copy: HostCopy  # of these tensors, which may be on their way


@dataclass(frozen=True, slots=True)
class _Attachment:
    """Files to publish beside the patterns."""

    files: Files


_writing: dict[Hashable, tuple[int, "weakref.ref[DiskWriter]"]] = {}
"""The identity of blobs that are being written -> the process that writes, and its writer."""


def _writer_here(blobs: Blobs) -> "DiskWriter | None":
    """Return the writer of this process that holds the lease of a run, if there is one."""
    process, writer = _writing.get(blobs.identity(), (0, None))
    return writer() if writer is not None and process == os.getpid() else None


def _occupied_text(blobs: Blobs) -> str:
    """Say who writes a run whose lease cannot be had."""
    if _writer_here(blobs) is not None:
        return (
            f"{blobs.location} is still being recorded to by this process: an earlier recorder was started and not "
            "closed. Call its close(), or drop every reference to it; or choose another folder."
        )
    return f"{blobs.location} is being recorded to by another process. Choose another folder."


class DiskWriter:
    """A sink that writes a run folder. Made by `dualform.record`."""

    def __init__(
        self,
        blobs: Blobs,
        *,
        dtype: Dtype,
        shard_bytes: int,
        queue_bytes: int,
        resume: bool | int,
        steps: int | None,
        factory: str | None,
        factory_arguments: Mapping[str, Any],
        keep: Sequence[Keep] = (Patterns(),),
        training: str | None = None,
    ) -> None:
        self.blobs = blobs
        self.path = blobs.location  # as messages call the run
        self.rank = 0  # the number of this process among those that record the run
        self.place = blobs  # where the files of this process are kept
        self.dtype = dtype
        self.taken_bytes = 0  # of the keys and values of all steps handed over
        self.shares: SharesEntry | None = None  # how shares are grouped that another sink keeps beside the patterns
        self.checkpoints: tuple[int, ...] | None = None  # of a run that is made from checkpoints: those so far
        self._shard_bytes = shard_bytes
        self._resume = resume
        self._planned = steps
        self._factory = factory
        self._factory_arguments = dict(factory_arguments)
        self._keep = keep
        again = any(isinstance(one, Steps) for one in keep)
        self._training = TrainingEntry(training, surroundings=find_surroundings()) if again else None
        self._queue: ByteQueue[TakenStep | _Seal | _Attachment] = ByteQueue(queue_bytes)
        self._worker: threading.Thread | None = None
        self._ended = False  # whether the worker was told that nothing more will come
        self._over = True  # whether no worker runs, so that nothing more is published by one
        self._over_calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # a wake-up call at the worker's end
        self._locked = False  # whether the folder's lock is ours
        self._left = False  # whether the training thread publishes no more either
        self._unsealed = 0  # bytes handed over since the last seal
        self._sealed_at = time.monotonic()
        self._checked = False
        self._hole: BaseException | None = None  # the error that kept a step from being taken; none can follow it
        self._columns: dict[str, str] = {}
        self._accumulated = AccumulatedCalls({}, PooledLayers())
        self._copier = HostCopier()
        self._moments: list[_Seal | None] = []  # of a step that was made and is to come: what ends a shard there
        self._shards = ShardWriter(blobs, Manifest({}, {}, (), {}))
        self._keeper = StateKeeper(None)
        self._divided: frozenset[str] = frozenset()  # parameters of which each process keeps its own rows
        self._stack = ExitStack()

    # On the training thread ---------------------------------------------------------------------------------------

    def open(self, start: Start) -> int:
        """Begin a run, or continue one; return the number of the first step to come.

        Of several processes the first has to open its writer before the others, which join the run where it begins.
        """
        self.rank = start.rank
        if self.rank:
            self.place = self.blobs.within(rank_folder(self.rank))
        self._divided = frozenset(start.divided)
        self._shards = ShardWriter(self.place, self._describe(start))
        self._accumulated = self._new_accumulated(PooledLayers())
        kept = start.state if start.divided or not self.rank else None
        self._keeper = StateKeeper(kept, divided_only=self.rank > 0)
        steps = 0
        try:
            self.place.make_ready()
            self._take_lock()
            if self.rank:
                steps = self._join(start)
            elif self.blobs.size(MANIFEST) is not None and not self._is_half_begun():
                self._continue(start)
            else:
                self._begin(start)
            self._over = False
            self._worker = start_alone(self._work, name="dualform-writer")
        except BaseException as error:
            if not self._over:  # the thread may run by now; it ends, and has nothing to publish
                self._ended = True
                self._queue.close()
            try:
                self._remove_unborn()
            finally:
                self._unlock()
            if isinstance(error, OSError) and not isinstance(error, StoreError | RunExistsError):
                raise StoreError(f"{self.path} cannot be written: {error}. Choose another folder.") from error
            raise
        return steps if self.rank else self._shards.manifest.steps

    def _remove_unborn(self) -> None:
        """Remove the files of a run whose beginning failed before its manifest: they would pass for somebody else's."""
        if self._locked and self.place.size(MANIFEST) is None:
            self.place.remove_unpublished()
            for name in (INITIAL, FROZEN, STARTING):
                with contextlib.suppress(OSError):
                    self.place.remove(name)

    def _take_lock(self) -> None:
        """Hold the folder's lock; an interrupted recording of this process may still be publishing there."""
        if not self._stack.enter_context(self.place.lease()):
            self._stack.close()
            earlier = _writer_here(self.place)
            if earlier is not None and earlier._left:
                earlier._wait_for_worker(WAIT_SECONDS)
            if not self._stack.enter_context(self.place.lease()):
                raise RunExistsError(_occupied_text(self.place))
        self._locked = True
        place = self.place.identity()
        _writing[place] = (os.getpid(), weakref.ref(self))
        self._stack.callback(_writing.pop, place, None)

    def updates(self) -> Mapping[str, int]:
        """Return how many updates of each parameter the run holds, those before a warm start included."""
        return count_updates(Run(self.blobs))

    def check(self, binding: Binding) -> None:
        """Raise `AnnotationError` where a column has changed its type."""
        check_columns(self._columns, binding)

    def wants_values(self, layer: str) -> bool:
        """Say whether the values of a layer are stored, or looked at before they are."""
        return self._accumulated.stores(layer)

    def takes_inputs(self, layer: str) -> bool:
        """Say whether the inputs of a layer are stored in place of its keys."""
        return self._shards.manifest.layers[layer].unfolding is not None

    def needs_whole_steps(self) -> bool:
        """Say whether the run keeps steps, to be made again."""
        return self._training is not None

    def call(self, record: CallRecord) -> None:
        """Keep a call's patterns until their step, or until they are discarded."""
        self._accumulated.add(record)

    def before_step(self, prepared: PreparedStep) -> None:
        """Do nothing: a run folder keeps no state of the optimizer during a training."""

    def stepped(self, snapshot: Callable[[], Snapshot]) -> None:
        """Note that a step was made that is to come: where it will end a shard, the model's state is read now."""
        self._moments = [self._look(snapshot) if self._is_full(self._accumulated.nbytes()) else None]

    def _is_full(self, more_bytes: int = 0) -> bool:
        """Say whether a shard ends here, with some more bytes."""
        late = time.monotonic() - self._sealed_at >= PUBLISH_SECONDS
        return self._unsealed + more_bytes >= self._shard_bytes or late

    def step(self, facts: StepFacts) -> None:
        """Queue a step; every `shard_bytes` a shard is sealed."""
        moments, self._moments = self._moments, []
        self._check_whole()
        try:
            self._queue.wait_for_room(self._accumulated.nbytes())  # before memory is taken for the copies
            taken = self._accumulated.join(self._own_facts(facts) if self.rank else facts)
            if not self._checked:
                self._check_space(taken)
            size = taken.nbytes
            self._queue.put(taken, size)
        except BaseException as error:
            self._hole = error
            raise
        self._unsealed += size
        self.taken_bytes += size
        if moments:  # the model may have gone on since
            if moments[0] is not None:
                self._put_seal(moments[0])
        elif self._is_full():
            self._put_seal(self._look(facts.snapshot))

    def _own_facts(self, facts: StepFacts) -> StepFacts:
        """Return a step without what is the same in every process, which process 0 logs: settings, factors, samples.

        Where the training is to be run again, every process logs the marks of its own parameters and calls.
        """
        if self._training is None:
            return replace(facts, facts=(), samples={})
        return replace(facts, facts=[one._replace(settings={}, factors=()) for one in facts.facts])

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the patterns of some backwards; what was queued stays queued."""
        self._accumulated.discard(backwards)

    def state(self) -> Mapping[str, Any]:
        """Return nothing: a resumed recording finds all that it needs in the run."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing, as there is nothing to take."""

    def publish_beside(
        self, publish: Callable[[Blobs, Manifest], Mapping[str, Any]], snapshot: Callable[[], Snapshot]
    ) -> Manifest:
        """Publish everything taken so far, and then files of another sink beside it.

        Args:
            publish: publishes files, given the place and the manifest, and returns what changes in the manifest.
            snapshot: copies the parameters as the last step left them.
        """
        self.flush(snapshot)
        try:
            self._shards.check_alone()
            self._shards.publish_manifest(**publish(self.place, self._shards.manifest))
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self.path} cannot be written: {error}.") from error
        return self._shards.manifest

    def attach(self, files: Files) -> None:
        """Queue files; they are published before anything that is handed over later. Process 0 keeps them for all."""
        self._check_whole()
        if self.rank:
            return
        size = sum(
            len(content) if isinstance(content, str) else sum(tensor.nbytes for tensor in content.values())
            for content in files.values()
        )
        self._queue.put(_Attachment(files), size)

    def flush(self, snapshot: Callable[[], Snapshot]) -> None:
        """Publish everything taken so far before returning."""
        self._check_whole()
        self._put_seal(self._look(snapshot, wait=True))
        self._queue.join()

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Publish everything, then the final parameters, then say so in the manifest."""
        if self._hole is not None:
            self._keeper = StateKeeper(None)  # the model has moved on since the last step that was taken
        try:
            self._drain({} if self._hole else {name: tensor.clone() for name, tensor in final.items()})
            self._check_whole()
            try:
                self._shards.check_alone()
                if self.rank:
                    files = self._shards.manifest.files | self._publish_rows(FINAL, final)
                    state, more = self._keeper.finish(self.place, self._shards.manifest.uncovered_state)
                    self._shards.publish_manifest(closed=True, files=files | more, uncovered_state=state)
                    return
                entry = publish_tensors(self.blobs, FINAL, final)
                state, files = self._keeper.finish(self.blobs, self._shards.manifest.uncovered_state)
                self._shards.publish_manifest(
                    closed=True, files={**self._shards.manifest.files, FINAL: entry, **files}, uncovered_state=state
                )
            except OSError as error:
                raise StoreError(f"The final parameters could not be written: {error}.") from error
        finally:
            self._release()

    def close_without_final(self, reason: str) -> None:
        """Publish everything, then say in the manifest that the run is closed, and why it has no final parameters."""
        self._keeper = StateKeeper(None)  # the rest of the model is not as the last step left it either
        try:
            self._drain({})
            self._check_whole()
            try:
                self._shards.publish_manifest(closed=True, no_final="" if self.rank and not self._divided else reason)
            except OSError as error:
                raise StoreError(f"The end of the recording could not be written: {error}.") from error
        finally:
            self._release()

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        """Return the published step after which the parameters were these, or None."""
        return find_step(Run(self.blobs), parameters)

    def abandon(self) -> None:
        """Publish what was taken, and stop; the run stays open for `resume`.

        After the end there is nothing to do. After an end that was interrupted this returns at once: what was taken is
        published in the background, and the folder stays locked until that is done.
        """
        self._keeper = StateKeeper(None)  # the parameters may be those of no step
        try:
            with contextlib.suppress(StoreError):
                self._drain({})
        finally:
            self._release()

    def _drain(self, parameters: Snapshot) -> None:
        """Publish everything taken, and let the worker end before anybody else may write."""
        if self._ended:
            return
        self._ended = True
        if self._over:  # the worker never began, or has failed
            self._queue.check()
            return
        try:
            self._put_seal(self._look(lambda: parameters, wait=True))
            self._queue.join()
        except Exception:
            self._queue.close()
            self._wait_for_worker()
            raise
        except BaseException:  # a Ctrl-C while closing: the worker publishes the rest without anybody who waits for it
            self._queue.close()
            raise
        self._queue.close()
        self._wait_for_worker()

    def _wait_for_worker(self, seconds: float = math.inf) -> None:
        """Return when the worker has ended, or after some seconds.

        `Thread.join` is not used for waiting: after a Ctrl-C it takes the thread for ended, whether it has or not.
        """
        end = time.monotonic() + seconds
        while not self._over and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                self._over_calls.get(timeout=MAX_WAIT_SECONDS)
        if self._over and self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()

    def _release(self) -> None:
        """Free the folder's lock: now, or where the worker has not ended yet, at its end."""
        self._left = True
        self._accumulated.clear()
        if self._over:
            self._unlock()

    def _unlock(self) -> None:
        self._locked = False
        with contextlib.suppress(IndexError):  # both threads may come here, and one of them finds nothing left to undo
            self._stack.close()

    def _check_whole(self) -> None:
        if self._hole is not None:
            raise StoreError(
                f"An earlier step was not recorded ({self._hole}), so later ones cannot be added to it. "
                "What was published before stays readable. Continue from a checkpoint with resume=True."
            )

    def _describe(self, start: Start) -> Manifest:
        return Manifest(
            layers={
                name: LayerEntry(
                    kind=layer.kind,
                    d_in=layer.d_in,
                    d_out=layer.d_out,
                    uses=layer.uses,
                    store=self._store(name, layer),
                    dtype=self._stored_dtype(name, layer) or _name(start.parameters[layer.uses[0].parameter].dtype),
                    optional=layer.optional,
                    unfolding=self._unfolding(name, layer, start.parameters[layer.uses[0].parameter].dtype),
                )
                for name, layer in start.layers.items()
            },
            parameters={
                name: ParameterEntry(
                    start.divided[name].shape if name in start.divided else tuple(tensor.shape), _name(tensor.dtype)
                )
                for name, tensor in start.parameters.items()
            },
            optimizers=start.optimizers,
            uncovered=dict(start.uncovered),
            batch_axis=start.batch_axis,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={"dualform": __version__, "torch": torch.__version__},
            factory=self._factory,
            factory_arguments=self._factory_arguments,
            shares=self.shares,
            training=self._training,
            checkpoints=self.checkpoints,
            rank=start.rank,
            divided=bool(start.divided),
            processes=((0, start.processes),) if start.processes > 1 and not start.rank else (),
        )

    def _unfolding(self, name: str, layer: LayerStart, trained: torch.dtype) -> Unfolding | None:
        """Return how keys are taken from inputs, if these are stored in their place.

        A run that keeps steps is compared with replays by the checksums of its keys.
        """
        if layer.unfolding is None or self._training is not None:
            return None
        return layer.unfolding if stores_inputs(layer.unfolding, self._stored_dtype(name, layer), trained) else None

    def _stored_dtype(self, name: str, layer: LayerStart) -> StoredDtype | None:
        """Return the dtype in which a layer's patterns are stored; None for the one that is trained."""
        return None if self._store(name, layer) == "steps" else stored_dtype(self.dtype, name)

    def _store(self, name: str, layer: LayerStart) -> Stored:
        """Return what is stored of a layer's patterns."""
        if self._training is None or keeps_patterns(self._keep, name):
            return "keys" if layer.keys_only else "shares" if layer.shares_only else "keys+values"
        if layer.keys_only:
            raise RefusedError(
                f"Layer {name!r} is recorded with its keys only, and keep=Steps() stores none of its patterns. Leave "
                'out its "keys", or store them: keep=[Steps(), Patterns(layers=[...])].'
            )
        return "steps"

    def _begin(self, start: Start) -> None:
        if self._resume is not False and self._resume is not True:
            raise ResumeError(f"{self.path} holds no run to resume at step {self._resume}.")
        self.blobs.remove_unpublished()
        initial = publish_tensors(self.blobs, INITIAL, _start_tensors(start))
        entries, files = self._keeper.begin(self.blobs)
        files |= self._keeper.publish_start(self.blobs)
        self._shards.publish_manifest(files={INITIAL: initial, **files}, uncovered_state=entries)

    def _is_half_begun(self) -> bool:
        """Say whether a run has no steps yet, nor all rows of its parameters; then nothing is left of it.

        Some of its processes were killed before they had published their rows, so that it holds nothing to continue.
        """
        run = Run(self.blobs)
        if self._resume is False or run.steps or not run.published.divided:
            return False
        try:
            _ = run.initial
        except CorruptError:
            for rank in reversed(range(max(count for _, count in run.published.processes))):
                (self.blobs.within(rank_folder(rank)) if rank else self.blobs).remove(MANIFEST)
            return True
        return False

    def _continue(self, start: Start) -> None:
        if self._resume is False:
            raise RunExistsError(
                f"{self.path} holds a recorded run already. Pass resume=True to continue it from a "
                "checkpoint, or choose another folder."
            )
        step = None if self._resume is True else int(self._resume)
        pooled = self._shards.continue_from(*resume_at(self.blobs, self._shards.manifest, start, step))
        self._accumulated = self._new_accumulated(pooled)
        self._columns = dict(self._shards.manifest.columns)
        state, files = self._keeper.begin(self.blobs)
        self._shards.publish_manifest(files={**self._shards.manifest.files, **files}, uncovered_state=state)

    def _join(self, start: Start) -> int:
        """Join the run that process 0 has just begun or continued, and return the number of its first step to come."""
        first = Manifest.read(self.blobs)
        step = first.steps
        if self.place.size(MANIFEST) is None:
            self._shards.manifest = as_stored(first, self._shards.manifest)
            self._accumulated = self._new_accumulated(PooledLayers())
            self.place.remove_unpublished()
            files = self._publish_rows(INITIAL, _start_tensors(start)) if not step and self._begins(start) else {}
            self._publish_divided_state(files)
            return step
        pooled = self._shards.continue_from(*join_at(self.place, self._shards.manifest, step))
        self._accumulated = self._new_accumulated(pooled)
        self._columns = dict(self._shards.manifest.columns)
        self._publish_divided_state(self._shards.manifest.files)
        return step

    def _publish_divided_state(self, files: Mapping[str, FileEntry]) -> None:
        """Publish the manifest of a process after the first, with its files and what it keeps of divided state."""
        state, more = self._keeper.begin(self.place)
        self._shards.publish_manifest(files={**files, **more}, uncovered_state=state)

    def _begins(self, start: Start) -> bool:
        """Say whether the first rows of divided parameters, which process 0 has, are those of as many processes."""
        places = TensorFile(Blob(self.blobs, INITIAL)).places
        counts = {name: math.ceil(rows.shape[0] / start.processes) for name, rows in start.divided.items()}
        return all(places[name].shape[:1] == (count,) for name, count in counts.items())

    def _publish_rows(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, FileEntry]:
        """Publish a process's own rows of divided parameters, and of the optimizer's state of these."""
        owner = {key: key.rpartition(STATE)[2] for key in tensors}
        mine = {
            key: tensor
            for key, tensor in tensors.items()
            if owner[key] in self._divided and tensor.shape == tensors[owner[key]].shape
        }
        return {name: publish_tensors(self.place, name, mine)} if mine else {}

    def _new_accumulated(self, pooled: PooledLayers) -> AccumulatedCalls:
        """Return what takes the calls of a recording whose manifest is there."""
        return AccumulatedCalls(
            self._dtypes(),
            pooled,
            unstored=[name for name, layer in self._shards.manifest.layers.items() if layer.store == "steps"],
            inputs=self._with_inputs(),
            marker=None if self._training is None else ParameterMarker(),
            rank=self.rank,
        )

    def _dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype that each layer is stored in."""
        return {name: getattr(torch, layer.dtype) for name, layer in self._shards.manifest.layers.items()}

    def _with_inputs(self) -> list[str]:
        """Return the layers whose inputs are stored in place of their keys."""
        return [name for name in self._shards.manifest.layers if self.takes_inputs(name)]

    def _check_space(self, record: TakenStep) -> None:
        self._checked = True
        need = self._shard_bytes if self._planned is None else self._planned * self._stored_bytes(record)
        free = self.blobs.free_bytes()
        if free is not None and free < need:
            per = "one shard" if self._planned is None else f"{self._planned} steps"
            raise StoreError(
                f"{self.path} has {size_text(free)} free, but {per} will take {size_text(need)}. "
                'Choose another disk, fewer layers, keys only, dtype="float16" or dtype="int8".'
            )

    def _stored_bytes(self, record: TakenStep) -> int:
        def size(taken: TakenRows | None, layer: str) -> int:
            if taken is None:
                return 0
            dtype = stored_dtype(self.dtype, layer)
            if taken.encoded or dtype is None or not taken.rows.is_floating_point() or taken.rows.dim() == 1:
                return taken.nbytes
            itemsize: int = getattr(torch, dtype).itemsize
            return itemsize * taken.rows.numel() + 4 * len(taken.rows)  # and a scale for each row

        return sum(size(rows, call.layer) for call in record.calls for rows in (call.keys, call.values))

    def _look(self, snapshot: Callable[[], Snapshot], *, wait: bool = False) -> _Seal:
        """Return what ends a shard here: the parameters and the uncovered state as they are now, on their way."""
        # Nothing where they are not those of the last step; then the rest is not either. Process 0 keeps both.
        parameters = {} if self.rank else snapshot()
        state = self._keeper.after_step() if parameters else None
        if self._divided:
            parameters = {}  # of which no process has all rows
        values = {} if state is None else state.values
        copy = self._copier.copy([*parameters.values(), *values.values()])
        here = iter(copy.tensors)
        parameters = {name: next(here) for name in parameters}
        state = None if state is None else replace(state, values={name: next(here) for name in values})
        return _Seal(parameters, state, wait, copy)

    def _put_seal(self, seal: _Seal) -> None:
        """Let the shard so far end."""
        self._queue.put(seal, sum(tensor.nbytes for tensor in seal.copy.tensors))
        self._unsealed = 0
        self._sealed_at = time.monotonic()

    # On the writer's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._publish_all()
        finally:
            self._over = True
            if self._left:
                self._unlock()
            self._over_calls.put(None)

    def _publish_all(self) -> None:
        """Take the items of the queue to its end, and publish them."""
        try:
            for item in self._queue:
                if isinstance(item, TakenStep):
                    item.wait()
                    item.compact()
                    self._shards.take(item)
                elif isinstance(item, _Attachment):
                    self._shards.attach(item.files)
                else:
                    item.copy.wait()
                    self._shards.write(item.parameters, item.state)
                    if item.wait:
                        self._shards.settle()
            if not self._queue.failed:
                self._shards.write({}, None)  # an interrupt may have come before the last seal
            self._shards.settle()
        except Exception as error:  # handed to the training thread, which raises it
            self._shards.drop()
            self._queue.fail(error)
            with contextlib.suppress(Exception):
                self._shards.settle()


def _start_tensors(start: Start) -> dict[str, Tensor]:
    """Return the parameters at the start, and the optimizers' state that is warm already, as they are published."""
    tensors = dict(start.parameters)
    for name, state in start.states.items():
        tensors |= {f"{entry}{STATE}{name}": tensor for entry, tensor in state.items()}
    return tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
