"""Compare the parameters in a run's files with the manifest, by the headers of the files, before they are used.

Everything that is rebuilt has the shape and dtype of the parameters at the start, so a shape that the manifest invents
is found here before any memory is taken for it.
"""

import torch

from dualform.errors import CorruptError
from dualform.printable import cut
from dualform.store.format import STATE
from dualform.store.manifest import Manifest
from dualform.store.tensors import TensorFile, TensorPlace

_PARAMETER_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""The dtypes that a parameter with values, or of a model in low precision, can have, as the manifest calls them."""


def check_parameters(file: TensorFile, manifest: Manifest, *, states: bool) -> None:
    """Raise `CorruptError` unless a file holds the parameters of the manifest, and nothing else.

    Args:
        file: the file.
        manifest: the run's manifest.
        states: whether the file may hold the optimizers' state beside them.
    """
    for name, entry in manifest.parameters.items():
        if name not in file.places:
            raise _bad_parameters(file, f"it lacks the parameter {cut(repr(name))}")
        place = file.places[name]
        if place.shape != entry.shape or place.dtype != _PARAMETER_DTYPES.get(entry.dtype, place.dtype):
            expected = f"expected {entry.shape} of {entry.dtype}"
            raise _bad_parameters(
                file, f"parameter {cut(repr(name))} is {place.shape} of {_dtype_name(place)}; {expected}"
            )
    for name in file.places.keys() - manifest.parameters.keys():
        state, _, parameter = name.partition(STATE)
        if not states or not state or parameter not in manifest.parameters:
            raise _bad_parameters(file, f"it holds {cut(repr(name))}, which the manifest does not know")
        shape = file.places[name].shape
        if shape not in ((), (1,), manifest.parameters[parameter].shape):
            raise _bad_parameters(file, f"the optimizer's {cut(repr(name))} is {shape}, unlike its parameter")


def _dtype_name(place: TensorPlace) -> str:
    return str(place.dtype).removeprefix("torch.")


def _bad_parameters(file: TensorFile, problem: str) -> CorruptError:
    return CorruptError(f"{file.blob}: {problem}. Restore the file from a copy of the run.")
