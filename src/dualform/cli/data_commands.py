"""The commands `dualform data ls` and `dualform data get`: the data sets of the experiments."""

import sys
from typing import Annotated

import typer

from dualform.cli.options import JsonOption

data = typer.Typer(help="The data sets of the experiments.", no_args_is_help=True)


@data.command("ls")
def data_ls(json: JsonOption = False) -> None:
    """List the data sets, and where this machine has them."""
    from dualform.experiments.datasets import describe_datasets
    from dualform.show.terminal_tables import console, print_grid, print_json

    rows = [
        (row.name, row.summary, row.licence, str(row.location) if row.location else None) for row in describe_datasets()
    ]
    if json:
        names = ("name", "summary", "licence", "location")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_grid(console(), "Data sets", ["name", "holds", "licence", "here"], rows)


@data.command("get")
def data_get(name: Annotated[str, typer.Argument(help="One of `dualform data ls`.")], json: JsonOption = False) -> None:
    """Make sure that this machine has a data set."""
    from dualform.experiments.datasets import fetch
    from dualform.show.terminal_tables import print_json

    location = fetch(name)
    if json:
        print_json({"name": name, "source": location.source, "folder": str(location.folder or "")})
    else:
        sys.stdout.write(f"{location}\n")
