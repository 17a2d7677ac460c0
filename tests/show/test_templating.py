"""Templates escape every value that is not markup of their own, and name what is missing."""

import math
import re
from typing import Any

import jinja2
import pytest

from dualform.show import templating
from dualform.show.panels.top_patterns import Card
from dualform.show.report.cards import card_list, picture
from dualform.show.report.svg import Bar, Line, bars, lines, strip
from dualform.show.templating import render, template_source
from dualform.show.text_places import TextPlace

HOSTILE = "<script>alert('\"')</script>"


def card(**changes):
    columns: dict[str, Any] = {
        "rank": 1, "pattern": 7, "value": -0.5, "share": 0.25, "sample": HOSTILE, "image": False, "label": 1,
        "label_name": HOSTILE, "step": 3, "occurrences": None, "passage": None, "columns": {},
    }  # fmt: skip
    return Card(**columns | changes)


DRAWN = {
    "bars": lambda: bars([Bar(HOSTILE[:11], 1.0, "<"), Bar("b", -2.0)], title=HOSTILE),
    "lines": lambda: lines([Line(HOSTILE[:14], [3.0, 1.0], "target"), Line("b", [2.0])], title=HOSTILE),
    "strip": lambda: strip([[1.0, -1.0]], [HOSTILE[:11]], title=HOSTILE, steps=20),
    "card": lambda: card_list([card()], None),
    "passage": lambda: card_list([card(passage=TextPlace(3, *[HOSTILE] * 4))], lambda sample: None),
    "facts": lambda: render("facts.html", rows=[(HOSTILE, HOSTILE)]),
    "table": lambda: render("table.html", head=[HOSTILE], rows=[[HOSTILE, HOSTILE]]),
    "layer totals": lambda: render(
        "layer_totals.html", charts=[(HOSTILE, None), (HOSTILE, HOSTILE)], left_out=HOSTILE, table=HOSTILE
    ),
    "picture": lambda: render("picture.html", uri=HOSTILE, alt=HOSTILE),
    "page": lambda: render(
        "page.html", title=HOSTILE, style=HOSTILE, script=HOSTILE, warnings=[HOSTILE], media=True, by=HOSTILE,
        left_out=[HOSTILE], summary=HOSTILE, sections=[HOSTILE], limits=[HOSTILE], provenance=HOSTILE, data=HOSTILE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_every_value_is_escaped(name):
    found = DRAWN[name]()
    assert found is not None
    assert "<script>alert" not in found
    assert "&lt;script&gt;" in found
    assert "'" not in found.replace("'none'", "").replace("'unsafe-inline'", ""), "a quote of the value"


def test_what_a_template_renders_is_not_escaped_again():
    chart = bars([Bar("a", 1.0)], title="one bar")
    found = render("layer_totals.html", charts=[("layer", chart)], left_out=0, table=render("facts.html", rows=[]))
    assert chart in found
    assert "&lt;" not in found


def test_a_value_that_nobody_gave_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'rows' is undefined"):
        render("facts.html")


def test_charts_draw_what_they_are_given():
    found = bars([Bar("few", 1.0), Bar("many", 12345.6, "◆")], title="totals")
    assert found.count("<rect") == 2
    assert ">12,350</text>" in found
    assert '<text x="61" y="32" text-anchor="end" class="b">many ◆</text>' in found
    assert lines([], title="nothing") is None
    assert picture(None, "nothing") == ""


def test_numbers_that_are_not_finite_are_said_and_not_drawn():
    found = bars([Bar("one", 1.0), Bar("lost", math.nan), Bar("beyond", math.inf)], title="totals")
    assert ">not a number</text>" in found
    assert not re.search(r'"-?(nan|inf)"', found)


def test_every_template_is_a_file_of_the_package():
    names = templating._environment().list_templates()
    assert {"page.html", "section.html", "bars.svg", "report.css", "report.js"} <= set(names)
    assert "prefers-color-scheme" in template_source("report.css")
