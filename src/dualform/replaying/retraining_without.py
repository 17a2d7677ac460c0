"""Run a training function on some of its samples only, without recording it: `train(recording, keep=ids)`.

The function says itself how it leaves samples out. That it did is checked by the samples that it annotates.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import ReplayError
from dualform.replaying.replayed_patterns import ReplayedPatterns, run_again_unrecorded
from dualform.replaying.training import Train
from dualform.store.places import Place
from dualform.store.reader import Run

EXPECTED = (
    "expected a function train(recording, keep=None) that trains on all samples without `keep`, and on the samples in "
    "`keep` (a tensor of ids, as they are annotated) with it"
)


class UnrecordedTraining:
    """Takes the place of a recorder in a training that is not recorded: everything it is told is dropped.

    Of annotations it checks that no sample is trained on that was to be left out.
    """

    def __init__(self, keep: Tensor) -> None:
        self._keep = keep.sort().values
        self.seen = False

    def __enter__(self) -> "UnrecordedTraining":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def annotate(self, **columns: Any) -> None:
        """Check that the samples of a batch may be trained on."""
        if "sample" not in columns:
            return
        self.seen = True
        samples = torch.as_tensor(columns["sample"]).reshape(-1).cpu()
        place = torch.searchsorted(self._keep, samples).clamp(max=len(self._keep) - 1)
        if len(wrong := samples[self._keep[place] != samples]):
            raise ReplayError(
                f"The training trains on sample {int(wrong[0])}, which it was told to leave out; {EXPECTED}."
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def retraining_of(path: Place, train: Train | None = None, *, trust: bool = False) -> "Retraining":
    """Return the training of a run as a function of the samples it may use: the given one, or the one it remembers."""
    return Retraining(ReplayedPatterns(Run(path), train, trust=trust).require_train())


class Retraining:
    """A training that can be run again on some of its samples; calling it returns the trained model."""

    def __init__(self, train: Train) -> None:
        try:
            inspect.signature(train).bind(None, keep=None)
        except (TypeError, ValueError):
            name = getattr(train, "__qualname__", type(train).__name__)
            raise ReplayError(f"{name} cannot be told to leave samples out; {EXPECTED}.") from None
        self._train = train

    def __call__(self, keep: Sequence[int]) -> nn.Module:
        """Train on the samples with these ids alone, and return the model."""
        ids = torch.as_tensor(keep)
        instead = UnrecordedTraining(ids)

        def recording(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> Any:
            return instead

        model = run_again_unrecorded(lambda given: self._train(given, keep=ids.clone()), recording)  # type: ignore[call-arg]
        if not instead.seen:
            raise ReplayError(
                f"The training has annotated no samples: whether it left any out cannot be told; {EXPECTED}, and "
                "annotates sample=ids."
            )
        if not isinstance(model, nn.Module):
            raise ReplayError(f"The training returned {type(model).__name__}; expected the trained model.")
        return model
