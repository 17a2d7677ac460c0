"""Findings of the study of checkpoints, as tables: for the terminal and for docs/results.md."""

from collections.abc import Sequence

from dualform.experiments.checkpoint_study import REORDERED, SAME, TESTED
from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import Grid, costs, mean_and_deviation


def summarise_checkpoints(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of the study, from the findings of its seeds."""
    return [_variant_lines(findings), _layer_lines(findings), _method_lines(findings), costs(findings)]


def checkpoints_section(findings: Sequence[Row], *, command: str) -> Section:
    """Return the study's section of the results page."""
    first, study = findings[0], findings[0]["study"]
    accuracy = mean_and_deviation([found["accuracy"] for found in findings], scale=100, digits=1)
    text = (
        f"A residual network ({len(study['widths'])} blocks with BatchNorm, {first['parameters']:,} parameters) is "
        f"trained on {study['data']} and not recorded: {study['checkpoints'] * study['steps']:,} steps of SGD with "
        f"momentum {study['momentum']} and weight decay, batches of {study['batch']}, a rate that falls along a "
        f"cosine; {accuracy} % of the test images are right. Left are the start and {study['checkpoints']} "
        f"checkpoints, one after every {study['steps']} steps. `dualform.from_checkpoints` makes memories of them with "
        "data that are more or less those of the training, and says how much of the change of the weights each "
        "explains, 1 − ‖rest‖² / ‖change‖².",
        made_by(command, len(findings)),
    )
    title = "Only checkpoints are left: `dualform reproduce checkpoints`"
    return Section("checkpoints", title, text, summarise_checkpoints(findings))


def _percent(values: Sequence[float]) -> str:
    return mean_and_deviation(values, scale=100, digits=0) + " %"


def _variant_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for name in findings[0]["variants"]:
        mine = [found["variants"][name] for found in findings]
        low, high = min(min(one["all"][:-1]) for one in mine), max(max(one["all"][:-1]) for one in mine)
        rows.append(
            (
                name,
                _percent([one["all"][-1] for one in mine]),
                f"{100 * low:.0f} to {100 * high:.0f} %",
                f"{max(one['rest'] for one in mine):.2g}",
                *(
                    mean_and_deviation([one["agreement"][by] for one in mine], scale=1, digits=2)
                    for by in ("label", "sample")
                ),
            )
        )
    verdict = (
        "With the same batches the memory is the recorded one and passes `verify`."
        if all(found["verified"] for found in findings)
        else "WITH THE SAME BATCHES A MEMORY DID NOT PASS `verify`."
    )
    note = (
        f"{verdict} The rest is ‖what no pattern explains‖ / ‖change‖ of the whole training; above 1 nothing is "
        f"explained. The last columns are correlations with the recorded memory: of what each class, and each sample "
        f"that both memories have, adds in the last layer to the logit of the predicted class, the mean over {TESTED} "
        "test images. An explained share says that such steps lead from one checkpoint to the next, and not that the "
        "training saw these very samples: compare the row of other samples."
    )
    columns = ("data between checkpoints", "explains", "of single intervals", "rest", "classes", "samples")
    return Grid("How much is explained?", columns, tuple(rows), note)


def _layer_lines(findings: Sequence[Row]) -> Grid:
    mine = [found["variants"][REORDERED] for found in findings]
    study = findings[0]["study"]
    ends = [str((k + 1) * study["steps"]) for k in range(study["checkpoints"])]
    rows = [
        (name, *(f"{100 * sum(m['layers'][name][k] for m in mine) / len(mine):.0f}" for k in range(len(ends) + 1)))
        for name in mine[0]["layers"]
    ]
    means = [100 * sum(one["all"][k] for one in mine) / len(mine) for k in range(len(ends) + 1)]
    rows.append(("all layers", *(f"{share:.0f}" for share in means)))
    title = f"By layer and interval, with {REORDERED}: percent explained"
    note = "A column is an interval, named by the step of the checkpoint at its end."
    return Grid(title, ("layer", *ends, "whole"), tuple(rows), note)


def _method_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for name in (SAME, REORDERED):
        steps = [found["variants"][name]["all"] for found in findings]
        fixed = [found["at_checkpoints"][name] for found in findings]
        rows.append((name, "steps from each checkpoint", _percent([one[-1] for one in steps]), _span(steps)))
        rows.append((name, "gradients at each checkpoint", _percent([one[-1] for one in fixed]), _span(fixed)))
    note = (
        "The second way takes all gradients of an interval at the checkpoint before it, with the same rates and "
        "momentum, and is usual for estimates of influence. A negative share is a rest that is larger than the change."
    )
    columns = ("data", "gradients", "explains", "of single intervals")
    return Grid("Why steps, and not gradients at the checkpoints", columns, tuple(rows), note)


def _span(found: Sequence[Sequence[float]]) -> str:
    return f"{100 * min(min(one[:-1]) for one in found):.0f} to {100 * max(max(one[:-1]) for one in found):.0f} %"
