"""Findings of the study of fine-tuning, as tables: for the terminal and for docs/results.md."""

from collections.abc import Sequence
from statistics import mean

from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import Grid, mean_and_deviation

METHODS = (
    "unrolled effects",
    "effects",
    "EK-FAC, best damping",
    "direct contributions (no filter)",
    "path contributions",
    "unrolled, samples shuffled",
)
"""The methods in the order of the table; those that were not asked are left out."""


def summarise_tuning(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of the study, from the findings of its seeds."""
    return [_score_lines(findings), _change_lines(findings), _cost_lines(findings)]


def tuning_section(findings: Sequence[Row], *, command: str) -> Section:
    """Return the study's section of the results page."""
    study = findings[0]["study"]
    cases = study["cases"]
    text = (
        _where_it_leads(findings),
        f"A network is fine-tuned on {cases[0]['samples']} samples, and the very same run (same start, seed, order and "
        f"dropout) is taken again {study['subsets']} times for each share of samples left out, drawn at random, whose "
        "weight in the loss is zero. A method is scored by the rank correlation, over these runs, of what it predicts "
        f"for a test input's loss with what happened; means over {study['tests']} test inputs. 1 is perfect, and there "
        "is no noise that would keep a method from it. Unrolled effects are the derivative of this run; effects and "
        "EK-FAC (kronfluence's, of the dampings tried the best by this very score) predict trainings with any seed.",
        "The derivative holds for small changes. Where they are large, or where it turns on something finer than they "
        "are, it foretells little: an AdamW that begins anew, with PyTorch's default eps of 1e-8, divides gradients "
        "that are almost zero by roots that are almost zero, and its first steps turn on their signs. Compare the rows "
        "with 1500 steps before. The slope says how much of the predicted change came about: near 1 the prediction has "
        "the right size, near 0 it is far too large. A larger eps makes a run smoother; a few trainings with samples "
        "left out tell whether a run can be asked in this way. The cases were not fixed beforehand: those with 1500 "
        "steps before are there because a first try failed so.",
        "Characters: a Transformer of two blocks that was trained on WikiText-2 and is fine-tuned on passages of "
        "Aesop's fables. Digits: an MLP that was trained on the digits 0 to 4 and is fine-tuned on all ten. Published "
        "figures, not measured here: bergson's table for a fine-tuned GPT-2 (README of version 2.5.1) has .931 for "
        "MAGIC, the same derivative by another implementation, .685 and .454 for EK-FAC with and without conjugate "
        "gradients, and .473 for SOURCE.",
        made_by(command, len(findings)),
    )
    title = f"Fine-tuning, the same run again: `{command}`"
    return Section("tuning", title, text, summarise_tuning(findings))


def _where_it_leads(findings: Sequence[Row]) -> str:
    """Return the sentence that says in which rows unrolled effects are not ahead, and in how many they are."""
    rows, behind = _rows(findings), []
    for at, share, title in rows:
        scores = {
            name: mean(found["cases"][at]["lds"][name][share] for found in findings)
            for name in findings[0]["cases"][at]["lds"]
        }
        best = max(scores, key=lambda name: scores[name])
        if best != METHODS[0]:
            behind.append(f"{title} ({best} {scores[best]:.2f}, unrolled effects {scores[METHODS[0]]:.2f})")
    lost = f"Unrolled effects are behind in: {'; '.join(behind)}. " if behind else ""
    return f"{lost}They are ahead of every other method in {len(rows) - len(behind)} of {len(rows)} rows."


def _rows(findings: Sequence[Row]) -> list[tuple[int, str, str]]:
    """Return the place of a case, a share that was left out, and their title, for each row."""
    return [
        (at, f"{share:g}", f"{case['name']}: {share:.0%} out")
        for at, case in enumerate(findings[0]["study"]["cases"])
        for share in findings[0]["study"]["shares"]
    ]


def _score_lines(findings: Sequence[Row]) -> Grid:
    there = findings[0]["cases"][0]["lds"]
    methods = [name for name in METHODS if name in there]
    rows = [
        (
            title,
            *(
                mean_and_deviation([found["cases"][at]["lds"][name][share] for found in findings], scale=1, digits=2)
                for name in methods
            ),
        )
        for at, share, title in _rows(findings)
    ]
    return Grid("Rank correlation with the run that was taken again", ("left out", *methods), tuple(rows))


def _change_lines(findings: Sequence[Row]) -> Grid:
    rows = []
    for at, share, title in _rows(findings):
        mine = [found["cases"][at] for found in findings]
        rows.append(
            (
                title,
                f"{mean(one['before'] for one in mine):.2f}",
                f"{mean(one['after'] for one in mine):.2f}",
                f"{mean(one['change'][share] for one in mine):.3f}",
                mean_and_deviation([one["change"][f"{share} slope"] for one in mine], scale=1, digits=2),
            )
        )
    columns = ("fine-tuning", "test loss before", "after", "mean change without the samples", "slope of unrolled")
    return Grid("How large the changes are, and whether the predicted size is right", columns, tuple(rows))


def _cost_lines(findings: Sequence[Row]) -> Grid:
    study = findings[0]["study"]
    asked = [name for name in findings[0]["cases"][0]["seconds"] if name != "one fine-tuning"]
    rows = []
    for at, case in enumerate(study["cases"]):
        mine = [found["cases"][at] for found in findings]
        one = mean(each["seconds"]["one fine-tuning"] for each in mine)
        rows.append(
            (
                case["name"],
                f"{mine[0]['parameters']:,}",
                f"{mine[0]['steps']}",
                f"{one:.2g} s",
                *(f"{mean(each['seconds'][name] for each in mine) / one:.0f} ×" for name in asked),
            )
        )
    note = (
        f"Processor time of one thread, for {study['tests']} test inputs and all samples, in fine-tunings without any "
        "recording. EK-FAC's is that of all dampings together; recordings are not counted."
    )
    return Grid("Cost", ("fine-tuning", "parameters", "steps", "one run", *asked), tuple(rows), note)
