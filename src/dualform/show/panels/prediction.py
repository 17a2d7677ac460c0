"""The model's prediction for an input, with and without a mask."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.show.panels.examples import whole_text
from dualform.show.session import Mask, Session, Subject

MAX_UNITS = 5  # of the largest outputs that are shown


@dataclass(frozen=True, slots=True)
class OutputValue:
    """One output unit's value, and its probability after a softmax over all units."""

    output: float
    probability: float


@dataclass(frozen=True, slots=True)
class OutputUnit:
    """One output unit without and with the mask; `after` is None without a mask."""

    unit: int
    name: str
    before: OutputValue
    after: OutputValue | None


@dataclass(frozen=True, slots=True)
class ModelPrediction:
    """The model's prediction for one input.

    Attributes:
        target: the unit that would be right, where it is known.
        target_name: that unit as people read it.
        before: the unit with the largest output of the trained model.
        after: the unit with the largest output under the mask.
        before_name: the unit `before` as people read it.
        after_name: the unit `after` as people read it.
        masked: whether there is a mask.
        flipped: whether the mask changes the prediction.
        probability: whether probabilities mean anything, which takes several units.
        text: the input as text, where it is a test of a text.
        outputs: the units with the largest outputs without and with the mask, and the target.
    """

    target: int | None
    target_name: str | None
    before: int
    after: int
    before_name: str
    after_name: str
    masked: bool
    flipped: bool
    probability: bool
    text: str | None
    outputs: list[OutputUnit]


def model_prediction(session: Session, subject: Subject, mask: Mask) -> ModelPrediction:
    """Return the outputs of an input with and without a mask: the largest of both, and the target."""
    before = session.outputs(subject)
    after = None if mask.removal.nothing else session.outputs(subject, mask)
    units = _strongest_units(before) if after is None else [*_strongest_units(before), *_strongest_units(after)]
    if subject.target is not None and 0 <= subject.target < len(before):
        units.append(subject.target)
    says = int(before.argmax())
    says_after = says if after is None else int(after.argmax())
    chances = before.softmax(dim=0), None if after is None else after.softmax(dim=0)
    return ModelPrediction(
        target=subject.target,
        target_name=None if subject.target is None else session.name(subject.target),
        before=says,
        after=says_after,
        before_name=session.name(says),
        after_name=session.name(says_after),
        masked=after is not None,
        flipped=says != says_after,
        probability=len(before) > 1,
        text=None if subject.test is None else whole_text(session, subject.test) or None,
        outputs=[
            OutputUnit(
                unit,
                session.name(unit),
                OutputValue(float(before[unit]), float(chances[0][unit])),
                None
                if after is None or chances[1] is None
                else OutputValue(float(after[unit]), float(chances[1][unit])),
            )
            for unit in dict.fromkeys(units)
        ],
    )


def _strongest_units(outputs: Tensor) -> list[int]:
    return torch.topk(outputs, min(MAX_UNITS, len(outputs))).indices.tolist()
