"""Arguments and options that several commands share, and the memory that they select."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from dualform.attend.memory import Memory

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a recorded run.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Model = Annotated[Optional[str], typer.Option("--model", help="package.module:factory that makes the model.")]  # noqa: UP045 (typer)
Inputs = Annotated[Optional[Path], typer.Option("--inputs", help=".npy or .safetensors; default: the run's tests.")]  # noqa: UP045
Where = Annotated[Optional[str], typer.Option("--where", help="SQL: keep only these patterns.")]  # noqa: UP045
Without = Annotated[Optional[str], typer.Option("--without", help="SQL: leave these patterns out.")]  # noqa: UP045
Accept = Annotated[
    bool,
    typer.Option(
        "--accept-untrained", help="Answer with the factory's own values for what the run does not keep, and say so."
    ),
]
Trust = Annotated[bool, typer.Option("--trust", help="Call the factory that the run remembers, which runs its code.")]
At = Annotated[Optional[int], typer.Option("--at", help="Look back from after this many steps.")]  # noqa: UP045


def open_view(run: Path, *, where: str | None = None, without: str | None = None, at: int | None = None) -> "Memory":
    """Open a run, and return the view of it that the options --where, --without and --at select."""
    import dualform

    memory = dualform.open(run)
    if at is not None:
        memory = memory.at(step=at)
    if where is not None:
        memory = memory.where(where)
    return memory if without is None else memory.without(without)
