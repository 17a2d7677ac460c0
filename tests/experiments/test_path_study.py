"""The study of path contributions, tiny: every part of it, its page, and going on where it stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualform.attend import spotlight
from dualform.attend.path import PathContributions, find_path_contributions
from dualform.errors import DataError
from dualform.experiments import path_study
from dualform.experiments.findings import Clock
from dualform.experiments.image_studies import ImageStudy, ImageStudyName, image_study
from dualform.experiments.image_training import Phase
from dualform.experiments.page import write_page
from dualform.experiments.path_page import path_section, summarise_path
from dualform.experiments.path_study import PathStudy, reproduce_path
from dualform.experiments.questions_page import QUESTIONS, write_questions
from dualform.experiments.retraining_config import RetrainingConfig

TINY = PathStudy("digits", tests=4, errors=6, reference=5, width=10, updates=12)
RETRAINING = RetrainingConfig(
    name="digits, SGD", data="digits", epochs=1, train=40, tests=4, hidden=(8,), batch=20, subsets=4, seeds=2,
    recordings=1, models=1, splits=1,
)  # fmt: skip


def small_study(name: ImageStudyName, data: str) -> ImageStudy:
    study = image_study(name, data)
    return replace(
        study,
        phases=tuple(Phase(phase.tasks, 15) for phase in study.phases),
        recipe=replace(study.recipe, hidden=(16,)),
    )


@pytest.mark.slow
def test_the_study_is_whole_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_study, "image_study", small_study)
    monkeypatch.setattr(PathStudy, "evaluations", property(lambda self: (RETRAINING,)))
    found = reproduce_path(TINY, tmp_path / "study", seed=0, keep=False)
    assert found["errors"]["errors"] == 6
    assert {row["what"] for row in found["cost"]["rows"]} >= {"by label", "per sample"}
    forgetting = found["forgetting"]
    assert forgetting["updates"] == [12, 12]
    whole = forgetting["start"] + forgetting["gained"] + forgetting["taken"] + forgetting["rest"]
    assert whole == pytest.approx(forgetting["output"], abs=1e-6)
    for what in ("layers", "steps"):
        assert sum(row["digits"] for row in forgetting[what].values()) == pytest.approx(forgetting["gained"], abs=1e-6)
    assert set(found["retraining"]["digits, SGD"]) == set(path_study.LDS_METHODS)
    assert not (tmp_path / "study" / "run").exists()
    page = tmp_path / "results.md"
    write_page(page, [path_section([found], tmp_path / "study" / "figures", command="dualform reproduce path")])
    text = page.read_text("utf-8")
    assert all(grid.title in text for grid in summarise_path([found]))
    large = {name: part for name, part in found.items() if name != "retraining"}  # as mnist's
    section = path_section([large], tmp_path / "study" / "figures", command="dualform reproduce path")
    assert "on digits alone" in section.text[-1]
    assert len(section.grids) == len(summarise_path([found])) - 1

    write_questions(
        found, tmp_path / "study" / "figures", tmp_path / "questions.md", command="dualform reproduce questions"
    )
    text = (tmp_path / "questions.md").read_text("utf-8")
    assert all(f"## {name.capitalize()}" in text for name in QUESTIONS)
    assert (tmp_path / "figures" / "questions.png").is_file()

    monkeypatch.setattr(path_study, "_errors_findings", None)  # parts that are done are not made again
    (tmp_path / "study" / "part-retraining.json").unlink()
    again = reproduce_path(TINY, tmp_path / "study", seed=0, keep=False)
    assert again["errors"] == found["errors"]
    assert again["retraining"] == found["retraining"]


@pytest.mark.slow
def test_the_cost_is_not_that_of_a_kept_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_study, "image_study", small_study)
    asked = path_study._Trained(TINY, tmp_path, seed=0, device="cpu")(Clock({}))
    computed = []

    def counted(*arguments: Any, **options: Any) -> PathContributions:
        computed.append(options)
        return find_path_contributions(*arguments, **options)

    monkeypatch.setattr(spotlight, "find_path_contributions", counted)
    for _ in range(2):
        path_study._cost_findings(asked, TINY, "cpu")
    assert len(computed) == 2 * 3


def test_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="runs on mnist or digits"):
        path_study.path_study("cifar-10")
