"""The number of tokens that a model takes, from wherever it says so."""

from types import SimpleNamespace

import pytest
from torch import nn

from dualform.attend.context import check_context, context_of, naming_failures
from dualform.errors import QueryError, SelectionError


def model_with(**attributes):
    model = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "n_positions",
        "n_ctx",
        "max_position_embeddings",
        "max_seq_len",
        "max_seq_length",
        "context_length",
        "seq_length",
    ],
)
@pytest.mark.parametrize("holder", ["config", "cfg", "hparams"])
def test_the_usual_names_are_known(holder, name):
    assert context_of(model_with(**{holder: SimpleNamespace(**{name: 24})})) == 24
    assert context_of(model_with(**{holder: {name: 24}})) == 24


def test_the_model_itself_comes_first():
    assert context_of(model_with(context=10, config={"n_ctx": 20})) == 10
    assert context_of(model_with(block_size=10)) == 10


@pytest.mark.parametrize("wrapper", ["_orig_mod", "module", "base_model", "model"])
def test_a_wrapped_model_is_asked(wrapper):
    outer = nn.Module()
    setattr(outer, wrapper, model_with(config={"n_ctx": 20}))
    assert context_of(outer) == 20


def test_the_text_part_of_a_configuration_is_read():
    assert context_of(model_with(config=SimpleNamespace(text_config={"n_ctx": 7}))) == 7


@pytest.mark.parametrize("value", [None, 0, -1, True, "32", 3.5, nn.Linear(1, 1)])
def test_what_is_no_number_of_tokens_is_not_taken(value):
    assert context_of(model_with(config=SimpleNamespace(n_ctx=value))) is None


def test_a_model_that_contains_itself_or_raises_says_nothing():
    class Odd(nn.Module):
        @property
        def config(self):
            raise RuntimeError("not attached")

        @property
        def base_model(self):
            return self

    assert context_of(Odd()) is None


@pytest.mark.parametrize("context", [0, -3, "many"])
def test_a_context_is_a_positive_number(context):
    with pytest.raises(QueryError, match="expected the number of tokens"):
        check_context(context)
    check_context(None)
    check_context(5)


def test_failures_are_named_and_ours_pass():
    words = r"prompt of 9 tokens: AssertionError: too long. .*context="
    with pytest.raises(QueryError, match=words) as caught, naming_failures(9):
        raise AssertionError("too long")
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(SelectionError, match="no column"), naming_failures(9):
        raise SelectionError("no column")
