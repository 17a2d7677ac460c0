"""The baseline: the parameters as the last recorded step left them, to find what else has changed them since.

Of every parameter a fixed sample of its elements is kept, which also is the step's fingerprint. An edit of a few
elements is hardly ever in the sample, so a window of neighbouring elements is kept as well, another one after each
step, until all of them had their turn. So an edit that goes on from step to step is found soon, at a bounded cost.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualform.recording.parameter_samples import JointSample, ParameterSamples
from dualform.recording.sinks import SAMPLE, sample
from dualform.threads import one_thread

Array = npt.NDArray[Any]

CPU_WINDOW_ELEMENTS = 1 << 13
"""Elements of a step's window in the CPU's memory: copying and comparing them takes about 5 microseconds."""
GPU_WINDOW_ELEMENTS = 1 << 22
"""Elements of a step's window on a GPU, where reading them takes less time than starting to."""
ROUNDING = 8
"""How many units of rounding (eps times the parameter's norm) a parameter may move without counting as changed.

Weights that are perturbed and put back by subtraction (sharpness-aware minimisation) come back to within rounding.
"""


@dataclass(frozen=True, slots=True)
class LaterComparison:
    """A comparison of parameters with what was noted, whose outcome is still on its way from a GPU.

    Attributes:
        differs: how many elements differ, () float64; None where `changed` has to be asked.
        changed: returns the parameters that differ by more than rounding; waits for the GPU.
    """

    differs: Tensor | None
    changed: Callable[[], list[str]]


class _Group:
    """Parameters of one device and dtype, as they were when they were noted: their samples, and one window.

    All samples and the window are read into one tensor; by numpy where they lie in the CPU's memory. For a few hundred
    elements torch spends most of its time on choosing how to copy them, and numpy far less.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, windows: bool) -> None:
        self.names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._windows = _windows(self._parameters) if windows else [()]
        self._turn = -1  # which of the windows is noted
        self._places: list[tuple[int, torch.Size, tuple[int, ...]]] = []  # each parameter's memory, shape and strides
        self._views: list[Tensor | None] = []  # each sample in the parameter's memory; None if it has to be copied
        self._window: list[Tensor] | None = None  # the parts of the window, once they were taken
        self._flat: list[Array] | None = None  # all elements of each parameter, where numpy reads them
        self._arrays: list[Array] = []  # then the samples in the parameters' memory, and the parts of the window
        self._lengths: list[int] = []  # of all parts as they were noted
        self.note()

    def note(self) -> None:
        """Keep the parameters' samples as they are now, and the next window."""
        self._find_views()
        self._turn = (self._turn + 1) % len(self._windows)
        if len(self._windows) > 1:
            self._window = None
        if self._flat is not None:
            count = len(self._flat)
            self._arrays[count:] = [self._flat[i][at] for i, at in self._windows[self._turn]]
        self._noted = self._read()

    def samples(self) -> JointSample:
        """Return each parameter's sample as it was noted."""
        counts = dict(zip(self.names, self._lengths, strict=False))
        return JointSample(self._noted[: sum(counts.values())], counts)

    def changed(self) -> list[str]:
        """Return the parameters that are not as they were noted, beyond rounding."""
        kind = self._noted.dtype, self._noted.device
        moved = self._find_views()
        if self._flat is not None and np.concatenate(self._arrays).tobytes() == self._noted.numpy().tobytes():
            return []
        parts = self._parts()
        if self._flat is None and (not moved or all((part.dtype, part.device) == kind for part in parts)):
            with one_thread():
                if torch.equal(torch.cat(parts), self._noted):
                    return []
        noted = self._noted.split(self._lengths)
        both = zip(self._owners(), parts, noted, strict=True)
        return [self.names[i] for i, now, then in both if _is_changed(now, then)]

    def compare_later(self) -> "LaterComparison":
        """Start to compare the parameters with what was noted, on their GPU; nobody waits for the outcome here."""
        self._find_views()
        parts = self._parts()
        kind = self._noted.dtype, self._noted.device
        if any((part.dtype, part.device) != kind for part in parts):
            changed = self.changed()
            return LaterComparison(None, lambda: changed)
        now, noted, lengths = torch.cat(parts), self._noted, self._lengths
        owners = self._owners()

        def changed_names() -> list[str]:
            both = zip(owners, now.split(lengths), noted.split(lengths), strict=True)
            return [self.names[i] for i, here, there in both if _is_changed(here, there)]

        return LaterComparison((now != noted).sum(dtype=torch.float64), changed_names)

    def _owners(self) -> list[int]:
        """Return for each part, as `_parts` has them, the number of the parameter that it is a part of."""
        return [*range(len(self.names)), *(i for i, _ in self._windows[self._turn])]

    def _find_views(self) -> bool:
        """Look for parameters whose memory is another one by now, and say whether there are any."""
        places = [(one.data_ptr(), one.shape, one.stride()) for one in self._parameters]
        if places == self._places:
            return False
        # The views keep the old memory, so that no new memory can have an address of theirs.
        self._places, self._views = places, [_sample_view(p) for p in self._parameters]
        self._window = None
        self._flat, self._arrays = None, []
        if self._parameters and all(map(_numpy_can_read, self._parameters)):
            self._flat = [parameter.detach().view(-1).numpy() for parameter in self._parameters]
            self._arrays = [flat[:: max(1, len(flat) // SAMPLE)] for flat in self._flat]
            self._arrays += [self._flat[i][at] for i, at in self._windows[self._turn]]
        return True

    def _read(self) -> Tensor:
        """Return all samples and the window as they are now, one after the other."""
        if self._flat is not None:
            self._lengths = list(map(len, self._arrays))
            return torch.from_numpy(np.concatenate(self._arrays))
        parts = self._parts()
        self._lengths = [part.shape[0] for part in parts]
        with one_thread():
            return torch.cat(parts)

    def _parts(self) -> list[Tensor]:
        """Return every sample, and the parts of the window, as they are now."""
        samples = [sample(p) if v is None else v for p, v in zip(self._parameters, self._views, strict=True)]
        if self._window is not None:
            return samples + self._window
        window = [self._parameters[i].detach().reshape(-1)[at] for i, at in self._windows[self._turn]]
        if all(view is not None for view in self._views):  # else a part may be a copy
            self._window = window
        return samples + window


def _numpy_can_read(parameter: Tensor) -> bool:
    """Say whether numpy can read a parameter's elements where they lie in memory."""
    plain = parameter.is_cpu and parameter.layout is torch.strided and parameter.is_contiguous()
    real = plain and not parameter.is_neg() and not parameter._is_zerotensor()  # else its memory holds other numbers
    return real and parameter.dtype in (torch.float32, torch.float64)


def _windows(parameters: Collection[Tensor]) -> list[tuple[tuple[int, slice], ...]]:
    """Divide all elements that a sample may leave out into windows, each of some (parameter, elements)."""
    windows: list[list[tuple[int, slice]]] = [[]]
    room = 0
    for i, parameter in enumerate(parameters):
        size = parameter.numel() if parameter.numel() >= 2 * SAMPLE else 0  # smaller ones are sampled whole
        limit = CPU_WINDOW_ELEMENTS if parameter.device.type == "cpu" else GPU_WINDOW_ELEMENTS
        start = 0
        while start < size:
            if not room:
                windows.append([])
                room = limit
            stop = min(size, start + room)
            windows[-1].append((i, slice(start, stop)))
            start, room = stop, room - (stop - start)
    return [tuple(window) for window in windows[1:]] or [()]


def _sample_view(parameter: Tensor) -> Tensor | None:
    """Return the elements of a parameter's sample as a view of its memory, or None where `sample` has to copy it."""
    if not parameter.is_contiguous():
        return None
    flat = parameter.detach().view(-1)
    return flat[:: max(1, len(flat) // SAMPLE)]


def _is_changed(now: Tensor, before: Tensor) -> bool:
    """Say whether elements are others by more than rounding; what is not a number stays itself."""
    if now.dtype != before.dtype or now.shape != before.shape:
        return True
    now, then = now.to(before.device).double(), before.double()
    other = (now != then) & ~(now.isnan() & then.isnan())
    if not bool(other.any()):
        return False
    bound = ROUNDING * torch.finfo(before.dtype).eps * float(then.norm())
    return not float((now - then)[other].norm()) <= bound


class Baseline:
    """The covered parameters as the last recorded step left them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], exact: Collection[str]) -> None:
        self._parameters = parameters
        self._exact = exact
        self._groups: dict[int, list[_Group]] = {}  # by owner: the id of an optimizer, 0 for parameters of none
        self._owners: dict[int, tuple[str, ...]] = {}
        self.kinds: dict[str, tuple[torch.dtype, torch.device]] = {}  # of the parameters when they were noted

    def note(self, owner: int, names: Collection[str]) -> ParameterSamples:
        """Keep the parameters of one optimizer as they are now, and return their samples.

        Parameters that belong to no optimizer are kept as they were when that became so.
        """
        mine = tuple(names)
        if self._owners.get(owner) == mine:
            for group in self._groups[owner]:
                group.note()
        else:
            self._regroup(owner, mine)
            if owner:
                owned = {name for known, theirs in self._owners.items() if known for name in theirs}
                rest = tuple(name for name in self._parameters if name not in owned)
                if self._owners.get(0) != rest:
                    self._regroup(0, rest)
        return ParameterSamples([group.samples() for group in self._groups[owner]])

    def changed(self, *, keys_only: bool = False) -> list[str]:
        """Return the parameters that are not as they were noted; with `keys_only` also those of keys-only layers."""
        found = {
            name
            for groups in self._groups.values()
            for group in groups
            if keys_only or group.names[0] in self._exact
            for name in group.changed()
        }
        return [name for name in self._parameters if name in found]

    def compare_later(self) -> list[LaterComparison]:
        """Start to compare all parameters of exactly recorded layers, as `changed` does, without waiting."""
        groups = [group for groups in self._groups.values() for group in groups if group.names[0] in self._exact]
        return [group.compare_later() for group in groups]

    def is_converted(self, name: str, parameter: Tensor) -> bool:
        """Say whether a parameter has another dtype than when it was noted, or is on another device."""
        dtype, device = self.kinds[name]
        return parameter.dtype is not dtype or parameter.device != device

    def converted(self) -> list[str]:
        """Return the parameters that `is_converted` says it of."""
        kinds = self.kinds
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter.dtype is not kinds[name][0] or parameter.device != kinds[name][1]
        ]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter when it was noted."""
        return self.kinds[name][0]

    def regroup(self) -> None:
        """Note all parameters as and where they are now, after a move to another device."""
        for owner, names in self._owners.items():
            self._regroup(owner, names)

    def _regroup(self, owner: int, names: tuple[str, ...]) -> None:
        self._owners[owner] = names
        kinds: dict[tuple[torch.dtype, torch.device, bool], dict[str, Tensor]] = {}
        for name in names:
            parameter = self._parameters[name]
            self.kinds[name] = parameter.dtype, parameter.device
            kinds.setdefault((*self.kinds[name], name in self._exact), {})[name] = parameter
        # Parameters of no optimizer are mostly frozen, and may be many more than those that are trained.
        self._groups[owner] = [_Group(group, windows=exact and owner != 0) for (_, _, exact), group in kinds.items()]
