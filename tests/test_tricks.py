"""Training tricks that touch the graph: each is exact, or refused by name, and never silently wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.errors import RefusedError
from helpers.loops import state


class Blocks(nn.Module):
    """Three blocks, of which the middle one may be checkpointed."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.middle = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.reentrant is None:
            inside = self.middle(hidden)
        else:
            inside = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(hidden + inside)
        return result


class Sequences(nn.Module):
    """A recurrent layer and attention, which hand their weights to one function of torch each."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)
        self.reentrant = reentrant

    def middle(self, hidden: Tensor) -> Tensor:
        states = self.lstm(hidden)[0]
        found: Tensor = self.attention(states, states, states, need_weights=False)[0]
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs[..., None])
        if self.reentrant is None:
            inside = self.middle(hidden)
        else:
            inside = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        result: Tensor = self.last(inside).mean(1)
        return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: dualform.Recorder | None = None) -> None:
    for step in range(30):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        labels = inputs[:, :3].argmax(1)
        if recorder is not None:
            recorder.annotate(label=labels)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def make(reentrant: bool | None = None) -> Blocks:
    torch.manual_seed(0)
    return Blocks(reentrant=reentrant).double()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
def test_activation_checkpointing(
    run: Path, reentrant: bool, optimizer_type: Callable[..., torch.optim.Optimizer]
) -> None:
    model, plain = make(reentrant), make()
    optimizer = optimizer_type(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        train(model, optimizer, recorder)
    train(plain, optimizer_type(plain.parameters(), lr=0.01))
    assert all(torch.equal(tensor, state(plain)[name]) for name, tensor in state(model).items())
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed
    assert all((layer.error or 0) < 1e-12 for layer in found.layers)
    for layer in memory.layers:
        assert memory.patterns(layer).num_rows == 180, layer
        assert memory.patterns(layer)["label"].null_count == 0, layer


# The compiler looks at .grad of everything that passes, and warns of it itself.
COMPILED = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_recurrent_layers_and_attention(run: Path, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Sequences(reentrant=reentrant).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        train(model, optimizer, recorder)
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert memory.patterns("lstm.l0").num_rows == 30 * 6 * 5
    assert set(memory.patterns("attention.in_proj")["label"].to_pylist()) == {0, 1, 2}


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_recurrent_layers_and_attention(run: Path, backend: str) -> None:
    torch.manual_seed(0)
    model = Sequences(reentrant=None).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compiled: Any = torch.compile(model, backend=backend)
    with dualform.record(compiled, optimizer, run, strict=True):
        train(compiled, optimizer)
    assert dualform.open(run).verify(model).passed
    torch._dynamo.reset()


def test_a_parametrized_recurrent_weight_leaves_its_layer_uncovered(run: Path) -> None:
    torch.manual_seed(0)
    model = Sequences(reentrant=None).double()
    nn.utils.parametrizations.weight_norm(model.lstm, "weight_hh_l0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(UserWarning, match="lstm.parametrizations.weight_hh_l0"):
        recorder = dualform.record(model, optimizer, run)
    assert "lstm.l0" not in recorder.layers
    with recorder:
        train(model, optimizer)
    assert dualform.open(run).verify(model).passed


def test_a_projected_lstm_is_uncovered(run: Path) -> None:
    model = nn.LSTM(3, 4, proj_size=2)
    with pytest.raises(dualform.errors.UnknownLayerError, match="holds no layer that can be recorded"):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run)


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_is_compiled_after_the_recording_began(run: Path, backend: str) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled: Any = torch.compile(model, backend=backend)
    with dualform.record(compiled, optimizer, run, strict=True) as recorder:
        train(compiled, optimizer, recorder)
    memory = dualform.open(run)
    assert "middle.1" in memory.layers  # without the compiler's prefix
    assert memory.verify(model).passed
    torch._dynamo.reset()


@pytest.mark.slow
@COMPILED
def test_a_model_that_was_compiled_and_run_before_is_refused_until_reset(run: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(torch.randn(6, 5, dtype=torch.float64))
    refused = pytest.raises(RefusedError, match=r"compiled before it \(call torch._dynamo.reset\(\)\)")
    with refused, dualform.record(compiled, optimizer, run):
        train(compiled, optimizer)
    torch._dynamo.reset()
    with dualform.record(compiled, optimizer, run.with_name("again")):
        train(compiled, optimizer)
    assert dualform.open(run.with_name("again")).verify(model).passed
    torch._dynamo.reset()


def test_a_parametrized_weight_is_uncovered_and_said_so(run: Path) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(UserWarning, match=r"not recorded: '0.bias', '0.parametrizations"):
        recorder = dualform.record(model, optimizer, run)
    with recorder:
        train(model, optimizer, recorder)
    memory = dualform.open(run)
    assert list(memory.layers) == ["2"]
    assert memory.verify(model).passed


def test_frozen_layers_are_left_out_and_stay(run: Path) -> None:
    model = make()
    model.first.requires_grad_(False)
    model.middle[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=0.01)
    with dualform.record(model, optimizer, run, strict=True) as recorder:
        train(model, optimizer, recorder)
    memory = dualform.open(run)
    assert "first" not in memory.layers
    assert "middle.0" in memory.layers
    assert memory.verify(model).passed


class Everything(nn.Module):
    """What autocast computes in bfloat16, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 6, 2)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.conv(inputs[:, None]).transpose(1, 2))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        result: Tensor = self.last(hidden).mean(1)
        return result


@pytest.mark.parametrize("all_inside", [False, True])
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
def test_autocast_works_with_its_residual_reported(
    run: Path, optimizer_type: Callable[..., torch.optim.Optimizer], *, all_inside: bool
) -> None:
    """Also where backward and step run inside of autocast, which then must not round the recorder's own products."""
    torch.manual_seed(0)
    model = Everything()
    optimizer = optimizer_type(model.parameters(), lr=0.05 if optimizer_type is torch.optim.SGD else 0.005)
    with dualform.record(model, optimizer, run, strict=True):
        for step in range(40):
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1))
                if all_inside:
                    loss.backward()
                    optimizer.step()
            if not all_inside:
                loss.backward()
                optimizer.step()
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    assert "were rounded by autocast" in repr(found)
    checks = {check.parameter: check for layer in found.layers for check in layer.parameters}
    assert checks["last.weight"].noise > 0
    assert all(check.relative < 3e-2 for check in checks.values())
    assert checks["last.weight"].relative > 1e-5  # reported, not hidden
    with torch.no_grad():
        model.last.weight.mul_(1.05)
    assert not memory.verify(model).passed


def test_a_regulariser_under_autocast_is_still_refused(run: Path) -> None:
    model = make().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(6, 5)).float().square().mean()
        (loss + 0.1 * model.last.weight.square().sum()).backward()
        with pytest.raises(RefusedError, match="patterns do not explain"):
            optimizer.step()


def test_recurrent_layers_and_muon_are_refused_under_autocast(run: Path) -> None:
    model = Sequences(reentrant=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with (
        dualform.record(model, optimizer, run),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RefusedError, match="autocast"),
    ):
        model(torch.randn(6, 5))
    plain = nn.Linear(5, 4, bias=False)
    muon = torch.optim.Muon(plain.parameters())
    with dualform.record(plain, muon, run.with_name("muon")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(torch.randn(6, 5)).float().square().mean()
        loss.backward()
        with pytest.raises(RefusedError, match="Muon under autocast"):
            muon.step()
