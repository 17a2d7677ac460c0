"""Layers whose weight is computed from other parameters: never recorded, always named, and never silently wrong."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import dualform
from dualform.errors import CoverageError, DualformError, UnknownLayerError
from dualform.recording.layers import find_kind
from dualform.recording.unrecordable import describe_unrecordable


def older(normalise: Callable[..., nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return a deprecated normalisation of torch, which works by a hook before the forward, without its warning."""

    def call(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return normalise(module)

    return call


class Symmetric(nn.Module):
    """Makes a symmetric matrix of an upper triangle."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric(module: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", Symmetric())


def pruned(module: nn.Module) -> nn.Module:
    found: nn.Module = prune.l1_unstructured(module, "weight", 0.5)
    return found


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], tuple[str, ...]]] = {  # and the parameters that are left
    "weight norm": (
        parametrizations.weight_norm,
        ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ),
    "spectral norm": (parametrizations.spectral_norm, ("parametrizations.weight.original",)),
    "orthogonal": (parametrizations.orthogonal, ("parametrizations.weight.original",)),
    "linear": (symmetric, ("parametrizations.weight.original",)),
    "older weight norm": (older(nn.utils.weight_norm), ("weight_g", "weight_v")),
    "older spectral norm": (older(nn.utils.spectral_norm), ("weight_orig",)),
    "pruning": (pruned, ("weight_orig",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_computed_weight_is_named_with_what_to_do(run: Path, way: str) -> None:
    change, parameters = WAYS[way]
    torch.manual_seed(0)
    model = nn.Sequential(change(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    assert find_kind(model[0]) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = ", ".join(f"'0.{name}'" for name in ("bias", *parameters))
    expected = rf"{re.escape(named)} \(1 \w*Linear \(its weight is computed from other parameters\)\)"
    advice = "The weight of .*Linear is computed from other parameters in every forward.*remove_parametrizations"
    with pytest.raises(CoverageError, match=f"{expected}.*{advice}"):
        dualform.record(model, optimizer, run / "strict", strict=True)
    with pytest.warns(UserWarning, match=f"{expected}.*{advice}"):
        recorder = dualform.record(model, optimizer, run / "plain")
    with recorder:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run / "plain")
    assert set(memory.layers) == {"2"}
    assert memory.verify(model).passed
    assert set(memory.coverage.uncovered) == {f"0.{name}" for name in ("bias", *parameters)}


@pytest.mark.parametrize("way", ["weight norm", "older weight norm"])
def test_a_computed_weight_of_other_kinds_is_named_too(run: Path, way: str) -> None:
    change, _ = WAYS[way]
    for make in (lambda: nn.Conv1d(4, 4, 1), lambda: nn.ConvTranspose1d(4, 4, 1), lambda: nn.Bilinear(4, 4, 2)):
        module = change(make())
        with pytest.raises(UnknownLayerError, match=r"\(its weight is computed from other parameters\).*The weight of"):
            dualform.record(module, torch.optim.SGD(module.parameters(), lr=0.1), run)


def test_a_computed_weight_of_a_recurrent_layer_is_named(run: Path) -> None:
    layer = parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    with pytest.raises(UnknownLayerError, match=r"ParametrizedLSTM \(its weight_hh_l0 is computed"):
        dualform.record(layer, torch.optim.SGD(layer.parameters(), lr=0.1), run)


def test_a_layer_is_recorded_again_once_its_parametrization_is_removed(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    parametrize.remove_parametrizations(model[0], "weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run, strict=True):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    assert dualform.open(run).verify(model).passed


def test_an_original_that_another_layer_applies_as_it_is_is_refused(run: Path) -> None:
    """The recorded layer's patterns are only a part of the parameter's gradient."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False), parametrizations.spectral_norm(nn.Linear(4, 4, bias=False))
    first.weight = second.parametrizations.weight.original  # type: ignore[assignment, union-attr]
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run):
        model(torch.randn(5, 4)).square().mean().backward()
        with pytest.raises(DualformError, match=r"'0\.weight' cannot be recorded exactly"):
            optimizer.step()


@pytest.mark.parametrize("way", ["weight norm", "older weight norm", "spectral norm"])
def test_a_layer_that_is_parametrized_in_mid_recording_is_refused(run: Path, way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()

    with dualform.record(model, optimizer, run):
        step()
        WAYS[way][0](model[0])
        with pytest.raises(DualformError, match=r"0\.weight"):
            step()


def test_a_parameter_that_a_layer_uses_twice_is_not_called_computed() -> None:
    layer = nn.LSTM(4, 4)
    layer.weight_hh_l0 = layer.weight_ih_l0
    assert describe_unrecordable(layer) == "1 LSTM"
