"""A spotlight in a notebook: totals by group and the top training samples of each layer, as a report draws them."""

import importlib.resources
from html import escape
from typing import Any

from dualform.attend.layer import LayerSpotlight
from dualform.attend.spotlight import Spotlight
from dualform.errors import DualformError
from dualform.show.grouping import annotated_columns, group_name
from dualform.show.panels.top_patterns import Card
from dualform.show.report.cards import cards
from dualform.show.report.svg import Bar, bars
from dualform.show.text_places import text_around
from dualform.store.corpus_fit import PLACE
from dualform.store.media import Media

QUERIES = 3  # that are drawn
TOP = 5
MAX_GROUPS = 40


def spotlight_html(spotlight: Spotlight) -> str:
    """Return a spotlight as HTML, its first few queries."""
    style = (importlib.resources.files("dualform.show.report") / "assets" / "report.css").read_text(encoding="utf-8")
    scoped = style.replace(":root{", ".dualform{").replace("body{", ".dualform{").replace("main{", ".dualform main{")
    queries = max((len(layer) for layer in spotlight.layers.values()), default=0)
    sections = "".join(_query(spotlight, query) for query in range(min(queries, QUERIES)))
    more = f"<p class=muted>… and {queries - QUERIES:,} more queries.</p>" if queries > QUERIES else ""
    return f'<div class="dualform"><style>{scoped}</style>{sections}{more}</div>'


def _query(spotlight: Spotlight, query: int) -> str:
    parts = []
    for name, layer in spotlight.layers.items():
        if query < len(layer):
            top = f"<h4>It attends to most</h4>{_top(layer, query)}"
            parts.append(f"<h3>{escape(name)}, {layer.count():,} patterns</h3>{_totals(layer, query)}{top}")
    return f'<section class="test"><h2>Query {query}</h2>{"".join(parts)}</section>'


def _totals(layer: LayerSpotlight, query: int) -> str:
    columns = annotated_columns(list(layer.columns))
    for column in sorted(columns, key=lambda name: name != "label"):  # labels first
        try:
            totals = layer.totals(column)
        except DualformError:
            continue
        if len(totals.groups) > MAX_GROUPS:
            continue
        rows = [
            Bar(group_name(layer.media, (column,), group), value)
            for group, value in zip(totals.groups, totals.values[query].tolist(), strict=True)
        ]
        title = f"total attention by {column}"
        return f"<figure><figcaption>{escape(title)}</figcaption>{bars(rows, title=title)}</figure>"
    return ""


def _top(layer: LayerSpotlight, query: int) -> str:
    media = layer.media
    top = layer.top(TOP, per="sample" if "sample" in layer.columns else "pattern")
    rows = [row for row in top.to_arrow().to_pylist() if row["query"] == query]
    return cards([_card(media, row) for row in rows], media.image)


def _card(media: Media, row: dict[str, Any]) -> Card:
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
