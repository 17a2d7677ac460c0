"""Commands about a run as a whole, and about what can be recorded, from `info` to `estimate` and `support`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dualform.cli.options import (
    AtOption,
    ExecutorOption,
    JsonOption,
    ModelOption,
    RunArgument,
    TrainOption,
    TrustOption,
    open_view,
)
from dualform.errors import DualformError, QueryError
from dualform.named_code import import_named
from dualform.printable import printable

FACTORY_HINT = (
    "The weights that {} makes are not the trained ones. Leave --model out to compare with what the run keeps, or let "
    "the factory load your checkpoint."
)


def info_command(run: RunArgument, json: JsonOption = False) -> None:
    """Say what a run holds: layers, patterns, bytes, columns."""
    import dualform
    from dualform.show.terminal_tables import print_json

    found = dualform.open(run).info()
    if json:
        print_json(found)
    else:
        sys.stdout.write(f"{printable(repr(found))}\n")


def verify_command(
    run: RunArgument,
    model: ModelOption = None,
    at: AtOption = None,
    train: TrainOption = None,
    trust: TrustOption = False,
    executor: ExecutorOption = None,
    json: JsonOption = False,
) -> None:
    """Check every file, rebuild every weight from the patterns, and compare with the live ones."""
    from dualform.show.model_loading import make_model
    from dualform.show.terminal_tables import print_json

    memory = open_view(run, at=at, executor=executor, train=train, trust=trust)
    outcome = memory.verify(None if model is None else make_model(model))
    factory_hint = "" if outcome.passed or model is None else FACTORY_HINT.format(model)
    hint = " ".join(filter(None, (outcome.hint, factory_hint)))
    if json:
        rows = [
            {
                "layer": layer.layer,
                "patterns": layer.patterns,
                "bytes": layer.bytes,
                "relative_error": layer.error,
                "bound": layer.bound,
                **({} if layer.rounding is None else {"rounding": layer.rounding}),
                **({} if layer.replayed is None else {"replay_equal": layer.replayed}),
                **(
                    {}
                    if layer.unexplained is None
                    else {"unexplained": layer.unexplained, "explained": layer.explained}
                ),
                "passed": layer.passed,
                "parameters": [
                    {
                        "parameter": check.parameter,
                        "error": check.error,
                        "change": check.change,
                        "bound": check.bound,
                        "passed": check.passed,
                    }
                    for check in layer.parameters
                ],
            }
            for layer in outcome.layers
        ]
        print_json(
            {
                "step": outcome.step,
                "files": outcome.files,
                "passed": outcome.passed,
                "verdict": outcome.verdict,
                "uncovered": outcome.uncovered,
                "uncovered_share": outcome.uncovered_share,
                "hint": hint,
                "layers": rows,
            }
        )
    else:
        sys.stdout.write(f"{printable(repr(outcome))}\n" + (f"{factory_hint}\n" if factory_hint else ""))
    if not outcome.passed:
        raise typer.Exit(1)


def copy_command(
    run: RunArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new folder, or a new address: s3://bucket/run.")],
    json: JsonOption = False,
) -> None:
    """Copy a run between folders and object storage, comparing every file with its checksum."""
    from dualform.opening import copy_run
    from dualform.recording.estimate import size_text
    from dualform.show.terminal_tables import print_json

    copied = copy_run(run, target)
    if json:
        print_json(copied)
    else:
        sys.stdout.write(printable(f"{copied.location}: {copied.files} files, {size_text(copied.bytes)}") + "\n")


def replay_command(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="The folder of the new run.")],
    keep: Annotated[str, typer.Option(help="What to store: patterns.")] = "patterns",
    layers: Annotated[
        list[str], typer.Option("--layers", "-l", help="Only these layers' patterns; repeatable. Default: all.")
    ] = [],  # noqa: B006
    dtype: Annotated[str | None, typer.Option(help="What patterns are stored in, as dualform.record takes it.")] = None,
    train: TrainOption = None,
    trust: TrustOption = False,
) -> None:
    """Run the training of a run that keeps steps again, prove every step, and store its patterns in a new run."""
    import dualform

    if keep != "patterns":
        raise QueryError(f"--keep is {keep!r}; expected patterns.")
    function = None if train is None else import_named(train, option="--train")
    patterns = dualform.Patterns(layers=layers or None, dtype=dtype)  # type: ignore[arg-type]
    dualform.replay(function, run, keep=patterns, to=to, trust=trust)
    found = dualform.open(to).info()
    sys.stdout.write(f"{printable(repr(found))}\n")


def estimate_command(
    model: ModelOption = None,
    shape: Annotated[str | None, typer.Option(help="Of one batch of inputs, for example 64,3,32,32.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="The inputs are numbers of tokens below this one, in place of float32.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="How many steps the training takes.", min=1)] = 1000,
    groups: Annotated[int, typer.Option(help="How many groups of patterns Shares would keep.", min=1)] = 10,
    json: JsonOption = False,
) -> None:
    """Say what each way of keeping a training takes on disk; without --model, for networks of three sizes."""
    import torch

    from dualform.experiments.cost_page import cost_page
    from dualform.show.costs import cost_table, keeping_costs
    from dualform.show.model_loading import make_model
    from dualform.show.terminal_tables import print_json

    if model is None:
        sys.stdout.write(cost_page())
        return
    if shape is None or not all(size.strip().isdigit() for size in shape.split(",")):
        raise QueryError(f"--shape is {shape!r}; expected the sizes of one batch of inputs, for example 64,3,32,32.")
    sizes = [int(size) for size in shape.split(",")]
    inputs = torch.zeros(sizes, dtype=torch.float32 if tokens is None else torch.int64)
    network = make_model(model)
    try:
        found = keeping_costs(network, inputs, steps=steps, groups=groups)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, DualformError):
            raise
        raise QueryError(
            f"{model} takes no inputs of shape {sizes} ({type(error).__name__}: {error}). Give --shape of one batch, "
            "and --tokens where the inputs are numbers of tokens."
        ) from error
    if json:
        print_json(found)
    else:
        sys.stdout.write(cost_table(found))


def support_command() -> None:
    """Print which layers and optimizers are supported, as Markdown."""
    from dualform.show.support import support_page

    sys.stdout.write(support_page())
