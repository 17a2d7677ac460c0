"""Commands that make a page of a run: `report` as one file, `view` in the browser."""

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from dualform.cli.options import Accept, Json, Model, Run, Trust, open_view
from dualform.printable import printable


def report(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    tests: Annotated[int, typer.Option(help="How many test examples, some of them wrong.", min=1)] = 12,
    test: Annotated[list[int], typer.Option("--test", "-t", help="These instead; repeatable.")] = [],  # noqa: B006
    by: Annotated[Optional[str], typer.Option(help="Group by columns: label, or task,label.")] = None,  # noqa: UP045
    no_media: Annotated[bool, typer.Option("--no-media", help="Leave training samples and test images out.")] = False,
    max_mb: Annotated[float, typer.Option("--max-mb", help="The size of the file at most.", min=0.01)] = 3.0,
    model: Model = None,
    accept_untrained: Accept = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write one self-contained HTML file about some test examples."""
    from dualform.show.grouping import parse_by
    from dualform.show.report.write import write_report
    from dualform.show.tables import print_json

    written = write_report(
        open_view(run),
        output,
        tests=test or tests,
        by=None if by is None else parse_by(by),
        media=not no_media,
        most_mb=max_mb,
        model=model,
        accept_untrained=accept_untrained,
        trust=trust,
    )
    if json:
        print_json(written)
    else:
        lines = [f"{written.path}: {written.tests} tests, {written.bytes / 1e6:.2f} MB", *written.warnings]
        sys.stdout.write(printable("\n".join(lines)) + "\n")


def view(
    run: Run,
    model: Model = None,
    port: Annotated[int, typer.Option(help="0 for a free one.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Where to listen; anything but this machine needs --expose.")] = "127.0.0.1",
    expose: Annotated[bool, typer.Option("--expose", help="Let other machines ask.")] = False,
    memory_mb: Annotated[int, typer.Option("--memory-mb", help="Memory for live masks.", min=1)] = 512,
    accept_untrained: Accept = False,
    trust: Trust = False,
) -> None:
    """Look at a run in the browser, with live masks."""
    from dualform.show.viewer.serve import serve

    serve(
        run,
        model=model,
        host=host,
        port=port,
        budget=memory_mb * 1_000_000,
        expose=expose,
        accept_untrained=accept_untrained,
        trust=trust,
    )
