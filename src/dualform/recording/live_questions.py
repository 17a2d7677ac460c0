"""Questions that are asked before a training, and answered from its shares while it goes on.

A recording that keeps shares keeps no patterns, so that what depends on how shares came about cannot be asked of it
afterwards. Here is the protocol of such a question; `dualform.PathQuestion` is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from dualform.recording.sinks import Start


@dataclass(frozen=True, slots=True, eq=False)
class SharesNow:
    """The training after some steps, as a question that follows it sees it.

    Attributes:
        steps: how many steps were taken.
        labels: the groups so far; later ones come behind these.
        parameters: the covered parameters.
        shares: (G + 2, ...) what each group made of a parameter, what is left of the start, and the rest: all that
            no group explains, rounding included. They sum to the parameter.
        state: the changing state that no recorded layer covers.
    """

    steps: int
    labels: tuple[Any, ...]
    parameters: Mapping[str, Tensor]
    shares: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


class LiveFollower(Protocol):
    """Follows one training to answer a question about it."""

    def is_due(self, steps: int) -> bool:
        """Say whether the question has to see the training after so many steps."""

    def look(self, now: SharesNow) -> None:
        """See the training."""

    def answer(self) -> Mapping[str, Tensor]:
        """Return the answer as tensors to be kept with the run; the training was seen after its last step."""


class LiveQuestion(Protocol):
    """A question as settings; each recording that keeps shares asks it anew."""

    def follow(self, name: str, model: nn.Module, start: Start, by: tuple[str, ...], first: SharesNow) -> LiveFollower:
        """Begin to follow a training.

        Args:
            name: what the user calls the question.
            model: the model that is trained, with its weights before the first step.
            start: what is recorded.
            by: the columns of the first grouping, whose shares the question sees.
            first: the training before its first step.
        """
