"""Rows that stay in a GPU's memory: what was read and decoded once need not travel there for every question."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

SHARE = 0.5  # of the memory that is free


@dataclass(slots=True)
class Resident:
    """Tensors on devices, each as long as this lives."""

    held: dict[object, Tensor] = field(default_factory=dict)

    def get(self, what: object, size: int, device: torch.device, make: Callable[[], Tensor]) -> Tensor | None:
        """Return a tensor, made the first time; nothing where `size` bytes do not fit on the device."""
        found = self.held.get((what, device))
        if found is None and fits(size, device):
            found = self.held[what, device] = make()
        return found


def fits(size: int, device: torch.device) -> bool:
    """Say whether a device may hold so many bytes for long. A CPU reads where they lie."""
    return device.type == "cuda" and size <= SHARE * torch.cuda.mem_get_info(device)[0]
