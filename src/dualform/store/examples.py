"""The test examples that a run may keep beside its patterns, so that it can be asked without other files."""

import dataclasses

from torch import Tensor

from dualform.errors import QueryError, RunExistsError, StoreError
from dualform.store.format import TESTS, Manifest, locked, opened_tensors, publish_tensors
from dualform.store.reader import Run


def add_tests(run: Run, inputs: Tensor, targets: Tensor | None) -> None:
    """Publish test inputs (M, ...) and their targets (M,), replacing earlier ones."""
    if targets is not None and len(targets) != len(inputs):
        raise QueryError(f"There are {len(inputs)} test inputs, but {len(targets)} targets. Give one per input.")
    tensors = {"inputs": inputs} if targets is None else {"inputs": inputs, "targets": targets}
    try:
        with locked(run.folder) as mine:
            if not mine:
                raise RunExistsError(f"{run.folder} is being recorded to. Add test examples when it is closed.")
            entry = publish_tensors(run.folder / TESTS, {n: tensor.detach().cpu() for n, tensor in tensors.items()})
            manifest = Manifest.read(run.folder)
            manifest = dataclasses.replace(manifest, files={**manifest.files, TESTS: entry})
            manifest.publish(run.folder)
    except OSError as error:
        if isinstance(error, RunExistsError):
            raise
        raise StoreError(f"The test examples could not be written to {run.folder}: {error}.") from error
    run.manifest = manifest


def read_tests(run: Run) -> tuple[Tensor, Tensor | None]:
    """Return the test inputs and, where they are known, their targets."""
    if TESTS not in run.manifest.files:
        raise QueryError(
            f"{run.folder} keeps no test examples. Add some with memory.add_tests, or give your own inputs."
        )
    with opened_tensors(run.folder / TESTS) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors["inputs"], tensors.get("targets")
