"""One test example of a report: prediction, panels A to D, and what masking each group does."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dualform.attend.layer import Per
from dualform.attend.removal import Removal
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.panels.curves import SortedAttention, sorted_attention
from dualform.show.panels.layer_totals import LayerTotals, layer_totals
from dualform.show.panels.prediction import Prediction, model_prediction
from dualform.show.panels.timeline import Timeline, attention_timeline
from dualform.show.panels.top_patterns import TopPatterns, top_patterns
from dualform.show.predictions import MASK_NOTE
from dualform.show.report.cards import cards, no_image, picture
from dualform.show.report.svg import Bar, Line, bars, figures, lines, strip
from dualform.show.session import Mask, Session

CURVE_LAYERS = 4  # layers whose curves are drawn, the last ones


@dataclass(frozen=True, slots=True)
class Facts:
    """The answers that a report shows of one test example; they stand in the file as JSON too."""

    test: int
    prediction: Prediction
    layers: LayerTotals
    contributions: LayerTotals | None
    effects: LayerTotals | None
    curves: list[SortedAttention]
    time: Timeline
    positive: TopPatterns
    negative: TopPatterns


@dataclass(frozen=True, slots=True)
class MaskedGroup:
    """What the model says without one group.

    Attributes:
        group: the group that is masked.
        after: test -> the output unit that the model predicts then.
        accuracy: the share of right predictions over all tests; None without targets.
    """

    group: Any
    after: dict[int, int]
    accuracy: float | None


def gather(session: Session, test: int, by: GroupingColumns) -> Facts:
    """Ask everything about one test example."""
    subject = session.test(test)
    layer = session.output_layer or list(session.memory.layers)[-1]
    per: Per = "sample" if "sample" in session.memory.columns else "pattern"
    shown = list(session.memory.layers)[-CURVE_LAYERS:]
    exact = session.exact
    return Facts(
        test=test,
        prediction=model_prediction(session, subject, Mask(Removal())),
        layers=layer_totals(session, subject, by, "attention"),
        contributions=layer_totals(session, subject, by, "contribution") if exact else None,
        effects=layer_totals(session, subject, by, "effect") if exact else None,
        curves=[sorted_attention(session, subject, name, by, of="attention", count=500) for name in shown],
        time=attention_timeline(session, subject, layer, by),
        positive=top_patterns(session, subject, layer, per=per, count=8, by=by),
        negative=top_patterns(session, subject, layer, per=per, count=4, tab="negative", by=by),
    )


def render(session: Session, facts: Facts, by: GroupingColumns, masks: Sequence[MaskedGroup], *, media: bool) -> str:
    """Return the section of one test example."""
    said = facts.prediction
    right = None if said.target is None else said.target == said.before
    verdict = "" if right is None else "right" if right else "wrong"
    target = "" if said.target_name is None else f", target {said.target_name}"
    heading = f"Test {facts.test}{target}: the model says {said.before_name}"
    tag = f' <span class="tag {verdict}">{verdict}</span>' if verdict else ""
    return (
        f'<section class="test" id="test-{facts.test}" data-verdict="{verdict}"><h2>{escape(heading)}{tag}</h2>'
        f"{_top(session, facts, media=media)}"
        f"<h3>A. Attention by {escape(_by(by))}, in each layer</h3>{_layers(session, facts.layers, by, said)}"
        f"{_contributions(session, facts, by)}{_effects(session, facts, by)}"
        f"<h3>B. The strongest patterns of each group, sorted</h3>{_curves(session, facts, by)}"
        f"<h3>C. Attention along training, {escape(facts.time.layer)}</h3>{_time(session, facts, by)}"
        f"<h3>D. Training samples it attends to most, {escape(facts.positive.layer)}</h3>"
        f"{_patterns(session, facts, media=media)}{_masks(session, by, facts, masks)}</section>"
    )


def _by(by: GroupingColumns) -> str:
    return ", ".join(map(str, by))


def _top(session: Session, facts: Facts, *, media: bool) -> str:
    pixels = session.test_images[facts.test] if media and session.test_images is not None else None
    text = facts.prediction.text if media else None
    passage = "" if text is None else f'<p class="passage">{escape(text[-400:])}</p>'
    rows = [
        Bar(
            output.name,
            100 * output.before.probability,
            "◆" if output.unit == facts.prediction.target else "",
        )
        for output in facts.prediction.outputs
    ]
    chart = bars(rows, title="probability of each output, percent", width=260)
    figure = f"<figure><figcaption>probability, percent</figcaption>{chart}</figure>"
    return f'<div class="top">{picture(pixels, f"test {facts.test}")}{passage}{figure}</div>'


def _marks(by: GroupingColumns, group: Any, said: Prediction) -> str:
    names = list(map(str, by))
    if "label" not in names:
        return ""
    label = group[names.index("label")] if isinstance(group, list | tuple) else group
    return ("◆" if label == said.target else "") + ("▸" if label == said.before else "")


def _layers(session: Session, found: LayerTotals, by: GroupingColumns, said: Prediction) -> str:
    names = [group_name(session.media, by, group) for group in found.groups]
    charts = []
    for layer in found.layers:
        if layer.totals is None:
            charts.append(f"<figure><figcaption>{escape(layer.layer)}: keys only</figcaption></figure>")
            continue
        rows = [
            Bar(name, value, _marks(by, group, said))
            for name, value, group in zip(names, layer.totals, found.groups, strict=True)
        ]
        title = f"{layer.layer}: total {found.of} by group"
        charts.append(f"<figure><figcaption>{escape(layer.layer)}</figcaption>{bars(rows, title=title)}</figure>")
    table = _table(
        ["group", *(layer.layer for layer in found.layers)],
        [
            [name, *("–" if layer.totals is None else figures(layer.totals[i]) for layer in found.layers)]
            for i, name in enumerate(names)
        ],
    )
    more = f"<p class=muted>{found.left_out} more groups have smaller totals.</p>" if found.left_out else ""
    return f'<div class="charts">{"".join(charts)}</div>{more}<details><summary>As a table</summary>{table}</details>'


def _contributions(session: Session, facts: Facts, by: GroupingColumns) -> str:
    if facts.contributions is None:
        return ""
    name = escape(facts.contributions.unit_name)
    note = (
        f"What each group adds to the output “{name}”: exact in the last layer; in the others along the gradient "
        "of that output, exact while no unit switches."
    )
    charts = _layers(session, facts.contributions, by, facts.prediction)
    return f"<h4>Contribution to the predicted output</h4><p class=muted>{note}</p>{charts}"


def _effects(session: Session, facts: Facts, by: GroupingColumns) -> str:
    if facts.effects is None or all(layer.totals is None for layer in facts.effects.layers):
        return ""
    name = escape(facts.effects.unit_name)
    note = (
        f"What training on each group is predicted to have brought to the margin of “{name}”: a prediction of "
        "retraining, not a share of the output; effects do not sum to the weight."
    )
    charts = _layers(session, facts.effects, by, facts.prediction)
    return f"<h4>Effect on the predicted output</h4><p class=muted>{note}</p>{charts}"


def _curves(session: Session, facts: Facts, by: GroupingColumns) -> str:
    charts = []
    for found in facts.curves:
        tasks = list(dict.fromkeys(group[0] for group in found.groups if isinstance(group, list | tuple)))
        series = []
        for group, values in zip(found.groups, found.curves, strict=True):
            marks = _marks(by, group, facts.prediction)
            role = "target" if "◆" in marks else "output" if "▸" in marks else ""
            dashed = len(tasks) > 1 and group[0] != tasks[0]
            series.append(Line(group_name(session.media, by, group), values, role, dashed))
        title = f"{found.layer}: sorted attention of each group's strongest patterns"
        charts.append(f"<figure><figcaption>{escape(found.layer)}</figcaption>{lines(series, title=title)}</figure>")
    return f'<div class="charts">{"".join(charts)}</div>'


def _time(session: Session, facts: Facts, by: GroupingColumns) -> str:
    names = [group_name(session.media, by, group) for group in facts.time.groups]
    chart = strip(facts.time.grid, names, title="total attention by group and step", steps=session.memory.step)
    caption = "blue positive, orange negative, stronger is larger"
    return f"<figure>{chart}<figcaption class=muted>{caption}</figcaption></figure>"


def _patterns(session: Session, facts: Facts, *, media: bool) -> str:
    image = session.media.image if media else no_image
    least = all(card.value > 0 for card in facts.negative.cards)
    found = [("Most positive", facts.positive), ("Least" if least else "Most negative", facts.negative)]
    return "".join(f"<h4>{title}</h4>{cards(answer.cards, image)}" for title, answer in found if answer.cards)


def _masks(session: Session, by: GroupingColumns, facts: Facts, masks: Sequence[MaskedGroup]) -> str:
    if not masks:
        return ""
    rows = []
    for mask in masks:
        after = mask.after[facts.test]
        before = facts.prediction.before
        outcome = f"flips to {session.name(after)}" if after != before else "stays"
        rows.append(
            [
                group_name(session.media, by, mask.group),
                outcome,
                f"{100 * mask.accuracy:.1f} %" if mask.accuracy is not None else "–",
            ]
        )
    table = _table([f"without {_by(by)}", "this prediction", "accuracy on all tests"], rows)
    return f"<h3>E. Without each group</h3>{table}<p class=muted>{MASK_NOTE}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
