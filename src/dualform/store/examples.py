"""The test examples that a run may keep beside its patterns, so that it can be asked without other files."""

from torch import Tensor

from dualform.errors import QueryError
from dualform.store.format import TESTS, opened_tensors, publish_tensors
from dualform.store.media import add_media
from dualform.store.reader import Run


def add_tests(run: Run, inputs: Tensor, targets: Tensor | None) -> None:
    """Publish test inputs (M, ...) and their targets (M,), replacing earlier ones."""
    if targets is not None and len(targets) != len(inputs):
        raise QueryError(f"There are {len(inputs)} test inputs, but {len(targets)} targets. Give one per input.")
    tensors = {"inputs": inputs} if targets is None else {"inputs": inputs, "targets": targets}
    plain = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    add_media(run, {TESTS: lambda path: publish_tensors(path, plain)}, what="test examples")


def read_tests(run: Run) -> tuple[Tensor, Tensor | None]:
    """Return the test inputs and, where they are known, their targets."""
    if TESTS not in run.manifest.files:
        raise QueryError(
            f"{run.folder} keeps no test examples. Add some with memory.add_tests, or give your own inputs."
        )
    with opened_tensors(run.folder / TESTS) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors["inputs"], tensors.get("targets")
