"""One test example of a report: prediction, panels A to D, and the predictions without each group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualform.attend.questions import Per
from dualform.attend.removal import Removal
from dualform.errors import SharesOnlyError
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.panels.curves import SortedAttention, sorted_attention
from dualform.show.panels.layer_totals import LayerTotals, layer_totals
from dualform.show.panels.path_account import PathAccount
from dualform.show.panels.prediction import ModelPrediction, model_prediction
from dualform.show.panels.timeline import Timeline, attention_timeline
from dualform.show.panels.top_patterns import TopPatterns, top_patterns
from dualform.show.predictions import MASK_NOTE
from dualform.show.report.cards import card_list, picture
from dualform.show.report.svg import Bar, Line, bars, figures, lines, strip, waterfall_svg
from dualform.show.session import Mask, Session
from dualform.show.templating import render

if TYPE_CHECKING:
    from markupsafe import Markup

CURVE_LAYERS = 4  # the last layers, whose curves are drawn
TEXT_CHARACTERS = 400  # of a test's text that are shown, the last ones


@dataclass(frozen=True, slots=True)
class TestAnswers:
    """The answers that a report shows of one test example; they stand in the file as JSON too."""

    test: int
    prediction: ModelPrediction
    layers: LayerTotals
    contributions: LayerTotals | None
    effects: LayerTotals | None
    curves: list[SortedAttention]
    time: Timeline | None
    positive: TopPatterns | None
    negative: TopPatterns | None
    needs_patterns: str = ""  # why curves, time and top patterns are not there
    path: PathAccount | str | None = None  # where the answer comes from, or why that is not known; None if not asked


@dataclass(frozen=True, slots=True)
class MaskedGroup:
    """The model's predictions without one group.

    Attributes:
        group: the group that is masked.
        after: test -> the output unit that the model predicts then.
        accuracy: the share of right predictions over all tests; None without targets.
    """

    group: Any
    after: dict[int, int]
    accuracy: float | None


def ask_about_test(
    session: Session, test: int, by: GroupingColumns, *, path: PathAccount | str | None = None
) -> TestAnswers:
    """Ask everything about one test example; its path contributions, which all tests share a path for, are given."""
    subject = session.test(test)
    layer = session.output_layer or list(session.memory.layers)[-1]
    per: Per = "sample" if "sample" in session.memory.columns else "pattern"
    shown = [name for name, entry in session.memory.layers.items() if entry.store != "shares"][-CURVE_LAYERS:]
    exact = session.exact
    curves: list[SortedAttention] = []
    time = positive = negative = None
    needs_patterns = ""
    try:
        curves = [sorted_attention(session, subject, name, by, of="attention", count=500) for name in shown]
        time = attention_timeline(session, subject, layer, by)
        positive = top_patterns(session, subject, layer, per=per, count=8, by=by)
        negative = top_patterns(session, subject, layer, per=per, count=4, tab="negative", by=by)
    except SharesOnlyError as error:
        needs_patterns = str(error)
    return TestAnswers(
        test=test,
        prediction=model_prediction(session, subject, Mask(Removal())),
        layers=layer_totals(session, subject, by, "attention"),
        contributions=layer_totals(session, subject, by, "contribution") if exact else None,
        effects=layer_totals(session, subject, by, "effect") if exact else None,
        curves=curves,
        time=time,
        positive=positive,
        negative=negative,
        needs_patterns=needs_patterns,
        path=path,
    )


def section_html(
    session: Session, facts: TestAnswers, by: GroupingColumns, masks: Sequence[MaskedGroup], *, media: bool
) -> "Markup":
    """Return the section of one test example.

    Args:
        session: the opened run.
        facts: the answers about the test example.
        by: the columns that they are grouped by.
        masks: the model's predictions without each group.
        media: show the test example and training samples, not only numbers.
    """
    said = facts.prediction
    target = "" if said.target_name is None else f", target {said.target_name}"
    verdict = "" if said.target is None else "right" if said.target == said.before else "wrong"
    pixels = session.test_images[facts.test] if media and session.test_images is not None else None
    shares = [
        Bar(output.name, 100 * output.before.probability, "◆" if output.unit == said.target else "")
        for output in said.outputs
    ]
    images = session.media.image if media else None
    least = facts.negative is not None and all(card.value > 0 for card in facts.negative.cards)
    found = [("Most positive", facts.positive), ("Least" if least else "Most negative", facts.negative)]
    time, best = facts.time, facts.positive
    effects = facts.effects if facts.effects and any(x.totals is not None for x in facts.effects.layers) else None
    return render(
        "section.html",
        test=facts.test,
        verdict=verdict,
        heading=f"Test {facts.test}{target}: the model says {said.before_name}",
        picture=picture(pixels, f"test {facts.test}"),
        text=said.text[-TEXT_CHARACTERS:] if media and said.text is not None else None,
        probabilities=bars(shares, title="probability of each output, percent", width=260),
        by=", ".join(map(str, by)),
        path=facts.path,
        waterfall=_waterfall(facts.path) if isinstance(facts.path, PathAccount) else "",
        attention=_layer_charts(session, facts.layers, by, said),
        unit_name=facts.layers.unit_name,
        contributions=None if facts.contributions is None else _layer_charts(session, facts.contributions, by, said),
        effects=None if effects is None else _layer_charts(session, effects, by, said),
        curves=[(curves.layer, _curves_chart(session, curves, by, said)) for curves in facts.curves],
        time_layer="" if time is None else time.layer,
        timeline=""
        if time is None
        else strip(time.grid, time.names, title="total attention by group and step", steps=session.memory.step),
        patterns_layer="" if best is None else best.layer,
        patterns=[(title, card_list(answer.cards, images)) for title, answer in found if answer and answer.cards],
        needs_patterns=facts.needs_patterns,
        masks=_masks_table(session, by, facts, masks) if masks else "",
        mask_note=MASK_NOTE,
    )


def _waterfall(found: PathAccount) -> "Markup":
    """Return the parts of an output as a chart and as a table."""
    rows = [Bar(part.name, part.value, aside=part.kind not in ("group", "others")) for part in found.bars]
    chart = waterfall_svg(rows, Bar("this input", found.output), title=f"parts of {found.question}")
    cells = [[part.name, figures(part.value)] for part in found.bars]
    table = render("table.html", head=["part", "adds"], rows=[*cells, ["this input", figures(found.output)]])
    exact = (
        f"Parts to about {found.parts_error:.2%}, residual {found.residual_error:.2%} of the change, "
        f"{found.gradients:,} gradients."
    )
    return render("path.html", account=found, output=figures(found.output), chart=chart, table=table, exact=exact)


def _group_marks(by: GroupingColumns, group: Any, said: ModelPrediction) -> str:
    """Return the marks of a group whose label is the target or the model's output."""
    names = list(map(str, by))
    if "label" not in names:
        return ""
    label = group[names.index("label")] if isinstance(group, list | tuple) else group
    return ("◆" if label == said.target else "") + ("▸" if label == said.before else "")


def _layer_charts(session: Session, found: LayerTotals, by: GroupingColumns, said: ModelPrediction) -> "Markup":
    """Return the totals by group: a chart for each layer, and all of them as a table."""
    charts: list[tuple[str, Markup | None]] = []
    for layer in found.layers:
        if layer.totals is None:
            charts.append((f"{layer.layer}: {layer.reason or 'keys only'}", None))
            continue
        rows = [
            Bar(name, value, _group_marks(by, group, said))
            for name, value, group in zip(found.names, layer.totals, found.groups, strict=True)
        ]
        charts.append((layer.layer, bars(rows, title=f"{layer.layer}: total {found.of} by group")))
    table = render(
        "table.html",
        head=["group", *(layer.layer for layer in found.layers)],
        rows=[
            [name, *("–" if layer.totals is None else figures(layer.totals[i]) for layer in found.layers)]
            for i, name in enumerate(found.names)
        ],
    )
    return render("layer_totals.html", charts=charts, left_out=found.left_out, table=table)


def _curves_chart(
    session: Session, found: SortedAttention, by: GroupingColumns, said: ModelPrediction
) -> "Markup | str":
    """Return one layer's sorted curves; a second task's are dashed."""
    tasks = list(dict.fromkeys(group[0] for group in found.groups if isinstance(group, list | tuple)))
    series = []
    for group, name, values in zip(found.groups, found.names, found.curves, strict=True):
        marks = _group_marks(by, group, said)
        role = "target" if "◆" in marks else "output" if "▸" in marks else ""
        series.append(Line(name, values, role, dashed=len(tasks) > 1 and group[0] != tasks[0]))
    return lines(series, title=f"{found.layer}: sorted attention of each group's strongest patterns") or ""


def _masks_table(session: Session, by: GroupingColumns, facts: TestAnswers, masks: Sequence[MaskedGroup]) -> "Markup":
    """Return the prediction for the test example without each group, as a table."""
    before = facts.prediction.before
    rows = []
    for mask in masks:
        after = mask.after[facts.test]
        rows.append(
            [
                group_name(session.media, by, mask.group),
                f"flips to {session.name(after)}" if after != before else "stays",
                f"{100 * mask.accuracy:.1f} %" if mask.accuracy is not None else "–",
            ]
        )
    head = [f"without {', '.join(map(str, by))}", "this prediction", "accuracy on all tests"]
    return render("table.html", head=head, rows=rows)
