"""The paper's Table 1: does the class with the largest total attention agree with the target, or with the output?"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.attend.answers import Vote


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of test examples, for one layer.

    Attributes:
        layer: the layer's name.
        target_when_wrong: the winning class is the true one, among examples the model got wrong.
        output_when_wrong: the winning class is the one the model said, among the same.
        when_right: the winning class is the true one (which the model said), among the others.
    """

    layer: str
    target_when_wrong: float
    output_when_wrong: float
    when_right: float


def agreement(vote: Vote, targets: Tensor, outputs: Tensor) -> tuple[Agreement, ...]:
    """Compare each layer's winning classes with targets (Q,) and the model's outputs (Q,)."""
    right = targets == outputs
    rows = []
    for layer, winners in vote.winners.items():
        won = torch.tensor([_label(winner) for winner in winners])
        rows.append(
            Agreement(
                layer=layer,
                target_when_wrong=_share(won == targets, ~right),
                output_when_wrong=_share(won == outputs, ~right),
                when_right=_share(won == targets, right),
            )
        )
    return tuple(rows)


def _label(winner: Any) -> int:
    return -1 if winner is None else int(winner)


def _share(hit: Tensor, among: Tensor) -> float:
    return float(hit[among].double().mean()) if bool(among.any()) else float("nan")
