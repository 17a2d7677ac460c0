"""Commands that train networks of our own: `demo`, `gallery`, `reproduce` and `evaluate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dualform.cli.options import JsonOption, TrustOption, open_view, training_named
from dualform.errors import QueryError


def demo_command(
    folder: Annotated[Path, typer.Option(help="Where to put the run and the figures.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the network and the order of its training.")] = 0,
    json: JsonOption = False,
) -> None:
    """Digits, end to end, under a minute: train, record, verify, spotlights, masks, figures."""
    from dualform.experiments.demo import run_demo
    from dualform.experiments.demo_output import demo_json, show_demo
    from dualform.show.terminal_tables import print_json

    result = run_demo(folder, seed=seed)
    if json:
        print_json(demo_json(result))
    else:
        show_demo(result)


def gallery_command(
    folder: Annotated[Path, typer.Option(help="Where to put the pictures.")] = Path("docs/figures"),
    seed: Annotated[int, typer.Option(help="Of the demo's network and the order of its training.")] = 0,
) -> None:
    """Make README's pictures anew, from a run of the demo; scripts/screenshots.py makes those of the viewer."""
    from dualform.experiments.gallery import draw_gallery

    for path in draw_gallery(folder, seed=seed):
        sys.stdout.write(f"{path}\n")


def reproduce_command(
    study: Annotated[
        str,
        typer.Argument(
            help="single, joint, continual, aesop, wikitext2, text, sources, path, checkpoints, noise, tuning, "
            "questions, or all.",
            show_default=False,
        ),
    ],
    data_set: Annotated[
        str | None,
        typer.Option("--data", help="mnist, digits, for single cifar-10; for text one of `dualform data ls`."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="For text: a file of your own, in UTF-8.")] = None,
    tokens: Annotated[str | None, typer.Option(help="For text: chars or words.")] = None,
    model: Annotated[str, typer.Option(help="Of a language model: lstm or transformer.")] = "lstm",
    paper: Annotated[bool, typer.Option("--paper", help="Language models of the paper's size.")] = False,
    updates: Annotated[
        int | None, typer.Option(help="Of a language model, or of each of the two tasks in path.", min=1)
    ] = None,
    units: Annotated[int | None, typer.Option(help="LSTM units, or width of the Transformer.", min=1)] = None,
    seeds: Annotated[int, typer.Option(help="How many runs, with seeds 0, 1, ...", min=1)] = 1,
    folder: Annotated[Path, typer.Option(help="Where to put runs, findings and figures.")] = Path("runs/reproduce"),
    keep: Annotated[
        str,
        typer.Option(
            help="Keep the recorded patterns of: first, all or none of the seeds; or shares in their place (continual)."
        ),
    ] = "first",
    page: Annotated[
        Path | None,
        typer.Option(help="Write sections to this page; with all: docs/results.md, other data: FOLDER/results.md."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train and attend, for example cuda.")] = "cpu",
    json: JsonOption = False,
) -> None:
    """Run the paper's studies, images and language models, and put our numbers beside the paper's."""
    from dualform.experiments.reproduction import ReproductionOptions, reproduce_studies

    options = ReproductionOptions(
        study, data_set, seeds, folder, keep, page, device, file, tokens, model, paper, updates, units
    )  # fmt: skip
    reproduce_studies(options, json=json)


def evaluate_command(
    what: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN", help="A TOML file (see benchmarks/truth), or with --retrain a run.")
    ],
    retrain: Annotated[
        int | None, typer.Option(help="Run the training of a RUN again on so many random halves of its samples.")
    ] = None,
    train: Annotated[
        str | None, typer.Option("--train", help="package.module:function, train(recording, keep=None), of the RUN.")
    ] = None,
    trust: TrustOption = False,
    folder: Annotated[Path | None, typer.Option(help="Where to keep everything; default runs/truth/NAME.")] = None,
    device: Annotated[str, typer.Option(help="Where to retrain, for example cuda.")] = "cpu",
    json: JsonOption = False,
) -> None:
    """Retrain on random halves of the data, and say how well effects predicted it.

    Of a recorded RUN, its own training is run again (--retrain 10): slope and rank correlation in minutes. Of a CONFIG,
    everything is done from the data on, and goes on where it stopped.
    """
    if retrain is not None:
        _calibrate(what, retrain, train=train, trust=trust, json=json)
    elif Path(what).suffix == ".toml":
        _evaluate(Path(what), folder=folder, device=device, json=json)
    else:
        raise QueryError(f"{what} is no TOML file. Of a recorded run say how often to retrain: --retrain 10.")


def _calibrate(run: str, retrainings: int, *, train: str | None, trust: bool, json: bool) -> None:
    """Compare the effects of a run with retrainings of its own training."""
    from dualform.attend.answers import EFFECT_NOTE
    from dualform.experiments.calibration import calibrate_effects, calibration_row
    from dualform.opening import retraining_of
    from dualform.show.terminal_tables import console, print_json

    memory = open_view(run, train=train, trust=trust)
    found = calibrate_effects(memory, retraining_of(run, training_named(train), trust=trust), retrainings=retrainings)
    if json:
        print_json({**calibration_row(found), "note": EFFECT_NOTE})
        return
    screen = console()
    for line in [*found.lines(), EFFECT_NOTE]:
        screen.print(line, markup=False, highlight=False)


def _evaluate(config: Path, *, folder: Path | None, device: str, json: bool) -> None:
    from dualform.attend.answers import EFFECT_NOTE
    from dualform.experiments import retraining
    from dualform.experiments.retraining_config import read_config
    from dualform.experiments.retraining_page import table
    from dualform.experiments.retraining_results import Evaluation
    from dualform.show.terminal_tables import console, print_grid, print_json

    settings = read_config(config)
    results = folder or Path("runs/truth") / settings.name
    retraining.evaluate_effects(settings, results, device=device, tell=_tell)
    scores = retraining.scores(settings, results)
    if json:
        each = {name: list(splits.values()) for name, splits in scores.items()}
        print_json({"config": settings, "scores": each, "note": EFFECT_NOTE})
        return
    grid = table([Evaluation(settings, scores)])
    screen = console()
    print_grid(screen, f"{grid.title}, mean ± standard error over {settings.splits} splits", grid.columns, grid.rows)
    screen.print(EFFECT_NOTE)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
