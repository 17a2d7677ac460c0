"""Runs that were recorded in format version 1 open, and give the answers that they gave then."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dualform
from dualform.errors import FormatError
from dualform.store.manifest import Manifest
from golden.recipes import ANSWERS, FOLDER, RECIPES, STEPS, ask, make_model, record

GOLDEN: dict[str, Any] = json.loads(ANSWERS.read_text())
WITHIN = 2e-5  # of an answer's largest element, whatever torch's version and the processor's order of summation
WITHIN_COARSE = 5e-2  # where the optimizer rounds its update to bfloat16 (Muon)
KEY_BIAS = ("attention-adam", 5e-2, 2e-4)
"""A run with key biases, and its bounds for single contributions and for everything else.

A key bias has a gradient that is rounding alone. Adam makes updates of it, which differ from processor to processor.
"""


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
    _compare(name, found, expected)


def test_layers_are_described_as_a_recording_of_today_describes_them(name: str, path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    record(again, RECIPES[name])
    old, new = (json.loads((folder / "manifest.json").read_text()) for folder in (path, again))
    found = dualform.open(again).layers
    with_inputs = [layer for layer, entry in found.items() if entry.unfolding is not None]
    assert (old["version"], new["version"]) == (1, 5 if with_inputs else 2)
    assert bool(with_inputs) == name.startswith("convolutions")  # of which runs of old have keys
    found = {layer: dataclasses.replace(entry, unfolding=None) for layer, entry in found.items()}
    assert dualform.open(path).layers == found
    first = next(iter(new["layers"].values()))
    assert "parameters" not in first
    assert "uses" in first


def test_a_manifest_is_the_same_after_it_is_written_again(name: str) -> None:
    manifest = Manifest.read(FOLDER / name)
    assert Manifest.from_json(manifest.to_json(), path=FOLDER) == manifest


@pytest.mark.parametrize("name", ["linear-sgd-pooled", "lstm-sgd", "gru-sgd", "attention-sgd"])
def test_a_run_is_resumed(name: str, path: Path) -> None:
    recipe = RECIPES[name]
    trained = dualform.open(path).trained(make_model(recipe))
    record(path, recipe, first=STEPS - 1, model=trained, resume=STEPS)
    memory = dualform.open(path)
    assert memory.step == STEPS + 1
    assert memory.verify(trained).passed
    assert json.loads((path / "manifest.json").read_text())["version"] == 2


def test_a_role_that_is_none_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copytree(FOLDER / "linear-muon", tmp_path / "run")) / "manifest.json"
    path.write_text(path.read_text().replace('"weight": "0.weight"', '"wait": "0.weight"'))
    with pytest.raises(FormatError, match="'wait' is no role of a parameter"):
        dualform.open(path.parent)


def _within(what: str) -> float:
    """Return how far an answer may be from that of old, relative to its largest element."""
    run, contributions, others = KEY_BIAS
    if what.startswith(run):
        return contributions if what.endswith(", contributions") else others
    return WITHIN_COARSE if "-muon" in what else WITHIN


def _compare(what: str, found: Any, expected: Any) -> None:
    """Compare answers, which may be nested, but for the errors of `verify`, which are rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for part in expected.keys() - {"errors"}:
            _compare(f"{what}, {part}", found[part], expected[part])
    elif not isinstance(expected, list):
        assert found == expected, what
    elif "patterns of top" not in what:  # ties are in any order, so that their scores are compared instead
        old, new = (np.array([np.nan if x is None else x for x in each], dtype=float) for each in (expected, found))
        size = np.nanmax(np.abs(old), initial=1e-6)
        np.testing.assert_allclose(new, old, rtol=0, atol=_within(what) * size, err_msg=what)
