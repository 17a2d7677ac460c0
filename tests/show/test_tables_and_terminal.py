"""Small pieces of showing: drawings, cells, JSON."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dualform.show.terminal_images import draw, join_blocks
from dualform.show.terminal_tables import cell, console, percent, plain, print_grid


def test_draw_shrinks_a_tall_image_by_whole_factors():
    image = np.zeros((28, 28))
    image[:, 14:] = 255
    lines = draw(image)
    assert len(lines) == 14
    assert set(lines) == {" " * 14 + "█" * 14}


def test_draw_takes_colour_and_darkness():
    assert draw(np.zeros((2, 2, 3))) == ["    ", "    "]


def test_side_by_side_aligns_blocks_of_different_height():
    text = join_blocks([("a", ["xx"]), ("bc", ["y", "z"])], gap=1)
    assert text.splitlines() == ["a  bc", "xx y", "   z"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (1234, "1,234"), (0.12345, "0.1235"), (float("nan"), "-"), (("a", 3), "a, 3")],
)
def test_cells(value, text):
    assert cell(value) == text


def test_percent_of_nothing():
    assert percent(float("nan")) == "-"


def test_plain_makes_json_of_anything():
    @dataclass
    class Point:
        x: torch.Tensor
        y: float

    assert plain({"p": Point(torch.tensor([1, 2]), float("inf"))}) == {"p": {"x": [1, 2], "y": None}}


def test_labels_are_shown_as_they_are_and_nothing_in_them_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup, colons no emoji, and control characters do not reach the terminal."""
    labels = ["[/x]", "[cat]", "[bold]b[/bold]", ":smile:", "\x1b[31mred", "\x9b31m", "a\x07b", "\u202egnp.exe"]
    print_grid(console(), "title [/x] \x1b[2J", ["label"], [[label] for label in labels])
    out = capsys.readouterr().out
    for label in labels[:4]:
        assert label in out
    assert not any(char in out for char in "\x1b\x9b\x07\u202e")
