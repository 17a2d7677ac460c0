"""How a step rounds: settings to the parameter's dtype, and products as the machine does."""

from collections.abc import Callable
from functools import lru_cache

import torch


def near(dtype: torch.dtype) -> Callable[[float], float]:
    """Return the function that rounds a number to a dtype, as a step does with its settings.

    A decay of 1 - 1e-5 is off by 5e-8 in float32: nothing in one step, but the same in all of them.
    """
    return lambda number: _rounded(number, dtype)


@lru_cache(maxsize=1024)
def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype))


def machine(device: torch.device) -> str:
    """Return what decides how the same numbers are rounded: the device, its instructions, and the threads on it."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
