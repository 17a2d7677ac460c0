"""The baseline: the parameters as the last recorded step left them, to find what else has changed them since.

Of every parameter a fixed sample of its elements is kept, which also is the step's fingerprint, and of the larger ones
a checksum of all elements: an edit of a few elements is hardly ever in the sample. No copies of parameters are kept.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dualform.record.sinks import SAMPLE, sample
from dualform.threads import one_thread

ROUNDING = 8
"""How many units of rounding (eps times the parameter's norm) a parameter may move without counting as changed.

Weights that are perturbed and put back by subtraction (sharpness-aware minimisation) come back to within rounding.
"""


class _Group:
    """Parameters of one device and dtype: their samples in one tensor, and a checksum of each of the larger ones."""

    def __init__(self, parameters: Mapping[str, Tensor], *, whole: bool) -> None:
        self.names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        # A sample of fewer elements is all of them. Without `whole` samples have to do.
        self._larger = [i for i, p in enumerate(self._parameters) if whole and p.numel() >= 2 * SAMPLE]
        self._bytes = max((self._parameters[i].nbytes for i in self._larger), default=0)
        self._addresses: list[int] = []
        self._views: list[Tensor | None] = []  # nothing where a parameter's elements do not lie in order
        self.note()

    def note(self) -> None:
        """Keep the parameters' samples and checksums as they are now."""
        self._find_views()
        self._samples, self._checksums = self._measure()
        self._lengths = [self._length(i) for i in range(len(self.names))]

    def samples(self) -> Iterator[tuple[str, Tensor]]:
        """Return each parameter's sample as it was noted."""
        return zip(self.names, self._samples.split(self._lengths), strict=True)

    def changed(self) -> list[str]:
        """Return the parameters that are not as they were noted, beyond rounding."""
        kind = self._samples.dtype, self._samples.device
        if not self._find_views() or all((p.dtype, p.device) == kind for p in self._parameters):
            samples, checksums = self._measure()
            if torch.equal(samples, self._samples) and torch.equal(checksums, self._checksums):
                return []
        noted = dict(zip(self._larger, self._checksums, strict=True))
        return [name for i, (name, before) in enumerate(self.samples()) if self._is_changed(i, before, noted.get(i))]

    def _is_changed(self, i: int, before: Tensor, checksum: Tensor | None) -> bool:
        parameter = self._parameters[i].detach()
        if parameter.dtype != before.dtype or _moved(sample(parameter), before):
            return True
        # Sums of the same elements on another device differ by more than the rounding of the elements.
        return checksum is not None and parameter.device == before.device and self._resummed(i, checksum)

    def _find_views(self) -> bool:
        """Look for parameters whose memory is another one by now, and say whether there are any."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses == self._addresses:
            return False
        # The views keep the old memory, so that no new memory can have an address of theirs.
        self._addresses, self._views = addresses, [_sample_view(p) for p in self._parameters]
        return True

    def _measure(self) -> tuple[Tensor, Tensor]:
        """Return all samples, one after the other, and the checksums (number of larger parameters,)."""
        with one_thread():
            samples = torch.cat(
                [sample(p) if v is None else v for p, v in zip(self._parameters, self._views, strict=True)]
            )
        with one_thread(bytes_read=self._bytes, device=samples.device):
            checksums = _checksums([self._parameters[i].detach() for i in self._larger], samples)
        return samples, checksums

    def _length(self, i: int) -> int:
        view = self._views[i]
        return len(sample(self._parameters[i]) if view is None else view)

    def _resummed(self, i: int, before: Tensor) -> bool:
        """Say whether a parameter's checksum moved by more than the rounding of its elements and of its sum."""
        parameter = self._parameters[i].detach()
        with one_thread(bytes_read=self._bytes, device=parameter.device):
            now = float(_checksums([parameter], parameter)[0])
        then = float(before)
        if now == then or (now != now and then != then):
            return False
        scale = float(parameter.double().norm()) + abs(then)
        return not abs(now - then) <= ROUNDING * torch.finfo(parameter.dtype).eps * scale


def _checksums(parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return a number per tensor that hardly any edit leaves alone: its sum, or on a GPU its norm.

    There all norms take one kernel, and each sum would take one of its own.
    """
    if not parameters:
        return like.new_empty(0)
    if like.device.type == "cpu":
        return torch.stack([parameter.sum() for parameter in parameters])
    return torch.stack(torch._foreach_norm(list(parameters)))


def _sample_view(parameter: Tensor) -> Tensor | None:
    """Return the elements of a parameter's sample as a view of its memory, or None where `sample` has to copy it."""
    if not parameter.is_contiguous():
        return None
    flat = parameter.detach().view(-1)
    return flat[:: max(1, len(flat) // SAMPLE)]


def _moved(now: Tensor, before: Tensor) -> bool:
    """Say whether a sample moved by more than rounding; what is not a number stays itself."""
    if now.shape != before.shape:
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
        self._kinds: dict[str, tuple[torch.dtype, torch.device]] = {}

    def note(self, owner: int, names: Collection[str]) -> dict[str, Tensor]:
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
        return {name: kept for group in self._groups[owner] for name, kept in group.samples()}

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

    def is_converted(self, name: str, parameter: Tensor) -> bool:
        """Say whether a parameter has another dtype than when it was noted, or is on another device."""
        dtype, device = self._kinds[name]
        return parameter.dtype is not dtype or parameter.device != device

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter when it was noted."""
        return self._kinds[name][0]

    def regroup(self) -> None:
        """Note all parameters as and where they are now, after a move to another device."""
        for owner, names in self._owners.items():
            self._regroup(owner, names)

    def _regroup(self, owner: int, names: tuple[str, ...]) -> None:
        self._owners[owner] = names
        kinds: dict[tuple[torch.dtype, torch.device, bool], dict[str, Tensor]] = {}
        for name in names:
            parameter = self._parameters[name]
            self._kinds[name] = parameter.dtype, parameter.device
            kinds.setdefault((*self._kinds[name], name in self._exact), {})[name] = parameter
        # Parameters of no optimizer are mostly frozen, and may be many more than those that are trained.
        self._groups[owner] = [_Group(group, whole=exact and owner != 0) for (_, _, exact), group in kinds.items()]
