"""docs/results.md, written from findings. No number in it is typed by hand."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualform.experiments.summary import Grid, summarise
from dualform.experiments.truth_page import kept_section

Row = dict[str, Any]

HEAD = """# Results

This page is made by `{command}`, from the runs themselves; no number in it is
typed by hand. The paper is Irie, Csordás and Schmidhuber, "The Dual Form of Neural Networks Revisited" (ICML 2022).
Numbers are means ± standard deviations over {seeds} seeds. {recipe}
"""

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


def write_page(path: Path, findings: Mapping[str, Sequence[Row]], figures: Mapping[str, Path], *, command: str) -> None:
    """Write the page and copy its figures beside it.

    Args:
        path: the page.
        findings: study name → the findings of its seeds.
        figures: study name → the folder with its figures, of the first seed.
        command: what made all this.
    """
    seeds = len(next(iter(findings.values())))
    lines = [HEAD.format(command=command, seeds=seeds, recipe=_recipe(next(iter(findings.values()))[0]))]
    target = path.parent / "figures" / "results"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for name, runs in findings.items():
        title, text = INTRODUCTION[name]
        phases = ", then ".join(
            f"{phase['steps']:,} updates on {' and '.join(phase['tasks'])}" for phase in runs[0]["study"]["phases"]
        )
        lines += [f"## {title}: `dualform reproduce {name}`\n", f"{phases}. {text}\n"]
        lines += [_markdown(grid) for grid in summarise(runs)]
        lines += ["### Single test examples\n"]
        for figure in runs[0]["figures"]:
            shutil.copy(figures[name] / figure, target / figure)
            lines.append(f"![{_caption(figure)}](figures/results/{figure})\n")
    kept = kept_section(path)  # on effects, which another command writes
    path.write_text("\n".join([*lines, kept]).rstrip() + "\n")


def _recipe(found: Row) -> str:
    recipe = found["study"]["recipe"]
    return (
        f"Networks have hidden layers of {' and '.join(map(str, recipe['hidden']))} ReLU units; SGD with momentum "
        f"{recipe['momentum']}, learning rate {recipe['learning_rate']:g}, gradient norm clipped at "
        f"{recipe['clip']:g}, batches of {recipe['batch']}."
    )


def _markdown(grid: Grid) -> str:
    table = [
        f"### {grid.title}\n",
        "| " + " | ".join(grid.columns) + " |",
        "|" + "---|" * len(grid.columns),
        *("| " + " | ".join(row) + " |" for row in grid.rows),
        "",
    ]
    return "\n".join([*table, f"{grid.note}\n"] if grid.note else table)


def _caption(figure: str) -> str:
    """Return words for a figure's file name, such as `continual-mnist-wrong-1-curves.png`."""
    *name, verdict, _, what = figure.removesuffix(".png").split("-")
    words = {
        "curves": "the strongest training patterns of each class",
        "totals": "total attention per class",
        "top": "the training images it attends to most",
    }
    return f"{' '.join(name)}, a test image the model gets {verdict}: {words[what]}"
