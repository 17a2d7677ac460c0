"""Samples of parameters, by which a step is recognised: a few elements of each, one parameter's after the other's.

They are read together, as one tensor for all parameters of a device and dtype. To cut that tensor into a sample for
each parameter costs the training thread more than to read it, so it is done only where somebody asks for a sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class JointSample:
    """The samples of some parameters in one tensor.

    Attributes:
        tensor: their elements, one sample after the other.
        counts: the number of elements of each sample.
    """

    tensor: Tensor  # (n,)
    counts: Mapping[str, int]


class ParameterSamples(Mapping[str, Tensor]):
    """The sample of each parameter, (n,), by the parameter's name. The mapping never changes."""

    __slots__ = ("_cut", "_joined")

    def __init__(self, joined: Sequence[JointSample]) -> None:
        self._joined = joined
        self._cut: dict[str, Tensor] | None = None  # the single samples, once anybody has asked for one

    def __getitem__(self, name: str) -> Tensor:
        return self._samples()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for one in self._joined for name in one.counts)

    def __len__(self) -> int:
        return sum([len(one.counts) for one in self._joined])

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the samples lie in."""
        return [one.tensor for one in self._joined]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "ParameterSamples":
        """Return the same samples in copies of these tensors."""
        both = zip(self._joined, tensors, strict=True)
        return ParameterSamples([JointSample(tensor, one.counts) for one, tensor in both])

    def _samples(self) -> dict[str, Tensor]:
        if self._cut is None:
            found: dict[str, Tensor] = {}
            for one in self._joined:
                found.update(zip(one.counts, one.tensor.split(list(one.counts.values())), strict=True))
            self._cut = found
        return self._cut


def tensors_of_samples(samples: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors that samples lie in: few, where they were read together."""
    return samples.tensors() if isinstance(samples, ParameterSamples) else list(samples.values())


def samples_in(samples: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
    """Return the same samples in copies of the tensors that `tensors_of_samples` returns."""
    if isinstance(samples, ParameterSamples):
        return samples.with_tensors(tensors)
    return dict(zip(samples, tensors, strict=True))
