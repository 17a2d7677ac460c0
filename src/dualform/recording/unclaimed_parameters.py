"""Unclaimed parameters: those that no recorded layer covers and no recorded optimizer holds.

They are no part of the memory, which is right as long as nothing trains them. An optimizer that `record` was not given
may train them; so a sample of each is taken at the start of a recording and compared at its end.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dualform.recording.sharded_modules import own_part
from dualform.recording.sinks import sample
from dualform.recording.watch import plain_name


class UnclaimedParameters:
    """Samples of the unclaimed parameters of a model that require a gradient."""

    def __init__(self, model: nn.Module, recorded: Mapping[str, nn.Parameter], held: Collection[int]) -> None:
        known = {id(parameter) for parameter in recorded.values()} | set(held)
        self._samples: list[tuple[str, nn.Parameter, Tensor]] = [
            (plain_name(name), parameter, sample(own_part(parameter)))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in known and not is_lazy(parameter)
        ]

    def warning(self, held: Collection[int]) -> str | None:
        """Return a warning that names the unclaimed parameters that have changed, or None if none has.

        Args:
            held: ids of the parameters that recorded optimizers hold by now; these are left out.
        """
        changed = [
            name
            for name, parameter, before in self._samples
            if id(parameter) not in held and not torch.equal(sample(own_part(parameter)).to(before.device), before)
        ]
        if not changed:
            return None
        shown = ", ".join(map(repr, changed[:8])) + (f" and {len(changed) - 8} more" if len(changed) > 8 else "")
        return (
            f"{shown} changed while the model was recorded, though no optimizer that record() was given holds "
            f"{'it' if len(changed) == 1 else 'them'}; what changed is no part of the memory. Give every "
            "optimizer that trains the model: record(model, [first, second], ...)."
        )
