"""The default choice of layers is what the optimizer holds: frozen layers are neither listed, written nor refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import dualform
from dualform.errors import CoverageError, QueryError, RefusedError, UnknownLayerError
from dualform.recording.watch import watch
from helpers.loops import assert_exact, batches, counts, loss_of, mlp, record, sgd, train


class LowRank(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it, as adapters are made."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return frozen + self.lora_B(self.lora_A(x))

    def merged(self) -> nn.Linear:
        """Return one layer that computes the same."""
        merged = nn.Linear(self.base.in_features, self.base.out_features)
        merged.weight.data = self.base.weight.data + self.lora_B.weight.data @ self.lora_A.weight.data
        merged.bias.data = self.base.bias.data
        return merged


def adapted(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LowRank(nn.Linear(5, 7, dtype=dtype)), nn.ReLU(), LowRank(nn.Linear(7, 3, dtype=dtype)))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that holds what requires a gradient, as trainers make it."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def tensors(run: Path, name: str) -> list[str]:
    with safe_open(next(run.glob(f"{name}*")), "pt") as file:
        return sorted(file.keys())


ADAPTERS = ["0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [None, "trained"])
def test_a_frozen_base_is_neither_listed_nor_written_nor_refused(run: Path, dtype: torch.dtype, layers: Any) -> None:
    model = adapted(dtype)
    optimizer = trained(model)
    with dualform.record(model, optimizer, run, layers=layers, strict=True) as recorder:
        assert list(recorder.layers) == ADAPTERS
        train(model, optimizer, batches(6))
    memory = dualform.open(run)
    assert counts(memory) == dict.fromkeys(ADAPTERS, 24)
    assert memory.verify(model).passed
    expected = [f"{name}.weight" for name in ADAPTERS]
    assert tensors(run, "initial") == tensors(run, "final") == expected


def test_an_optimizer_that_holds_the_frozen_base_keeps_it_recorded(run: Path) -> None:
    """What it holds it may train later; a base of low precision cannot be, and is left out."""
    model = adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(2))
        model[0].base.requires_grad_(True)
        train(model, optimizer, batches(2))
    memory = dualform.open(run)
    assert counts(memory)["0.base"] == 8
    assert_exact(memory, model)
    model = adapted(torch.bfloat16)
    assert list(dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.05), run / "b").layers) == ADAPTERS


def test_low_precision_that_is_trained_or_named_is_still_refused(run: Path) -> None:
    model = adapted(torch.bfloat16)
    optimizer = trained(model)
    layers: Any
    for layers in ("0.base", ["0.base", "*lora*"], {"0.base": "keys+values"}):
        with pytest.raises(RefusedError, match=r"Layer '0.base' has parameters of dtype torch.bfloat16"):
            dualform.record(model, optimizer, run, layers=layers)
    for layers in ("*", ["0.*", "2.*"], {"*": "keys+values"}):
        assert list(dualform.record(model, optimizer, run, layers=layers).layers) == ADAPTERS
    assert "0.base" in dualform.record(model, optimizer, run, layers={"*": "keys"}).layers
    model.get_parameter("0.base.bias").requires_grad_(True)
    with pytest.raises(RefusedError, match=r"Layer '0.base' has parameters of dtype torch.bfloat16"):
        dualform.record(model, trained(model), run)


def test_a_layer_called_trained_is_chosen_from_a_list(run: Path) -> None:
    model = nn.Sequential()
    model.add_module("trained", nn.Linear(5, 4))
    model.add_module("head", nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.get_submodule("head").parameters(), lr=0.1)
    assert dualform.record(model, optimizer, run, layers="trained").layers == ("head",)
    with pytest.warns(UserWarning, match="not recorded: 'head.weight'"):
        assert dualform.record(model, optimizer, run, layers=["trained"]).layers == ("trained",)


def test_without_an_optimizer_what_requires_a_gradient_is_trained() -> None:
    assert [layer.name for layer in watch(adapted(torch.bfloat16), None)] == ADAPTERS
    assert list(dualform.estimate(adapted(), batches(1)[0], steps=1).layers) == ADAPTERS
    assert [layer.name for layer in watch(mlp().requires_grad_(False), None)] == ["0", "2"]


class Scaled(nn.Module):
    """A frozen layer whose outputs are multiplied with a trained vector."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale


def test_nothing_trained_that_can_be_recorded_is_refused_with_what_the_optimizer_holds(run: Path) -> None:
    model = nn.Sequential(Scaled(nn.Linear(5, 7)), nn.ReLU(), Scaled(nn.Linear(7, 3)))
    with pytest.raises(
        UnknownLayerError,
        match=r"Nothing that AdamW holds can be recorded: there are 2 Parameters of Scaled \('scale'\)",
    ):
        dualform.record(model, trained(model), run)
    assert not run.exists()


def test_an_optimizer_of_another_model_is_refused(run: Path) -> None:
    with pytest.raises(UnknownLayerError, match=r"None of the 4 parameters that SGD holds belongs to this Sequential"):
        dualform.record(mlp(), sgd(mlp()), run)


# Parameters that join, or that somebody else trains -----------------------------------------------------------------


def test_a_group_that_is_added_later_is_told_of_once_by_name(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model[2])
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(2))
        optimizer.add_param_group({"params": list(model[0].parameters())})
        expected = r"'0.weight', '0.bias' joined SGD after the recording began.*layers=\[..., '0'\]"
        with pytest.warns(UserWarning, match=expected) as caught:
            train(model, optimizer, batches(3))
        assert len(caught) == 1
        assert Path(caught[0].filename).name == "loops.py"
    memory = dualform.open(run)
    assert list(memory.layers) == ["2"]
    assert memory.verify(model).passed


def test_a_group_that_is_added_before_the_first_step_is_told_of(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model[2])
    recorder = dualform.record(model, optimizer, run)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with recorder, pytest.warns(UserWarning, match=r"'0.weight', '0.bias' joined SGD"):
        train(model, optimizer, batches(1))


def test_a_group_that_is_added_later_is_refused_when_strict(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model[2])
    with dualform.record(model, optimizer, run, strict=True):
        optimizer.add_param_group({"params": [model[0].bias]})
        for _ in range(2):
            with pytest.raises(CoverageError, match=r"'0.bias' joined SGD .*is not recorded.*strict=True"):
                train(model, optimizer, batches(1))


def test_what_another_optimizer_trains_is_told_of_at_the_end(run: Path) -> None:
    model = mlp()
    mine, other = sgd(model[0]), sgd(model[2])
    recorder = dualform.record(model, mine, run).start()
    for x in batches(3):
        model.zero_grad()
        loss_of(model(x)).backward()
        mine.step()
        other.step()
    with pytest.warns(UserWarning, match=r"'2.weight', '2.bias' changed while .*record\(model, \[first, second\]"):
        recorder.close()
    assert counts(dualform.open(run)) == {"0": 12}


def test_a_head_that_is_trained_alone_is_recorded_without_a_word(run: Path) -> None:
    """The rest requires gradients, which nobody applies."""
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with dualform.record(model, optimizer, run, strict=True):
        for x in batches(3):
            model.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"2": 12}
    assert_exact(memory, model)


# Adapters that were merged ------------------------------------------------------------------------------------------


def test_verifying_a_merged_model_says_what_happened(run: Path) -> None:
    model = adapted()
    optimizer = trained(model)
    memory = record(run, model, optimizer)
    first, last = model[0], model[2]
    assert isinstance(first, LowRank)
    assert isinstance(last, LowRank)
    merged = nn.Sequential(first.merged(), nn.ReLU(), last.merged())
    with pytest.raises(QueryError, match=r"lacks the recorded parameters '0.lora_A.weight'.*merge_and_unload"):
        memory.verify(merged)
    assert memory.verify().passed
    plain = mlp()
    memory = record(run.parent / "plain", plain, sgd(plain))
    with pytest.raises(QueryError, match=r"lacks the recorded parameters '0.weight', .*'2.bias'\.$"):
        memory.verify(nn.Sequential())
