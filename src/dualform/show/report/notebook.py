"""Answers in a notebook: a spotlight as a report draws it, and a spotlight on a text as tables."""

from typing import TYPE_CHECKING, Any

from dualform.attend.layer import LayerSpotlight
from dualform.attend.spotlight import Spotlight
from dualform.attend.text_answers import TextSpotlight, rankings
from dualform.corpus import PLACE
from dualform.engine.beside_patterns import Media
from dualform.errors import DualformError
from dualform.show.grouping import annotated_columns, group_name
from dualform.show.panels.top_patterns import Card
from dualform.show.report.cards import card_list
from dualform.show.report.svg import Bar, bars
from dualform.show.templating import render, template_source
from dualform.show.text_places import text_around

if TYPE_CHECKING:
    from markupsafe import Markup

MAX_QUERIES = 3  # that are drawn
TOP_SAMPLES = 5  # samples of each layer
MAX_CHART_GROUPS = 40  # of a chart


def spotlight_html(spotlight: Spotlight) -> "Markup":
    """Return a spotlight as HTML: for its first queries, each layer's totals by group and top training samples."""
    style = template_source("report.css")
    for selector, scoped in ((":root{", ".dualform{"), ("body{", ".dualform{"), ("main{", ".dualform main{")):
        style = style.replace(selector, scoped)
    count = max((len(layer) for layer in spotlight.layers.values()), default=0)
    queries = [
        (query, [_layer(name, layer, query) for name, layer in spotlight.layers.items() if query < len(layer)])
        for query in range(min(count, MAX_QUERIES))
    ]
    more = f"{count - MAX_QUERIES:,}" if count > MAX_QUERIES else ""
    return render("notebook.html", style=style, queries=queries, more=more)


def text_spotlight_html(spotlight: TextSpotlight) -> "Markup":
    """Return a spotlight on a text as HTML: for each layer the passages, documents and tokens attended to most."""
    return render("text_notebook.html", spotlight=spotlight, rankings=rankings)


def _layer(name: str, layer: LayerSpotlight, query: int) -> dict[str, Any]:
    """Return one layer as its template takes it."""
    title, chart = _totals_chart(layer, query)
    cards: list[Card] = []
    if layer.keeps_patterns:
        top = layer.top(TOP_SAMPLES, per="sample" if "sample" in layer.columns else "pattern")
        cards = [_notebook_card(layer.media, row) for row in top.to_arrow().to_pylist() if row["query"] == query]
    return {
        "name": name,
        "patterns": f"{layer.count():,}",
        "chart_title": title,
        "chart": chart,
        "cards": card_list(cards, layer.media.image),
    }


def _totals_chart(layer: LayerSpotlight, query: int) -> "tuple[str, Markup | None]":
    """Return a chart of totals with its title: by label, or by the first column that has few enough groups."""
    columns = annotated_columns(list(layer.columns))
    for column in sorted(columns, key=lambda name: name != "label"):  # labels first
        try:
            totals = layer.totals(column)
        except DualformError:
            continue
        if len(totals.groups) > MAX_CHART_GROUPS:
            continue
        rows = [
            Bar(group_name(layer.media, (column,), group), value)
            for group, value in zip(totals.groups, totals.values[query].tolist(), strict=True)
        ]
        title = f"total attention by {column}"
        return title, bars(rows, title=title)
    return "", None


def _notebook_card(media: Media, row: dict[str, Any]) -> Card:
    sample, label, place = row.get("sample"), row.get("label"), row.get(PLACE)
    return Card(
        rank=row["rank"],
        pattern=row["pattern"],
        value=row["attention"],
        share=None,
        sample=sample,
        image=isinstance(sample, int) and media.image(sample) is not None,
        label=label,
        label_name=None if label is None else group_name(media, ("label",), label),
        step=row.get("step"),
        occurrences=row.get("occurrences"),
        passage=text_around(media.text, place) if media.text is not None and isinstance(place, int) else None,
        columns={},
    )
