"""Arguments and options that several commands share, and the memory that they select."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualform.named_code import import_named

if TYPE_CHECKING:
    from dualform.attend.memory import Memory

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a recorded run, or its address: s3://bucket/run.")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", help="What runs questions: local (threads, a GPU) or ray (a cluster, or workers here)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="package.module:factory that makes the model.")]
InputsOption = Annotated[Path | None, typer.Option("--inputs", help=".npy or .safetensors; default: the run's tests.")]
WhereOption = Annotated[str | None, typer.Option("--where", help="SQL: keep only these patterns.")]
WithoutOption = Annotated[str | None, typer.Option("--without", help="SQL: leave these patterns out.")]
AcceptOption = Annotated[
    bool,
    typer.Option(
        "--accept-untrained", help="Answer with the factory's own values for what the run does not keep, and say so."
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Call the functions that the run remembers, which runs its code.")
]
TrainOption = Annotated[
    str | None,
    typer.Option("--train", help="package.module:function that runs the training, for a run that keeps steps."),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="For texts in pieces: package.module:name of an object with encode and decode, a tokenizer.json, or a "
        "folder of transformers.",
    ),
]
AtOption = Annotated[int | None, typer.Option("--at", help="Look back from after this many steps.")]


def open_view(
    run: str,
    *,
    where: str | None = None,
    without: str | None = None,
    at: int | None = None,
    executor: str | None = None,
    train: str | None = None,
    trust: bool = False,
) -> "Memory":
    """Open a run, and return the view of it that the options --where, --without and --at select.

    The patterns of a run that keeps steps come back by the training that --train names, or with --trust by the one that
    the run names.
    """
    import dualform

    memory = dualform.open(run, executor=executor, train=training_named(train), trust=trust)
    return select_view(memory, where=where, without=without, at=at)


def training_named(train: str | None) -> Any:
    """Return the training function that the option --train names; None where it is not given."""
    return None if train is None else import_named(train, option="--train")


def select_view(memory: "Memory", *, where: str | None, without: str | None, at: int | None) -> "Memory":
    """Return the view of a memory that the options --where, --without and --at select."""
    if at is not None:
        memory = memory.at(step=at)
    if where is not None:
        memory = memory.where(where)
    return memory if without is None else memory.without(without)
