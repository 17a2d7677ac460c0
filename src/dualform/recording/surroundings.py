"""The machine and the settings of torch on which the bits of a training depend, in words."""

import contextlib
import platform
from collections.abc import Callable

import torch

_SETTINGS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.__version__,
    "threads": torch.get_num_threads,
    "processor": lambda: f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    "device": lambda: torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU",
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "precision of float32 products": torch.get_float32_matmul_precision,
    "TF32 in convolutions": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn's choice by trial": lambda: torch.backends.cudnn.benchmark,
    "default dtype": torch.get_default_dtype,
}


def find_surroundings() -> dict[str, str]:
    """Return the settings as they are now, by name; those that this torch cannot tell are left out."""
    found = {}
    for name, read in _SETTINGS.items():
        with contextlib.suppress(RuntimeError, AttributeError):
            found[name] = str(read())
    return found
