"""Which layers are recorded, and which trained parameters that leaves uncovered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dualform
from dualform.errors import CoverageError, RefusedError, UnknownLayerError
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.layers import LayerKind, find_kind, kinds
from dualform.recording.layers.layer_kind import _KINDS
from dualform.recording.watch import watch
from helpers.loops import assert_exact, batches, counts, loss_of, mlp, record, sgd


class OwnNorm(nn.LayerNorm):
    """A layer of the user's own, which is not linear in its parameters and so cannot be recorded."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).tanh()


def network() -> nn.Module:
    """Return a network with the linear layers encoder.0, encoder.2 and head, and no others."""
    torch.manual_seed(0)
    return Network()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))
        self.norm = OwnNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(x)))


def chosen(layers: Any) -> dict[str, str]:
    return {layer.name: "keys" if layer.keys_only else "keys+values" for layer in watch(network(), layers)}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ["encoder.0", "encoder.2", "head"]),
        ("head", ["head"]),
        ("encoder.*", ["encoder.0", "encoder.2"]),
        ("*", ["encoder.0", "encoder.2", "head"]),
        ("encoder.[01]", ["encoder.0"]),
        (["head", "encoder.0"], ["encoder.0", "head"]),
        (("head", "enc*2"), ["encoder.2", "head"]),
    ],
    ids=str,
)
def test_layers_by_name_and_pattern(layers: Any, expected: list[str]) -> None:
    assert chosen(layers) == dict.fromkeys(expected, "keys+values")


def test_layers_by_mapping_of_which_the_first_match_decides() -> None:
    assert chosen({"head": "keys", "*": "keys+values"}) == {
        "encoder.0": "keys+values",
        "encoder.2": "keys+values",
        "head": "keys",
    }
    assert chosen({"*": "keys+values", "head": "keys"})["head"] == "keys+values"
    assert chosen({"encoder.*": "keys"}) == {"encoder.0": "keys", "encoder.2": "keys"}


@pytest.mark.parametrize("layers", ["heads", ["head", "decoder.*"], {"norm": "keys"}, ["Head"]], ids=str)
def test_unknown_names_are_named_with_those_there_are(layers: Any) -> None:
    with pytest.raises(UnknownLayerError, match=r"matches no layer.*'encoder.0', 'encoder.2', 'head'.*Linear"):
        watch(network(), layers)


def test_unknown_ways_of_storing_are_named() -> None:
    with pytest.raises(
        UnknownLayerError, match=r"'head' is to store 'values'; expected one of \('keys\+values', 'keys'"
    ):
        watch(network(), {"head": "values"})  # type: ignore[dict-item]


@pytest.mark.parametrize("layers", [[], {}, ()], ids=str)
def test_no_layers_at_all(layers: Any) -> None:
    with pytest.raises(UnknownLayerError, match="names no layer"):
        watch(network(), layers)


def test_a_model_without_any_such_layer() -> None:
    with pytest.raises(UnknownLayerError, match=r"Sequential holds no layer that can be recorded.*Linear"):
        watch(nn.Sequential(nn.PReLU()), None)
    assert {"Linear", "Conv2d", "Embedding", "LayerNorm"} <= set(kinds())


# Coverage -----------------------------------------------------------------------------------------------------------


def test_uncovered_parameters_are_warned_of_and_listed(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with pytest.warns(UserWarning, match=r"2 trained parameters .*are not recorded: 'norm.weight', 'norm.bias'"):
        recorder = dualform.record(model, optimizer, run)
    with recorder:
        for x in batches(5):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.info().uncovered == {"norm.weight": 6, "norm.bias": 6}
    assert_exact(memory, model)


def test_uncovered_parameters_are_an_error_when_strict(run: Path) -> None:
    model = network()
    with pytest.raises(CoverageError, match=r"'norm.weight', 'norm.bias'.*strict=True"):
        dualform.record(model, sgd(model), run, strict=True)
    assert not run.exists()


def test_frozen_parameters_need_no_cover(run: Path) -> None:
    model = network()
    model.norm.requires_grad_(False)
    memory = record(run, model, sgd(model), strict=True)
    assert memory.info().uncovered == {}
    assert_exact(memory, model)


def test_layers_left_out_are_uncovered(run: Path) -> None:
    model = mlp()
    with pytest.warns(UserWarning, match=r"\(50\.0%|are not recorded: '0.weight', '0.bias'"):
        dualform.record(model, sgd(model), run, layers="2")


def test_parameters_of_no_module_are_listed(run: Path) -> None:
    model = mlp()
    loose = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    with pytest.warns(UserWarning, match=r"<optimizer 0, group 0, parameter 4>"):
        dualform.record(model, optimizer, run)


def test_many_uncovered_parameters_are_counted(run: Path) -> None:
    model = nn.Sequential(*(OwnNorm(5) for _ in range(6)), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match=r"12 trained parameters .*'3.bias' and 4 more"):
        dualform.record(model, sgd(model), run)


# Kinds --------------------------------------------------------------------------------------------------------------


class Renamed(nn.Linear):
    """Computes what nn.Linear computes."""


class Doubled(nn.Linear):
    """Does not."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_subclass_counts_when_it_computes_the_same(run: Path) -> None:
    assert find_kind(Renamed(3, 2)) is not None
    assert find_kind(Doubled(3, 2)) is None
    model = nn.Sequential(Renamed(5, 3))
    assert_exact(record(run, model, sgd(model)), model)


def test_a_computed_weight_is_no_parameter() -> None:
    assert find_kind(parametrizations.weight_norm(nn.Linear(3, 2))) is None
    assert find_kind(parametrizations.spectral_norm(nn.Linear(3, 2))) is None


def test_a_transformer_layer(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(6, 2, dim_feedforward=8, dropout=0.1, batch_first=True)
    optimizer = sgd(model, lr=0.01)
    with pytest.warns(UserWarning, match="not recorded"):
        recorder = dualform.record(model, optimizer, run, layers=["linear1", "linear2"])
    with recorder:
        for x in batches(20, 2, 3, 6):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"linear1": 120, "linear2": 120}
    assert_exact(memory, model)


def test_a_model_that_is_one_layer(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    memory = record(run, model, sgd(model))
    assert list(memory.layers) == [""]
    assert_exact(memory, model)
    torch.testing.assert_close(memory.attend(model, torch.eye(5))[""].output(), model(torch.eye(5)), rtol=0, atol=1e-6)


class Twice(nn.Module):
    """z = (A + B) x: two parameters that are made of the same keys and values in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(3, 5) / 5), nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Return (A + B) x."""
        return x @ (self.one + self.two).T


class TwiceKind(LayerKind):
    """The layer kind of `Twice`, with a name for each use."""

    name = "Twice"

    def __init__(self, *names: str) -> None:
        self._names = names

    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """Return the two uses, whose maps are equal."""
        one, two = self._names
        return ParameterUse(one, "one", "outer"), ParameterUse(two, "two", "outer")

    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return 5 and 3."""
        return 5, 3


def test_two_parameters_of_equal_maps_are_both_recorded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_KINDS, Twice, TwiceKind("first", "second"))
    model = Twice()
    optimizer = torch.optim.SGD([{"params": [model.one], "lr": 0.05}, {"params": [model.two], "lr": 0.01}])
    memory = record(run, model, optimizer)
    assert memory.layers[""].parameters == {"first": "one", "second": "two"}
    assert_exact(memory, model)
    asked = memory.attend(model, torch.eye(5))[""]
    torch.testing.assert_close(asked.output(), model(torch.eye(5)).detach(), rtol=0, atol=1e-6)
    sums = asked.start() + asked.contributions().sum(dim=1)
    torch.testing.assert_close(sums, model(torch.eye(5)).detach(), rtol=0, atol=1e-6)


def test_two_uses_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would stand for both, and the other's updates would be nobody's."""
    monkeypatch.setitem(_KINDS, Twice, TwiceKind("weight", "weight"))
    with pytest.raises(RefusedError, match=r"'one' and 'two' by the same name, 'weight'"):
        watch(Twice(), None)
