"""The study of checkpoints, small: findings and tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from dualform.errors import DataError, QueryError
from dualform.experiments.checkpoint_page import checkpoints_section, summarise_checkpoints
from dualform.experiments.checkpoint_study import OTHERS, REORDERED, SAME, WRONG, CheckpointStudy, reproduce_checkpoints
from dualform.experiments.reproduction import ReproductionOptions, reproduce_studies

TINY = CheckpointStudy(data="digits", widths=(2,), checkpoints=2, steps=3, batch=16)


def test_findings_say_what_is_explained_and_become_tables(tmp_path: Path) -> None:
    found = reproduce_checkpoints(TINY, tmp_path, seed=0, keep=False)
    shares = {name: variant["all"][-1] for name, variant in found["variants"].items()}
    assert shares[SAME] > 1 - 1e-9
    assert shares[REORDERED] < 1 - 1e-3
    assert shares[WRONG] < shares[REORDERED]
    assert shares[OTHERS] < shares[REORDERED]
    assert found["verified"]
    assert found["variants"][SAME]["agreement"] == {"label": pytest.approx(1.0), "sample": pytest.approx(1.0)}
    assert found["variants"][WRONG]["agreement"]["sample"] < found["variants"][REORDERED]["agreement"]["sample"] < 1
    assert found["at_checkpoints"][SAME][-1] < 1 - 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["findings.json"]
    assert reproduce_checkpoints(TINY, tmp_path, seed=0, keep=False) == found
    grids = summarise_checkpoints([found])
    assert grids[1].rows[-1][0] == "all layers"
    assert len(grids[1].columns) == 2 + TINY.checkpoints
    assert "6 steps of SGD" in " ".join(checkpoints_section([found], command="dualform reproduce checkpoints").text)


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="an interval of 100 steps takes 1600 of them"):
        reproduce_checkpoints(replace(TINY, steps=100), tmp_path, seed=0)
    with pytest.raises(QueryError, match="path, checkpoints, noise, tuning, questions or all"):
        reproduce_studies(ReproductionOptions("checkpoint"), json=False)
