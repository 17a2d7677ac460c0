"""The text of a training, collected while its rows come."""

import torch

import dualform
from dualform.integrations.training_text import PADDING, Rows, TrainingText


class Letters:
    """A tokenizer: token n is the n-th letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def test_a_row_has_the_same_places_whenever_it_comes() -> None:
    text = TrainingText()
    first = text.places(torch.tensor([[3, 4, 5], [6, 7, 8]]), None, ["one", "two"])
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    again = text.places(torch.tensor([[6, 7, 8], [3, 4, 9]]), None, ["two", "three"])
    assert again.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert len(text) == 9


def test_processes_that_exchange_their_rows_have_one_text() -> None:
    texts = [TrainingText(), TrainingText()]
    batches = [torch.tensor([[3, 4, 0]]), torch.tensor([[6, 7, 8]])]
    masks = [torch.tensor([[1, 1, 0]]), None]
    sent: list[Rows] = []

    def alone(rows: Rows) -> list[Rows]:
        sent.append(rows)
        return [rows]

    for text, tokens, mask in zip(texts, batches, masks, strict=True):
        text.places(tokens, mask, ["row"], gather=alone)
    found = [
        TrainingText().places(tokens, mask, ["row"], gather=lambda rows: sent).tolist()
        for tokens, mask in zip(batches, masks, strict=True)
    ]
    assert found == [[[0, 1, 2]], [[3, 4, 5]]]
    texts[0].places(batches[0], masks[0], ["row"], gather=alone)
    assert sent[-1] == []  # a row that is known is not sent again


def test_padding_on_either_side_is_no_part_of_a_row() -> None:
    text = TrainingText()
    tokens = torch.tensor([[3, 4, 0], [0, 3, 4], [0, 0, 0]])
    places = text.places(tokens, (tokens != 0).long(), ["one", "one again", "nothing"])
    assert places.tolist() == [[0, 1, 2], [2, 0, 1], [2, 2, 2]]
    corpus = text.corpus(Letters())
    assert corpus.titles == ("one", PADDING)
    assert corpus.train.tolist() == [3, 4, 0]
    assert corpus.words(corpus.train) == ["d", "e", "a"]


def test_a_text_goes_on_where_a_run_is_resumed() -> None:
    text = TrainingText()
    text.places(torch.tensor([[3, 4], [5, 6]]), None, ["one", "two"])
    resumed = TrainingText(text.corpus(Letters()))
    assert resumed.places(torch.tensor([[5, 6], [7, 8]]), None, ["two", "three"]).tolist() == [[2, 3], [4, 5]]
    corpus = resumed.corpus(Letters())
    assert isinstance(corpus, dualform.Corpus)
    assert corpus.titles == ("one", "two", "three")
