"""The runs of a trial of rows: a backward that computes no gradient of a weight shows what a whole one shows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualform.recording import model_copies, row_trials
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.layer_hooks import catch_calls
from dualform.recording.model_copies import copied_parameters
from dualform.recording.row_evidence import SeenCall
from dualform.recording.row_trials import _Trial, check_rows, still_holds
from dualform.recording.watch import watch

ROWS, D = 6, 5


class Called(nn.Module):
    """Layers that a function puts together."""

    def __init__(self, forward: Callable[["Called", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleDict(layers)
        self.compute = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def in_place(model: Called, x: Tensor) -> Tensor:
    return model.layers["b"](model.layers["a"](x).relu_())


def in_place_on_a_view(model: Called, x: Tensor) -> Tensor:
    return model.layers["b"](model.layers["a"](x[:, None]).tanh_()[:, 0])


def reused(model: Called, x: Tensor) -> Tensor:
    return model.layers["a"](model.layers["a"](x).sigmoid())


def beside(model: Called, x: Tensor) -> Tensor:
    model.layers["b"](x)  # what it returns is not used
    return model.layers["a"](x)


def checkpointed(reentrant: bool) -> Callable[[Called, Tensor], Tensor]:
    def forward(model: Called, x: Tensor) -> Tensor:
        hidden = checkpoint(
            lambda x: model.layers["a"](x).tanh(), x + 0 * model.layers["a"].bias, use_reentrant=reentrant
        )
        return model.layers["b"](hidden)

    return forward


def recurrent(model: Called, x: Tensor) -> Tensor:
    return model.layers["b"](model.layers["a"](x[:, None].expand(-1, 3, -1))[0])


def attending(model: Called, x: Tensor) -> Tensor:
    rows = x[:, None].expand(-1, 3, -1)
    return model.layers["b"](model.layers["a"](rows, rows, rows)[0])


def linear() -> nn.Module:
    return nn.Linear(D, D)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(linear(), nn.LayerNorm(D), nn.ReLU(), linear()),
    "in place": lambda: Called(in_place, a=linear(), b=linear()),
    "in place on a view": lambda: Called(in_place_on_a_view, a=linear(), b=linear()),
    "reused": lambda: Called(reused, a=linear()),
    "beside": lambda: Called(beside, a=linear(), b=linear()),
    "checkpointed": lambda: Called(checkpointed(False), a=linear(), b=linear()),
    "checkpointed, reentrant": lambda: Called(checkpointed(True), a=linear(), b=linear()),
    "lstm": lambda: Called(recurrent, a=nn.LSTM(D, 4, batch_first=True), b=nn.Linear(4, 2)),
    "gru": lambda: Called(recurrent, a=nn.GRU(D, 4, batch_first=True), b=nn.Linear(4, 2)),
    "attention": lambda: Called(attending, a=nn.MultiheadAttention(D, 1, batch_first=True), b=linear()),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (1, D)), nn.Conv1d(1, 3, 2, padding=1), nn.ReLU(), nn.Linear(6, 2)),
}


def rows(seed: int = 3) -> Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(seed))


def seen(model: nn.Module, inputs: Tensor) -> dict[str, list[SeenCall]]:
    return _Trial(model, "", watch(model, None), (inputs,), {})._plain


@pytest.mark.parametrize("name", MODELS)
def test_a_backward_to_the_layers_shows_what_a_whole_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    found = seen(model, rows())

    monkeypatch.setattr(row_trials, "_go_back", lambda total, wanted: total.backward())
    expected = seen(model, rows())
    assert found.keys() == expected.keys()
    assert any(call.values is not None for calls in found.values() for call in calls)
    for layer, calls in found.items():
        for call, other in zip(calls, expected[layer], strict=True):
            assert call.leading == other.leading
            assert torch.equal(call.keys, other.keys), layer
            assert (call.values is None) == (other.values is None), layer
            if call.values is not None and other.values is not None:
                torch.testing.assert_close(call.values, other.values, rtol=1e-6, atol=1e-7)


def test_no_gradient_of_a_weight_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    gradients = torch.autograd.grad

    def grad(total: Tensor, wanted: Any, **options: Any) -> Any:
        asked[:] = wanted
        return gradients(total, wanted, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    seen(MODELS["mlp"](), rows())
    assert len(asked) == 3
    assert not any(isinstance(one, Tensor) for one in asked)
    seen(MODELS["lstm"](), rows())
    assert sum(isinstance(one, Tensor) for one in asked) == 4, "an LSTM's errors are read where its backward left them"


@pytest.mark.parametrize("name", ["images", "mlp", "lstm", "attention"])
def test_the_shape_of_patterns_is_that_of_the_keys(name: str) -> None:
    model = MODELS[name]()
    layers = {layer.name: layer for layer in watch(model, None)}
    with catch_calls(layers) as calls:
        model(rows())
    found = [call for of_layer in calls.values() for call in of_layer]
    assert found
    assert all(call.leading == call.keys().shape[:-1] for call in found)


def test_a_layer_of_a_copy_is_found_though_its_module_copies_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def __deepcopy__(self, memo: Any) -> "Own":
            made = Own.__new__(Own)
            nn.Module.__init__(made)
            made.inner = copy.deepcopy(self.inner)
            return made

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x)
            return result

    model = nn.Sequential(Own(), nn.ReLU(), linear())
    found = check_rows(model, watch(model, None), (rows(),), {}, rows=ROWS, axis=0)
    assert {name: check.outcome for name, check in found.items()} == {"0.inner": "proved", "2": "proved"}


# Memory that is used again --------------------------------------------------------------------------------------------


def test_a_parameter_of_a_copy_that_somebody_keeps_stays_as_it_is() -> None:
    kept: list[Tensor] = []

    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.weight)
            return super().forward(x)

    first = Keeping(D, 8192)  # large enough for the pool
    model = nn.Sequential(first, nn.Linear(8192, 2))
    layers, memory, batch = watch(model, None), BufferPool(), torch.randn(32, D)
    known = check_rows(model, layers, (batch,), {}, rows=32, axis=0)
    kept.clear()
    weights = []
    for _ in range(3):
        weights.append(first.weight.detach().clone())
        assert still_holds(known, model, layers, (batch,), {}, rows=32, axis=0, memory=memory)
        with torch.no_grad():
            first.weight.add_(1)
    assert len(kept) == 6
    assert all(torch.equal(tensor, weights[i // 2]) for i, tensor in enumerate(kept))


def test_copies_take_memory_that_was_there_and_leave_the_model_alone() -> None:
    model = nn.Linear(256, 256)
    memory = BufferPool()
    before = copy.deepcopy(model.state_dict())
    places = set()
    for _ in range(4):
        found = copied_parameters(model, memory)
        weight = found[id(model.weight)]
        assert torch.equal(weight, model.weight)
        places.add(weight.data_ptr())
        assert weight.data_ptr() != model.weight.data_ptr()
        with torch.no_grad():
            weight.zero_()
        del found, weight
    assert len(places) <= 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_large_models_copies_keep_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(256, 256)
    monkeypatch.setattr(model_copies, "MAX_KEPT_BYTES", 1000)
    assert copied_parameters(model, BufferPool()) == {}


def test_a_trial_whose_copy_writes_to_its_parameters_does_not_write_to_the_models() -> None:
    class Clipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.weight.data.clamp_(-0.01, 0.01)
            result: Tensor = self.inner(x)
            return result

    model, memory, batch = Clipping(), BufferPool(), torch.randn(32, 256)
    before = model.inner.weight.detach().clone()
    layers = watch(model, None)
    for _ in range(2):
        known = check_rows(model, layers, (batch,), {}, rows=32, axis=0, memory=memory)
        assert still_holds(known, model, layers, (batch,), {}, rows=32, axis=0, memory=memory)
    assert torch.equal(model.inner.weight, before)


def test_a_failed_backward_is_told_as_before() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise ValueError("no way back")

    model = Called(lambda model, x: Failing.apply(model.layers["a"](x)), a=linear())
    found = check_rows(model, watch(model, None), (rows(),), {}, rows=ROWS, axis=0)
    assert {check.reason for check in found.values()} == {"the trial raised ValueError: no way back"}
