"""Runs that were recorded in format version 1 open, and give the answers that they gave then."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden.recipes import ANSWERS, FOLDER, RECIPES, ask

GOLDEN: dict[str, Any] = json.loads(ANSWERS.read_text())
WITHIN = 2e-5  # of an answer's largest element, whatever torch's version and the processor's order of summation
WITHIN_COARSE = 5e-2  # where the optimizer rounds its update to bfloat16 (Muon)


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    """The name of each golden run in turn."""
    return str(request.param)


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    """A copy of a golden run, in which derived sums may be cached."""
    return Path(shutil.copytree(FOLDER / name, tmp_path / name))


def test_every_recipe_is_there() -> None:
    assert set(GOLDEN) == set(RECIPES) == {folder.parent.name for folder in FOLDER.glob("*/manifest.json")}


def test_the_runs_are_of_version_1() -> None:
    for name in RECIPES:
        assert json.loads((FOLDER / name / "manifest.json").read_text())["version"] == 1


def test_answers_are_those_of_old(name: str, path: Path) -> None:
    found, expected = ask(path, RECIPES[name]), GOLDEN[name]
    assert found["passed"]
    assert {layer for layer, error in found["errors"].items() if error is None} == {
        layer for layer, error in expected["errors"].items() if error is None
    }
    _compare(name, found, expected, WITHIN_COARSE if "muon" in name else WITHIN)


def _compare(what: str, found: Any, expected: Any, within: float) -> None:
    """Compare answers, which may be nested, but for the errors of `verify`, which are rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for part in expected.keys() - {"errors"}:
            _compare(f"{what}, {part}", found[part], expected[part], within)
    elif not isinstance(expected, list):
        assert found == expected, what
    elif "patterns of top" not in what:  # ties are in any order, so that their scores are compared instead
        old, new = (np.array([np.nan if x is None else x for x in each], dtype=float) for each in (expected, found))
        size = np.nanmax(np.abs(old), initial=1e-6)
        np.testing.assert_allclose(new, old, rtol=0, atol=within * size, err_msg=what)
