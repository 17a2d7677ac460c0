"""The application with all its commands, and the entry point of the script `dualform`."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from dualform._version import __version__
from dualform.cli.data_commands import data
from dualform.cli.experiment_commands import demo_command, evaluate_command, gallery_command, reproduce_command
from dualform.cli.page_commands import report_command, view_command
from dualform.cli.question_commands import attend_command, mask_command
from dualform.cli.run_commands import (
    copy_command,
    estimate_command,
    info_command,
    replay_command,
    support_command,
    verify_command,
)
from dualform.errors import DualformError
from dualform.printable import printable

app = typer.Typer(
    help="See what a trained network owes to each thing it was trained on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo_command,
    "gallery": gallery_command,
    "reproduce": reproduce_command,
    "estimate": estimate_command,
    "info": info_command,
    "verify": verify_command,
    "cp": copy_command,
    "attend": attend_command,
    "evaluate": evaluate_command,
    "mask": mask_command,
    "replay": replay_command,
    "report": report_command,
    "view": view_command,
    "support": support_command,
}
"""The commands by name, in the order in which --help lists them."""
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(data, name="data")


def main() -> None:
    """Run the command line; a failure is one line on stderr."""
    try:
        app(prog_name="dualform")
    except DualformError as error:
        sys.stderr.write(f"dualform: {printable(str(error))}\n")
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        sys.stdout.write(f"{__version__}\n")
        raise typer.Exit
