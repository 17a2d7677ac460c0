"""Every layer × every optimizer family: rebuilt weights against live ones, contributions against autograd, replays.

The second half of tests/test_exactness.py, which covers the scalar family's settings in depth.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.engine.shares import replayed_parameters
from dualform.recording.layers import composites, registered, sums_in_own_order
from dualform.recording.optimizers import supported
from dualform.store.reader import Run
from helpers.folds import folded
from helpers.pairs import pairwise

STEPS = 7  # RAdam leaves its first phase after the fifth
B, L, D = 4, 5, 6


class Around(nn.Module):
    """A layer between a linear one and a head, so that its input is trained too."""

    def __init__(self, layer: nn.Module, width: int, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.before = nn.Linear(D, D)
        self.layer = layer
        self.prepare = prepare
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D)."""
        found = self.layer(self.prepare(self.before(x).tanh()))
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found.reshape(len(x), -1)[:, : self.head.in_features])


class Attending(Around):
    """Self-attention."""

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D)."""
        hidden = self.before(x).tanh()
        return self.head(self.layer(hidden, hidden, hidden)[0].reshape(len(x), -1))


class Looking(nn.Module):
    """A table of tokens, also used as output layer where it is tied."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, D, padding_idx=0)
        self.middle = nn.Linear(D, D)
        self.head = nn.Linear(D, 7)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D), of which the first elements choose tokens."""
        tokens = (x[..., 0].abs() * 3).long() % 7
        return self.head(self.middle(self.table(tokens)).tanh())


class Bags(nn.Module):
    """Bags of tokens with padding: as a table, or in a row with offsets and weights that another layer makes."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.weighted = weighted
        self.weigh = nn.Linear(D, 1)
        self.layer = nn.EmbeddingBag(7, D, mode="sum" if weighted else "mean", padding_idx=0)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D), of which the first elements choose tokens."""
        tokens = (x[..., 0].abs() * 3).long() % 7
        weights = self.weigh(x)[..., 0]
        if not self.weighted:
            return self.head(self.layer(tokens) * weights.mean(1, keepdim=True))
        offsets = torch.arange(0, tokens.numel(), L)
        return self.head(self.layer(tokens.flatten(), offsets, per_sample_weights=weights.flatten()).tanh())


class Pairing(Around):
    """A bilinear layer of the input and of what a linear layer makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, D)."""
        return self.head(self.layer(self.before(x).tanh(), x).reshape(len(x), -1))


class Affine(nn.Module):
    """Multiplies and adds, channel by channel."""

    def __init__(self, channels: int, *, factor: bool = True, shift: bool = True) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.randn(channels, 1)) if factor else None
        self.beta = nn.Parameter(torch.zeros(1, channels, 1)) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, channels, L)."""
        x = x if self.alpha is None else self.alpha * x
        return x if self.beta is None else x + self.beta


class OwnNorm(nn.Module):
    """A norm as projects write it: mean 0 and deviation 1 over one axis, then a factor and a shift of each element."""

    def __init__(self, width: int, *, axis: int) -> None:
        super().__init__()
        shape = [width if i == axis % 3 else 1 for i in range(3)]
        self.gain = nn.Parameter(torch.rand(shape) + 0.5)
        self.offset = nn.Parameter(torch.zeros(shape))
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, ..., ...)."""
        centred = x - x.mean(self.axis, keepdim=True)
        return self.gain * centred / (centred.square().mean(self.axis, keepdim=True) + 1e-5).sqrt() + self.offset


class Positions(nn.Module):
    """Adds a learned table of positions."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, at most `length`, width)."""
        return x + self.table[:, : x.shape[1]]


class _Conv1D(nn.Module):
    """What transformers calls Conv1D: a linear layer with its weight stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 4) / 3)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        return torch.addmm(self.bias, x.view(-1, D), self.weight).view(*x.shape[:-1], 4)


_Conv1D.__module__, _Conv1D.__name__ = "transformers.pytorch_utils", "Conv1D"


def _image(x: Tensor) -> Tensor:
    return x.reshape(len(x), 2, 3, -1)  # (B, 2, 3, 5)


def _volume(x: Tensor) -> Tensor:
    return x.reshape(len(x), 1, 2, 3, -1)


def _channels(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Around(nn.Linear(D, 4), 4 * L),
    "transformers.Conv1D": lambda: Around(_Conv1D(), 4 * L),
    "Embedding": lambda: Looking(tied=False),
    "Embedding, tied to the output layer": lambda: Looking(tied=True),
    "Conv1d": lambda: Around(nn.Conv1d(D, 4, 3, padding=1), 4 * L, _channels),
    "Conv2d": lambda: Around(nn.Conv2d(2, 4, (2, 3), stride=(1, 2), dilation=1), 8, _image),
    "Conv2d, in groups": lambda: Around(nn.Conv2d(2, 4, 2, groups=2), 16, _image),
    "Conv3d": lambda: Around(nn.Conv3d(1, 3, 2), 18, _volume),
    "ConvTranspose1d": lambda: Around(nn.ConvTranspose1d(D, 4, 3, stride=2, padding=1), 36, _channels),
    "ConvTranspose2d": lambda: Around(
        nn.ConvTranspose2d(2, 3, (2, 3), stride=(1, 2), output_padding=(0, 1)), 144, _image
    ),
    "ConvTranspose2d, in groups": lambda: Around(nn.ConvTranspose2d(2, 4, 2, groups=2, dilation=2), 140, _image),
    "ConvTranspose3d": lambda: Around(nn.ConvTranspose3d(1, 2, 2, bias=False), 144, _volume),
    "Bilinear": lambda: Pairing(nn.Bilinear(D, D, 4), 4 * L),
    "EmbeddingBag": lambda: Bags(weighted=False),
    "EmbeddingBag, weighted": lambda: Bags(weighted=True),
    "LayerNorm": lambda: Around(nn.LayerNorm(D), D * L),
    "RMSNorm": lambda: Around(nn.RMSNorm(D, eps=1e-6), D * L),
    "GroupNorm": lambda: Around(nn.GroupNorm(2, D), D * L, _channels),
    "BatchNorm1d": lambda: Around(nn.BatchNorm1d(D), D * L, _channels),
    "BatchNorm2d": lambda: Around(nn.BatchNorm2d(2), D * L, _image),
    "BatchNorm3d": lambda: Around(nn.BatchNorm3d(1), D * L, _volume),
    "Elementwise": lambda: Around(Affine(D), D * L, _channels),
    "Elementwise, shift alone": lambda: Around(Affine(D, factor=False), D * L, _channels),
    "ScaledFunction": lambda: Around(OwnNorm(D, axis=-1), D * L),
    "ScaledFunction, of channels": lambda: Around(OwnNorm(D, axis=1), D * L, _channels),
    "PositionTable": lambda: Around(Positions(L + 2, D), D * L),
    "LSTM": lambda: Around(nn.LSTM(D, 4, batch_first=True), 4 * L),
    "GRU": lambda: Around(nn.GRU(D, 4, batch_first=True), 4 * L),
    "RNN": lambda: Around(nn.RNN(D, 4, batch_first=True), 4 * L),
    "LSTMCell": lambda: Around(nn.LSTMCell(D, 4), 4, lambda x: x[:, 0]),
    "GRUCell": lambda: Around(nn.GRUCell(D, 4), 4, lambda x: x[:, 0]),
    "RNNCell": lambda: Around(nn.RNNCell(D, 4), 4, lambda x: x[:, 0]),
    "MultiheadAttention": lambda: Attending(nn.MultiheadAttention(D, 2, batch_first=True), D * L),
}
make = torch.optim
OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "SGD": lambda m: [make.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)],
    "Adam": lambda m: [make.Adam(m.parameters(), lr=1e-2, weight_decay=1e-3, amsgrad=True)],
    "AdamW": lambda m: [make.AdamW(m.parameters(), lr=1e-2)],
    "NAdam": lambda m: [make.NAdam(m.parameters(), lr=1e-2)],
    "RAdam": lambda m: [make.RAdam(m.parameters(), lr=1e-2)],
    "Adamax": lambda m: [make.Adamax(m.parameters(), lr=1e-2)],
    "RMSprop": lambda m: [make.RMSprop(m.parameters(), lr=1e-3, momentum=0.5, centered=True)],
    "Adagrad": lambda m: [make.Adagrad(m.parameters(), lr=1e-2)],
    "Adadelta": lambda m: [make.Adadelta(m.parameters(), lr=0.3)],
    "Muon": lambda m: [
        make.Muon([p for p in m.parameters() if p.dim() == 2], lr=1e-2),
        make.AdamW([p for p in m.parameters() if p.dim() != 2], lr=1e-2),
    ],
}


def test_the_matrix_is_whole() -> None:
    """A new layer or optimizer has to come here too."""
    assert {name.partition(",")[0] for name in LAYERS} == {*registered(), *composites()}
    assert OPTIMIZERS.keys() == set(supported())


@dataclass
class Trained:
    """A recorded run and its live model."""

    memory: dualform.Memory
    model: nn.Module
    inputs: Callable[[int], Tensor]
    layer: str


def fit(path: Path, layer: str, optimizers: Callable[[nn.Module], Sequence[Optimizer]], dtype: torch.dtype) -> Trained:
    torch.manual_seed(0)
    model = LAYERS[layer]().to(dtype)
    chosen = optimizers(model)

    def inputs(step: int) -> Tensor:
        return torch.randn(B, L, D, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)

    with dualform.record(model, chosen, path, strict=True) as recorder:
        for step in range(STEPS):
            recorder.annotate(sample=torch.arange(B), half=step % 2)
            for optimizer in chosen:
                optimizer.zero_grad()
            output = model(inputs(step))
            (output * torch.linspace(-1, 2, output.numel()).to(output).reshape(output.shape)).sin().mean().backward()
            for optimizer in chosen:
                optimizer.step()
    return Trained(dualform.open(path), model, inputs, layer)


CASES = pairwise(LAYERS, OPTIMIZERS, (torch.float32, torch.float64))
"""Every layer with every optimizer, and each of them in both dtypes."""


@pytest.mark.mostly_slow(fast=len(LAYERS))
@pytest.mark.parametrize(("layer", "optimizer", "dtype"), CASES, ids=str)
def test_is_exact(run: Path, layer: str, optimizer: str, dtype: torch.dtype) -> None:
    trained = fit(run, layer, OPTIMIZERS[optimizer], dtype)
    found = trained.memory.verify(trained.model)
    assert found.passed, found
    if dtype == torch.float64:
        assert all(check.relative <= 1e-10 for one in found.layers for check in one.parameters if check.change), found
    stored = Run(run)
    names = replayed_parameters(stored, stored.layers)
    again = folded(stored, stored.layers, horizon=STEPS)
    assert bool(names) == (optimizer != "SGD")
    for name in names:
        live = trained.model.get_parameter(name).detach()
        if name.startswith("layer.") and sums_in_own_order(layer.partition(",")[0]):
            # The kernel sums gradients in an order of its own: rebuilt to rounding.
            torch.testing.assert_close(again[name].parameter, live, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(again[name].parameter, live), name


@pytest.mark.mostly_slow(fast=7)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
@pytest.mark.parametrize("layer", LAYERS)
def test_contributions_add_up(tmp_path: Path, layer: str, optimizer: str) -> None:
    """What every pattern adds to an output sums to what the start lacks of it, group by group and one by one."""
    trained = fit(tmp_path / "run", layer, OPTIMIZERS[optimizer], torch.float64)
    memory, model = trained.memory, trained.model
    spotlight = memory.attend(model, trained.inputs(99)[:1])
    halves, whole = [memory.where(half=half).shares() for half in (0, 1)], memory.shares()
    start_alone = memory.where("step < 0")
    for name in spotlight:
        one = spotlight[name]
        output = one.output()
        totals = one.totals(by="half", of="contribution").values
        start = start_alone.attend(queries={name: one.queries})[name].output()
        shared = {p for n, e in memory.layers.items() if n != name for p in e.parameters.values()}
        if not shared & set(memory.layers[name].parameters.values()):
            torch.testing.assert_close(
                start.reshape(len(one), -1) + totals.sum(1), output.reshape(len(one), -1), rtol=1e-9, atol=1e-11
            )
        torch.testing.assert_close(one.contributions().sum(1), totals.sum(1), rtol=1e-8, atol=1e-11)
        for parameter in memory.layers[name].parameters.values():
            torch.testing.assert_close(halves[0][parameter] + halves[1][parameter], whole[parameter])


@pytest.mark.parametrize("layer", LAYERS)
def test_one_steps_shares_are_autograds_gradients(tmp_path: Path, layer: str) -> None:
    """After one step of SGD with rate 1 every parameter's share is minus what autograd accumulated."""
    torch.manual_seed(0)
    model = LAYERS[layer]().double()
    optimizer = make.SGD(model.parameters(), lr=1.0)
    with dualform.record(model, optimizer, tmp_path / "run", strict=True):
        for seed in (1, 2):
            inputs = torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            model(inputs).sin().square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    shares = dualform.open(tmp_path / "run").shares()
    assert shares.keys() == gradients.keys()
    for name, gradient in gradients.items():
        unmoved = "in_proj_bias" in name or name.endswith("weight_hh")  # a cell's first state is zero
        assert unmoved or float(gradient.norm()) > 0, name  # or nothing would be shown
        torch.testing.assert_close(shares[name], -gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("layer", LAYERS)
def test_recording_leaves_the_training_as_it_is(tmp_path: Path, layer: str) -> None:
    """With recording and without it, every parameter and buffer is equal to the bit."""

    def trained(*, record: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = LAYERS[layer]()
        optimizer = make.AdamW(model.parameters(), lr=1e-2)
        with dualform.record(model, optimizer, tmp_path / "run") if record else nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(B, L, D)).sin().square().mean().backward()
                optimizer.step()
        return model.state_dict()

    plain, recorded = trained(record=False), trained(record=True)
    assert all(torch.equal(tensor, recorded[name]) for name, tensor in plain.items())
