"""Findings of the study of bad data, as tables: for the terminal and for docs/results.md."""

from collections.abc import Sequence
from statistics import mean

from dualform.experiments.findings import Row
from dualform.experiments.page import Section, made_by
from dualform.experiments.study_summary import Grid, mean_and_deviation


def summarise_noise(findings: Sequence[Row]) -> list[Grid]:
    """Return the tables of the study, from the findings of its seeds."""
    return [_ranking_lines(findings), _source_lines(findings)]


def noise_section(findings: Sequence[Row], *, command: str) -> Section:
    """Return the study's section of the results page."""
    study = findings[0]["study"]
    planted = round(study["noise"] * study["train"])
    text = (
        f"{planted:,} of {study['train']:,} training labels of {study['data']} are replaced by other classes, drawn "
        f"at random. An MLP with {study['hidden']} hidden units is trained on all of them: {study['epochs']} epochs of "
        f"SGD with momentum 0.9 and learning rate {study['learning_rate']:g}, batches of {study['batch']}. Each method "
        "ranks all training samples, most suspicious first. Harm is the predicted rise of the loss of "
        f"{study['held']:,} held-out samples whose labels are right, summed; of path contributions, what a sample "
        "added to the loss of the first 60 of them. A sample's own loss is asked with the label that it was given: the "
        "more a network owes this loss to the sample itself, the more it had to learn it by heart. TracInCP and "
        "confident learning are written from the published formulas, with five checkpoints and five folds; EK-FAC is "
        "kronfluence's with its own damping, where it is installed. Nothing was tuned: all methods were run once for "
        "each seed, with the first settings that were tried.",
        f"Then the first {planted:,} samples of each ranking are taken out and {study['retrainings']} networks are "
        "trained on what is left, with seeds of their own; their accuracy is that on the test set, which no method "
        "sees. Last, the samples come from "
        f"{study['sources']} sources, and in one of them each label is wrong with probability "
        f"{study['source_noise']:g}: each source is taken out in turn and networks are trained again.",
        made_by(command, len(findings)),
    )
    title = f"Do effects find bad data? `{command}`"
    return Section(f"noise-{study['data']}", title, text, summarise_noise(findings))


def _percent(values: Sequence[float]) -> str:
    return mean_and_deviation(values, scale=100, digits=1)


def _ranking_lines(findings: Sequence[Row]) -> Grid:
    study = findings[0]["study"]
    planted = round(study["noise"] * study["train"])
    methods: dict[str, list[Row]] = {}
    for found in findings:
        for row in found["labels"]["rows"]:
            methods.setdefault(row["method"], []).append(row)
    by_precision = sorted(methods, key=lambda name: -mean(row["average"] for row in methods[name]))
    rows = [
        (
            name,
            _percent([row["half"] for row in methods[name]]),
            _percent([row["all"] for row in methods[name]]),
            mean_and_deviation([row["average"] for row in methods[name]], scale=1, digits=3),
            _percent([row["accuracy"] for row in methods[name]]),
        )
        for name in by_precision
    ]
    for taken in ("nothing", "the wrong labels"):
        cell = _percent([found["labels"]["accuracy"][taken] for found in findings])
        rows.append((f"({taken} taken out)", "", "", "", cell))
    columns = (
        "samples in the order of",
        f"wrong in the first {planted // 2:,}, %",
        f"in the first {planted:,}, %",
        "average precision",
        "accuracy without them, %",
    )
    note = (
        f"Average precision is the mean, over the {planted:,} wrong labels, of the share of wrong ones up to their "
        "place; a random order has about the share of wrong labels."
    )
    return Grid("Planted wrong labels", columns, tuple(rows), note)


def _source_lines(findings: Sequence[Row]) -> Grid:
    mine = [found["source"] for found in findings]
    rows = (
        (
            "the bad source has the most harmful effect",
            f"{sum(one['bad'] == one['found'] for one in mine)} of {len(mine)}",
        ),
        (
            "its effect on the held-out loss",
            mean_and_deviation([one["harm"][one["bad"]] for one in mine], scale=1, digits=3),
        ),
        (
            "the others', mean",
            mean_and_deviation(
                [mean(x for at, x in enumerate(one["harm"]) if at != one["bad"]) for one in mine], scale=1, digits=3
            ),
        ),
        ("accuracy with all sources, %", _percent([one["all"] for one in mine])),
        ("without the source that effects name", _percent([one["without"][one["found"]] for one in mine])),
        ("without another source, mean", _percent([one["without_other"] for one in mine])),
    )
    note = "Positive effects raise the loss. Every source was really taken out, and networks were trained again."
    return Grid("A bad source", ("", ""), rows, note)
