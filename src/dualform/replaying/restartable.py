"""`dualform.Restartable`: a training in pieces, `init()`, `step(state, batch)`, `batches[i]`, that can start anywhere.

It is a training function like any other. Beyond that, its state can be kept between two steps and put back, so that a
replay need not begin at the first step.
"""

import random
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dualform.errors import ReplayError
from dualform.replaying.training import Recording

State = MutableMapping[str, Any]
"""The state of a training by name: `"model"`, `"optimizer"`, and whatever else changes from step to step."""
SampleLosses = Callable[[nn.Module, Any], Tensor]
"""Of the model and a batch: the loss of each sample, (B,)."""
GENERATORS = "generators"
"""The name under which the global generators of random numbers are kept beside the user's entries."""
PLAIN = (bool, int, float, str, type(None))


class KeepPoint(Protocol):
    """Keeps the state of a training between two steps, where it wants to."""

    def __call__(self, step: int, take: Callable[[], dict[str, Any]], settle: Callable[[], None], /) -> None:
        """Look at a training before a step.

        Args:
            step: the number of the step.
            take: returns the training's state.
            settle: sees to it that all steps before have been handed to the recording's sink.
        """


class BatchesByNumber(Protocol):
    """The batches of a training: a list, a tensor of indices, or anything with a length and numbered entries."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Restartable:
    """A training in pieces. `dualform.record_training` and `dualform.open(path, train=...)` take it as a function.

        def init():
            torch.manual_seed(0)
            model = make_model()
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

        def step(state, batch):                                        # exactly one step of the optimizer
            state["optimizer"].zero_grad()
            cross_entropy(state["model"](batch["images"]), batch["labels"]).backward()
            state["optimizer"].step()

        train = dualform.Restartable(init, step, batches, columns=lambda batch: {"label": batch["labels"]})
        model = dualform.record_training(train, "runs/lm")

    A replay of it keeps restart points, every sqrt(S) of S steps, in the run's folder `restart/`. Later replays begin
    at the point before the steps that are asked for, and a replay after a kill finds the points of the one before.
    """

    def __init__(
        self,
        init: Callable[[], State],
        step: Callable[[Any, Any], Any],
        batches: BatchesByNumber,
        *,
        columns: Callable[[Any], Mapping[str, Any]] | None = None,
        loss: SampleLosses | None = None,
        max_norm: float | None = None,
        every: int | None = None,
        **options: Any,
    ) -> None:
        """Put a training together.

        Args:
            init: returns the state before the first step, a dictionary. `"model"` and `"optimizer"` (one, or a list)
                must be in it. Every entry has `state_dict` and `load_state_dict` (schedulers, scalers, averages), is a
                `torch.Generator`, or is made of numbers, texts, tensors, lists and dictionaries; the last are
                replaced in the dictionary by the step itself, as in `state["seen"] += 1`. All that is drawn at random
                is seeded here.
            step: takes the state and a batch, and takes exactly one step of the optimizer.
            batches: the batches, by number: `batches[i]` is that of step i, the same whenever it is asked for.
            columns: returns the columns of a batch, as `Recorder.annotate` takes them.
            loss: returns the loss of each sample of a batch, (B,), given the model and the batch: the mean of them is
                what a step minimises. Needed for `effects(method="unrolled")` alone, which compares it with every step.
            max_norm: what a step holds the norm of all gradients to, with `torch.nn.utils.clip_grad_norm_`, if it does;
                for the same question.
            every: how many steps lie between two restart points; by default the root of their number.
            options: what is recorded, as `dualform.record` takes it (`layers`, `batch_axis`, ...).
        """
        if every is not None and every < 1:
            raise ValueError(f"every is {every}; expected a number of steps, from 1 on.")
        self._init = init
        self._step = step
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; expected a positive number, or None for no clipping.")
        self.batches = batches
        self.every = every
        self.loss = loss
        self.max_norm = max_norm
        self._columns = columns
        self._options = options

    def columns_of(self, batch: Any) -> Mapping[str, Any]:
        """Return the columns of a batch."""
        return {} if self._columns is None else self._columns(batch)

    def __call__(self, recording: Recording) -> nn.Module:
        """Run the whole training, and return its model."""
        return self.run(recording)

    def run(
        self,
        recording: Recording,
        *,
        first: int = 0,
        point: "Mapping[str, Any] | None" = None,
        keep: "KeepPoint | None" = None,
        begin: Callable[[State], None] | None = None,
    ) -> nn.Module:
        """Run the training from a step on, and return its model.

        Args:
            recording: opens the recording.
            first: the number of the first step to take.
            point: the state before that step, as `take_point` returned it; None at the beginning.
            keep: is called before each step.
            begin: is called with the state before the first step that is taken.
        """
        state = self._init()
        if not isinstance(state, MutableMapping) or not {"model", "optimizer"} <= state.keys():
            raise ReplayError(
                f"init() returned {type(state).__name__}; expected a dictionary with the entries 'model' and "
                "'optimizer', and whatever else changes from step to step."
            )
        if point is not None:
            put_back(state, point)
        if begin is not None:
            begin(state)
        model: nn.Module = state["model"]
        with recording(model, state["optimizer"], **self._options) as recorder:
            for number in range(first, len(self.batches)):
                if keep is not None:
                    keep(number, lambda: take_point(state), recorder.flush)
                batch = self.batches[number]
                if self._columns is not None:
                    recorder.annotate(**self.columns_of(batch))
                self._step(state, batch)
                if not recorder.closed and recorder.step != number + 1:
                    raise ReplayError(
                        f"step(state, batch) took {recorder.step - number} steps of the optimizer for batch {number}; "
                        "expected exactly 1. Accumulate gradients inside of step, and give it all that it needs as "
                        "one batch."
                    )
        return model


def take_point(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of all that a training's state holds, and of the global generators, as tensors and plain values."""
    found = {name: _copied(_read(name, entry), name) for name, entry in state.items()}
    return found | {GENERATORS: _read_generators()}


def put_back(state: State, point: Mapping[str, Any]) -> None:
    """Give a training's state, as `init` returned it, the values of a point; raise where they do not fit."""
    try:
        _put_back(state, point)
    except ReplayError:
        raise
    except Exception as error:  # whatever the training's own entries raise for values that are not theirs
        raise ReplayError(
            f"The restart point does not fit the training ({type(error).__name__}: {error}). Delete the folder "
            "restart/ of the run: it is made anew."
        ) from error


def _put_back(state: State, point: Mapping[str, Any]) -> None:
    if lacking := [name for name in state if name not in point]:
        raise ReplayError(f"The restart point has no {lacking[0]!r}: init() returns other entries than it did.")
    for name, entry in state.items():
        kept = point[name]
        if isinstance(entry, torch.Generator):
            entry.set_state(kept)
        elif hasattr(entry, "load_state_dict"):
            entry.load_state_dict(kept)
        elif _is_stateful_list(entry):
            for one, its in zip(entry, kept, strict=True):
                one.load_state_dict(its)
        else:
            state[name] = _copied(kept, name)
    _set_generators(point[GENERATORS])


def _is_stateful_list(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and bool(entry) and all(hasattr(one, "load_state_dict") for one in entry)


def _read(name: str, entry: Any) -> Any:
    """Return the values of an entry."""
    if isinstance(entry, torch.Generator):
        return entry.get_state()
    if hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict"):
        return entry.state_dict()
    if _is_stateful_list(entry):
        return [one.state_dict() for one in entry]
    return entry


def _copied(value: Any, name: str) -> Any:
    """Return a copy of a value, with tensors in the CPU's memory; raise where it holds anything that is no value."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping) and all(type(key) in (int, str) for key in value):
        return {key: _copied(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(entry, f"{name}[{place}]") for place, entry in enumerate(value))
    raise ReplayError(
        f"{name} of the training's state is a {type(value).__name__}, which cannot be kept at a restart point. Give it "
        "state_dict and load_state_dict, or make it of numbers, texts, tensors, lists and dictionaries."
    )


def _read_generators() -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and Python."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def _set_generators(kept: Mapping[str, Any]) -> None:
    torch.set_rng_state(kept["torch"])
    if kept["cuda"]:
        torch.cuda.set_rng_state_all(kept["cuda"])
    kind, keys, *rest = kept["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(_tuples(kept["python"]))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
