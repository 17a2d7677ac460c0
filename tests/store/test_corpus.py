"""The corpus that a run keeps: what goes in comes out, and what is missing or broken is named."""

import json

import numpy as np
import pytest

import dualform
from dualform.errors import CorruptError, QueryError
from dualform.store.format import VOCABULARY
from dualform.store.reader import Run
from helpers.loops import mlp, record, sgd
from helpers.texts import tiny_corpus


@pytest.fixture
def kept(run):
    model = mlp()
    memory = record(run, model, sgd(model))
    memory.add_corpus(tiny_corpus())
    return run


def file_of(folder):
    path = Run(folder).blob(VOCABULARY).local_path()
    assert path is not None
    return path


def test_a_corpus_comes_back_as_it_was(kept):
    expected, found = tiny_corpus(), dualform.open(kept).corpus()
    for name in ("train", "test", "starts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == np.int64
    for name in ("name", "unit", "spaced", "vocabulary", "titles"):
        assert getattr(found, name) == getattr(expected, name)


def test_a_kept_corpus_is_verified_with_the_run(kept):
    assert dualform.open(kept).verify()
    path = file_of(kept)
    path.write_text(path.read_text().replace("wolf", "bear"))
    with pytest.raises(CorruptError, match=r"vocabulary-\w+\.json"):
        dualform.open(kept).verify()


def test_a_run_without_a_corpus_says_so(run):
    model = mlp()
    with pytest.raises(QueryError, match="keeps no corpus"):
        record(run, model, sgd(model)).corpus()


def test_a_vocabulary_that_lacks_a_part_is_corrupt(kept):
    path = file_of(kept)
    words = json.loads(path.read_text())
    size = path.stat().st_size
    del words["titles"]
    path.write_text(json.dumps(words).ljust(size))
    with pytest.raises(CorruptError, match="titles"):
        dualform.open(kept).corpus()


def test_documents_of_places():
    corpus = tiny_corpus()
    places = np.array([0, corpus.starts[1] - 1, corpus.starts[1], len(corpus.train) - 1])
    assert [corpus.titles[i] for i in corpus.documents(places)] == ["Page 0", "Page 0", "Page 1", "Page 5"]
