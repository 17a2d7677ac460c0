"""The test examples that a run may keep beside its patterns, so that it can be asked without other files."""

import dataclasses

import safetensors.torch
from torch import Tensor

from dualform.errors import QueryError
from dualform.store.format import TESTS, Manifest, publish
from dualform.store.reader import Run


def add_tests(run: Run, inputs: Tensor, targets: Tensor | None) -> None:
    """Publish test inputs (M, ...) and their targets (M,), replacing earlier ones."""
    if targets is not None and len(targets) != len(inputs):
        raise QueryError(f"There are {len(inputs)} test inputs, but {len(targets)} targets. Give one per input.")
    tensors = {"inputs": inputs} if targets is None else {"inputs": inputs, "targets": targets}
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    entry = publish(run.folder / TESTS, lambda partial: safetensors.torch.save_file(whole, partial))
    manifest = Manifest.read(run.folder)
    manifest = dataclasses.replace(manifest, files={**manifest.files, TESTS: entry})
    manifest.publish(run.folder)
    run.manifest = manifest


def read_tests(run: Run) -> tuple[Tensor, Tensor | None]:
    """Return the test inputs and, where they are known, their targets."""
    if TESTS not in run.manifest.files:
        raise QueryError(
            f"{run.folder} keeps no test examples. Add some with memory.add_tests, or give your own inputs."
        )
    tensors = safetensors.torch.load_file(run.folder / TESTS)
    return tensors["inputs"], tensors.get("targets")
