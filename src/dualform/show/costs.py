"""What each way of keeping a training takes on disk, for one model and one batch; `dualform estimate` prints it.

Patterns and shares are counted by `dualform.estimate`. Nothing is trained or recorded here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dualform.recording.estimate import estimate, size_text
from dualform.recording.keep import Shares

STEP_BYTES = 60
"""Bytes that `Steps()` keeps for each parameter and step: linear layers recorded by SGD and AdamW took 58 to 71."""


@dataclass(frozen=True, slots=True)
class KeepingCost:
    """What one way of keeping a training takes on disk.

    Attributes:
        keep: the way, as it is given to `dualform.record`.
        answers: what can be asked of it.
        bytes: its size.
    """

    keep: str
    answers: str
    bytes: int


def keeping_costs(model: nn.Module, inputs: Any, *, steps: int, groups: int = 10) -> list[KeepingCost]:
    """Return what each way of keeping takes, if every step sees a batch like this one.

    Annotations come on top of each: about a byte for each value.

    >>> import torch
    >>> for cost in keeping_costs(nn.Linear(784, 10), torch.zeros(64, 784), steps=1000, groups=4):
    ...     print(cost.keep, cost.bytes)
    Patterns() 203264000
    Patterns(dtype="float16") 102144000
    Patterns(dtype="int8") 51328000
    Patterns(), layers={"*": "keys"} 200704000
    Shares(by=...) of 4 groups 376800
    Steps() 182800
    """

    def patterns(**options: Any) -> int:
        return estimate(model, inputs, steps=steps, **options).total

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ends = 2 * sum(parameter.numel() * parameter.element_size() for parameter in trained)
    shares = Shares(by="group", groups=groups)
    found: Sequence[tuple[str, str, Callable[[], int]]] = (
        ("Patterns()", "everything", patterns),
        ('Patterns(dtype="float16")', "everything, to 2e-3 of the change", lambda: patterns(dtype="float16")),
        ('Patterns(dtype="int8")', "everything, with the error reported", lambda: patterns(dtype="int8")),
        ('Patterns(), layers={"*": "keys"}', "attention alone", lambda: patterns(layers={"*": "keys"})),
        (f"Shares(by=...) of {groups} groups", "masks, weights and totals by group", lambda: patterns(keep=shares)),
        ("Steps()", "everything, by running the training again", lambda: ends + steps * STEP_BYTES * len(trained)),
    )
    return [KeepingCost(keep, answers, size()) for keep, answers, size in found]


def cost_table(found: Sequence[KeepingCost]) -> str:
    """Return costs as a table in text."""
    widths = [max(len(getattr(cost, name)) for cost in found) for name in ("keep", "answers")]
    rows = [f"{cost.keep:<{widths[0]}}  {cost.answers:<{widths[1]}}  {size_text(cost.bytes):>9}" for cost in found]
    return "\n".join(rows) + "\n"
