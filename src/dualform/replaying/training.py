"""A training as a function: it is given what opens a recording, and can be called again.

def train(recording):
    torch.manual_seed(0)
    model, optimizer, loader = build()
    with recording(model, optimizer) as recorder:
        for inputs, labels in loader: ...
    return model
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from dualform.errors import ReplayError
from dualform.named_code import find_name
from dualform.recording.keep import Keep, Steps
from dualform.recording.recorder import Recorder
from dualform.store.blobs import Blobs
from dualform.store.record_to_folder import record


class Recording(Protocol):
    """Opens the one recording of a training; takes what `dualform.record` takes, but for the path."""

    def __call__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> Recorder:
        """Return a recorder of this model's training, to be used in a with statement."""


STORAGE_OPTIONS = ("dtype", "steps", "shard_bytes", "queue_bytes", "factory", "factory_arguments")
"""Options of `dualform.record` that say how a run is stored, and nothing of what is recorded."""
Train = Callable[[Recording], Any]
"""A training as a function; what it returns is the caller's."""


class OneRecording:
    """A `Recording` that a training has to use exactly once."""

    def __init__(self, make: Callable[..., Recorder]) -> None:
        self._make = make
        self.recorder: Recorder | None = None

    def __call__(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> Recorder:
        """Return the recorder of this training."""
        if self.recorder is not None:
            raise ReplayError(
                "The training function opens a second recording. Give each training a function of its own: a run "
                "holds one."
            )
        self.recorder = self._make(model, optimizer, **options)
        return self.recorder

    def require_used(self, train: Train) -> None:
        """Raise where a training has ended without opening its recording."""
        if self.recorder is None:
            name = getattr(train, "__qualname__", repr(train))
            raise ReplayError(
                f"{name} has ended without opening its recording. Let it call what it is given: "
                "`with recording(model, optimizer) as recorder:` around the steps."
            )


def record_training(
    train: Train,
    path: str | os.PathLike[str] | Blobs,
    *,
    keep: Keep | Sequence[Keep] | None = None,
    **options: Any,
) -> Any:
    """Run a training and record it so that it can be run again; return what the training returns.

        model = dualform.record_training(train, "runs/lm")
        memory = dualform.open("runs/lm", train=train)
        memory.attend(model, prompts).top(10)                     # runs the training again

    By default the run keeps facts and marks of every step, a few kilobytes each, and no patterns: a question runs the
    training again, which is proved to be the same step by step, and asks it while it runs. A function that can be
    imported is remembered by its name; it is called under the same rule as a factory (docs/security.md).

    Args:
        train: the training. It is given a `recording`, which takes what `dualform.record` takes but for the path, and
            must open it once. All that it draws at random has to be seeded inside of it.
        path: the run folder to make, or the `Blobs` to keep the run in.
        keep: what the run stores; by default `Steps()`. With `[Steps(), Patterns(layers="head")]` the patterns of some
            layers are stored, and questions about these need no replay.
        options: how the run is stored, as `dualform.record` takes it (`dtype`, `shard_bytes`, `factory`, ...). What is
            recorded (`layers`, `batch_axis`, ...) is said inside the training, so that a replay has it too.
    """
    if wrong := [name for name in options if name not in STORAGE_OPTIONS]:
        raise TypeError(
            f"record_training got {wrong[0]!r}; expected only {', '.join(STORAGE_OPTIONS)}. Give other options inside "
            "the training: recording(model, optimizer, layers=...)."
        )
    kept = Steps() if keep is None else keep
    opened = OneRecording(
        lambda model, optimizer, **more: record(
            model, optimizer, path, **{"keep": kept, "training": find_name(train), **options, **more}
        )
    )
    result = train(opened)
    opened.require_used(train)
    return result
