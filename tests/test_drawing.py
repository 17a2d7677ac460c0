"""Answers find what draws them in a notebook by a registry, and know nothing of it."""

import subprocess
import sys

from dualform import drawing
from dualform.drawing import notebook_html, register_html


class Answer:
    pass


def test_an_answer_without_a_registered_function_has_no_html(monkeypatch):
    monkeypatch.setattr(drawing, "_DRAWN", {})
    assert notebook_html(Answer()) is None
    register_html("Answer", lambda answer: f"<b>{type(answer).__name__}</b>")
    assert notebook_html(Answer()) == "<b>Answer</b>"


def test_importing_dualform_registers_what_draws_spotlights_and_loads_nothing_of_it():
    script = (
        "import sys, dualform; from dualform import drawing; "
        "assert {'Spotlight', 'TextSpotlight'} <= set(drawing._DRAWN), drawing._DRAWN; "
        "sys.exit('jinja2' in sys.modules or 'dualform.show.report' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
