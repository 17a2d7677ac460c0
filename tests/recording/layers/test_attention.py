"""MultiheadAttention, over its options, against live training and its projections written out."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from helpers.loops import WITHIN, leftovers
from helpers.pairs import pairwise

E, L, S, B = 8, 5, 4, 3
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@dataclass(frozen=True)
class Case:
    """One use of attention: its options, what it attends to, and the projections that this takes."""

    projections: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    others: str = "self"  # "memory" for keys and values alike, "apart" for two tensors
    call: dict[str, Any] = field(default_factory=dict)
    batched: bool = True


CASES = {
    "self": Case(("in_proj", "out_proj")),
    "no bias": Case(("in_proj", "out_proj"), {"bias": False}),
    "batch first": Case(("in_proj", "out_proj"), {"batch_first": True}),
    "no weights": Case(("in_proj", "out_proj"), call={"need_weights": False}),
    "dropout": Case(("in_proj", "out_proj"), {"dropout": 0.3, "batch_first": True}),
    "unbatched": Case(("in_proj.q", "in_proj.k", "in_proj.v", "out_proj"), batched=False),
    "masked": Case(
        ("in_proj", "out_proj"),
        {"batch_first": True},
        call={"key_padding_mask": torch.arange(L) >= torch.tensor([[5], [3], [4]]), "need_weights": False},
    ),
    "causal": Case(
        ("in_proj", "out_proj"),
        call={"attn_mask": torch.ones(L, L).triu(1).bool(), "is_causal": True, "need_weights": False},
    ),
    "cross": Case(("in_proj.q", "in_proj.kv", "out_proj"), {"batch_first": True}, "memory"),
    "cross, keys and values apart": Case(("in_proj.q", "in_proj.k", "in_proj.v", "out_proj"), {}, "apart"),
    "other widths": Case(
        ("q_proj", "k_proj", "v_proj", "out_proj"), {"kdim": 6, "vdim": 4, "batch_first": True}, "apart"
    ),
    "zero attention": Case(("in_proj", "out_proj"), {"add_zero_attn": True}),
}


class Net(nn.Module):
    """Linear layers that make what is attended to, and attention."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.attention = nn.MultiheadAttention(E, 2, **case.options)
        self.query = nn.Linear(2, E)
        self.keys = nn.Linear(2, case.options.get("kdim", E))
        self.values = nn.Linear(2, case.options.get("vdim", E))
        self.keys.requires_grad_(case.others != "self")
        self.values.requires_grad_(case.others == "apart")

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """Take (L, B, 2) and (S, B, 2), or batch first, or unbatched."""
        query = self.query(x).tanh()
        key = query if self.case.others == "self" else self.keys(other).tanh()
        value = self.values(other).tanh() if self.case.others == "apart" else key
        output: Tensor = self.attention(query, key, value, **self.case.call)[0]
        return output


def inputs(case: Case, dtype: torch.dtype, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for length in (L, S):
        shape = (length, 2) if not case.batched else (B, length, 2) if "batch_first" in case.options else (length, B, 2)
        found.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return found[0], found[1]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, dtype: torch.dtype, steps: int = 16) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        output = model(*inputs(case, dtype, step))
        (output * torch.linspace(-1, 2, output.numel()).to(output).reshape(output.shape)).sin().mean().backward()
        optimizer.step()


@pytest.mark.mostly_slow(fast=11)
@pytest.mark.parametrize(("name", "optimizer", "dtype"), pairwise(CASES, OPTIMIZERS, WITHIN), ids=str)
def test_rebuilds_every_projection(tmp_path: Path, name: str, optimizer: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    plain = Net(case).to(dtype)
    model = copy.deepcopy(plain)
    chosen = OPTIMIZERS[optimizer](model)
    with dualform.record(model, chosen, tmp_path / "run", strict=True):
        fit(model, chosen, case, dtype)
    assert not leftovers(model, chosen)
    fit(plain, OPTIMIZERS[optimizer](plain), case, dtype)
    for own, parameter in model.named_parameters():  # recording changes nothing, dropout included
        assert torch.equal(parameter, plain.get_parameter(own)), own
    memory = dualform.open(tmp_path / "run")
    found = memory.verify(model)
    assert found.passed, found
    if dtype == torch.float64:
        assert all((layer.error or 0.0) <= 1e-10 for layer in found.layers), found
    mine = [layer.removeprefix("attention.") for layer in memory.layers if layer.startswith("attention.")]
    assert tuple(mine) == case.projections


@EVERY_OPTIMIZER
@pytest.mark.parametrize("name", ["batch first", "cross", "cross, keys and values apart", "other widths", "unbatched"])
def test_answers_for_each_projection(tmp_path: Path, name: str, optimizer: str) -> None:
    """In eval mode without gradients, where torch would rather take its fast path."""
    case = CASES[name]
    torch.manual_seed(1)
    model = Net(case).to(torch.float64)
    chosen = OPTIMIZERS[optimizer](model)
    with dualform.record(model, chosen, tmp_path / "run", strict=True) as recorder:
        for step in range(8):
            recorder.annotate(half=step % 2)
            fit(model, chosen, case, torch.float64, steps=1)
    memory = dualform.open(tmp_path / "run")
    x, other = inputs(case, torch.float64, 99)
    layers = [f"attention.{projection}" for projection in case.projections]
    spotlight = memory.attend(model, (x, other), layers=layers)
    attention = model.attention
    weight: Tensor
    bias: Tensor
    if attention._qkv_same_embed_dim:
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    else:
        weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        biases = attention.in_proj_bias.chunk(3)
    rows = {"in_proj": (0, 3), "in_proj.q": (0, 1), "in_proj.kv": (1, 3), "in_proj.k": (1, 2), "in_proj.v": (2, 3)}
    rows |= {"q_proj": (0, 1), "k_proj": (1, 2), "v_proj": (2, 3)}
    for projection, layer in zip(case.projections, layers, strict=True):
        one = spotlight[layer]
        if projection == "out_proj":
            weight, bias = attention.out_proj.weight, attention.out_proj.bias
        else:
            start, stop = rows[projection]
            weight, bias = torch.cat(weights[start:stop]), torch.cat(biases[start:stop])
        with torch.no_grad():
            expected = functional.linear(one.queries, weight, bias)
        torch.testing.assert_close(one.output().reshape(expected.shape), expected, rtol=1e-9, atol=1e-10)
        totals = one.totals(by="half", of="contribution").values
        torch.testing.assert_close(one.contributions().sum(1), totals.sum(1), rtol=1e-8, atol=1e-11)
    # The queries are what the projections saw: the model's own output follows from the output projection's.
    last = spotlight["attention.out_proj"]
    with torch.no_grad():
        output = model.eval()(x, other)
    shown = output.transpose(0, 1) if "batch_first" in case.options and case.batched else output
    torch.testing.assert_close(last.output().reshape(-1, E), shown.reshape(-1, E), rtol=1e-9, atol=1e-10)


def test_annotations_follow_the_rows(tmp_path: Path) -> None:
    case = CASES["batch first"]
    torch.manual_seed(1)
    model = Net(case)
    optimizer = OPTIMIZERS["SGD"](model)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.annotate(sample=torch.arange(B), token=torch.arange(B * L).reshape(B, L))
        fit(model, optimizer, case, torch.float32, steps=1)
    memory = dualform.open(tmp_path / "run")
    x, other = inputs(case, torch.float32, 0)
    spotlight = memory.attend(model, (x, other), layers=["query", "attention.in_proj", "attention.out_proj"])
    for layer in ("attention.in_proj", "attention.out_proj"):
        top = spotlight[layer].top(B * L)
        samples, tokens = top.columns["sample"], top.columns["token"]
        assert sorted(set(tokens)) == list(range(B * L))
        assert all(token // L == sample for token, sample in zip(tokens, samples, strict=True))


@pytest.mark.parametrize("fast", [True, False])
def test_an_encoder_with_padding_is_asked_without_nested_tensors(tmp_path: Path, fast: bool) -> None:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(E, 2, 12, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=fast)
    optimizer = OPTIMIZERS["AdamW"](model)
    mask = torch.arange(L) >= torch.tensor([[5], [3], [4]])
    with dualform.record(model, optimizer, tmp_path / "run", strict=True):
        for step in range(10):
            x = torch.randn(B, L, E, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x, src_key_padding_mask=mask).masked_fill(mask[..., None], 0).sin().mean().backward()
            optimizer.step()
    memory = dualform.open(tmp_path / "run")
    assert memory.verify(model).passed
    assert torch.backends.mha.get_fastpath_enabled()
    asked = memory.attend(model, {"src": torch.zeros(B, L, E), "src_key_padding_mask": mask})
    assert torch.backends.mha.get_fastpath_enabled()
    assert set(asked) == set(memory.layers)
    assert len(asked["layers.1.self_attn.in_proj"]) == B * L


def test_what_bias_kv_appends_is_uncovered(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(E, 2, add_bias_kv=True)
    optimizer = OPTIMIZERS["SGD"](model)
    with pytest.warns(UserWarning, match="'bias_k', 'bias_v'"):
        recording = dualform.record(model, optimizer, tmp_path / "run")
    with recording:
        for step in range(5):
            x = torch.randn(L, B, E, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x, x, x)[0].sin().mean().backward()
            optimizer.step()
    assert dualform.open(tmp_path / "run").verify(model).passed
