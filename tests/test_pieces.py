"""Pieces of tokenizers of several makes, written here: the texts of their tokens join to the text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dualform
from dualform.errors import MediaError, QueryError
from dualform.pieces import _byte_signs, encode_text, piece_texts, raw_piece, render_chat, vocabulary_size
from dualform.tokens import join

TEXT = "The naïve 狐狸 sees the 🐺 — the naïve fox."


class ByteLevel:
    """Tokens are bytes or pairs of bytes; a piece may end within a character. As in transformers, it takes options."""

    def __init__(self):
        data = TEXT.encode()
        pairs = sorted({data[i : i + 2] for i in range(len(data) - 1)})
        self.pieces = [bytes([byte]) for byte in range(256)] + pairs
        self.special = "<|end|>"

    def __len__(self):
        return len(self.pieces) + 1

    def encode(self, text, add_special_tokens=True):
        data, found = text.encode(), []
        while data:
            piece = data[:2] if data[:2] in self.pieces and len(data) > 1 else data[:1]
            found.append(self.pieces.index(piece))
            data = data[len(piece) :]
        return [*found, len(self.pieces)] if add_special_tokens else found

    def decode(self, tokens, skip_special_tokens=False):
        kept = [token for token in tokens if token < len(self.pieces)]
        text = b"".join(self.pieces[token] for token in kept).decode(errors="replace")
        return text if skip_special_tokens or len(kept) == len(tokens) else text + self.special

    def convert_ids_to_tokens(self, token):
        signs = {byte: sign for sign, byte in _byte_signs().items()}
        return self.special if token == len(self.pieces) else "".join(signs[byte] for byte in self.pieces[token])


class PlainBytes:
    """Knows the bytes of its tokens, takes no options, and has gaps in its numbers."""

    n_vocab = 300

    def encode(self, text):
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens):
        return self._bytes(tokens).decode(errors="replace")

    def decode_single_token_bytes(self, token):
        return self._bytes([token])

    def _bytes(self, tokens):
        if any(token > 255 for token in tokens):
            raise KeyError(tokens)
        return bytes(tokens)


class Spaced:
    """Writes the space before a word into the piece, drops it at the start of a text, and returns an encoding."""

    def __init__(self):
        self.words = ["<unk>", *("▁" + word for word in dict.fromkeys(["a", *TEXT.split()])), "<0xE2>"]

    def get_vocab_size(self):
        return len(self.words)

    def encode(self, text):
        tokens = [self.words.index("▁" + word) if "▁" + word in self.words else 0 for word in text.split()]
        return SimpleNamespace(ids=tokens)

    def decode(self, tokens):
        text = "".join("\N{REPLACEMENT CHARACTER}" if t == len(self.words) - 1 else self.words[t] for t in tokens)
        return text.replace("▁", " ").removeprefix(" ")

    def id_to_token(self, token):
        return self.words[token]


@pytest.mark.parametrize("make", [ByteLevel, PlainBytes, Spaced])
def test_pieces_join_to_the_text(make):
    tokenizer = make()
    tokens = encode_text(tokenizer, TEXT)
    corpus = dualform.Corpus.from_tokens(tokens, tokenizer=tokenizer, name="foxes")
    assert join(corpus.words(corpus.train), "pieces").strip() == TEXT
    assert corpus.unit == "pieces"
    assert len(corpus.vocabulary) == vocabulary_size(tokenizer) > max(tokens)


def test_special_tokens_stay_out_of_a_prompt_and_have_a_text():
    tokenizer = ByteLevel()
    last = len(tokenizer) - 1
    assert last not in encode_text(tokenizer, TEXT)
    assert piece_texts(tokenizer, [last]) == ["<|end|>"]
    assert raw_piece(tokenizer, last) == "<|end|>"


def test_a_piece_within_a_character_is_spelled():
    tokenizer = ByteLevel()
    assert piece_texts(tokenizer, [0xE2]) == ["<0xE2>"]
    assert piece_texts(PlainBytes(), [0xE2, 65]) == ["<0xE2>", "A"]
    spaced = Spaced()
    assert piece_texts(spaced, [spaced.words.index("<0xE2>")]) == ["<0xE2>"]


def test_a_number_without_a_token_has_a_name():
    assert piece_texts(PlainBytes(), [299]) == ["<299>"]


def test_a_tokenizer_that_does_not_know_a_letter():
    class Digits:
        def encode(self, text):
            return [int(sign) for sign in text]

        def decode(self, tokens):
            return "".join(map(str, tokens))

    corpus = dualform.Corpus.from_tokens([3, 1, 2], tokenizer=Digits())
    assert corpus.vocabulary == ("0", "1", "2", "3")
    with pytest.raises(QueryError, match="could not encode 'x': ValueError"):
        encode_text(Digits(), "x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either tokenizer=... or vocabulary="),
        ({"tokenizer": PlainBytes(), "vocabulary": ["a"]}, "either tokenizer=... or vocabulary="),
        ({"tokenizer": PlainBytes(), "unit": "words"}, "unit is 'words'; expected pieces"),
        ({"vocabulary": ["a", "b"], "unit": "bytes"}, "unit is 'bytes'; expected chars or words or pieces"),
        ({"vocabulary": ["a", "b"]}, "There is a token 2, but the vocabulary has 2"),
        ({"vocabulary": "abc", "documents": [(1, "A")]}, "ascending places below 3, the first of them 0"),
        ({"vocabulary": "abc", "documents": [(0, "A"), (3, "B")]}, "ascending places below 3"),
        ({"vocabulary": "abc", "documents": []}, "ascending places"),
        ({"vocabulary": "abc", "test": [0.5]}, "The test tokens are"),
        ({"vocabulary": "abc", "test": [-1]}, "go down to -1"),
    ],
)
def test_a_corpus_that_cannot_be_made(options, words):
    with pytest.raises(MediaError, match=words):
        dualform.Corpus.from_tokens([0, 1, 2], **options)
    with pytest.raises(MediaError, match="expected \\(N,\\) whole numbers"):
        dualform.Corpus.from_tokens([[0, 1]], vocabulary="ab")


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda tokens: np.array(tokens, dtype=np.uint16)])
def test_tokens_of_any_kind(kind, run):
    corpus = dualform.Corpus.from_tokens(
        kind([2, 0, 1, 1]), vocabulary="abc", test=kind([0, 1]), documents=[(0, "A"), (2, "B")], name="kinds"
    )
    assert (corpus.train.tolist(), corpus.test.tolist(), corpus.titles) == ([2, 0, 1, 1], [0, 1], ("A", "B"))
    assert corpus.train.dtype == np.int64
    assert repr(corpus) == "Corpus('kinds', 4 + 2 pieces, vocabulary of 3, 2 documents)"


def test_a_chat_is_rendered_by_the_tokenizers_template() -> None:
    class Chat:
        def apply_chat_template(
            self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
        ) -> str:
            assert not tokenize
            said = "".join(f"[{one['role']}] {one['content']} " for one in messages)
            return said + ("[assistant] " if add_generation_prompt else "")

    asked = {"role": "user", "content": "Who's there?"}
    assert render_chat(Chat(), [asked]) == "[user] Who's there? [assistant] "
    answered = {"role": "assistant", "content": "Nay,"}
    assert render_chat(Chat(), [asked, answered]) == "[user] Who's there? [assistant] Nay, "
    with pytest.raises(QueryError, match="a chat of 1 messages, but the tokenizer, of type NoneType, has no chat"):
        render_chat(None, [asked])
    with pytest.raises(QueryError, match="chat template failed: KeyError: 'content'"):
        render_chat(Chat(), [{"role": "user"}])
