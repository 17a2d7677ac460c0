"""Commands about a run as a whole, and about what can be recorded: `info`, `verify` and `support`."""

import sys

import typer

from dualform.cli.options import AtOption, JsonOption, ModelOption, RunArgument, open_view
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


def verify_command(run: RunArgument, model: ModelOption = None, at: AtOption = None, json: JsonOption = False) -> None:
    """Check every file, rebuild every weight from the patterns, and compare with the live ones."""
    from dualform.show.model_loading import make_model
    from dualform.show.terminal_tables import print_json

    memory = open_view(run, at=at)
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


def support_command() -> None:
    """Print which layers and optimizers are supported, as Markdown."""
    from dualform.show.support import support_page

    sys.stdout.write(support_page())
