"""The section of an image study on the results page."""

from collections.abc import Sequence
from pathlib import Path

from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import summarise_images, summarise_shares

INTRODUCTION = {
    "single": (
        "One task",
        "Which class has the largest total attention: the true one, or the one the model says? Even where the model is "
        "wrong, attention agrees with its output far more often than with the truth.",
    ),
    "joint": ("Two tasks together", "Both tasks in the same batches, ten shared outputs."),
    "continual": (
        "Two tasks in sequence",
        "First one task, then the other, ten shared outputs. The network forgets the first, but its memory does not: "
        "masking the second task's patterns gives the first network back.",
    ),
}


def image_section(name: str, findings: Sequence[Row], figures: Path, *, command: str) -> Section:
    """Return a study's section.

    Args:
        name: the study's.
        findings: of its seeds.
        figures: the folder with the figures of the first seed.
        command: the command line that made the findings.
    """
    title, text = INTRODUCTION[name]
    phases = ", then ".join(
        f"{phase['steps']:,} updates on {' and '.join(phase['tasks'])}" for phase in findings[0]["study"]["phases"]
    )
    shown = findings[0]["figures"]
    return Section(
        name=name,
        title=f"{title}: `dualform reproduce {name}`",
        text=(f"{phases}. {text}", f"{made_by(command, len(findings))} {_recipe(findings[0])}"),
        grids=summarise_images(findings),
        figures={figure: figures / figure for figure in shown},
        captions={figure: _caption(figure) for figure in shown},
    )


def shares_section(findings: Sequence[Row], *, command: str) -> Section:
    """Return the section of the continual study from shares.

    Args:
        findings: of its seeds.
        command: the command line that made the findings.
    """
    phases = ", then ".join(
        f"{phase['steps']:,} updates on {' and '.join(phase['tasks'])}" for phase in findings[0]["study"]["phases"]
    )
    return Section(
        name="continual-shares",
        title="Two tasks in sequence, from shares alone: `dualform reproduce continual --keep shares`",
        text=(
            f"{phases}, as above. No pattern is kept: while the network trains, each task's share of every weight is "
            "summed, by the halves of a random coin too, for the control. What the network forgot comes back when the "
            "second task's share is taken out.",
            f"{made_by(command, len(findings))} {_recipe(findings[0])}",
        ),
        grids=summarise_shares(findings),
    )


def _recipe(found: Row) -> str:
    recipe = found["study"]["recipe"]
    return (
        f"Networks have hidden layers of {' and '.join(map(str, recipe['hidden']))} ReLU units; SGD with momentum "
        f"{recipe['momentum']}, learning rate {recipe['learning_rate']:g}, gradient norm clipped at "
        f"{recipe['clip']:g}, batches of {recipe['batch']}."
    )


def _caption(figure: str) -> str:
    """Return words for a figure's file name, such as `continual-mnist-wrong-1-curves.png`."""
    *name, verdict, _, what = figure.removesuffix(".png").split("-")
    words = {
        "curves": "the strongest training patterns of each class",
        "totals": "total attention per class",
        "top": "the training images it attends to most",
    }
    return f"{' '.join(name)}, a test image the model gets {verdict}: {words[what]}"
