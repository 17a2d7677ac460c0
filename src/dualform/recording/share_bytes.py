"""The bytes that shares by group take, on the device that they are folded on and on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dualform.recording.keep import Shares

PATH_COPIES = 4
"""Copies of the shares that a question about the path holds: at its last look and now, and two segments' changes."""


@dataclass(frozen=True, slots=True)
class ShareBytes:
    """The bytes that shares take.

    Attributes:
        device: on the device that they are folded on, averages included.
        disk: in the run folder, for one horizon and what is needed to go on.
        per_group: what one more group adds on the device.
    """

    device: int
    disk: int
    per_group: int


def share_bytes(
    uses: Mapping[str, Sequence[str]], sizes: Mapping[str, int], averages: Mapping[str, int], *, groups: int
) -> ShareBytes:
    """Return the bytes that shares take for a number of groups.

    Args:
        uses: parameter -> the layers that use it.
        sizes: parameter -> bytes of one share of it.
        averages: parameter -> how many averages its optimizer keeps, 0 or 1.
        groups: how many groups there are, over all groupings.

    >>> share_bytes({"w": ["layer"]}, {"w": 100}, {"w": 1}, groups=3)
    ShareBytes(device=800, disk=1000, per_group=200)
    """
    per_group = sum(len(layers) * sizes[name] * (1 + averages[name]) for name, layers in uses.items())
    whole = sum(sizes[name] * (1 + averages[name]) for name in uses)
    readable = sum(len(layers) * sizes[name] * groups + 2 * sizes[name] for name, layers in uses.items())
    resumed = sum(
        len(layers) * sizes[name] * averages[name] * groups + 2 * sizes[name] for name, layers in uses.items()
    )
    return ShareBytes(groups * per_group + whole, readable + resumed, per_group)


def path_bytes(sizes: Mapping[str, int], shares: Shares) -> int:
    """Return the bytes that questions about the path take at the most: copies of shares, and of their changes.

    Args:
        sizes: parameter -> bytes of one share of it.
        shares: what is kept, with the questions.

    >>> path_bytes({"w": 100}, Shares(by="label", groups=3))
    0
    """
    return PATH_COPIES * len(shares.paths) * (shares.groups + 2) * sum(sizes.values())


def fold_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which shares of a parameter are folded: its own, and at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes a device has free; None where nobody knows."""
    if device.type == "cuda":
        return (
            int(torch.cuda.mem_get_info(device)[0])
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 (a file of the system's)
            found = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(found.split()[1]) * 1024
