"""What a run keeps for people to look at: in while it is recorded or afterwards, out as it was, or refused."""

import numpy as np
import pytest
import torch

import dualform
from dualform.errors import CorruptError, MediaError, QueryError
from helpers.small import batch, network, recorded, sgd, train

PIXELS = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(3, 4, 5)


def test_media_and_tests_come_with_the_recording(run):
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
        recorder.media(images=PIXELS, samples=[7, 3, 5], labels=["cat", "dog", "fox"], mean=2.0, deviation=4.0)
        recorder.tests(*batch(0), images=torch.zeros(6, 4, 5, 3, dtype=torch.uint8))
        train(model, optimizer, range(3), recorder)
        recorder.flush()
        live = dualform.open(run)
        assert live.media.labels == ["cat", "dog", "fox"], "published before the steps that came later"
    memory = dualform.open(run)
    assert memory.verify(model).passed
    torch.testing.assert_close(memory.media.image(3), PIXELS[1])
    assert memory.media.image(4) is None
    assert memory.media.scale == (2.0, 4.0)
    torch.testing.assert_close(memory.tests()[0], batch(0)[0])
    images = memory.test_images()
    assert images is not None
    assert images.shape == (6, 4, 5, 3)
    assert memory.media.text is None


def test_media_can_be_added_later_and_replaced(run):
    recorded(run, 3)
    memory = dualform.open(run)
    assert not memory.media.has_images
    memory.add_media(images=PIXELS)
    memory.add_media(images=PIXELS.flip(0).numpy())
    torch.testing.assert_close(dualform.open(run).media.image(0), PIXELS[2])
    assert memory.verify().passed


def test_a_text_comes_back(run):
    recorded(run, 3)
    memory = dualform.open(run)
    memory.add_media(
        tokens=[0, 1, 2, 1, 0], vocabulary=["a", "b", "c"], documents=[(0, "One"), (3, "Two")], unit="words"
    )
    corpus = dualform.open(run).corpus()
    assert corpus.words(corpus.train) == ["a", "b", "c", "b", "a"]
    assert [corpus.titles[i] for i in corpus.documents(np.array([2, 3]))] == ["One", "Two"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({}, "nothing to keep"),
        ({"images": PIXELS.float()}, "uint8"),
        ({"images": PIXELS[0]}, "expected"),
        ({"images": torch.zeros(1, 4, 5, 2, dtype=torch.uint8)}, "expected"),
        ({"images": torch.zeros(1, 600, 5, dtype=torch.uint8)}, "512"),
        ({"images": PIXELS, "samples": [1, 1, 2]}, "different samples"),
        ({"images": PIXELS, "samples": [1, 2]}, "different samples"),
        ({"labels": ["a"], "mean": 1.0}, "give both"),
        ({"labels": ["a"], "mean": 1.0, "deviation": 0.0}, "not 0"),
        ({"tokens": [0, 1]}, "vocabulary"),
        ({"tokens": [0, 3], "vocabulary": ["a"]}, "run from 0 to 3"),
        ({"tokens": [0.5], "vocabulary": ["a"]}, "integers"),
        ({"tokens": [0], "vocabulary": ["a"], "unit": "syllables"}, "chars, words"),
        ({"tokens": [0], "vocabulary": ["a"], "documents": [(3, "x")]}, "first of them 0"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(run, what, words):
    recorded(run, 1)
    before = {path.name for path in run.rglob("*")}
    with pytest.raises(MediaError, match=words):
        dualform.open(run).add_media(**what)
    assert {path.name for path in run.rglob("*")} == before


def test_as_many_test_images_as_inputs(run):
    recorded(run, 1)
    with pytest.raises(QueryError, match="6 test inputs, but 3 test images"):
        dualform.open(run).add_tests(*batch(0), images=PIXELS)


def test_nothing_is_kept_outside_of_a_recording(run):
    model = network()
    with pytest.raises(MediaError, match="with statement"):
        dualform.record(model, sgd(model), run).media(labels=["a"])


def test_a_damaged_description_is_named(run):
    recorded(run, 1)
    dualform.open(run).add_media(labels=["cat"])
    (path,) = (run / "media").glob("media-*.json")
    path.write_text("{" + path.read_text()[1:-1] + "!")
    with pytest.raises(CorruptError, match=r"media-\w+\.json"):
        _ = dualform.open(run).media
