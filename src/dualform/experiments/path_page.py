"""Findings of the study of path contributions, as tables: for the terminal and for docs/results.md."""

from collections.abc import Sequence
from pathlib import Path

from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import Grid, costs, mean_and_deviation

METHODS = {
    "effects": "effects",
    "path": "path contributions",
    "direct": "direct contributions (no filter)",
    "attention": "absolute attention",
    "ceiling": "ceiling",
}


def summarise_path(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of the study, from the findings of its seeds."""
    return [
        _error_lines(findings),
        _forgetting_lines(findings),
        _step_lines(findings),
        *([_retraining_lines(findings)] if "retraining" in findings[0] else []),
        _cost_lines(findings),
        costs(findings),
    ]


def path_section(findings: Sequence[Row], figures: Path, *, command: str) -> Section:
    """Return the study's section of the results page.

    Args:
        findings: of its seeds.
        figures: the folder with the figures of the first seed.
        command: the command line that made the findings.
    """
    study = findings[0]["study"]
    first = findings[0]["errors"]["first"]
    text: tuple[str, ...] = (
        "Path contributions split a quantity of the whole network's output into parts of the training, on the "
        f"networks of the studies above ({study['data']}). They account for this training; they predict no retraining.",
        made_by(command, len(findings)),
    )
    if "retraining" not in findings[0]:
        text = (*text, "Single samples, and how well their parts predict retraining, are looked at on digits alone.")
    name = "path" if study["data"] == "mnist" else f"path_{study['data']}"
    shown = f"{name}-waterfall.png"
    source = figures / "path-waterfall.png"
    drawn = source.is_file()
    caption = (
        f"test image {first['test']}: {first['said']} rather than {first['true']}, against the reference"
        if first
        else ""
    )
    return Section(
        name=name,
        title=f"Where the answer comes from, on {study['data']}: `dualform reproduce path`",
        text=text,
        grids=summarise_path(findings),
        figures={shown: source} if drawn else {},
        captions={shown: caption} if drawn else {},
    )


def _error_lines(findings: Sequence[Row]) -> Grid:
    def cell(row: int, name: str) -> str:
        return mean_and_deviation([found["errors"]["rows"][row][name] for found in findings])

    rows = tuple(
        (
            entry["method"],
            *(cell(i, name) for name in ("named_leads", "said_leads", "true_leads", "true_least")),
        )
        for i, entry in enumerate(findings[0]["errors"]["rows"])
    )
    count = mean_and_deviation([found["errors"]["errors"] for found in findings], scale=1, digits=0)
    note = (
        f"{count} test errors. A class leads when its training images have the largest part, or the largest total "
        "attention. The first column is about the class that the contrast names; it says something where the contrast "
        "of a control class, which is neither the said nor the true one, is led by its own class less often. The "
        f"reference is the mean over {findings[0]['study']['reference']} training images."
    )
    columns = ("method", "named class leads", "said class leads", "true class leads", "true class is last")
    return Grid("Test errors: which class leads, percent", columns, rows, note)


def _forgetting_lines(findings: Sequence[Row]) -> Grid:
    forgetting = [found["forgetting"] for found in findings]
    first, second = forgetting[0]["tasks"]

    def cell(values: Sequence[float]) -> str:
        return mean_and_deviation(values, scale=1, digits=2)

    rows = [
        (layer, *(cell([f["layers"][layer][task] for f in forgetting]) for task in (first, second)))
        for layer in forgetting[0]["layers"]
    ]
    rows.append(("all layers", cell([f["gained"] for f in forgetting]), cell([f["taken"] for f in forgetting])))
    lost = mean_and_deviation([f["lost_share"] for f in forgetting])
    note = (
        f"{_updates_text(forgetting[0])}Mean over {findings[0]['study']['tests']} {first} tests of the parts of their "
        "margins. Start "
        f"{cell([f['start'] for f in forgetting])}, margin at the end {cell([f['output'] for f in forgetting])}, what "
        f"no pattern explains and the residual {cell([f['rest'] for f in forgetting])}. {second} took from {lost} % of "
        f"the margins. Parts to about {max(f['parts_error'] for f in forgetting):.1%}, residual "
        f"{max(f['residual'] for f in forgetting):.2%} of the change."
    )
    return Grid(
        f"Two tasks in sequence: what each added to the margins of {first}, through each layer",
        ("layer", f"part of {first}", f"part of {second}"),
        tuple(rows),
        note,
    )


def _updates_text(forgetting: Row) -> str:
    """Say how many updates each task got, where the findings know."""
    if "updates" not in forgetting:
        return ""
    parts = (
        f"{count:,} updates on {task}" for count, task in zip(forgetting["updates"], forgetting["tasks"], strict=True)
    )
    return f"{', then '.join(parts)}. "


def _step_lines(findings: Sequence[Row]) -> Grid:
    forgetting = [found["forgetting"] for found in findings]
    first, second = forgetting[0]["tasks"]
    rows = tuple(
        (
            step,
            *(
                mean_and_deviation([f["steps"][step][task] for f in forgetting], scale=1, digits=2)
                for task in (first, second)
            ),
        )
        for step in forgetting[0]["steps"]
    )
    title = f"Two tasks in sequence: when the margins of {first} came and went"
    return Grid(title, ("from step", f"part of {first}", f"part of {second}"), rows)


def _retraining_lines(findings: Sequence[Row]) -> Grid:
    names = list(findings[0]["retraining"])
    rows = tuple(
        (
            label,
            *(mean_and_deviation([f["retraining"][name][key] for f in findings], scale=1, digits=2) for name in names),
        )
        for key, label in METHODS.items()
    )
    note = "As in “Do effects predict retraining?”, one split and one recording. Path contributions are no prediction."
    return Grid("Linear datamodeling score", ("score", *names), rows, note)


def _cost_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for i, entry in enumerate(findings[0]["cost"]["rows"]):
        mine = [found["cost"]["rows"][i] for found in findings]
        rows.append(
            (
                entry["what"],
                mean_and_deviation([one["seconds"] for one in mine], scale=1),
                mean_and_deviation([one["trainings"] for one in mine], scale=1),
                mean_and_deviation([one["evaluations"] for one in mine], scale=1, digits=0),
                f"{max(one['parts_error'] for one in mine):.2%}",
                f"{max(one['residual'] for one in mine):.2%}",
            )
        )
    training = mean_and_deviation([found["cost"]["training"] for found in findings], scale=1)
    note = (
        f"For {findings[0]['study']['tests']} test images at once; reading the patterns from disk is part of it. The "
        f"plain training, without recording, takes {training} s. On a CPU, seconds are the processor's."
    )
    columns = ("path contributions", "seconds", "trainings", "gradients taken", "parts error", "residual")
    return Grid("Cost", columns, tuple(rows), note)
