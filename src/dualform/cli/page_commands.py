"""Commands that make a page of a run: `report` as one file, `view` in the browser."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dualform.cli.options import (
    AcceptOption,
    ExecutorOption,
    JsonOption,
    ModelOption,
    RunArgument,
    TokenizerOption,
    TrainOption,
    TrustOption,
    open_view,
    training_named,
)
from dualform.printable import printable


def report_command(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    tests: Annotated[int, typer.Option(help="How many test examples, some of them wrong.", min=1)] = 12,
    test: Annotated[list[int], typer.Option("--test", "-t", help="These instead; repeatable.")] = [],  # noqa: B006
    by: Annotated[str | None, typer.Option(help="Group by columns: label, or task,label.")] = None,
    no_media: Annotated[bool, typer.Option("--no-media", help="Leave training samples and test images out.")] = False,
    no_path: Annotated[
        bool, typer.Option("--no-path", help="Leave out where answers come from, which takes longest.")
    ] = False,
    max_mb: Annotated[float, typer.Option("--max-mb", help="The size of the file at most.", min=0.01)] = 3.0,
    model: ModelOption = None,
    accept_untrained: AcceptOption = False,
    train: TrainOption = None,
    trust: TrustOption = False,
    executor: ExecutorOption = None,
    json: JsonOption = False,
) -> None:
    """Write one self-contained HTML file about some test examples."""
    from dualform.show.grouping import parse_by
    from dualform.show.report.write import write_report
    from dualform.show.terminal_tables import print_json

    written = write_report(
        open_view(run, executor=executor, train=train, trust=trust),
        output,
        tests=test or tests,
        by=None if by is None else parse_by(by),
        media=not no_media,
        most_mb=max_mb,
        model=model,
        accept_untrained=accept_untrained,
        trust=trust,
        path_contributions=not no_path,
    )
    if json:
        print_json(written)
    else:
        lines = [f"{written.path}: {written.tests} tests, {written.bytes / 1e6:.2f} MB", *written.warnings]
        sys.stdout.write(printable("\n".join(lines)) + "\n")


def view_command(
    run: RunArgument,
    model: ModelOption = None,
    port: Annotated[int, typer.Option(help="0 for a free one.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Where to listen; anything but this machine needs --expose.")] = "127.0.0.1",
    expose: Annotated[bool, typer.Option("--expose", help="Let other machines ask.")] = False,
    tokenizer: TokenizerOption = None,
    memory_mb: Annotated[int, typer.Option("--memory-mb", help="Memory for live masks.", min=1)] = 512,
    accept_untrained: AcceptOption = False,
    train: TrainOption = None,
    trust: TrustOption = False,
    executor: ExecutorOption = None,
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
        train=training_named(train),
        tokenizer=tokenizer,
        trust=trust,
        executor=executor,
    )
