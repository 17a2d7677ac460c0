"""What a run keeps of the model's state that no recorded layer covers, and how a reader puts it into a model.

Frozen parameters are published once, at the start, while they are small; larger ones are known by their checksums.
Trained uncovered parameters and buffers are published at closing, and while they are small also at the start and with
every shard, so that a run that grows or was cut off can be asked too, and the path that the training took. What cannot
be kept is listed with the reason.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from dualform.engine.beside_patterns import KnownState, lossy_text
from dualform.errors import QueryError
from dualform.recording.model_state import StatePart, live_state
from dualform.recording.sinks import sample
from dualform.recording.watch import plain_name
from dualform.store.blobs import Blob, Blobs, FileEntry
from dualform.store.format import FROZEN, STARTING, STORABLE_DTYPES, UNCOVERED, shard_files
from dualform.store.manifest import StateEntry
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile, publish_tensors, tensor_bytes
from dualform.torch_modes import without_gradients

FROZEN_BYTES = 64 << 20  # of all frozen parameters together, up to which they are kept by value
SHARD_STATE_BYTES = 16 << 20  # of all changing state together, up to which it is published with every shard

NOT_KNOWN = "the run was recorded by a version of dualform that did not keep it"
StateParts = Mapping[str, StatePart]


def digest(tensor: Tensor) -> str:
    """Return the xxh3 checksum of a tensor's bytes, as hexadecimal."""
    return xxhash.xxh3_64_hexdigest(tensor_bytes(tensor))


def _entry(part: StatePart, *, checked: bool) -> StateEntry:
    """Return the manifest's entry for a part of the state; its checksum is taken where `checked` says so."""
    if part.tensor is None:
        return StateEntry(part.kind, (), "", "", part.reason)
    try:
        mark = digest(part.tensor) if checked else ""
    except Exception as error:  # whatever it is, it must not end a training
        return StateEntry(part.kind, (), "", "", f"cannot be read ({type(error).__name__}: {error})")
    return StateEntry(part.kind, tuple(part.tensor.shape), str(part.tensor.dtype).removeprefix("torch."), mark)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _storable(parts: StateParts) -> dict[str, Tensor]:
    """Return the live tensors of the parts whose values can be kept."""
    return {
        name: part.tensor
        for name, part in parts.items()
        if part.tensor is not None and part.tensor.dtype in STORABLE_DTYPES
    }


def _total_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@dataclass(frozen=True, slots=True)
class ShardState:
    """The changing state after a shard's last step.

    Attributes:
        values: copies of the parts that are kept, each on its device or on its way from there.
        stale: the parts that have changed and are not kept.
    """

    values: Mapping[str, Tensor]
    stale: tuple[str, ...]


class StateKeeper:
    """Publishes the uncovered state of one recording. Its methods are called on the training thread."""

    def __init__(self, parts: Callable[..., StateParts | None] | None, *, divided_only: bool = False) -> None:
        """Keep the state of a model.

        Args:
            parts: finds it; None where none is kept.
            divided_only: whether to keep this process's rows of divided parts alone, as a process after the first does.
        """
        self._parts = parts
        self._divided_only = divided_only
        self._samples: dict[str, Tensor] = {}  # of frozen parameters at the start, to see whether they stay frozen

    def begin(self, blobs: Blobs) -> tuple[dict[str, StateEntry] | None, dict[str, FileEntry]]:
        """Publish the frozen parameters while they are small; return the manifest's entries and the new files."""
        parts = self._now()
        if parts is None:
            return None, {}
        entries = {name: _entry(part, checked=part.kind == "frozen") for name, part in parts.items()}
        frozen = {name: part for name, part in parts.items() if part.kind == "frozen" and part.tensor is not None}
        self._samples = {name: sample(part.tensor) for name, part in frozen.items() if part.tensor is not None}
        values = _storable(frozen)
        if not values or _total_bytes(values) > FROZEN_BYTES:
            return entries, {}
        return entries, {FROZEN: publish_tensors(blobs, FROZEN, _copied(values))}

    def publish_start(self, blobs: Blobs) -> dict[str, FileEntry]:
        """Publish the changing state as it is before the first step, while it is small; return the new file."""
        parts = self._now(extra=False) or {}
        values = _storable({name: one for name, one in parts.items() if one.kind != "frozen" and not one.divided})
        if not values or _total_bytes(values) > SHARD_STATE_BYTES:
            return {}
        return {STARTING: publish_tensors(blobs, STARTING, _copied(values))}

    def after_step(self) -> ShardState | None:
        """Return copies of the state that has changed since the start; None where the model's state cannot be read."""
        parts = self._now(extra=False)
        if parts is None:
            return None
        changing = {name: part for name, part in parts.items() if part.tensor is not None and self._changed(name, part)}
        values = _storable({name: part for name, part in changing.items() if not part.divided})
        if _total_bytes(values) > SHARD_STATE_BYTES:
            values = {}
        copies = {name: tensor.detach().clone() for name, tensor in values.items()}
        return ShardState(copies, tuple(name for name in changing if name not in values))

    def finish(
        self, blobs: Blobs, before: Mapping[str, StateEntry] | None
    ) -> tuple[dict[str, StateEntry] | None, dict[str, FileEntry]]:
        """Publish the state at closing; return the manifest's entries and the new files.

        Args:
            blobs: where the run is kept.
            before: the manifest's entries until now, by which frozen parameters are compared with their start.
        """
        parts = self._now()
        if parts is None:
            return None, {}
        entries = {name: _entry(part, checked=True) for name, part in parts.items()}
        values = _storable({name: part for name, part in parts.items() if part.kind != "frozen"})
        moved = _storable(
            {
                name: part
                for name, part in parts.items()
                if part.kind == "frozen" and entries[name] != (before or {}).get(name)
            }
        )
        values |= moved if _total_bytes(moved) <= FROZEN_BYTES else {}
        values = {name: tensor for name, tensor in values.items() if not entries[name].reason}
        return entries, {UNCOVERED: publish_tensors(blobs, UNCOVERED, _copied(values))} if values else {}

    def _now(self, *, extra: bool = True) -> StateParts | None:
        found = None if self._parts is None else self._parts(extra=extra and not self._divided_only)
        if found is None or not self._divided_only:
            return found
        return {name: part for name, part in found.items() if part.divided}

    def _changed(self, name: str, part: StatePart) -> bool:
        """Say whether a part may differ from its start; frozen parameters are recognised by a sample of elements."""
        if part.kind != "frozen" or name not in self._samples or part.tensor is None:
            return True
        now, then = sample(part.tensor), self._samples[name]
        return now.shape != then.shape or now.dtype != then.dtype or not torch.equal(now.to(then.device), then)


def known_state(run: Run) -> KnownState | None:
    """Return what a run knows of the uncovered state at its end; None for a run that was recorded without it.

    Of parts that were divided by rows the values of all processes that recorded its end are put together.
    """
    own = _own_known_state(run)
    divided = _divided_state(run)
    if own is None or not divided:
        return own
    every = [own, *(found for one in run.last_others() if (found := _own_known_state(one)) is not None)]
    values, checksums, unknown = dict(own.values), dict(own.checksums), dict(own.unknown)
    for name in divided:
        for kept in (values, checksums, unknown):
            kept.pop(name, None)
        rows = [one.values[name] for one in every if name in one.values]
        marks = [_mark_of_rows(one, name) for one in every]
        if len(rows) == len(every):
            values[name] = torch.cat(rows)
        elif all(marks) and not run.manifest.no_final and run.manifest.closed:
            checksums[name] = ",".join(marks)
        else:
            reasons = [one.unknown[name] for one in every if name in one.unknown]
            unknown[name] = reasons[0] if reasons else "is not kept by all processes that had rows of it"
    return KnownState(values, checksums, unknown)


def _divided_state(run: Run) -> set[str]:
    """Return the uncovered parts of which processes after the first keep rows."""
    return {name for one in run.last_others() for name in one.published.uncovered_state or ()}


def _mark_of_rows(state: KnownState, name: str) -> str:
    """Return the number of a process's rows and their checksum, as `_fits` reads them; empty where not known."""
    if name in state.values:
        return f"{len(state.values[name])}:{digest(state.values[name])}"
    return state.checksums.get(name, "")


def _fits(tensor: Tensor, mark: str) -> bool:
    """Say whether a tensor has a checksum, or each of its parts by rows the checksum beside their number."""
    if ":" not in mark:
        return digest(tensor) == mark
    parts = [part.split(":") for part in mark.split(",")]
    counts = [int(count) for count, _ in parts]
    if sum(counts) != len(tensor):
        return False
    return all(digest(rows) == one for rows, (_, one) in zip(tensor.split(counts), parts, strict=True))


def _own_known_state(run: Run) -> KnownState | None:
    """Return what the files of one process know of the uncovered state at the end of the run."""
    entries = run.published.uncovered_state
    if entries is None:
        return None
    last = run.manifest.shards[-1] if run.manifest.shards else None
    values = _read_tensors(run, FROZEN)
    latest: dict[str, Tensor] = {}  # values after the last step, whatever the manifest's checksums of the start say
    stale: frozenset[str] = frozenset()
    if run.manifest.closed and not run.manifest.no_final:
        values |= _read_tensors(run, UNCOVERED)
    elif last is not None and last.state_after == last.stop:
        latest = _read_tensors(run, shard_files(last.index)["uncovered"])
        stale = frozenset(last.stale)
    elif last is not None:
        stale = frozenset(entries)  # frozen parameters too may have been changed since the start
    divided = set(entries) if run.published.rank else _divided_state(run)
    known, checksums, unknown = dict(latest), {}, {}
    for name, entry in entries.items():
        if name in known:
            continue
        if entry.reason:
            unknown[name] = entry.reason
        elif name in values and name not in stale and _is_current(values[name], entry):
            known[name] = values[name]
        elif entry.xxh3 and name not in stale:
            checksums[name] = f"{entry.shape[0]}:{entry.xxh3}" if name in divided else entry.xxh3
        else:
            unknown[name] = "is not kept before the recording is closed"
    return KnownState(known, checksums, unknown)


def known_states(run: Run) -> list[tuple[int, Mapping[str, Tensor]]]:
    """Return the changing state wherever a run keeps it, with the number of steps after which it was so, ascending.

    A frozen parameter that was trained later, or changed otherwise, is as it was at the start until it is seen changed.
    """
    found: list[tuple[int, dict[str, Tensor]]] = [(0, _read_tensors(run, STARTING))]
    stale: list[tuple[str, ...]] = [()]
    for shard in run.manifest.shards:
        if shard.state_after == shard.stop:
            found.append((shard.stop, _read_tensors(run, shard_files(shard.index)["uncovered"])))
            stale.append(shard.stale)
    if run.manifest.closed and not run.manifest.no_final and (values := _read_tensors(run, UNCOVERED)):
        kept = [place for place, (steps, _) in enumerate(found) if steps < run.steps]
        found, stale = [*(found[place] for place in kept), (run.steps, values)], [stale[place] for place in kept]
        stale.append(())
    if divided := _divided_state(run):
        joined = known_state(run)
        for steps, values in found:
            for name in divided & values.keys():
                del values[name]
                if joined is not None and steps == run.steps and name in joined.values:
                    values[name] = joined.values[name]
    changing = {name for _, values in found for name in values} - divided
    start = {name: tensor for name, tensor in _read_tensors(run, FROZEN).items() if name in changing}
    for (_, values), too_large in zip(found, stale, strict=True):
        for name in start.keys() - values.keys() - set(too_large):
            values[name] = start[name]
    return [(steps, values) for steps, values in found if values]


def _read_tensors(run: Run, name: str) -> dict[str, Tensor]:
    """Return the tensors of one of the run's files; an empty dictionary where the manifest does not list the file."""
    if name not in run.files():
        return {}
    return TensorFile(Blob(run.blobs, name)).tensors()


def _is_current(value: Tensor, entry: StateEntry) -> bool:
    """Say whether a value is the one that the manifest's checksum describes."""
    return tuple(value.shape) == entry.shape and digest(value) == entry.xxh3


def restore(run: Run, model: nn.Module) -> dict[str, str]:
    """Put the kept values into a model; return the parts that are not as the recording left them, with the reason."""
    return _Restoring(run, model).doubts(put=True)


def differing(run: Run, model: nn.Module) -> dict[str, str]:
    """Return the uncovered parts of a model that are not as the recording left them; the model stays as it is."""
    return _Restoring(run, model).doubts(put=False)


class _Restoring:
    """The uncovered state of a run beside that of a model."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._state = known_state(run)
        self._model = model
        self._live = live_state(model, run.manifest.parameters)
        self._modules = {plain_name(path): module for path, module in model.named_modules()}

    def doubts(self, *, put: bool) -> dict[str, str]:
        if self._state is None:
            return dict.fromkeys(self._live, NOT_KNOWN)
        found = dict(self._state.unknown)
        for name, value in self._state.values.items():
            reason = self._put(name, value) if put else self._compare(name, digest(value), value)
            if reason:
                found[name] = reason
        for name, checksum in self._state.checksums.items():
            if reason := self._compare(name, checksum, None):
                found[name] = reason
        listed = {*self._state.values, *self._state.checksums, *found}
        return found | {name: "was not there when the run was recorded" for name in self._live if name not in listed}

    def _compare(self, name: str, mark: str, value: Tensor | None) -> str:
        live = self._live.get(name)
        if live is None:
            return "is missing in this model"
        if live.tensor is None:
            return live.reason
        if value is not None and live.tensor.dtype != value.dtype:
            live_value = live.tensor.to(value.dtype)
            return "" if digest(live_value) == mark else "differs from the kept values"
        return "" if _fits(live.tensor, mark) else "differs from the checksum that the run keeps"

    @without_gradients
    def _put(self, name: str, value: Tensor) -> str:
        """Copy a value into the model; a buffer of another shape, or one that is not there yet, is replaced."""
        live = self._live.get(name)
        path, _, leaf = name.rpartition(".")
        owner = self._modules.get(path)
        if live is not None and live.tensor is not None and live.tensor.shape == value.shape:
            # A buffer whose elements share memory cannot be written to; it is replaced below.
            with contextlib.suppress(RuntimeError):
                live.tensor.copy_(value)
                return lossy_text(live.tensor, value)
        if live is not None and live.kind != "buffer":
            shape = "not readable" if live.tensor is None else tuple(live.tensor.shape)
            raise QueryError(f"Parameter {name!r} is {tuple(value.shape)} in the memory, but {shape} in this model.")
        if owner is None or (leaf not in owner._buffers and hasattr(owner, leaf)):
            return "is missing in this model"
        device = next((p.device for p in self._model.parameters()), value.device)
        if leaf in owner._buffers:
            owner._buffers[leaf] = value.to(device)
        else:
            owner.register_buffer(leaf, value.to(device), persistent=False)
        return ""
