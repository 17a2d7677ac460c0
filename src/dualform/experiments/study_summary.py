"""Findings of several seeds, as tables: ours with deviations, and the paper's beside them where it has them.

The same tables go to the terminal and to docs/results.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from dualform.experiments.findings import Row
from dualform.experiments.image_studies import ACCURACY, TABLE_1
from dualform.recording.estimate import size_text


@dataclass(frozen=True, slots=True)
class Grid:
    """A titled table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def summarise_images(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of one study, from the findings of its seeds."""
    grids = [_accuracies(findings)]
    if findings[0]["table_1"]:
        grids += [_table_1_lines(findings, "magnitude"), _table_1_lines(findings, "attention")]
    if findings[0]["masks"]:
        grids.append(_masks_lines(findings))
    if findings[0]["sharing"]:
        grids.append(_sharing_lines(findings))
    if findings[0]["forgotten"]:
        grids.append(_forgotten_lines(findings))
    return [*grids, _exactness_lines(findings), costs(findings)]


def summarise_shares(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of the continual study from shares, from the findings of its seeds."""
    return [
        _accuracies(findings),
        _masks_lines(findings),
        _given_back_lines(findings),
        _sizes_lines(findings),
        _shares_exactness_lines(findings),
        costs(findings),
    ]


def _given_back_lines(findings: Sequence[Row]) -> Grid:
    first, second = findings[0]["study"]["tasks"]
    rows = tuple(
        (name, mean_and_deviation([f["given_back"][name] for f in findings], scale=1.0, digits=0))
        for name in findings[0]["given_back"]
    )
    return Grid(f"{first} tests before {second}, after it, and without it", ("tests", "how many"), rows)


def _sizes_lines(findings: Sequence[Row]) -> Grid:
    found = findings[0]
    rows = (
        ("the run folder, with shares", size_text(max(f["bytes"] for f in findings))),
        ("patterns of the same run", size_text(found["patterns_bytes"])),
    )
    by = "; ".join(", ".join(columns) for columns in found["groupings"])
    return Grid("Size of the memory", ("kept", "bytes"), rows, f"Shares are kept by {by}.")


def _shares_exactness_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for i, entry in enumerate(findings[0]["layers"]):
        names = ("unexplained", "rounding")
        worst = (f"{max(f['layers'][i][name] for f in findings):.1e}" for name in names)
        rows.append((entry["layer"], f"{entry['patterns']:,}", *worst))
    columns = ("layer", "patterns", "unexplained", "rounding")
    title = "Is it exact? What the groups' shares leave of the weights, relative to their change, the worst seed"
    note = (
        "Rounding is the difference of the final weights and all other parts, so that all of them sum to the weights."
    )
    return Grid(title, columns, tuple(rows), f"{note} {_verdict(findings)}")


def _verdict(findings: Sequence[Row]) -> str:
    return "Every run passed `verify`." if all(f["verified"] for f in findings) else "A RUN DID NOT PASS `verify`."


def mean_and_deviation(values: Sequence[float], *, scale: float = 100.0, digits: int = 1) -> str:
    """Return mean ± deviation of shares in percent.

    >>> mean_and_deviation([0.97, 0.972])
    '97.1 ± 0.1'
    """
    known = [scale * value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return "-"
    centre = f"{mean(known):.{digits}f}"
    return f"{centre} ± {stdev(known):.{digits}f}" if len(known) > 1 else centre


def _paper(findings: Sequence[Row]) -> bool:
    return bool(findings[0]["study"]["data"] == "mnist")


def _accuracies(findings: Sequence[Row]) -> Grid:
    paper = ACCURACY[findings[0]["study"]["name"]] if _paper(findings) else {}
    rows = tuple(
        (
            task,
            f"{paper[task]:.0f}" if task in paper else "-",
            mean_and_deviation([f["accuracy"][task] for f in findings]),
        )
        for task in findings[0]["accuracy"]
    )
    return Grid("Test accuracy, percent", ("task", "paper", "ours"), rows)


def _table_1_lines(findings: Sequence[Row], of: str) -> Grid:
    names = ("target_when_wrong", "output_when_wrong", "when_right")
    rows = []
    for i, entry in enumerate(findings[0]["table_1"][of]):
        cells = [entry["layer"]]
        for j, name in enumerate(names):
            if _paper(findings) and of == "magnitude":
                centre, deviation = TABLE_1[entry["layer"]][j]
                cells.append(f"{centre:.1f} ± {deviation:.1f}")
            cells.append(mean_and_deviation([f["table_1"][of][i][name] for f in findings]))
        rows.append(tuple(cells))
    heads = ("target, model wrong", "output, model wrong", "model right")
    if _paper(findings) and of == "magnitude":
        columns = [part for head in heads for part in (f"{head}: paper", "ours")]
    else:
        columns = list(heads)
    what = "absolute attention, as in the authors' code" if of == "magnitude" else "signed attention"
    title = f"The class with the largest total agrees with ..., percent ({what})"
    return Grid(title, ("layer", *columns), tuple(rows))


def _masks_lines(findings: Sequence[Row]) -> Grid:
    tasks = findings[0]["study"]["tasks"]
    rows = tuple(
        (entry["memory"], *(mean_and_deviation([f["masks"][i][task] for f in findings]) for task in tasks))
        for i, entry in enumerate(findings[0]["masks"])
    )
    note = "A mask removes recorded updates from the sum; the model is not retrained."
    return Grid("Test accuracy of views of the memory, percent", ("memory", *tasks), rows, note)


def _sharing_lines(findings: Sequence[Row]) -> Grid:
    tasks = findings[0]["study"]["tasks"]
    rows = tuple(
        (
            entry["tested"],
            entry["layer"],
            *(mean_and_deviation([f["sharing"][i]["share"][task] for f in findings]) for task in tasks),
            mean_and_deviation([f["sharing"][i]["largest_total_in_own_task"] for f in findings]),
        )
        for i, entry in enumerate(findings[0]["sharing"])
    )
    columns = ("tested on", "layer", *(f"on {task}" for task in tasks), "largest class total in own task")
    return Grid("How absolute attention is shared between the tasks, percent", columns, rows)


def _forgotten_lines(findings: Sequence[Row]) -> Grid:
    first, second = findings[0]["study"]["tasks"]
    keys = ("share_of_second_task", "largest_total_in_second_task", "largest_total_is_the_output")
    rows = []
    for which in ("forgotten", "still right"):
        for layer in [entry["layer"] for entry in findings[0]["layers"]]:
            found = [r for f in findings for r in f["forgotten"]["rows"] if (r["tests"], r["layer"]) == (which, layer)]
            rows.append((which, layer, *(mean_and_deviation([r[key] for r in found]) for key in keys)))
    count = mean_and_deviation([f["forgotten"]["counts"]["forgotten"] for f in findings], scale=1.0)
    title = f"{first} tests that were right before {second} and are wrong after it ({count} of them), percent"
    columns = ("tests", "layer", f"attention on {second}", f"largest total in {second}", "its class is the output")
    return Grid(title, columns, tuple(rows))


def _exactness_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for i, entry in enumerate(findings[0]["layers"]):
        errors = [f["layers"][i]["relative_error"] for f in findings]
        size = size_text(entry["bytes"])
        rows.append((entry["layer"], f"{entry['patterns']:,}", size, f"{mean(errors):.1e}", f"{max(errors):.1e}"))
    columns = ("layer", "patterns", "stored", "rebuild error, mean", "worst")
    return Grid("Is it exact? Weights rebuilt from the patterns", columns, tuple(rows), _verdict(findings))


def costs(findings: Sequence[Row]) -> Grid:
    """Return the seconds of each part of a study, and the machine."""
    steps = list(findings[0]["seconds"])
    rows = [(what, mean_and_deviation([f["seconds"][what] for f in findings], scale=1.0)) for what in steps]
    rows.append(("all", mean_and_deviation([sum(f["seconds"].values()) for f in findings], scale=1.0)))
    peak = max(f["machine"]["peak_memory_bytes"] for f in findings)
    where = findings[0]["machine"]
    note = f"Peak memory {size_text(peak)}. {where['processor']}, {where['threads']} threads, torch {_torch(findings)}."
    return Grid("Seconds", ("part", "seconds"), tuple(rows), note)


def _torch(findings: Sequence[Row]) -> str:
    return str(findings[0]["machine"]["versions"]["torch"])
