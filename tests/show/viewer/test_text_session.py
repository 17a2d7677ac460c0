"""Text in the viewer and in reports: tests and prompts that fit the model, and texts that fit the run."""

import pytest
import torch

import dualform
from dualform.attend.removal import Removal
from dualform.errors import QueryError
from dualform.show.held_out import held_out_windows
from dualform.show.panels.layer_totals import layer_totals
from dualform.show.panels.overview import run_overview
from dualform.show.panels.prediction import model_prediction
from dualform.show.session import Mask, Session
from dualform.show.viewer.parameters import BadQuestion, RequestParameters
from dualform.show.viewer.routes import questions
from helpers.language_models import (
    BLOCK,
    CHARACTERS,
    TOKENS,
    LastPositionModel,
    characters,
    record_last_position_model,
    written,
)


@pytest.fixture
def recorded(run):
    memory, model = record_last_position_model(run)
    memory.add_corpus(characters())
    return memory, model


def session_of(memory, model):
    return Session(memory, model, budget=1 << 20)


def test_tests_fit_the_context(recorded):
    session = session_of(*recorded)
    assert session.tests.shape[1] == BLOCK
    assert torch.equal(held_out_windows(characters(), 5)[0].unique(), TOKENS[:200].unique())
    with torch.no_grad():
        said = session.model(session.tests, session.tests)[0][:, -1].argmax(1)
    assert torch.equal(session.predictions(), said)
    assert session.output_layer == "lm_head"


def test_an_unknown_context_is_found_by_trying(recorded):
    memory, _ = recorded
    session = session_of(memory, memory.trained(LastPositionModel(block_size=None)))
    assert session.context is None
    assert session.tests.shape[1] == 10  # 80, 40, 20, 10
    whole, targets = held_out_windows(characters())
    assert torch.equal(session.tests, whole[:, -10:])
    assert torch.equal(session.targets, targets)
    with pytest.raises(BadQuestion, match="AssertionError: Cannot forward sequence of length 40"):
        RequestParameters([("prompt", written(TOKENS[:40]))]).subject(session)


def test_a_model_that_takes_no_tokens_is_an_error_with_its_own_words(recorded):
    class Broken(LastPositionModel):
        def forward(self, idx, targets=None):
            raise KeyError("attention_mask")

    memory, _ = recorded
    session = session_of(memory, memory.trained(Broken(block_size=None)))
    with pytest.raises(QueryError, match=r"The model failed on inputs \(1, 1\): KeyError: 'attention_mask'"):
        _ = session.tests


def test_a_prompt_is_cut_and_answered(recorded):
    session = session_of(*recorded)
    subject = RequestParameters([("prompt", written(TOKENS[:40]))]).subject(session)
    assert torch.equal(subject.inputs, TOKENS[None, 40 - BLOCK : 40])
    said = model_prediction(session, subject, Mask(Removal()))
    with torch.no_grad():
        assert said.before == int(session.model(subject.inputs)[0].argmax())
    assert [layer.layer for layer in layer_totals(session, subject, ("token",), "attention").layers][-1] == "lm_head"


def test_pieces_offer_no_prompt(run):
    memory, model = record_last_position_model(run)
    memory.add_corpus(dualform.Corpus.from_tokens(TOKENS, vocabulary=CHARACTERS, test=TOKENS[:100]))
    session = session_of(memory, model)
    assert run_overview(session).prompt is False
    with pytest.raises(BadQuestion, match="in pieces of a tokenizer"):
        RequestParameters([("prompt", "the wolf")]).subject(session)


def test_a_text_that_does_not_fit_is_refused(run):
    memory, model = record_last_position_model(run, text=torch.roll(TOKENS, 3))
    memory.add_tests(TOKENS[None, :BLOCK])
    session = session_of(memory, model)
    for ask in (
        lambda: run_overview(session),
        lambda: RequestParameters([("prompt", "the wolf")]).subject(session),
        lambda: questions()["/api/passage"](session, RequestParameters([("place", "3")])),
    ):
        with pytest.raises(QueryError, match="annotated places are wrong"):
            ask()
