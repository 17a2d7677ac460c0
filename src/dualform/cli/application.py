"""The application with all its commands, and the entry point of the script `dualform`."""

import sys
from typing import Annotated

import typer

from dualform._version import __version__
from dualform.cli.datasets import data
from dualform.cli.experiments import demo, evaluate, reproduce
from dualform.cli.pages import report, view
from dualform.cli.questions import attend, mask
from dualform.cli.runs import info, support, verify
from dualform.errors import DualformError
from dualform.printable import printable

app = typer.Typer(
    help="See what a trained network owes to each thing it was trained on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (demo, reproduce, info, verify, attend, evaluate, mask, report, view, support):  # as --help lists them
    app.command()(command)
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
