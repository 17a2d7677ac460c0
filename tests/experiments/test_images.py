"""The image studies on digits: small, whole, and everything that they promise."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dualform
from dualform.attend.answers import Vote
from dualform.errors import DataError, QueryError
from dualform.experiments import image_studies, images, reproduction
from dualform.experiments.agreement import agreement
from dualform.experiments.image_page import image_section
from dualform.experiments.image_studies import ACCURACY, IMAGE_STUDIES, TABLE_1, image_study
from dualform.experiments.image_training import _batches, make_tasks
from dualform.experiments.images import reproduce_images
from dualform.experiments.page import write_page
from dualform.experiments.reproduction import ReproductionOptions, reproduce_studies
from dualform.experiments.study_summary import mean_and_deviation, summarise_images
from dualform.show import figures


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Findings of every study on digits, and their folders."""
    folder = tmp_path_factory.mktemp("studies")
    rendered: dict[tuple[str, ...], Path] = {}  # by what sets a picture's layout, of which one is rendered
    save = figures._save_figure

    def save_one_of_a_kind(figure: Any, path: Path) -> Path:
        study, *_, outcome, _, kind = path.stem.split("-")
        alike = ("single" if study == "single" else "two tasks", outcome, kind)
        if alike not in rendered:
            rendered[alike] = save(figure, path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(rendered[alike], path)
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_save_figure", save_one_of_a_kind)
        return {
            name: (reproduce_images(image_study(name, "digits"), folder / name, seed=0), folder / name)
            for name in IMAGE_STUDIES
        }


@pytest.mark.slow
def test_every_study_learns_and_verifies(found):
    for name, (findings, _) in found.items():
        assert findings["verified"], name
        assert all(layer["relative_error"] < 1e-5 for layer in findings["layers"])
    assert found["single"][0]["accuracy"]["digits"] > 0.94
    assert min(found["joint"][0]["accuracy"].values()) > 0.94
    assert found["continual"][0]["accuracy"]["digits-permuted"] > 0.94


@pytest.mark.slow
def test_masking_the_second_task_gives_the_first_network_back(found):
    rows = {row["memory"]: row for row in found["continual"][0]["masks"]}
    before = rows["as it was after step 400"]["digits"]
    assert rows["everything"]["digits"] < before - 0.1  # it did forget
    assert abs(rows["without digits-permuted"]["digits"] - before) < 0.03
    assert rows["without a random half of each batch"]["digits"] < before - 0.1


@pytest.mark.slow
def test_shares_of_attention_are_shares(found):
    for name in ("joint", "continual"):
        for row in found[name][0]["sharing"]:
            assert sum(row["share"].values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_figures_are_there(found):
    for name, (findings, folder) in found.items():
        assert len(findings["figures"]) == (6 if name == "single" else 12)
        for figure in findings["figures"]:
            assert (folder / "figures" / figure).stat().st_size > 5000


@pytest.mark.slow
def test_findings_are_stored_and_reused(found, monkeypatch):
    findings, folder = found["single"]
    monkeypatch.setattr(images, "train_classifier", lambda *a, **k: pytest.fail("trained again"))
    assert reproduce_images(image_study("single", "digits"), folder, seed=0) == findings
    assert json.loads((folder / "findings.json").read_text()) == findings


def test_a_run_can_be_thrown_away_after_its_findings(tmp_path, monkeypatch):
    small = image_study("single", "digits")
    monkeypatch.setattr(images, "_figures", lambda *a: [])
    reproduce_images(small, tmp_path / "x", seed=1, keep=False)
    assert not (tmp_path / "x" / "run").exists()
    assert (tmp_path / "x" / "findings.json").is_file()


def test_an_interrupt_leaves_a_readable_memory(tmp_path, monkeypatch):
    steps = iter(range(1000))

    def clip(*_: object) -> None:
        if next(steps) == 100:
            raise KeyboardInterrupt

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", clip)
    with pytest.raises(KeyboardInterrupt):
        reproduce_images(image_study("single", "digits"), tmp_path / "x", seed=0)
    memory = dualform.open(tmp_path / "x" / "run")
    assert memory.step == 100
    assert memory.verify()


@pytest.mark.slow
def test_page_and_tables(found, tmp_path):
    findings = {name: [f] for name, (f, _) in found.items()}
    folders = {name: folder / "figures" for name, (_, folder) in found.items()}
    sections = [image_section(name, findings[name], folders[name], command="a command") for name in IMAGE_STUDIES]
    write_page(tmp_path / "results.md", sections)
    page = (tmp_path / "results.md").read_text()
    assert "`a command`" in page
    for name in IMAGE_STUDIES:
        for figure in findings[name][0]["figures"]:
            assert f"figures/results/{figure}" in page
            assert (tmp_path / "figures" / "results" / figure).is_file()
    for name in IMAGE_STUDIES:
        for grid in summarise_images(findings[name]):
            assert all(len(row) == len(grid.columns) for row in grid.rows), grid.title


@pytest.mark.slow
def test_the_papers_numbers_stand_beside_ours_at_its_size_only(found):
    findings, _ = found["single"]
    as_mnist = {**findings, "study": {**findings["study"], "data": "mnist"}, "accuracy": {"mnist": 0.971}}
    shown = {grid.title: grid for grid in summarise_images([as_mnist, as_mnist])}
    accuracy = shown["Test accuracy, percent"]
    assert accuracy.rows == (("mnist", "97", "97.1 ± 0.0"),)
    table = next(grid for title, grid in shown.items() if "authors" in title)
    assert table.rows[0][1] == "17.2 ± 2.7"
    assert summarise_images([findings])[0].rows[0][1] == "-"
    assert set(TABLE_1) == {"layers.0", "layers.1", "layers.2"}
    assert ACCURACY["continual"]["mnist"] == 45.0


def test_agreement_by_hand():
    vote = Vote(("label",), "attention", {"a": (1, 2, 3, 3)})
    (row,) = agreement(vote, torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 3, 3]))
    assert (row.when_right, row.target_when_wrong, row.output_when_wrong) == (1.0, 0.5, 0.5)


def test_batches_are_whole_epochs():
    batches = _batches(10, 3, 7, torch.Generator().manual_seed(0))
    assert [len(batch) for batch in batches] == [3] * 7
    assert len(torch.cat(batches[:3]).unique()) == 9  # no sample twice in an epoch


def test_samples_of_two_tasks_are_distinct():
    from dualform.experiments.image_studies import load_sets

    first, second = make_tasks(load_sets(("digits", "digits-permuted")))
    assert second.first_sample == len(first.train)
    assert not torch.equal(first.train, second.train)
    torch.testing.assert_close(first.train.sum(1), second.train.sum(1), rtol=1e-4, atol=1e-3)


def test_the_continual_study_from_shares(tmp_path, monkeypatch, capsys):
    study = image_study("continual", "digits")
    short = replace(study, phases=tuple(replace(phase, steps=25) for phase in study.phases))
    monkeypatch.setattr(image_studies, "image_study", lambda name, data: short)
    options = ReproductionOptions("continual", data="digits", folder=tmp_path, keep="shares", page=tmp_path / "page.md")
    reproduce_studies(options, json=True)
    (findings,) = json.loads(capsys.readouterr().out)["continual-digits-shares"]
    assert findings["verified"]
    assert findings["bytes"] < findings["patterns_bytes"]
    assert [row["memory"] for row in findings["masks"]][1:3] == ["without digits-permuted", "as it was after step 25"]
    given = findings["given_back"]
    assert given["forgotten, right under the mask"] <= given["forgotten"] <= given["right before"]
    page = (tmp_path / "page.md").read_text()
    assert "Made by `dualform reproduce continual --data digits --keep shares`. One seed." in page
    assert "| layers.2 | 3,200 |" in page
    monkeypatch.setattr(images, "train_classifier", lambda *a, **k: pytest.fail("trained again"))
    reproduce_studies(options, json=True)


def test_other_studies_need_patterns():
    with pytest.raises(QueryError, match="--keep shares goes with the study continual; 'single' looks at single"):
        reproduce_studies(ReproductionOptions("single", keep="shares"), json=True)


def test_unknown_data_is_named():
    with pytest.raises(DataError, match=r"single study runs on mnist, digits, or cifar-10; 'imagenet' came"):
        image_study("single", "imagenet")


def test_spread_of_nothing():
    assert mean_and_deviation([float("nan")]) == "-"


@pytest.mark.slow
@pytest.mark.parametrize(("data", "page"), [("mnist", "docs/results.md"), ("digits", "runs/results.md")])
def test_only_the_papers_data_writes_the_published_page(found, monkeypatch, capsys, data, page):
    written = []
    monkeypatch.setattr(images, "reproduce_images", lambda plan, *a, **k: found[plan.name][0])
    monkeypatch.setattr(reproduction, "_language_job", lambda name, options: reproduction._image_job("single", options))
    monkeypatch.setattr(reproduction, "write_page", lambda target, *a, **k: written.append(str(target)))
    options = ReproductionOptions("all", data=data, folder=Path("runs"), keep="none")
    reproduce_studies(options, json=True)
    reproduce_studies(replace(options, page=Path("mine.md")), json=True)
    reproduce_studies(replace(options, which="joint"), json=True)
    assert written == [page, "mine.md"]


def test_all_are_the_papers_studies_where_the_data_is_the_papers(monkeypatch):
    monkeypatch.setattr(reproduction, "_language_job", lambda name, options: name)
    monkeypatch.setattr(reproduction, "_image_job", lambda name, options: name)
    of_the_paper: list[Any] = reproduction._jobs(ReproductionOptions("all"))
    assert of_the_paper == [*IMAGE_STUDIES, "aesop", "wikitext2"]
    of_digits: list[Any] = reproduction._jobs(ReproductionOptions("all", data="digits"))
    assert of_digits == list(IMAGE_STUDIES)


@pytest.mark.slow
def test_writing_a_section_leaves_the_others(found, tmp_path):
    findings, _ = found["single"]
    page = tmp_path / "results.md"
    sections = {
        name: image_section(name, [found[name][0]], found[name][1] / "figures", command=f"make {name}")
        for name in ("continual", "single")
    }
    write_page(page, [sections["continual"]])
    before = page.read_text()
    write_page(page, [sections["single"]])
    both = page.read_text()
    assert both.index("make single") < both.index("make continual")  # in the paper's order
    assert before.partition("<!-- section continual -->")[2] in both
    write_page(page, [sections["single"]])
    assert page.read_text() == both
    names = {path.name for path in (tmp_path / "figures" / "results").iterdir()}
    assert names == {*findings["figures"], *found["continual"][0]["figures"]}
