"""The last token's row of each layer's input, in models of many shapes; refused where it cannot be told."""

import pytest
import torch
from torch import nn

import dualform
from dualform.attend.last_tokens import last_queries, prompt_queries
from dualform.errors import QueryError
from helpers.language_models import (
    BLOCK,
    SIZE,
    TOKENS,
    LastPositionModel,
    OutputModel,
    characters,
    record_last_position_model,
    record_model,
    record_output_model,
    written,
)

PROMPT = written(TOKENS[4:13])


@pytest.fixture(scope="module")
def last_position(tmp_path_factory):
    memory, model = record_last_position_model(
        tmp_path_factory.mktemp("last") / "run", factory="helpers.language_models:LastPositionModel"
    )
    memory.add_corpus(characters(documents=[(0, "First"), (200, "Second")]))
    return memory, model


@pytest.fixture(scope="module")
def output_object(tmp_path_factory):
    memory, model = record_output_model(tmp_path_factory.mktemp("object") / "run")
    memory.add_corpus(characters())
    return memory, model


def best(memory, query, layer):
    """Return the greatest attention of a query (1, d_in) over a layer's patterns, the obvious way."""
    return float(memory.attend(queries={layer: query})[layer].attention().max())


def test_a_head_at_the_last_position_and_shared_positions(last_position):
    memory, model = last_position
    found = memory.attend_text(model, PROMPT)
    assert list(found) == ["wte", "body.up", "body.down", "lm_head"]
    (note,) = found.notes
    assert note.startswith("left out: 'wpe', which holds no patterns with a place in the text")
    tokens = TOKENS[4:13][None]
    with torch.no_grad():
        places = torch.arange(1, 10)[:, None]
        x = model.wte(tokens) + model.wpe(torch.arange(9))
        expected = {"body.up": (x.cumsum(1) / places)[:, -1], "lm_head": model.body(x)[:, -1]}
        logits = model(tokens, tokens)[0][0, -1]
    for layer, query in expected.items():
        assert found[layer].by_pattern[0].attention == pytest.approx(best(memory, query, layer), rel=1e-4)
    assert found.next[0].token == written([int(logits.argmax())])
    assert found.next[0].probability == pytest.approx(float(logits.softmax(0).max()), rel=1e-5)


def test_an_output_object_and_positions_that_rows_share(output_object):
    memory, model = output_object
    found = memory.attend_text(model, PROMPT)
    assert list(found) == ["wte", "body.up", "body.down", "head"]
    tokens = TOKENS[4:13][None]
    with torch.no_grad():
        query = model.body(model.wte(tokens) + model.wpe(torch.arange(9)))[:, -1]
        logits = model(tokens).logits[0, -1]
    assert found["head"].by_pattern[0].attention == pytest.approx(best(memory, query, "head"), rel=1e-4)
    assert found.next[0].token == written([int(logits.argmax())])


def test_a_layer_that_is_named_must_have_an_answer(last_position):
    memory, model = last_position
    with pytest.raises(QueryError, match=r"layer 'wpe' holds no patterns with a place.*layers=\[\.\.\.\]"):
        memory.attend_text(model, PROMPT, layers=["wpe", "lm_head"])


def test_nothing_left_is_one_clear_error(last_position):
    memory, model = last_position
    with pytest.raises(QueryError, match="No layer can be asked about this prompt: 'wte' holds no patterns"):
        memory.where(token=99).attend_text(model, PROMPT)


def test_a_long_prompt_is_cut_to_the_configured_context(last_position):
    memory, model = last_position
    found = memory.attend_text(model, written(TOKENS[:40]), layers=["lm_head"])
    assert found.notes == (f"only the last {BLOCK} of 40 chars fit the model's context",)
    assert len(found.goes_on) == 40
    shorter = memory.attend_text(model, written(TOKENS[:40]), layers=["lm_head"], context=5)
    assert shorter.notes == ("only the last 5 of 40 chars fit the model's context",)
    expected = memory.attend_text(model, written(TOKENS[35:40]), layers=["lm_head"], context=5)
    assert shorter["lm_head"] == expected["lm_head"]


def test_an_unknown_context_is_tried_and_the_models_own_words_are_told(last_position):
    memory, _ = last_position
    model = memory.trained(LastPositionModel(block_size=None))
    with pytest.raises(QueryError, match=r"40 tokens: AssertionError: Cannot forward .* only 12\. .*context="):
        memory.attend_text(model, written(TOKENS[:40]))
    found = memory.attend_text(model, written(TOKENS[:10]), layers=["lm_head"])
    assert len(found.goes_on) == 3  # 10, 11 and 12 tokens fit
    assert "the model goes on for 3 chars only" in found.notes[0]
    with pytest.raises(QueryError, match="context is 0"):
        memory.attend_text(model, PROMPT, context=0)


def test_a_prompt_may_be_given_as_tokens(last_position):
    memory, model = last_position
    said = memory.attend_text(model, PROMPT, layers=["lm_head"])
    for tokens in (TOKENS[4:13], TOKENS[4:13].tolist()):
        found = memory.attend_text(model, tokens, layers=["lm_head"])
        assert (found.prompt, found["lm_head"]) == (PROMPT, said["lm_head"])
    for tokens, words in (([], "no tokens"), ([SIZE], f"no token {SIZE} "), ([0.5], "numbers of its tokens")):
        with pytest.raises(QueryError, match=words):
            memory.attend_text(model, tokens)


class Flattened(nn.Module):
    """Sees all tokens of a batch in one row after the other, and has a batch-free embedding of positions beside it."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(SIZE, 8)
        self.wpe = nn.Embedding(BLOCK, 8)
        self.head = nn.Linear(8, SIZE)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return self.head(x.flatten(0, 1))


def flat_loss(model):
    return lambda x, y: nn.functional.cross_entropy(model(x), y.flatten())


def test_a_flattened_batch_is_told_from_positions(tmp_path):
    model = Flattened()
    memory = record_model(tmp_path / "run", model, flat_loss(model))
    tokens = TOKENS[None, :6]
    found, reasons = prompt_queries(model, tokens, memory.layers, batch_axis=0, vocabulary=SIZE)
    assert list(found) == ["wte", "head"]
    assert torch.equal(found["head"], model.wte(tokens)[0, -1:] + model.wpe.weight[5:6])
    assert "saw (6,) for tokens (1, 6), and its input there does not change with the last token" in reasons["wpe"]
    memory.add_corpus(characters())
    assert list(memory.attend_text(model, written(TOKENS[:6]))) == ["wte", "head"]


class Experts(nn.Module):
    """Sends each token to one of two layers: which rows a layer sees depends on the text."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(SIZE, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, SIZE)

    def forward(self, tokens):
        x = self.wte(tokens)
        y = torch.zeros_like(x)
        spaces = tokens == 0
        for mask, layer in ((spaces, self.first), (~spaces, self.second)):
            if mask.any():
                y[mask] = layer(x[mask])
        return self.head(y)


def test_a_single_row_of_another_token_is_not_taken_for_the_last(tmp_path):
    model = Experts()
    memory = record_model(
        tmp_path / "run", model, lambda x, y: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    )
    tokens = torch.tensor([[3, 0, 5, 4]])  # one space, and not at the end
    found, reasons = prompt_queries(model, tokens, memory.layers, batch_axis=0, vocabulary=SIZE)
    assert list(found) == ["wte", "head"]
    assert "does not change with the last token" in reasons["first"]
    assert "saw (3,) for tokens (1, 4)" in reasons["second"]
    ends_in_a_space = torch.tensor([[3, 0]])  # one row each; that of "second" belongs to the first token
    found, reasons = prompt_queries(model, ends_in_a_space, memory.layers, batch_axis=0, vocabulary=SIZE)
    assert (list(found), list(reasons)) == (["wte", "head"], ["first", "second"])  # in the model's order
    no_space = torch.tensor([[3, 5, 4]])
    _, reasons = prompt_queries(model, no_space, memory.layers, batch_axis=0, vocabulary=SIZE)
    assert reasons["first"] == "was not called in the forward pass, so it has no queries"


class Twice(nn.Module):
    """Calls one layer twice in a row, and another one token by token."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(SIZE, 8)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, SIZE)

    def forward(self, tokens):
        x = self.again(torch.tanh(self.again(self.wte(tokens))))
        return torch.stack([self.head(x[:, i]) for i in range(x.shape[1])], dim=1)


def test_a_layer_that_is_called_often(tmp_path):
    model = Twice()
    loss = lambda x, y: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())  # noqa: E731
    memory = record_model(tmp_path / "run", model, loss)
    tokens = TOKENS[None, :6]
    found, reasons = prompt_queries(model, tokens, memory.layers, batch_axis=0, vocabulary=SIZE)
    assert reasons == {"again": "was called 2 times, so the last token has several queries"}
    expected = model.again(torch.tanh(model.again(model.wte(tokens))))[:, -1]
    torch.testing.assert_close(found["head"], expected.detach())
    with pytest.raises(QueryError, match=r"'again' was called 2 times.*layers="):
        last_queries(model, tokens, memory.layers)


class SequenceFirst(nn.Module):
    """Takes tokens (L, B), as torch's own recurrent layers do."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(SIZE, 8)
        self.rnn = nn.GRU(8, 8)
        self.head = nn.Linear(8, SIZE)

    def forward(self, tokens):
        return self.head(self.rnn(self.wte(tokens))[0])


def test_a_model_that_takes_the_sequence_first(tmp_path):
    model = SequenceFirst()
    loss = lambda x, y: nn.functional.cross_entropy(model(x.T).flatten(0, 1), y.T.flatten())  # noqa: E731
    memory = record_model(tmp_path / "run", model, loss, batch_axis=1)
    memory.add_corpus(characters())
    tokens = TOKENS[4:13]
    found = memory.attend_text(model, written(tokens), goes_on=3)
    with torch.no_grad():
        hidden = model.rnn(model.wte(tokens[:, None]))[0][-1]
        logits = model.head(hidden)[0]
    assert found["head"].by_pattern[0].attention == pytest.approx(best(memory, hidden, "head"), rel=1e-4)
    assert found.next[0].token == written([int(logits.argmax())])
    assert found.goes_on[0] == written([int(logits.argmax())])


def test_rows_and_positions_of_one_number_are_not_guessed(tmp_path):
    model = Flattened()
    memory = record_model(tmp_path / "run", model, flat_loss(model))
    with pytest.raises(QueryError, match=r"saw \(4,\) for tokens \(4, 4\)"):
        last_queries(model, TOKENS[:16].reshape(4, 4), {"wpe": memory.layers["wpe"]})


def test_effects_take_the_same_outputs(last_position, output_object):
    targets = torch.tensor([1, 2])
    tokens = TOKENS[:24].reshape(2, BLOCK)
    for memory, model in (last_position, output_object):
        for quantity in ("margin", "loss"):
            layers = ["body.up", "body.down"]
            found = memory.attend(model, tokens, quantity=quantity, layers=layers)
            assert len(found.effects("token").values) == 2
    memory, model = last_position
    for quantity in ("margin", "loss"):
        said = memory.attend(model, tokens, targets=targets, quantity=quantity, layers=["body.up"])

        def plain(outputs, targets, quantity=quantity):
            logits = outputs[0][:, 0]
            if quantity == "loss":
                return nn.functional.cross_entropy(logits, targets, reduction="none")
            right = nn.functional.one_hot(targets, SIZE).bool()
            return logits[right] - logits.masked_fill(right, -torch.inf).logsumexp(1)

        expected = memory.attend(model, tokens, targets=targets, quantity=plain, layers=["body.up"])
        torch.testing.assert_close(said.effects("token").values, expected.effects("token").values)


def test_the_model_may_be_in_training_mode_and_stays_so(output_object):
    memory, model = output_object
    model.train()
    memory.attend_text(model, PROMPT, layers=["head"])
    assert model.training
    model.eval()


def test_a_model_of_padded_outputs(tmp_path):
    """A model may have more outputs than its tokenizer has tokens, in a text of pieces."""
    torch.manual_seed(0)
    model = OutputModel(SIZE + 5)
    memory = record_model(tmp_path / "run", model, lambda x, y: model(x, labels=x).loss)
    memory.add_corpus(dualform.Corpus.from_tokens(TOKENS, vocabulary=[f"{sign}" for sign in written(range(SIZE))]))
    with torch.no_grad():
        model.head.bias[SIZE + 2] = 50.0
    found = memory.attend_text(model, TOKENS[:5], layers=["head"], goes_on=1, other_model=True)
    assert found.next[0].token == found.goes_on == f"<{SIZE + 2}>"
    smaller = nn.Sequential(nn.Embedding(SIZE, 8), nn.Linear(8, SIZE - 1))
    small = record_model(tmp_path / "small", smaller, lambda x, y: smaller(x).square().mean())
    small.add_corpus(dualform.Corpus.from_tokens(TOKENS, vocabulary=written(range(SIZE))))
    with pytest.raises(QueryError, match=f"has {SIZE - 1} outputs"):
        small.attend_text(smaller, TOKENS[:5])
