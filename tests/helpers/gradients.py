"""A parameter whose gradient is accumulated and checked as a recording does it, without a model's hooks."""

import torch
from torch import Tensor, nn

from dualform.recording.gradient_check import GradientCheck, Resolution
from dualform.recording.gradient_history import Accumulation, Factors, GradientHistory, follow
from dualform.recording.gradient_samples import GradientSample
from dualform.recording.hooks import Arrival, Call
from dualform.recording.watch import watch

Seen = tuple[GradientHistory, GradientSample | None]


class FollowedWeight:
    """The weight or the bias of a linear layer, with patterns added to its gradient one backward after the other."""

    def __init__(
        self, d_out: int, d_in: int, dtype: torch.dtype = torch.float32, *, bias: bool = False, full: bool = True
    ) -> None:
        """Follow one parameter.

        Args:
            d_out: rows of the weight.
            d_in: columns of the weight.
            dtype: of the parameter.
            bias: follow the layer's bias instead of its weight.
            full: whether its gradients are checked in full.
        """
        layer = nn.Linear(d_in, d_out, bias=bias, dtype=dtype)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        self._layer = watch(layer, None, [optimizer])[0]
        self.name = "bias" if bias else "weight"
        self.parameter: nn.Parameter = layer.get_parameter(self.name)
        self.check = GradientCheck()
        self.history = GradientHistory(1 if bias else d_in)
        self.full = full
        self._arrivals: list[tuple[int, Arrival]] = []

    @property
    def gradient(self) -> Tensor:
        """The parameter's gradient, to be changed."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def accumulate(
        self, keys: Tensor, values: Tensor, *, unseen: Tensor | None = None, coarse: torch.dtype | None = None
    ) -> "FollowedWeight":
        """Add the patterns of a backward to the gradient, and a part that no pattern explains."""
        before = self.check.sample(
            self.name, self.parameter, self.parameter.grad, projected=self.history.projected, look="now"
        )
        added = values.sum(0) if self.name == "bias" else values.T @ keys
        added = added if unseen is None else added + unseen
        self.parameter.grad = added if self.parameter.grad is None else self.parameter.grad + added
        after = self.check.sample(self.name, self.parameter, self.parameter.grad, projected=True if self.full else None)
        assert after is not None
        micro = len(self.history.accumulations)
        self.history.accumulations.append(Accumulation(micro, before, after))
        call = Call(self._layer, micro, keys, raw=False, coarse=coarse, binding=None)
        self._arrivals.append((micro, Arrival(call, [values], keys=keys, values=values)))
        return self

    @property
    def seen(self) -> Seen:
        """The history, and the gradient as a step sees it."""
        final = self.check.sample(
            self.name, self.parameter, self.parameter.grad, projected=self.history.projected, look="at the step"
        )
        return self.history, final

    @property
    def factors(self) -> Factors:
        """What the samples show."""
        return follow(*self.seen)

    @property
    def resolution(self) -> Resolution:
        """What is known of the gradient at the step."""
        return self.check.resolve(self.name, self.parameter, self._arrivals, self.factors, full=self.full)
