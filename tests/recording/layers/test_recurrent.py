"""Recurrent layers and their cells, over their options, against live training and the definitions of their gates."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import dualform
from helpers.loops import WITHIN, leftovers
from helpers.pairs import pairwise

D, H, T, B = 3, 4, 5, 6
STEPS = 16
LENGTHS = torch.tensor([2, 5, 1, 4, 3, 5])
KERNELS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": lambda *args, **options: nn.RNN(*args, nonlinearity="tanh", **options),
    "relu": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    """One use of a recurrent layer: its options, and how it is called."""

    options: dict[str, Any]
    given: bool = False  # initial states, which are trained upstream
    packed: str = ""  # "sorted" or "unsorted"
    batched: bool = True
    losses: str = "outputs states"


CASES = {
    "plain": Case({}),
    "outputs only": Case({}, losses="outputs"),
    "last states only": Case({}, losses="states"),
    "no bias": Case({"bias": False}),
    "batch first": Case({"batch_first": True}),
    "initial states": Case({}, given=True),
    "bidirectional": Case({"bidirectional": True}, given=True),
    "two layers": Case({"num_layers": 2, "dropout": 0.4}),
    "everything": Case({"num_layers": 2, "bidirectional": True, "dropout": 0.3, "batch_first": True}, given=True),
    "unbatched": Case({"num_layers": 2}, batched=False),
    "packed": Case({}, packed="sorted"),
    "packed, unsorted": Case({"num_layers": 2, "bidirectional": True}, packed="unsorted", given=True),
    "packed, last states only": Case({"bidirectional": True, "bias": False}, packed="unsorted", losses="states"),
}
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)


class Net(nn.Module):
    """A recurrent layer between two linear ones; the first also makes its initial states, where they are given."""

    def __init__(self, kernel: str, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first = nn.Linear(2, D)
        self.rnn = KERNELS[kernel](D, H, **case.options)
        self.states = nn.Linear(2, H)
        self.last = nn.Linear(H * (2 if self.rnn.bidirectional else 1), 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Take (T, B, 2), (B, T, 2) or (T, 2)."""
        inputs: Any = self.first(x).tanh()
        hx = None
        if self.case.given:
            rows = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
            size = (rows, x.shape[0 if self.rnn.batch_first else 1], 2)
            h = self.states(torch.arange(size[0] * size[1] * 2).reshape(size).to(x) / 40).tanh()
            hx = (h, h * 0.5) if isinstance(self.rnn, nn.LSTM) else h
        if self.case.packed:
            unsorted = self.case.packed == "unsorted"
            lengths = LENGTHS if unsorted else LENGTHS.sort(descending=True).values
            inputs = pack_padded_sequence(inputs, lengths, self.rnn.batch_first, enforce_sorted=not unsorted)
        outputs, states = self.rnn(inputs, hx)
        if isinstance(outputs, PackedSequence):
            outputs, _ = pad_packed_sequence(outputs, self.rnn.batch_first)
        # In place where torch allows it: keys must not rely on what the user may overwrite.
        bent = outputs.relu() if isinstance(self.rnn, nn.LSTM) else outputs.relu_()
        found = [self.last(bent)] if "outputs" in self.case.losses else []
        if "states" in self.case.losses:
            found += list(states) if isinstance(states, tuple) else [states]
        return found


def batch(case: Case, dtype: torch.dtype, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (T, 2) if not case.batched else (B, T, 2) if case.options.get("batch_first") else (T, B, 2)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(found: Sequence[Tensor]) -> Tensor:
    """Return a loss with another weight on every element."""
    parts = [(one * torch.linspace(-1, 2, one.numel()).to(one).reshape(one.shape)).sin().mean() for one in found]
    return torch.stack(parts).sum()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Callable[[int], Any], steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss_of(model(inputs(step))).backward()
        optimizer.step()


def make(kernel: str, case: Case, dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    model = Net(kernel, case).to(dtype)
    model.states.requires_grad_(case.given)
    model.last.requires_grad_("outputs" in case.losses)
    return model


@pytest.mark.mostly_slow(fast=13)
@pytest.mark.parametrize(("name", "kernel", "dtype"), pairwise(CASES, KERNELS, WITHIN), ids=str)
def test_rebuilds_every_parameter(tmp_path: Path, name: str, kernel: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    plain = make(kernel, case, dtype)
    model = copy.deepcopy(plain)
    optimizer = OPTIMIZERS["SGD"](model)
    with dualform.record(model, optimizer, tmp_path / "run", strict=True):
        fit(model, optimizer, lambda step: batch(case, dtype, step), steps=STEPS)
    assert not leftovers(model, optimizer)
    fit(plain, OPTIMIZERS["SGD"](plain), lambda step: batch(case, dtype, step), steps=STEPS)
    for own, parameter in model.named_parameters():  # recording changes nothing, dropout included
        assert torch.equal(parameter, plain.get_parameter(own)), own
    memory = dualform.open(tmp_path / "run")
    found = memory.verify(model)
    assert found.passed, found
    within = WITHIN[dtype] if dtype == torch.float32 else 1e-10
    assert all((layer.error or 0.0) <= within for layer in found.layers), found
    directions = 2 if case.options.get("bidirectional") else 1
    parts = [f"rnn.l{i}{side}" for i in range(case.options.get("num_layers", 1)) for side in ("", "_reverse")]
    assert [layer for layer in memory.layers if layer.startswith("rnn")] == [
        part for part in parts if directions == 2 or "reverse" not in part
    ]
    assert memory.info().layers["rnn.l0"]["patterns"] == STEPS * (T * B if case.batched else T)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTMCell": lambda: nn.LSTMCell(D, H),
    "GRUCell, no bias": lambda: nn.GRUCell(D, H, bias=False),
    "GRUCell": lambda: nn.GRUCell(D, H),
    "RNNCell": lambda: nn.RNNCell(D, H),
    "RNNCell, relu": lambda: nn.RNNCell(D, H, nonlinearity="relu"),
}


class Loop(nn.Module):
    """A cell, called once per time step with its own state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.last = nn.Linear(H, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Take (T, B, D) or (T, D)."""
        state: Any = None
        found = []
        for now in x:
            state = self.cell(now, state)
            found.append(self.last(state[0] if isinstance(state, tuple) else state))
        return found


@pytest.mark.mostly_slow(fast=5)
@pytest.mark.parametrize(("cell", "rows", "dtype"), pairwise(CELLS, [(B,), ()], WITHIN), ids=str)
def test_rebuilds_cells(tmp_path: Path, cell: str, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    model = Loop(CELLS[cell]()).to(dtype)
    plain = copy.deepcopy(model)
    inputs = [torch.randn(T, *rows, D, dtype=torch.float64).to(dtype) for _ in range(STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run", strict=True):
        fit(model, optimizer, lambda step: inputs[step], steps=STEPS)
    fit(plain, torch.optim.SGD(plain.parameters(), lr=0.05), lambda step: inputs[step], steps=STEPS)
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in model.named_parameters())
    memory = dualform.open(tmp_path / "run")
    found = memory.verify(model)
    assert found.passed, found
    assert all((layer.error or 0.0) <= (1e-5 if dtype == torch.float32 else 1e-10) for layer in found.layers)
    assert memory.info().layers["cell"]["patterns"] == STEPS * T * max(len(rows) * B, 1)


def gates(model: Net, key: Tensor) -> Tensor:
    """Return the gates' pre-activations of the first layer at [x ; h], block by block as values have them."""
    x, h = key.split([D, H], dim=-1)
    parameter = model.rnn.get_parameter
    of_input = nn.functional.linear(x, parameter("weight_ih_l0"), parameter("bias_ih_l0"))
    of_hidden = nn.functional.linear(h, parameter("weight_hh_l0"), parameter("bias_hh_l0"))
    if not isinstance(model.rnn, nn.GRU):
        return of_input + of_hidden
    both = of_input[..., : 2 * H] + of_hidden[..., : 2 * H]
    return torch.cat([both, of_hidden[..., 2 * H :], of_input[..., 2 * H :]], dim=-1)


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@EVERY_KERNEL
def test_answers_for_the_gates(tmp_path: Path, kernel: str, optimizer: str) -> None:
    """Queries are [x_t ; h_{t-1}]; outputs, totals, masks and single contributions are those of the gates."""
    case = Case({"batch_first": True})
    model = make(kernel, case, torch.float64)
    chosen = OPTIMIZERS[optimizer](model)
    with dualform.record(model, chosen, tmp_path / "run", strict=True) as recorder:
        for step in range(12):
            recorder.annotate(
                sample=torch.arange(B) + B * (step % 2), token=torch.arange(B * T).reshape(B, T) % 3, half=step % 2
            )
            chosen.zero_grad()
            loss_of(model(batch(case, torch.float64, step))).backward()
            chosen.step()
    memory = dualform.open(tmp_path / "run")
    test = batch(case, torch.float64, 99)
    layer = memory.attend(model, test, layers=["rnn.l0"])["rnn.l0"]
    with torch.no_grad():
        x = model.first(test).tanh()
        h = model.rnn(x)[0]
        key = torch.cat([x, torch.cat([torch.zeros(B, 1, H, dtype=torch.float64), h[:, :-1]], dim=1)], dim=-1)
        expected = gates(model, key)
    # Queries come in the order of time, then rows, as the layer ran.
    torch.testing.assert_close(layer.queries, key.transpose(0, 1).reshape(-1, D + H))
    outputs = expected.transpose(0, 1).reshape(T * B, -1)
    torch.testing.assert_close(layer.output().reshape(T * B, -1), outputs, rtol=1e-9, atol=1e-10)
    by_half = layer.totals(by="half", of="contribution")
    by_token = layer.totals(by="token", of="contribution")
    torch.testing.assert_close(by_half.values.sum(1), by_token.values.sum(1))
    single = layer.contributions()
    torch.testing.assert_close(single.sum(1), by_half.values.sum(1))
    unit = layer.top(3, of="contribution", unit=1)
    assert torch.allclose(unit.values[:, 0, 0], single[:, :, 1].max(dim=1).values)
    masked = memory.without(half=0).apply(model)
    assert isinstance(masked, Net)
    again = memory.without(half=0).attend(masked, test, layers=["rnn.l0"], other_model=True)["rnn.l0"]
    with torch.no_grad():
        hidden = again.queries
        torch.testing.assert_close(again.output().reshape(T * B, -1), gates(masked, hidden), rtol=1e-9, atol=1e-10)
