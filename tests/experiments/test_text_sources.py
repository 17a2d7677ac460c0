"""The study of text sources, small: batches, findings and tables."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualform.errors import DataError, QueryError
from dualform.experiments import text_sources
from dualform.experiments.datasets import load_text
from dualform.experiments.datasets.textset import TextSet
from dualform.experiments.reproduction import ReproductionOptions, reproduce_studies
from dualform.experiments.text_sources import CONTROL, TextSourcesStudy, mixed_batches, read_texts
from dualform.experiments.text_sources_page import summarise_text_sources, text_sources_section

TINY = TextSourcesStudy(
    texts={"letters": 0.75, "digits": 0.25}, width=12, heads=2, blocks=1, context=16, batch=8, updates=4
)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "letters": TextSet("letters", "abcdefgh" * 40, "hgfedcba" * 10, unit="chars"),
        "digits": TextSet("digits", "01234567" * 40, "76543210" * 10, unit="chars"),
    }
    monkeypatch.setattr(text_sources, "load_text", found.__getitem__)


@pytest.mark.usefixtures("texts")
def test_each_row_comes_from_the_text_that_it_names() -> None:
    found = read_texts(TINY)
    batches = list(mixed_batches(TINY, found, seed=0))
    assert len(batches) == TINY.updates
    sources = [source for batch in batches for source in batch.source]
    assert 0.5 < sources.count("letters") / len(sources) < 0.95
    for batch in batches:
        for row, source in zip(batch.tokens, batch.source, strict=True):
            assert bytes(row.tolist()).decode() in ("abcdefgh" * 40 if source == "letters" else "01234567" * 40)
        assert set(batch.control) <= {CONTROL + name for name in TINY.texts}


@pytest.mark.usefixtures("texts")
def test_findings_add_up_and_become_tables(tmp_path: Path) -> None:
    found = text_sources.reproduce_text_sources(TINY, tmp_path, seed=0)
    groups = [*TINY.texts, *(CONTROL + name for name in TINY.texts)]
    assert [row["without"] for row in found["masks"]] == [None, *groups, *groups]
    assert [row["layer"] for row in found["masks"]] == [None, *[None] * len(groups), *["softmax"] * len(groups)]
    for domain in TINY.texts:
        margin = found["margins"][domain]
        assert sum(margin["parts"].values()) == pytest.approx(margin["sum"])
    everything, *others = found["masks"]
    assert any(abs(row["letters"] - everything["letters"]) > 1e-4 for row in others)
    assert text_sources.reproduce_text_sources(TINY, tmp_path, seed=0) == found
    text = text_sources_section([found], command="dualform reproduce sources").text
    assert text[1].startswith("**Read this first.**")
    calm = [
        {**row, **dict.fromkeys(TINY.texts, 9.0 if row["without"] in TINY.texts else 2.0)} for row in found["masks"]
    ]
    calmer = text_sources_section([{**found, "masks": calm}], command="dualform reproduce sources").text
    assert "what a text taught" in calmer[1]
    assert "without letters, softmax alone" in [row[0] for row in summarise_text_sources([found])[1].rows]
    titles = [grid.title for grid in summarise_text_sources([found])]
    assert titles[0].startswith("Where the true byte's logit comes from")
    assert "4 updates" in " ".join(text)


@pytest.mark.usefixtures("texts")
def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(DataError, match="one row takes 1001"):
        read_texts(replace(TINY, context=1000))
    with pytest.raises(QueryError, match="a multiple of the Transformer's 6 heads"):
        reproduce_studies(ReproductionOptions("sources", units=100), json=True)


def test_the_standard_library_is_a_text_with_titles() -> None:
    text = load_text("standard-library")
    lines = text.train.split("\n")
    assert len(text.titles) > 100
    assert all(0 <= title.line < len(lines) for title in text.titles)
    assert torch.tensor([title.line for title in text.titles]).diff().min() >= 0
