"""Make a run of checkpoints and of the data between them: a training that nobody recorded and nobody can run again.

From each checkpoint the optimizer's steps are taken again on the batches of its interval, recorded as in a training; at
the end of the interval the model is put to the next checkpoint. What the steps do not explain of the change between the
two checkpoints is measured and kept. To measure it, the recorded steps are also taken from the first checkpoint on
without ever being put anywhere: that is what the patterns alone make of the parameters.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.engine.explanation import IntervalRest
from dualform.errors import ReplayError
from dualform.progress import bar
from dualform.recording.recorder import Recorder
from dualform.recording.unwrap import unwrap_all
from dualform.recording.watch import Dtype, Layers, plain_name
from dualform.store.blobs import Blobs
from dualform.store.format import unexplained_file
from dualform.store.manifest import Manifest
from dualform.store.places import Place, as_blobs
from dualform.store.stored_rests import publish_rests
from dualform.store.writer import DiskWriter
from dualform.torch_modes import with_gradients, without_gradients

Checkpoint = Mapping[str, Tensor] | str | os.PathLike[str] | Callable[[], Mapping[str, Tensor]]
"""The state of a model: a state dict, the path of one, or a function that returns one."""
Batches = Sequence[Iterable[Any]] | Callable[[int], Iterable[Any]]
"""The batches of each interval: one iterable for each, or a function of the number of the interval, from 0."""
Rates = Sequence[float] | Callable[[int], float]
"""The learning rates: one for each interval, or a function of the number of the step, from 0."""
INTERVAL = "interval"
"""The column that says between which checkpoints a pattern comes from: 0 for the first two."""
SHARD_BYTES = 128 << 20
QUEUE_BYTES = 512 << 20
MAX_NAMED = 3
"""Number of names that differ that an error lists."""


def record_between_checkpoints(
    make_model: Callable[[], nn.Module],
    checkpoints: Sequence[Checkpoint],
    batches: Batches,
    loss: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]],
    path: Place,
    *,
    rates: Rates | None = None,
    columns: Callable[[Any], Mapping[str, Any]] | None = None,
    layers: Layers = None,
    dtype: Dtype = None,
    batch_axis: int | None = None,
    factory: str | None = None,
    factory_arguments: Mapping[str, Any] | None = None,
) -> None:
    """Write the run that `dualform.from_checkpoints` opens; it says what the arguments are."""
    _check_lengths(checkpoints, batches, rates)
    model = make_model()
    _load(model, _read(checkpoints[0], 0), 0)
    made = make_optimizer(model)
    optimizers = unwrap_all(made)
    _check_rates(optimizers, rates)
    free = _FreeSteps(model, optimizers)
    arrival = _Arrival(model, optimizers)
    writer = DiskWriter(
        as_blobs(path),
        dtype=dtype,
        shard_bytes=SHARD_BYTES,
        queue_bytes=QUEUE_BYTES,
        resume=False,
        steps=None,
        factory=factory,
        factory_arguments=factory_arguments or {},
    )
    writer.checkpoints = ()
    recorder = Recorder(model, made, writer, layers=layers, batch_axis=batch_axis)
    with arrival, recorder, bar("between checkpoints", total=len(checkpoints) - 1) as advance:
        rests = _Rests(model, writer, free, recorder)
        for interval, state in _intervals(checkpoints):
            count = 0
            for batch, is_last in _with_last(batches(interval) if callable(batches) else batches[interval]):
                _set_rates(optimizers, rates, interval, recorder.step)
                recorder.annotate(**_columns_of(batch, columns, interval))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                _backward(loss, model, batch)
                free.step()
                arrival.state = state if is_last else None
                for optimizer in optimizers:
                    optimizer.step()
                count += 1
            if not count:
                raise ReplayError(
                    f"There are no batches between checkpoints {interval} and {interval + 1}. Give the batches of each "
                    "interval anew (an iterator can be used once), or leave out one of the checkpoints."
                )
            rests.publish()
            advance(1)


def _columns_of(batch: Any, columns: Callable[[Any], Mapping[str, Any]] | None, interval: int) -> dict[str, Any]:
    """Return the columns of a batch, with that of its interval."""
    found = {} if columns is None else columns(batch)
    if INTERVAL in found:
        raise ReplayError(
            f"columns(batch) returned a column {INTERVAL!r}, which says between which checkpoints a pattern comes "
            "from. Give yours another name."
        )
    return {INTERVAL: interval, **found}


def _check_lengths(checkpoints: Sequence[Checkpoint], batches: Batches, rates: Rates | None) -> None:
    if len(checkpoints) < 2:
        raise ReplayError(
            f"There are {len(checkpoints)} checkpoints; expected at least two: the change between them is explained."
        )
    for what, given in (("batches", batches), ("rates", rates)):
        if given is None or callable(given):
            continue
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise TypeError(
                f"{what} is a {type(given).__name__}; expected a sequence with one entry for each interval, or a "
                "function."
            )
        if len(given) != len(checkpoints) - 1:
            raise ReplayError(
                f"There are {what} for {len(given)} intervals; expected {len(checkpoints) - 1}, one for each pair of "
                f"neighbouring checkpoints, of which there are {len(checkpoints)}."
            )


def _check_rates(optimizers: Sequence[Optimizer], rates: Rates | None) -> None:
    found = sorted({float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups})
    if rates is not None and len(found) > 1:
        raise ReplayError(
            f"rates would give one learning rate to parameter groups with different ones ({found[0]:g}, {found[1]:g}). "
            "Leave rates out, and change the groups' rates where the batches are made."
        )


def _set_rates(optimizers: Sequence[Optimizer], rates: Rates | None, interval: int, step: int) -> None:
    if rates is None:
        return
    rate = rates(step) if callable(rates) else rates[interval]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


@with_gradients
def _backward(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> None:
    found = loss(model, batch)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ReplayError(
            f"loss(model, batch) returned {what}; expected one number with gradients, as the training minimised it."
        )
    found.backward()


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last one."""
    iterator = iter(batches)
    nothing = object()
    batch = next(iterator, nothing)
    while batch is not nothing:
        following = next(iterator, nothing)
        yield batch, following is nothing
        batch = following


def _intervals(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """Yield the number of each interval and the checkpoint at its end, read when it is needed."""
    for place in range(1, len(checkpoints)):
        yield place - 1, _read(checkpoints[place], place)


def _read(checkpoint: Checkpoint, place: int) -> Mapping[str, Tensor]:
    """Return the state dict of a checkpoint."""
    found: Any
    if isinstance(checkpoint, str | os.PathLike):
        file = Path(checkpoint)
        if not file.is_file():
            raise ReplayError(f"Checkpoint {place} is to be read from {file}, which is no file.")
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
    else:
        found = checkpoint() if callable(checkpoint) else checkpoint
    if not isinstance(found, Mapping):
        raise ReplayError(f"Checkpoint {place} is a {type(found).__name__}; expected a model's state dict.")
    if wrong := [name for name, entry in found.items() if not isinstance(entry, Tensor)]:
        raise ReplayError(
            f"Checkpoint {place} holds {wrong[0]!r}, a {type(found[wrong[0]]).__name__} and no tensor. Give the "
            'model\'s state dict alone, for example lambda: torch.load(path, weights_only=True)["model"].'
        )
    return {plain_name(name): tensor for name, tensor in found.items()}


@without_gradients
def _load(model: nn.Module, state: Mapping[str, Tensor], place: int) -> None:
    """Put a model to a checkpoint, or raise where it is one of another model."""
    own = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    lacking, strange = [n for n in own if n not in state], [n for n in state if n not in own]
    if lacking or strange:
        listed = [f"lacks {name!r}" for name in lacking[:MAX_NAMED]] + [f"has {name!r}" for name in strange[:MAX_NAMED]]
        raise ReplayError(
            f"Checkpoint {place} is not one of the model that make_model returns: it {', '.join(listed)}. Give "
            "checkpoints and a function of the same model."
        )
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise ReplayError(
                f"Checkpoint {place} is not one of the model that make_model returns: {name!r} is "
                f"{tuple(state[name].shape)}, and {tuple(tensor.shape)} in the model."
            )
        tensor.copy_(state[name])


class _Arrival:
    """Puts the model to a checkpoint at the end of a step, before the recorder looks at it: hooks of the optimizers.

    Each optimizer's own parameters are put there when it has stepped, and all other state after the last optimizer.

    Attributes:
        state: the checkpoint at which the coming step ends; None where it ends where it leads.
    """

    state: Mapping[str, Tensor] | None = None

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._place = 0
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = [one.register_step_post_hook(self._after_step) for one in self._optimizers]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @without_gradients
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.state is None:
            return
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in mine and plain_name(name) in self.state:
                parameter.copy_(self.state[plain_name(name)])
        if optimizer is self._optimizers[-1]:
            self._place += 1
            _load(self._model, self.state, self._place)


class _FreeSteps:
    """The recorded steps, taken from the first checkpoint on and never put to another: what patterns alone make."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._live = optimizers
        self._free = [copy.deepcopy(optimizer) for optimizer in optimizers]
        self._pairs = [
            pair
            for live, free in zip(self._live, self._free, strict=True)
            for groups in zip(live.param_groups, free.param_groups, strict=True)
            for pair in zip(*(group["params"] for group in groups), strict=True)
        ]
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self.parameters = {names[id(live)]: free for live, free in self._pairs}

    def step(self) -> None:
        """Take the step that is about to be recorded, with the same settings and gradients."""
        for live, free in self._pairs:
            free.grad = None if live.grad is None else live.grad.clone()
        for live_optimizer, free_optimizer in zip(self._live, self._free, strict=True):
            groups = zip(live_optimizer.param_groups, free_optimizer.param_groups, strict=True)
            for live_group, free_group in groups:
                free_group.update({name: setting for name, setting in live_group.items() if name != "params"})
            free_optimizer.step()


class _Rests:
    """Measures and publishes, at each checkpoint, what the steps so far do not explain of it."""

    def __init__(self, model: nn.Module, writer: DiskWriter, free: _FreeSteps, recorder: Recorder) -> None:
        self._writer = writer
        self._free = free
        self._recorder = recorder
        every = {plain_name(name): one for name, one in model.named_parameters(remove_duplicate=False)}
        self._live = {name: every[name] for name in Manifest.read(writer.blobs).parameters}
        self._first = self._at_checkpoint()
        self._before = self._first, self._explained()
        self._step = 0

    def _at_checkpoint(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().double() for name, parameter in self._live.items()}

    def _explained(self) -> dict[str, Tensor]:
        """Return the parameters as the recorded steps alone make them; those that no optimizer holds as they are."""
        return {
            name: self._free.parameters.get(name, parameter).detach().cpu().double().clone()
            for name, parameter in self._live.items()
        }

    @without_gradients
    def publish(self) -> None:
        """Keep what is not explained of the checkpoint that the last step has reached."""
        now, explained = self._at_checkpoint(), self._explained()
        before, explained_before = self._before
        step = self._recorder.step
        unexplained = {name: now[name] - explained[name] for name in now}
        change = {name: now[name] - before[name] for name in now}
        rest = {name: change[name] - (explained[name] - explained_before[name]) for name in now}
        interval = IntervalRest(self._step, step, _norms(rest), _norms(change))
        whole = IntervalRest(
            0, step, _norms(unexplained), _norms({name: now[name] - self._first[name] for name in now})
        )
        stored = {name: tensor.to(self._live[name].dtype) for name, tensor in unexplained.items()}

        def publish(blobs: Blobs, manifest: Manifest) -> dict[str, Any]:
            entry = publish_rests(blobs, step, stored, interval, whole)
            files = {**manifest.files, unexplained_file(step): entry}
            return {"files": files, "checkpoints": (*(manifest.checkpoints or ()), step)}

        self._recorder.flush()
        self._writer.publish_beside(
            publish, lambda: {name: parameter.detach().cpu().clone() for name, parameter in self._live.items()}
        )
        self._before, self._step = (now, explained), step


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor.norm()) for name, tensor in tensors.items()}
