"""The optimizer's states as a step left them, for shares that may be folded later."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dualform.errors import RefusedError
from dualform.recording.packing import NumbersUnderWay
from dualform.recording.sinks import LiveParameter


class StatesAfter:
    """The optimizer's states as a step left them, to be read later: nobody waits for numbers that lie on a GPU."""

    def __init__(self, live: Mapping[str, LiveParameter]) -> None:
        self._states = {name: dict(one.state) for name, one in live.items()}
        self._tensors = [
            (name, entry, tensor, tensor._version)
            for name, state in self._states.items()
            for entry, tensor in state.items()
            if isinstance(tensor, Tensor)
        ]
        self._far = [
            (name, entry)
            for name, entry, tensor, _ in self._tensors
            if tensor.device.type != "cpu" and not tensor.dim() and live[name].parameter.dim()
        ]
        far = [self._states[name][entry].double() for name, entry in self._far]
        self._numbers = NumbersUnderWay([torch.stack(far)] if far else [])

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the states, with their numbers in the CPU's memory; refuse states that were written to since."""
        for name, entry, tensor, version in self._tensors:
            if tensor._version != version:
                raise RefusedError(
                    f"The optimizer's state {entry!r} of parameter {name!r} was edited after its step, before its "
                    "shares were folded. Edit it before record(), or end this recording first."
                )
        if self._far:
            for (name, entry), number in zip(self._far, self._numbers.read()[0], strict=True):
                self._states[name][entry] = number
        return self._states
