"""Path contributions that are asked for before a training, and found from shares while the model trains.

A recording that keeps shares has no patterns to follow the path with afterwards. While it records, each group's share
is there at every step, and the path is integrated as it goes by (`effects/path_walk.py`), for inputs and a quantity
that have to be known beforehand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dualform.attend.kept_paths import as_tensors, from_tensors
from dualform.attend.path import Asked, PathContributions, ReferenceInputs, answer_of_parts
from dualform.attend.queries import batches
from dualform.binning import label_order
from dualform.effects.output_gradients import Named, Quantity
from dualform.effects.path_contributions import FEWEST_SEGMENTS
from dualform.effects.path_probe import PathProbe
from dualform.effects.path_walk import PathSettings, PathWalk
from dualform.engine.description import LayerEntry
from dualform.errors import CorruptError, QueryError
from dualform.printable import cut
from dualform.recording.live_questions import SharesNow
from dualform.recording.sinks import Start
from dualform.torch_modes import call_without_autocast, with_gradients

NAME = "name"
"""Name of the tensor that holds, as bytes, what the user calls a question."""


@dataclass(frozen=True, slots=True, eq=False)
class PathQuestion:
    """A question about the path of weights that a training is going to take, for a recording that keeps shares.

        question = dualform.PathQuestion(test_images, quantity=dualform.contrast(9, 7), against=train_images[:32])
        keep = dualform.Shares(by="label", paths={"why 9": question})
        ...
        dualform.open("runs/mnist").paths["why 9"]

    What a group of patterns adds to the quantity is found while the model trains: at the end of every segment of the
    path the model runs on the inputs. The shares at the last one, and changes since, are kept beside the shares
    themselves (two to four more copies of them). The training stays the same to the bit.

    Attributes:
        inputs: a tensor; a tuple of the model's arguments; a mapping of its keywords; or an iterable of batches.
        targets: the class (or the classes of all tokens) of each input; needed unless the quantity is a function or a
            contrast.
        quantity: what the parts are contributions to, as `Memory.attend` takes it.
        against: reference inputs (R, ...): every number is then that of the input less their mean.
        tolerance: how much parts may change when the path is followed twice as finely, and how large the residual may
            be, both relative. What was reached is in the answer.
    """

    inputs: Any
    targets: Tensor | None = None
    quantity: Quantity = "logit"
    against: Tensor | None = None
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        if not callable(self.quantity):
            if self.quantity not in get_args(Named):
                raise QueryError(f"quantity is {self.quantity!r}; expected one of {get_args(Named)}, or a function.")
            if self.targets is None:
                raise QueryError(
                    f"A path question about a {self.quantity} needs targets: what the trained model will say is not "
                    "known before the training. Give targets=, or ask about dualform.contrast(9, 7)."
                )
        if not 0 < self.tolerance < 1:
            raise QueryError(f"tolerance is {self.tolerance}; expected a number between 0 and 1, for example 0.02.")

    def follow(self, name: str, model: nn.Module, start: Start, by: tuple[str, ...], first: SharesNow) -> "_Follower":
        """Begin to follow a training; see `LiveQuestion.follow`."""
        layers = {
            layer: LayerEntry(one.kind, one.d_in, one.d_out, one.uses, "shares", "", one.optional)
            for layer, one in start.layers.items()
        }
        asked, targets = list(batches(self.inputs)), self.targets
        reference = None
        if self.against is not None:
            question = Asked(model, asked, targets, self.quantity)
            reference = ReferenceInputs(question, targets, self.against, start.batch_axis)
            asked, targets = reference.batches, reference.targets
        units = None if reference is None else reference.units
        probe = PathProbe(model, asked, targets, self.quantity, layers, batch_axis=start.batch_axis, units=units)
        return _Follower(name, self, probe, reference, by, first)


class _Follower:
    """Follows one training for one question."""

    def __init__(
        self,
        name: str,
        question: PathQuestion,
        probe: PathProbe,
        reference: ReferenceInputs | None,
        by: tuple[str, ...],
        first: SharesNow,
    ) -> None:
        self._name = name
        self._question = question
        self._probe = probe
        self._reference = reference
        self._by = by
        self._last = first
        settings = PathSettings(len(first.labels), tolerance=question.tolerance)
        self._walk: PathWalk = self._alone(lambda: _begun(probe, settings, first))

    def _alone(self, call: Any) -> Any:
        """Run the model as if it were asked afterwards, whatever modes the training has."""
        return call_without_autocast(sorted({"cpu", self._probe.device.type}), with_gradients(call))

    def is_due(self, steps: int) -> bool:
        """Say whether a segment ends after so many steps."""
        return self._walk.is_due(steps)

    def look(self, now: SharesNow) -> None:
        """Integrate the segment from the last look on."""
        if now.steps == self._last.steps:
            return
        changes = {name: _change(self._last.shares[name], shares) for name, shares in now.shares.items()}
        self._walk.limit(now.steps // FEWEST_SEGMENTS)
        weights = _float64(now.parameters, self._probe)
        moved = {name: change.to(self._probe.device) for name, change in changes.items()}
        self._alone(lambda: self._walk.go_to(now.steps, weights, now.state, moved, alone=False))
        self._last = now

    def answer(self) -> dict[str, Tensor]:
        """Return the path contributions as tensors, and the question's name."""
        found, labels = self._walk.result(), self._last.labels
        order = sorted(range(len(labels)), key=lambda group: label_order(labels[group]))
        parts = torch.cat([found.parts[:, order], found.parts[:, len(labels) :]], dim=1)
        groups = tuple(labels[group] for group in order)
        answer = answer_of_parts(
            found, parts, groups, self._by, self._question.quantity, self._probe.names, None, self._reference
        )
        name = torch.tensor(list(self._name.encode()), dtype=torch.uint8)
        return {**as_tensors(answer, allow_nan=True), NAME: name}


def _begun(probe: PathProbe, settings: PathSettings, first: SharesNow) -> PathWalk:
    walk = PathWalk(probe, settings, _float64(first.parameters, probe), first.state)
    probe.check_rows()
    return walk


def _float64(parameters: Mapping[str, Tensor], probe: PathProbe) -> dict[str, Tensor]:
    return {name: tensor.detach().to(probe.device, torch.float64, copy=True) for name, tensor in parameters.items()}


def _change(before: Tensor, now: Tensor) -> Tensor:
    """Return the change of shares (G + 2, ...), some of whose groups may be new."""
    found = now.clone()
    groups = len(before) - 2
    found[:groups] -= before[:groups]
    found[-2:] -= before[-2:]
    return found


def read_paths(tensors: Mapping[str, Tensor], source: str) -> dict[str, PathContributions]:
    """Return the path contributions that a recording kept, by the names of their questions.

    Args:
        tensors: the answers' tensors, each answer's behind its number.
        source: the run's name, for messages.
    """
    answers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, field = name.partition(".")
        answers.setdefault(number, {})[field] = tensor
    found = {}
    for fields in answers.values():
        try:
            called = bytes(fields.pop(NAME).tolist()).decode()
            found[called] = _checked(from_tensors(fields))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(
                f"The path contributions that {source} keeps cannot be read: {cut(str(error), 200)}. Restore "
                "media/paths.safetensors from a copy of the run."
            ) from error
    return found


def _checked(found: PathContributions) -> PathContributions:
    """Return path contributions whose tensors fit each other; else raise `ValueError`."""
    inputs, groups = len(found.output), len(found.groups)
    shapes: dict[str, tuple[int, ...]] = {
        "values": (inputs, groups),
        "by_layer": (inputs, groups, len(found.layers)),
        **dict.fromkeys(("start", "state", "rest", "residual", "output"), (inputs,)),
    }
    for name, shape in shapes.items():
        tensor = getattr(found, name)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected numbers {shape}")
    return found
