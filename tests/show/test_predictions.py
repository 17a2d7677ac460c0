"""Predictions: of the last position, in evaluation mode, compared before and after a change of the weights."""

import pytest
import torch
from torch import nn

from dualform.errors import QueryError
from dualform.show import predictions
from dualform.show.predictions import compare_predictions, predict_units, share_right


def test_inputs_are_predicted_in_parts_of_any_size(monkeypatch):
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 5), torch.randn(50, 3)
    expected = model(inputs).argmax(dim=1)
    for at_once in (1, 7, 50, 1000):
        monkeypatch.setattr(predictions, "ROWS_AT_ONCE", at_once)
        assert torch.equal(predict_units(model, inputs), expected)
    assert predict_units(model, inputs[:0]).shape == (0,)


def test_the_model_is_in_evaluation_mode_and_gets_its_mode_back():
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.9))
    inputs = torch.randn(50, 3)
    assert torch.equal(predict_units(model, inputs), predict_units(model, inputs))
    assert model.training
    assert model[1].training


def test_a_model_that_fails_is_an_error_with_its_words():
    with pytest.raises(QueryError, match=r"The model failed on inputs \(2, 4\): RuntimeError"):
        predict_units(nn.Linear(3, 5), torch.zeros(2, 4))


def test_changes_of_predictions():
    before, after, targets = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 2, 2, 0]), torch.tensor([0, 2, 2, 1])
    found = compare_predictions(before, after, targets)
    assert (found.changed, found.accuracy_before, found.accuracy_after) == ([1, 3], 0.75, 0.75)
    found = compare_predictions(before, after, None)
    assert (found.changed, found.accuracy_before, found.accuracy_after) == ([1, 3], None, None)
    assert share_right(before[:0], targets[:0]) is None
