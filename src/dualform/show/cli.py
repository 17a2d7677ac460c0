"""The command line: parse, ask the memory, render. Stdout is the result, stderr the progress and the errors.

Exit status: 0, 1 for a failure (or a verification that did not pass), 2 for wrong usage. Nothing heavy is imported
before a command runs, so that `--help` is instant.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from dualform._version import __version__
from dualform.errors import DualformError, QueryError
from dualform.printable import printable

if TYPE_CHECKING:
    from dualform.attend.groups import Bins
    from dualform.attend.memory import Memory

app = typer.Typer(
    help="See what a trained network owes to each thing it was trained on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="The data sets of the experiments.", no_args_is_help=True)
app.add_typer(data, name="data")

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


FACTORY_HINT = (
    "The weights that {} makes are not the trained ones. Leave --model out to compare with what the run keeps, or let "
    "the factory load your checkpoint."
)


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


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where to put the run and the figures.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the network and the order of its training.")] = 0,
    json: Json = False,
) -> None:
    """Digits, end to end, under a minute: train, record, verify, spotlights, masks, figures."""
    from dualform.experiments.demo import run_demo
    from dualform.show.demo import demo_json, show_demo
    from dualform.show.tables import print_json

    result = run_demo(folder, seed=seed)
    if json:
        print_json(demo_json(result))
    else:
        show_demo(result)


@app.command()
def reproduce(
    study: Annotated[
        str, typer.Argument(help="single, joint, continual, aesop, wikitext2, text, or all.", show_default=False)
    ],
    data_set: Annotated[
        Optional[str],  # noqa: UP045 (typer)
        typer.Option("--data", help="mnist, digits, for single cifar-10; for text one of `dualform data ls`."),
    ] = None,
    file: Annotated[Optional[Path], typer.Option(help="For text: a file of your own, in UTF-8.")] = None,  # noqa: UP045
    tokens: Annotated[Optional[str], typer.Option(help="For text: chars or words.")] = None,  # noqa: UP045
    model: Annotated[str, typer.Option(help="Of a language model: lstm or transformer.")] = "lstm",
    paper: Annotated[bool, typer.Option("--paper", help="Language models of the paper's size.")] = False,
    updates: Annotated[Optional[int], typer.Option(help="Of a language model.", min=1)] = None,  # noqa: UP045
    units: Annotated[Optional[int], typer.Option(help="LSTM units, or width of the Transformer.", min=1)] = None,  # noqa: UP045
    seeds: Annotated[int, typer.Option(help="How many runs, with seeds 0, 1, ...", min=1)] = 1,
    folder: Annotated[Path, typer.Option(help="Where to put runs, findings and figures.")] = Path("runs/reproduce"),
    keep: Annotated[
        str, typer.Option(help="Keep the recorded patterns of: first, all or none of the seeds.")
    ] = "first",
    page: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write sections to this page; with all: docs/results.md, other data: FOLDER/results.md."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train and attend, for example cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Run the paper's studies, images and language models, and put our numbers beside the paper's."""
    from dualform.show.studies import Options, reproduce_studies

    options = Options(
        study, data_set, seeds, folder, keep, page, device, file, tokens, model, paper, updates, units
    )  # fmt: skip
    reproduce_studies(options, json=json)


@app.command()
def info(run: Run, json: Json = False) -> None:
    """Say what a run holds: layers, patterns, bytes, columns."""
    import dualform
    from dualform.show.tables import print_json

    found = dualform.open(run).info()
    if json:
        print_json(found)
    else:
        sys.stdout.write(f"{printable(repr(found))}\n")


@app.command()
def verify(run: Run, model: Model = None, at: At = None, json: Json = False) -> None:
    """Check every file, rebuild every weight from the patterns, and compare with the live ones."""
    from dualform.show.models import make_model
    from dualform.show.tables import print_json

    memory = _open(run, at=at)
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
                **({} if layer.rounding is None else {"rounding": layer.rounding, "replay_equal": layer.replayed}),
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


@app.command()
def attend(
    run: Run,
    model: Model = None,
    text: Annotated[Optional[str], typer.Option("--text", help="A prompt, for a language model.")] = None,  # noqa: UP045
    token_ids: Annotated[Optional[str], typer.Option("--token-ids", help='A prompt as tokens: "12 5 9".')] = None,  # noqa: UP045
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--tokenizer", help="With --text: package.module:name of an object with encode and decode."),
    ] = None,
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--context", help="With --text: how many tokens the model takes; default: as it says.", min=1),
    ] = None,
    inputs: Inputs = None,
    test: Annotated[list[int], typer.Option("--test", "-t", help="Which inputs to ask about; repeatable.")] = [0],  # noqa: B006
    layer: Annotated[list[str], typer.Option("--layer", "-l", help="Only these layers; repeatable.")] = [],  # noqa: B006
    by: Annotated[Optional[str], typer.Option(help="Totals by columns: label, task,label or step:500.")] = None,  # noqa: UP045
    of: Annotated[str, typer.Option(help="attention, magnitude, contribution or effect.")] = "attention",
    quantity: Annotated[str, typer.Option(help="What effects are effects on: margin or loss.")] = "margin",
    top: Annotated[int, typer.Option(help="How many patterns to list; 0 for none.")] = 5,
    per: Annotated[str, typer.Option(help="Rank each pattern, or each sample over its occurrences.")] = "pattern",
    smallest: Annotated[bool, typer.Option("--smallest", help="The most negative instead.")] = False,
    where: Where = None,
    without: Without = None,
    at: At = None,
    accept_untrained: Accept = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Ask what inputs attend to: totals by group, and the top training patterns; with --text, the top passages."""
    from dualform.show.ask import ask, show_answers
    from dualform.show.tables import print_json

    memory = _open(run, where=where, without=without, at=at)
    prompt = _prompt(text, token_ids, tokenizer=tokenizer, context=context)
    if prompt is not None:
        _attend_text(
            memory,
            prompt,
            model=model,
            layers=layer,
            top=top,
            tokenizer=tokenizer,
            context=context,
            accept_untrained=accept_untrained,
            trust=trust,
            json=json,
        )
        return
    answers = ask(
        memory,
        model=model,
        inputs=inputs,
        tests=test,
        layers=layer,
        by=None if by is None else _columns(by),
        of=of,
        quantity=quantity,
        top=top,
        per=per,
        largest=not smallest,
        accept_untrained=accept_untrained,
        trust=trust,
    )
    if json:
        print_json(answers)
    else:
        show_answers(answers)


@app.command()
def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see benchmarks/truth.")],
    folder: Annotated[Optional[Path], typer.Option(help="Where to keep everything; default runs/truth/NAME.")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option(help="Where to retrain, for example cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Retrain on random halves of the data, and say how well effects predicted it; goes on where it stopped."""
    from dualform.show.evaluate import run_evaluation

    run_evaluation(config, folder, device=device, json=json)


@app.command()
def mask(
    run: Run,
    where: Where = None,
    without: Without = None,
    at: At = None,
    model: Model = None,
    inputs: Inputs = None,
    layer: Annotated[list[str], typer.Option("--layer", "-l", help="Mask only these layers; repeatable.")] = [],  # noqa: B006
    accept_untrained: Accept = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Say what changes without some patterns: removes recorded updates; the model is not retrained."""
    from dualform.show.ask import compare_mask, show_mask
    from dualform.show.tables import print_json

    if where is None and without is None and at is None:
        raise QueryError('Nothing is masked. Give --where, --without or --at, for example --without "label = 3".')
    masked = _open(run, where=where, without=without, at=at)
    outcome = compare_mask(_open(run), masked, model, inputs, layer, accept_untrained=accept_untrained, trust=trust)
    if json:
        print_json(outcome)
    else:
        show_mask(outcome)


@app.command()
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
    from dualform.show.report.write import write_report
    from dualform.show.tables import print_json

    columns = None if by is None else tuple(_columns(by))
    written = write_report(
        _open(run),
        output,
        tests=test or tests,
        by=columns,
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


@app.command()
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


@app.command()
def support() -> None:
    """Print which layers and optimizers are supported, as Markdown."""
    from dualform.show.support import support_page

    sys.stdout.write(support_page())


@data.command("ls")
def data_ls(json: Json = False) -> None:
    """List the data sets, and where this machine has them."""
    from dualform.experiments.datasets import describe
    from dualform.show.tables import console, print_grid, print_json

    rows = [(row.name, row.summary, row.licence, str(row.location) if row.location else None) for row in describe()]
    if json:
        names = ("name", "summary", "licence", "location")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print_grid(console(), "Data sets", ["name", "holds", "licence", "here"], rows)


@data.command("get")
def data_get(name: Annotated[str, typer.Argument(help="One of `dualform data ls`.")], json: Json = False) -> None:
    """Make sure that this machine has a data set."""
    from dualform.experiments.datasets import fetch
    from dualform.show.tables import print_json

    location = fetch(name)
    if json:
        print_json({"name": name, "source": location.source, "folder": str(location.folder or "")})
    else:
        sys.stdout.write(f"{location}\n")


def _open(run: Path, *, where: str | None = None, without: str | None = None, at: int | None = None) -> "Memory":
    import dualform

    memory = dualform.open(run)
    if at is not None:
        memory = memory.at(step=at)
    if where is not None:
        memory = memory.where(where)
    return memory if without is None else memory.without(without)


def _prompt(
    text: str | None, token_ids: str | None, *, tokenizer: str | None, context: int | None
) -> "str | list[int] | None":
    """Return the prompt that was given, as a text or as tokens, if there is one."""
    if text is not None and token_ids is not None:
        raise QueryError("Both --text and --token-ids were given. Give the prompt once.")
    if token_ids is not None:
        if tokenizer is not None:
            raise QueryError("--tokenizer goes with --text: --token-ids are tokens already.")
        try:
            return [int(part) for part in token_ids.replace(",", " ").split()]
        except ValueError as error:
            raise QueryError(f'--token-ids is {token_ids!r}; expected whole numbers, for example "12 5 9".') from error
    if text is None and (tokenizer is not None or context is not None):
        raise QueryError("--tokenizer and --context go with a prompt: give --text or --token-ids.")
    return text


def _attend_text(
    memory: "Memory",
    prompt: "str | list[int]",
    *,
    model: str | None,
    layers: list[str],
    top: int,
    tokenizer: str | None,
    context: int | None,
    accept_untrained: bool,
    trust: bool,
    json: bool,
) -> None:
    import dataclasses

    from dualform.show.ask import late
    from dualform.show.language import show_text
    from dualform.show.models import load_model
    from dualform.show.tables import print_json
    from dualform.show.tokenizers import load_tokenizer

    pieces = None if tokenizer is None else load_tokenizer(tokenizer)
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    found = memory.unwarned().attend_text(
        loaded.model, prompt, layers=layers or None, top=top, tokenizer=pieces, context=context, other_model=True
    )
    doubts = [*loaded.warnings, memory.unknown_text(list(found.layers)), late(memory)]
    found = dataclasses.replace(found, notes=(*filter(None, doubts), *found.notes))
    if json:
        print_json(found)
    else:
        show_text(found)


def _columns(text: str) -> "list[str | Bins]":
    """Read `task,label` or `step:500`."""
    import dualform

    parts: list[Any] = []
    for part in text.split(","):
        column, colon, width = part.strip().partition(":")
        try:
            parts.append(dualform.bins(column, width=float(width)) if colon else column)
        except ValueError as error:
            raise QueryError(f"--by {part!r}: expected a column, or column:width with a positive width.") from error
    return parts
