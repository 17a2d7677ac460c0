"""The studies on digits answer what they answered before the engine stood between store and attend."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.programs import run_program

GOLDEN = Path(__file__).parent / "studies"
WITHOUT_PICTURES = """
import torch
from dualform.cli import main
from dualform.experiments import images
torch.set_num_threads(2)
images._figures = lambda *_: []
main()
"""
"""The command line with as many threads as the golden answers were made with, whose order of sums is another.

Pictures are no answers, and test_images.py draws them.
"""
MEASURED = {"relative_error", "bytes", "figures", "seconds", "machine"}  # not answers, but what they cost


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare two documents: numbers to rounding, everything else exactly, measured entries not at all."""
    if isinstance(expected, dict):
        assert found.keys() - MEASURED == expected.keys() - MEASURED, where
        for key in expected.keys() - MEASURED:
            assert_same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{i}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9), where
    else:
        assert found == expected, where


@pytest.mark.slow
@pytest.mark.parametrize("study", ["single", "joint", "continual"])
def test_a_study_on_digits_answers_as_before(study: str, tmp_path: Path) -> None:
    """The training itself is repeated: with other threads or another processor its last bits may differ."""
    options = ["--data", "digits", "--folder", tmp_path, "--keep", "none", "--json"]
    outcome = run_program(WITHOUT_PICTURES, "reproduce", study, *options)
    assert outcome.returncode == 0, outcome.stderr
    assert_same(json.loads(outcome.stdout), json.loads((GOLDEN / f"{study}.json").read_text()))


def test_the_comparison_can_fail() -> None:
    golden = json.loads((GOLDEN / "single.json").read_text())
    changed = json.loads((GOLDEN / "single.json").read_text())
    changed["single-digits"][0]["table_1"]["attention"][0]["when_right"] += 0.01
    with pytest.raises(AssertionError, match="when_right"):
        assert_same(changed, golden)
