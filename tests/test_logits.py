"""Logits are found in whatever a model returns, or refused by name."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from dualform.effects.output_gradients import measure_quantity
from dualform.errors import QueryError
from dualform.logits import last_logits_of, logits_of
from helpers.language_models import Output

LOGITS = torch.arange(6.0).reshape(2, 3)
LOSS = torch.tensor(0.5)
Named = namedtuple("Named", ["loss", "logits"])
OUTPUTS = [
    LOGITS,
    (LOGITS, None),
    (LOGITS, LOSS),
    [LOGITS, LOSS],
    (LOSS, LOGITS),
    (None, LOGITS),
    ((LOGITS, LOSS), "state"),
    {"loss": LOSS, "logits": LOGITS},
    Output(loss=LOSS, logits=LOGITS),
    SimpleNamespace(loss=LOSS, logits=LOGITS),
    Named(LOSS, LOGITS),
]


@pytest.mark.parametrize("outputs", OUTPUTS, ids=lambda outputs: type(outputs).__name__)
def test_logits_are_found(outputs):
    assert logits_of(outputs) is LOGITS


@pytest.mark.parametrize("quantity", ["margin", "loss"])
@pytest.mark.parametrize("outputs", OUTPUTS, ids=lambda outputs: type(outputs).__name__)
def test_effects_measure_the_logits(outputs, quantity):
    targets = torch.tensor([0, 2])
    assert torch.equal(measure_quantity(outputs, targets, quantity), measure_quantity(LOGITS, targets, quantity))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"last_hidden_state": LOGITS}, "a dict with the entries 'last_hidden_state'; expected logits as a tensor"),
        ((LOSS, None), r"a tuple of \(Tensor, NoneType\)"),
        ("text", "returned a str"),
        (SimpleNamespace(logits=None), "returned a SimpleNamespace"),
    ],
)
def test_outputs_without_logits_are_refused(outputs, words):
    with pytest.raises(QueryError, match=words):
        logits_of(outputs)
    with pytest.raises(QueryError, match="Give a function of the model's outputs as the quantity"):
        measure_quantity(outputs, None, "margin")


@pytest.mark.parametrize("logits", [torch.zeros(4), torch.zeros(2, 3, dtype=torch.int64)])
def test_a_margin_needs_classes(logits):
    with pytest.raises(QueryError, match=r"A margin needs logits \(\.\.\., classes\)"):
        measure_quantity(logits, None, "margin")


def test_a_head_at_the_last_position_is_measured_with_one_target_each():
    targets = torch.tensor([0, 2])
    expected = measure_quantity(LOGITS, targets, "loss")
    assert torch.equal(measure_quantity((LOGITS[:, None], None), targets, "loss"), expected)
    assert torch.equal(measure_quantity(LOGITS[:, None], targets[:, None], "loss"), expected)
    with pytest.raises(QueryError, match=r"\(2, 4\) for logits \(2, 1, 3\).*give the last token's alone"):
        measure_quantity(LOGITS[:, None], torch.zeros(2, 4, dtype=torch.int64), "loss")


def test_the_last_positions_logits_are_taken():
    every = torch.randn(2, 5, 7)
    last = every[:, -1]
    for outputs in (every, every[:, -1:], last, (every, None), {"logits": last}):
        assert torch.equal(last_logits_of(outputs, rows=2, length=5), last)
    assert torch.equal(last_logits_of(every.transpose(0, 1), rows=2, length=5, batch_axis=1), last)
    assert torch.equal(last_logits_of(every[0], rows=1, length=5), last[:1])  # one sequence, flattened


@pytest.mark.parametrize("shape", [(7,), (2, 4, 7), (3, 5, 7), (5, 7), (2, 5, 7, 1)])
def test_logits_of_another_shape_are_refused(shape):
    with pytest.raises(QueryError, match=r"This is no language model: it returned logits .* for tokens \(2, 5\)"):
        last_logits_of(torch.zeros(shape), rows=2, length=5)


def test_two_axes_of_one_length_are_not_guessed():
    with pytest.raises(QueryError, match="no language model"):
        last_logits_of(torch.zeros(5, 7), rows=5, length=5)  # rows, or positions?
