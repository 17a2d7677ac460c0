"""Are the parameters in a run's files those that the manifest lists? Asked before they are used, of headers alone.

Everything that is rebuilt has the shape and dtype of the parameters at the start, so a shape that the manifest invents
is found here before any memory is taken for it.
"""

from pathlib import Path
from typing import Any

from dualform.errors import CorruptError
from dualform.printable import cut
from dualform.store.format import STATE, opened_tensors
from dualform.store.manifest import Manifest

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}
"""How safetensors writes the dtypes that a parameter with values, or of a model in low precision, can have."""


def check_parameters(path: Path, manifest: Manifest, *, states: bool) -> None:
    """Raise `CorruptError` unless a file holds the parameters of the manifest, and nothing else.

    Args:
        path: the file.
        manifest: the run's manifest.
        states: whether the file may hold the optimizers' state beside them.
    """
    with opened_tensors(path) as file:
        names = set(file.keys())
        for name, entry in manifest.parameters.items():
            if name not in names:
                raise _corrupt(path, f"it lacks the parameter {cut(repr(name))}")
            shape, code = _described(file, name)
            if shape != entry.shape or code != _CODES.get(entry.dtype, code):
                raise _corrupt(
                    path, f"parameter {cut(repr(name))} is {shape} of {code}; expected {entry.shape} of {entry.dtype}"
                )
        for name in names - manifest.parameters.keys():
            state, _, parameter = name.partition(STATE)
            if not states or not state or parameter not in manifest.parameters:
                raise _corrupt(path, f"it holds {cut(repr(name))}, which the manifest does not know")
            shape, _ = _described(file, name)
            if shape not in ((), (1,), manifest.parameters[parameter].shape):
                raise _corrupt(path, f"the optimizer's {cut(repr(name))} is {shape}, unlike its parameter")


def _described(file: Any, name: str) -> tuple[tuple[int, ...], str]:
    """Return the shape of a tensor, and its dtype as safetensors writes it."""
    part = file.get_slice(name)
    return tuple(part.get_shape()), part.get_dtype()


def _corrupt(path: Path, problem: str) -> CorruptError:
    return CorruptError(f"{path}: {problem}. Restore the file from a copy of the run.")
