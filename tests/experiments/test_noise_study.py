"""The study of bad data, small: planted labels are found, a bad source is named, and findings become tables."""

import dataclasses
from pathlib import Path

import pytest
import torch

from dualform.experiments import noise_study
from dualform.experiments.noise_page import noise_section, summarise_noise
from dualform.experiments.noise_study import (
    NoiseStudy,
    average_precision,
    plant_bad_source,
    plant_wrong_labels,
    reproduce_noise,
)
from dualform.experiments.peer_influence import ekfac_is_installed, find_ekfac_effects

TINY = NoiseStudy(train=200, held=60, hidden=16, epochs=8, batch=20, retrainings=1, sources=4)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_study, "ekfac_is_installed", lambda: False)
    monkeypatch.setattr(noise_study, "PATH_INPUTS", 2)


@pytest.mark.slow
def test_findings_name_the_planted_labels_and_become_tables(tmp_path: Path) -> None:
    found = reproduce_noise(TINY, tmp_path / "study", seed=0, keep=False)
    rows = {row["method"]: row for row in found["labels"]["rows"]}
    for name in ("effects on held-out loss", "effects on its own loss", "TracInCP on its own loss"):
        assert rows[name]["average"] > 3 * rows["random order"]["average"]
    assert found["source"]["bad"] == found["source"]["found"]
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["findings.json"]
    assert reproduce_noise(TINY, tmp_path / "study", seed=0, keep=False) == found
    ranking, source = summarise_noise([found])
    assert ranking.rows[-1][0] == "(the wrong labels taken out)"
    assert source.rows[0][1] == "1 of 1"
    assert "20 of 200 training labels of digits" in noise_section([found], command="dualform reproduce noise").text[0]


def test_wrong_labels_are_wrong_and_only_they_are() -> None:
    clean = plant_wrong_labels(dataclasses.replace(TINY, noise=0.0), seed=3)
    data = plant_wrong_labels(TINY, seed=3)
    torch.testing.assert_close(data.inputs, clean.inputs)
    assert int(data.wrong.sum()) == TINY.planted
    assert not bool((clean.labels == data.labels)[data.wrong].any())
    assert bool((clean.labels == data.labels)[~data.wrong].all())
    sources = plant_bad_source(TINY, seed=3)
    assert len(sources.sources[sources.wrong].unique()) == 1


def test_average_precision_of_a_perfect_and_of_a_reversed_ranking() -> None:
    wanted = torch.tensor([True, True, False, False])
    assert average_precision(torch.tensor([4.0, 3.0, 2.0, 1.0]), wanted) == 1.0
    assert average_precision(torch.tensor([1.0, 2.0, 3.0, 4.0]), wanted) == pytest.approx((1 / 3 + 2 / 4) / 2)


@pytest.mark.slow
@pytest.mark.skipif(not ekfac_is_installed(), reason="kronfluence is not installed")
def test_ekfac_has_the_sign_of_effects() -> None:
    data = plant_wrong_labels(TINY, seed=0)
    model = noise_study.train_unrecorded(TINY, data.inputs, data.labels, seed=0)
    train = (data.inputs, data.labels)
    (found,) = find_ekfac_effects(model, train, train, "loss", dampings=(None,)).values()
    assert float((found.diagonal() < 0).double().mean()) > 0.95  # training on a sample lowers its own loss
