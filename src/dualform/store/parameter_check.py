"""Compare the parameters in a run's files with the manifest, by the headers of the files, before they are used.

Everything that is rebuilt has the shape and dtype of the parameters at the start, so a shape that the manifest invents
is found here before any memory is taken for it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualform.errors import CorruptError
from dualform.printable import cut
from dualform.store.format import STATE
from dualform.store.manifest import Manifest
from dualform.store.tensors import TensorFile, TensorPlace

_PARAMETER_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""The dtypes that a parameter with values, or of a model in low precision, can have, as the manifest calls them."""


def join_parameters(files: Sequence[TensorFile], manifest: Manifest, *, states: bool) -> dict[str, Tensor]:
    """Return the parameters of the manifest from the files of all processes, or raise `CorruptError`.

    Args:
        files: that of process 0, and those of the processes that keep rows of parameters, in the order of ranks.
        manifest: the run's manifest.
        states: whether the files may hold the optimizers' state beside the parameters.
    """
    first, *others = files
    if not others:
        _check_places(first, first.places, manifest, states=states)
        return first.tensors()
    found = [file.tensors() for file in files]
    joined: dict[str, Tensor] = {}
    for name, tensor in found[0].items():
        rows = [one[name] for one in found if name in one]
        if len(rows) > 1 and any(one.dim() == 0 or one.shape[1:] != tensor.shape[1:] for one in rows):
            raise _bad_parameters(first, f"{cut(repr(name))} and the rows of other processes do not fit together")
        joined[name] = torch.cat(rows) if tensor.dim() and len(rows) > 1 else tensor
    for file in others:
        for name in file.places.keys() - joined.keys():
            raise _bad_parameters(file, f"it holds {cut(repr(name))}, of which process 0 has no rows")
    places = {name: TensorPlace(one.dtype, tuple(one.shape), 0) for name, one in joined.items()}
    _check_places(first, places, manifest, states=states)
    return joined


def _check_places(file: TensorFile, places: Mapping[str, TensorPlace], manifest: Manifest, *, states: bool) -> None:
    """Raise `CorruptError` unless a file's tensors are the parameters of the manifest, and nothing else.

    Args:
        file: the file.
        places: the dtypes and shapes of its tensors, with the rows of all processes.
        manifest: the run's manifest.
        states: whether the file may hold the optimizers' state beside the parameters.
    """
    for name, entry in manifest.parameters.items():
        if name not in places:
            raise _bad_parameters(file, f"it lacks the parameter {cut(repr(name))}")
        place = places[name]
        if place.shape != entry.shape or place.dtype != _PARAMETER_DTYPES.get(entry.dtype, place.dtype):
            expected = f"expected {entry.shape} of {entry.dtype}"
            raise _bad_parameters(
                file, f"parameter {cut(repr(name))} is {place.shape} of {_dtype_name(place)}; {expected}"
            )
    for name in places.keys() - manifest.parameters.keys():
        state, _, parameter = name.partition(STATE)
        if not states or not state or parameter not in manifest.parameters:
            raise _bad_parameters(file, f"it holds {cut(repr(name))}, which the manifest does not know")
        shape = places[name].shape
        if shape not in ((), (1,), manifest.parameters[parameter].shape):
            raise _bad_parameters(file, f"the optimizer's {cut(repr(name))} is {shape}, unlike its parameter")


def _dtype_name(place: TensorPlace) -> str:
    return str(place.dtype).removeprefix("torch.")


def _bad_parameters(file: TensorFile, problem: str) -> CorruptError:
    return CorruptError(f"{file.blob}: {problem}. Restore the file from a copy of the run.")
