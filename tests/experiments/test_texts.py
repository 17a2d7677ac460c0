"""The texts: how they are read, split and titled, and every file that cannot be."""

import io
import zipfile

import numpy as np
import pytest

from dualform.errors import DataError
from dualform.experiments import datasets
from dualform.experiments.datasets import aesop, moby_dick, sources, wikitext2
from dualform.experiments.datasets.contents import SourceError, cut_book, read_zip
from dualform.experiments.datasets.textfile import read_text_file
from dualform.experiments.datasets.textset import TextSet, Title
from dualform.experiments.language.corpora import encode_part, make_corpus
from dualform.tokens import split_lines
from helpers.texts import tiny_text

FABLES = """CONTENTS

THE WOLF AND THE LAMB, 3

THE WOLF AND THE LAMB

One day a Wolf met a Lamb. It was by a brook.

THE FOX

A Fox saw some grapes, and could not reach them at all.
ANNOUNCEMENTS
Other books
"""


def test_aesop_runs_from_the_first_fable_to_the_announcements():
    text = aesop.build_aesop({"stickney.txt": FABLES.encode()})
    whole = text.train + text.test
    assert whole.startswith("THE WOLF AND THE LAMB\n\nOne day")
    assert whole.endswith("at all.\n")
    assert len(text.test) == len(whole) // 10
    assert [title.text for title in text.titles] == ["THE WOLF AND THE LAMB", "THE FOX"]
    with pytest.raises(DataError, match="no 'THE WOLF AND THE LAMB'"):
        aesop.build_aesop({"stickney.txt": b"something else"})


def test_moby_dick_has_chapters():
    text = moby_dick.build_moby_dick({"data.txt": b"CHAPTER 1. Loomings.\n\nCall me Ishmael.\n" * 3})
    assert text.titles[0] == Title(0, "CHAPTER 1. Loomings.")


def test_wikitext_has_pages_and_its_own_unknown_words():
    train = " \n = Boulter = \n \n He <unk> a film . \n \n = = Career = = \n \n W = \n = Points ; L = \n Losses \n"
    test = " \n = Other = \n \n A film \n"
    files = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
    contents = dict(zip(files, (train, " A film ends \n", test), strict=True))
    text = wikitext2.build_wikitext2({file: content.encode() for file, content in contents.items()})
    corpus = make_corpus(text)
    assert (corpus.titles, corpus.starts.tolist()) == (("Boulter",), [0])  # only a blank line stands ahead of it
    assert corpus.vocabulary.count("<unk>") == 1
    assert corpus.words(corpus.train[:7]) == ["<eos>", "=", "Boulter", "=", "<eos>", "<eos>", "He"]
    assert corpus.words(corpus.test[-3:]) == ["<unk>", "film", "<eos>"]
    assert corpus.words(encode_part(text.valid, corpus)) == ["<unk>", "film", "<unk>", "<eos>"]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "vocabulary", "documents"),
    [("aesop", 123_925, 13_769, 71, 155), ("wikitext-2", 2_088_628, 245_569, 33_278, 600)],
)
def test_the_real_texts(name, train, test, vocabulary, documents):
    if sources.find(datasets.catalogue.find_dataset(name)) is None:
        pytest.skip(f"{name} is not on this machine: dualform data get {name}")
    corpus = make_corpus(datasets.load_text(name))
    assert (len(corpus.train), len(corpus.test)) == (train, test)
    assert (len(corpus.vocabulary), len(corpus.titles)) == (vocabulary, documents)


def test_images_and_texts_are_told_apart(monkeypatch):
    with pytest.raises(DataError, match="digits is a set of images; expected a text"):
        datasets.load_text("digits")
    monkeypatch.setattr(datasets, "_build", lambda name, progress: tiny_text())
    with pytest.raises(DataError, match="aesop is a text; expected a set of images"):
        datasets.load("aesop")


# A file of one's own


def test_a_file_is_read_whatever_its_line_ends(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfone two\r\nthree four\r\n" * 20)
    text = read_text_file(path, "words")
    assert text.train.startswith("one two\nthree")
    assert "\r" not in text.train + text.test
    assert text.titles == (Title(0, "book.txt"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 " * 50, r"book\.txt is not UTF-8: byte 3 is 0xe9"),
        (b"", r"book\.txt is empty"),
        (b" \n\n ", r"book\.txt is empty"),
        (b"a", r"only 1 characters"),
    ],
)
def test_a_file_that_is_no_text_is_one_clear_error(tmp_path, content, message):
    (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text_file(tmp_path / "book.txt", "words")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_text_file(tmp_path / "missing.txt", "chars")
    with pytest.raises(DataError, match="cannot be read"):
        read_text_file(tmp_path, "chars")


# Tokens


def test_characters_are_all_of_the_text():
    text = "ab\n\ncd\x0be\u2028f"
    assert "".join("".join(line) for line in split_lines(text, "chars", spaced=False)) == text


def test_words_that_come_once_are_unknown_in_a_plain_text():
    corpus = make_corpus(TextSet("book", "a b. a c.\n\n\n\nd", "a z", unit="words"))
    assert corpus.words(corpus.train) == ["a", "<unk>", ".", "a", "<unk>", ".", "<unk>", "<unk>"]
    assert corpus.words(corpus.test) == ["a", "<unk>"]


def test_text_ahead_of_the_first_title_is_a_document():
    corpus = make_corpus(TextSet("book", "preface\nONE\na b\n", "a", unit="chars", titles=(Title(1, "ONE"),)))
    assert (corpus.titles, corpus.starts.tolist()) == (("book", "ONE"), [0, 8])
    np.testing.assert_array_equal(corpus.documents(np.array([0, 7, 8])), [0, 0, 1])


# Sources


def test_zip_archives_are_read_by_base_name():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("wikitext-2/wiki.train.tokens", "text")
    assert read_zip(stream.getvalue(), ["wiki.train.tokens"]) == {"wiki.train.tokens": b"text"}
    with pytest.raises(SourceError, match=r"does not hold wiki\.test\.tokens"):
        read_zip(stream.getvalue(), ["wiki.test.tokens"])
    with pytest.raises(SourceError, match="no complete zip file"):
        read_zip(stream.getvalue()[:-10], ["wiki.train.tokens"])


def test_a_book_is_cut_between_its_first_words_and_the_licence():
    book = b"\xef\xbb\xbfheader\r\n\r\n[Illustration: X]\r\ntext\r\n*** END OF THIS EBOOK ***\r\nlicence"
    assert cut_book(book, first="\n[Illustration", name="it") == b"\n[Illustration: X]\ntext\n"
    with pytest.raises(SourceError, match="has no"):
        cut_book(book, first="absent", name="it")
