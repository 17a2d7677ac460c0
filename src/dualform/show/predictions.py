"""Predictions of a model in evaluation mode, and their comparison after a change of its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualform.effects.slopes import output_rows
from dualform.errors import DualformError, QueryError
from dualform.modes import evaluating
from dualform.show.job import Cancelled
from dualform.torch_modes import without_gradients

MASK_NOTE = "A mask removes recorded updates from the sum; the model is not retrained."
ROWS_AT_ONCE = 2048
SEQUENCES_AT_ONCE = 64  # inputs of whole numbers with further axes: each has an output per position


@without_gradients
def run_model(model: nn.Module, inputs: Tensor) -> Any:
    """Return the output of a model for inputs, without gradients; an exception of the model becomes a `QueryError`.

    The model's mode is the caller's affair: a model that several threads use must be in evaluation mode already.
    """
    device = next((parameter.device for parameter in model.parameters()), inputs.device)
    with model_failures_named(inputs):
        return model(inputs.to(device))


@contextmanager
def model_failures_named(inputs: Tensor) -> Iterator[None]:
    """Turn an exception of a model on these inputs into a `QueryError` that says so."""
    try:
        yield
    except (DualformError, Cancelled, OSError):
        raise
    except Exception as error:
        raise QueryError(
            f"The model failed on inputs {tuple(inputs.shape)}: {type(error).__name__}: {error}. Keep test examples "
            "that it takes (memory.add_tests), or give a shorter prompt."
        ) from error


def predict_units(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the output unit that is largest for each input, (M,), on the CPU; of a text, at its last position.

    The model is in evaluation mode meanwhile, and its modules are back in their own modes afterwards.
    """
    if not len(inputs):
        return torch.zeros(0, dtype=torch.int64)
    at_once = ROWS_AT_ONCE if inputs.dim() < 3 or inputs.is_floating_point() else SEQUENCES_AT_ONCE
    with evaluating(model):
        return torch.cat([_largest_units(run_model(model, part), len(part)) for part in inputs.split(at_once)])


def _largest_units(output: Any, count: int) -> Tensor:
    rows = output_rows(output)
    return rows.reshape(count, -1, rows.shape[-1])[:, -1].argmax(dim=1).cpu()


def share_right(predictions: Tensor, targets: Tensor | None) -> float | None:
    """Return the share of predictions (M,) that are the targets (M,); None without targets or without inputs."""
    return None if targets is None or not len(predictions) else float((predictions == targets).double().mean())


@dataclass(frozen=True, slots=True)
class PredictionChanges:
    """Predictions for the same inputs before and after a change of the weights, compared.

    Attributes:
        changed: the numbers of the inputs whose predictions differ.
        accuracy_before: the share of right predictions before; None where targets are not known.
        accuracy_after: the share of right predictions after.
    """

    changed: list[int]
    accuracy_before: float | None
    accuracy_after: float | None


def compare_predictions(before: Tensor, after: Tensor, targets: Tensor | None) -> PredictionChanges:
    """Compare the predictions (M,) before and after a change of the weights."""
    changed = (before != after).nonzero()[:, 0].tolist()
    return PredictionChanges(changed, share_right(before, targets), share_right(after, targets))
