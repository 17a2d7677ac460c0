"""The study of fine-tuning, small: unrolled effects foretell the same run, and findings become tables."""

import dataclasses
from pathlib import Path

import pytest
import torch

from dualform.errors import DataError
from dualform.experiments import tuning_study
from dualform.experiments.tuning_page import summarise_tuning, tuning_section
from dualform.experiments.tuning_study import (
    TuningCase,
    TuningStudy,
    make_tuning,
    rank_correlation,
    reproduce_tuning,
)

CASE = TuningCase("digits", "digits", "SGD", 0.01, samples=32, batch=8, epochs=2, pretraining=30)
TINY = TuningStudy((CASE,), subsets=12, shares=(0.1,), tests=5, width=8)


@pytest.mark.slow
def test_unrolled_effects_foretell_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_study, "ekfac_is_installed", lambda: False)
    found = reproduce_tuning(TINY, tmp_path / "study", seed=0)
    scores = {name: scores["0.1"] for name, scores in found["cases"][0]["lds"].items()}
    assert scores["unrolled effects"] > 0.9
    assert scores["unrolled effects"] > scores["unrolled, samples shuffled"] + 0.3
    assert found["cases"][0]["change"]["0.1 slope"] == pytest.approx(1.0, abs=0.3)
    assert reproduce_tuning(TINY, tmp_path / "study", seed=0)["cases"] == found["cases"]
    table, change, cost = summarise_tuning([found])
    assert table.columns[1:3] == ("unrolled effects", "effects")
    assert change.rows[0][0] == "digits: 10% out"
    assert cost.rows[0][2] == "8"
    assert "ahead of every other method in 1 of 1" in tuning_section([found], command="").text[0]
    assert "bergson" in " ".join(tuning_section([found], command="dualform reproduce tuning").text)


def test_the_run_is_the_same_again_and_weights_of_zero_leave_samples_out() -> None:
    tuning = make_tuning(TINY, dataclasses.replace(CASE, dropout=0.2), seed=1)
    ones = torch.ones(CASE.samples)
    assert torch.equal(tuning.end(ones), tuning.end(ones))
    assert not torch.equal(tuning.end(ones), tuning.end(ones.index_fill(0, tuning.rows[0], 0.0)))


def test_rank_correlations_are_means_over_inputs() -> None:
    first = torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]])
    assert rank_correlation(first, first) == pytest.approx(1.0)
    assert rank_correlation(first, first.flip(1)) == pytest.approx(-1.0)
    assert rank_correlation(first, torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])) == pytest.approx(0.0)


def test_unknown_data_is_refused() -> None:
    with pytest.raises(DataError, match="expected text or digits"):
        make_tuning(TINY, dataclasses.replace(CASE, data="pictures"), seed=0)
