"""What the model says about an input, and what it would say under a mask."""

from typing import Any

import torch
from torch import Tensor

from dualform.show.viewer.ask import Ask
from dualform.show.viewer.questions import question
from dualform.show.viewer.routes.tests import whole_text
from dualform.show.viewer.session import Mask, Session, Subject

SHOWN = 5


@question("/api/prediction")
def prediction(session: Session, ask: Ask) -> dict[str, Any]:
    """Return the top outputs before and, under a mask, after it."""
    return predict(session, ask.subject(session), ask.mask(session))


def predict(session: Session, subject: Subject, mask: Mask) -> dict[str, Any]:
    """Return the outputs of an input with and without a mask, the union of both tops."""
    before = session.outputs(subject)
    masked = not mask.removal.nothing
    after = session.outputs(subject, mask) if masked else None
    units = _top(before) if after is None else list(dict.fromkeys([*_top(before), *_top(after)]))
    if subject.target is not None and 0 <= subject.target < len(before) and subject.target not in units:
        units.append(subject.target)
    said = int(before.argmax())
    says = said if after is None else int(after.argmax())
    chances = [before.softmax(dim=0), None if after is None else after.softmax(dim=0)]
    return {
        "target": subject.target,
        "target_name": None if subject.target is None else session.name(subject.target),
        "before": said,
        "after": says,
        "before_name": session.name(said),
        "after_name": session.name(says),
        "masked": masked,
        "flipped": said != says,
        "probability": len(before) > 1,
        "text": None if subject.test is None else whole_text(session, subject.test) or None,
        "outputs": [
            {
                "unit": unit,
                "name": session.name(unit),
                "before": _both(before, chances[0], unit),
                "after": None if after is None else _both(after, chances[1], unit),
            }
            for unit in units
        ],
    }


def _top(outputs: Tensor) -> list[int]:
    return torch.topk(outputs, min(SHOWN, len(outputs))).indices.tolist()


def _both(outputs: Tensor, chances: Tensor | None, unit: int) -> dict[str, float]:
    assert chances is not None, "computed with the outputs"
    return {"output": float(outputs[unit]), "probability": float(chances[unit])}
