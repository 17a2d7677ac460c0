"""Small modules that multiply or add a parameter element by element: which are recognised, and that they are exact."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.errors import DualformError
from dualform.recording.layers import LayerKind, find_kind
from helpers.loops import tolerances


class Module(nn.Module):
    """A module with parameters a and b, and a function of the input and of both."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in zip("ab", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters(recurse=False))


def by_channel(x: Tensor, a: Tensor) -> Tensor:
    return x * a.reshape(1, -1, *[1] * (x.dim() - 2))


RECOGNISED: dict[str, tuple[nn.Module, str, tuple[int, ...]]] = {  # the module, its kind, the shape of an input
    "factor of the last axis": (Module(lambda x, a: x * a, (6,)), "Elementwise", (2, 3, 6)),
    "factor, with axes of length 1": (Module(lambda x, a: a * x, (1, 1, 6)), "Elementwise", (2, 3, 6)),
    "factor of channels": (Module(lambda x, a: x * a[:, None, None], (6,)), "Elementwise", (2, 6, 3, 4)),
    "factor of channels, shaped": (Module(lambda x, a: x.mul(a), (6, 1, 1)), "Elementwise", (2, 6, 3, 4)),
    "factor of the second axis": (Module(by_channel, (6,)), "Elementwise", (2, 6, 3)),
    "shift": (Module(lambda x, a: x + a, (6,)), "Elementwise", (4, 6)),
    "factor and shift": (Module(lambda x, a, b: x * a + b, (6,), (6,)), "Elementwise", (2, 3, 6)),
    "shift and factor": (Module(lambda x, a, b: torch.addcmul(a, x, b), (6,), (6,)), "Elementwise", (2, 3, 6)),
    "table": (Module(lambda x, a: x + a, (5, 6)), "PositionTable", (2, 5, 6)),
    "table, with an axis in front": (Module(lambda x, a: x + a, (1, 5, 6)), "PositionTable", (2, 5, 6)),
    "table of more axes": (Module(lambda x, a: x + a, (5, 6)), "PositionTable", (2, 3, 5, 6)),
    "table, of which the first rows are taken": (
        Module(lambda x, a: x + a[:, : x.shape[1]], (1, 5, 6)),
        "PositionTable",
        (2, 3, 6),
    ),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_the_recognised_layer_is_linear_in_its_parameters(name: str) -> None:
    module, expected, shape = RECOGNISED[name]
    kind = find_kind(module)
    assert kind is not None
    assert kind.name == expected
    inputs = torch.randn(shape)
    keys = kind.keys(module, inputs)
    parts = [
        use.parameter_map.apply(module.get_parameter(use.parameter), keys.flatten(0, -2)) for use in kind.uses(module)
    ]
    live = kind.values(module, inputs, module(inputs))
    rest = kind.values(module, inputs, inputs)  # what the module adds the parameter to
    found = torch.stack(parts).sum(0).reshape(live.shape)
    has_factor = any(use.map == "scale" for use in kind.uses(module))
    torch.testing.assert_close(found if has_factor else found + rest, live)
    assert kind.widths(module) == (keys.shape[-1], live.shape[-1])


class WithChild(Module):
    def __init__(self) -> None:
        super().__init__(lambda x, a: x * a, (6,))
        self.child = nn.Identity()


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x * self.a if gate is None else x * gate


class Dropping(Module):
    """Drops elements in training only."""

    def __init__(self) -> None:
        super().__init__(lambda x, a: x * a, (6,))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.5, training=self.training)


def resized(x: Tensor, a: Tensor) -> Tensor:
    wide = a if x.shape[1] == a.shape[1] else functional.interpolate(a.mT, x.shape[1]).mT
    return x + wide


class Holding(Module):
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("holds a file")


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "one plus the parameter": lambda: Module(lambda x, a: x * (1 + a), (6,)),
    "exponential": lambda: Module(lambda x, a: x * a.exp(), (6,)),
    "bounded parameter": lambda: Module(lambda x, a: x * a.clamp(-5, 5), (6,)),
    "in place": lambda: Module(lambda x, a: x.mul_(a), (6,)),
    "dropout": Dropping,
    "noise": lambda: Module(lambda x, a: x * a + torch.randn_like(x), (6,)),
    "product with a vector": lambda: Module(lambda x, a: x @ a, (6,)),
    "half precision": lambda: Module(lambda x, a: (x.half() * a.half()).float(), (6,)),
    "another order": lambda: Module(lambda x, a: x * a.flip(0), (6,)),
    "two factors": lambda: Module(lambda x, a, b: x * a * b, (6,), (6,)),
    "factor of a table": lambda: Module(lambda x, a: x * a, (5, 6)),
    "one number": lambda: Module(lambda x, a: x * a, (1,)),
    "resized table": lambda: Module(resized, (1, 5, 6)),
    "table of the last positions": lambda: Module(lambda x, a: x + a[:, -x.shape[1] :], (1, 5, 6)),
    "positions first": lambda: Module(lambda x, a: x + a, (5, 1, 6)),
    "child": WithChild,
    "two arguments": TwoArguments,
    "cannot be copied": lambda: Holding(lambda x, a: x * a, (6,)),
    "matrix": lambda: Module(lambda x, a: x @ a, (6, 6)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_module_that_computes_something_else_is_left_alone(name: str) -> None:
    assert find_kind(LEFT_ALONE[name]()) is None


def test_the_trial_leaves_everything_as_it_was() -> None:
    module = Module(lambda x, a: x * a + 0 * torch.rand(1), (6,)).double()
    called: list[object] = []
    module.register_forward_hook(lambda *args: called.append(args))
    before, random = module.get_parameter("a").detach().clone(), torch.get_rng_state()
    assert isinstance(find_kind(module), LayerKind)
    assert torch.equal(module.get_parameter("a"), before)
    assert module.training
    assert torch.equal(torch.get_rng_state(), random)
    assert not called


class Scale(nn.Module):
    """A layer scale, as vision transformers have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Positions(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(1, length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]]


class Vision(nn.Module):
    """A small vision transformer without a bare parameter: a class token is a table of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(4, 6)
        self.token = nn.Embedding(1, 6)
        self.positions = Positions(5, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.scale = Scale(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, 4, 4)."""
        token = self.token(torch.zeros(len(x), 1, dtype=torch.int64))
        x = self.positions(torch.cat([token, self.patches(x)], dim=1))
        x = x + self.scale(self.mix(self.norm(x)).tanh().cumsum(1))
        result: Tensor = self.head(x[:, 0] + x[:, -1])
        return result


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_vision_transformer_is_covered_whole(run: Path, name: str, dtype: torch.dtype) -> None:
    def fit(path: Path | None) -> Vision:
        torch.manual_seed(0)
        model = Vision().to(dtype)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
        with nullcontext() if path is None else dualform.record(model, optimizer, path, strict=True) as recorder:
            for step in range(20):
                if recorder is not None:
                    recorder.annotate(sample=torch.arange(6), half=step % 2)
                optimizer.zero_grad()
                functional.cross_entropy(model(torch.randn(6, 4, 4, dtype=dtype)), torch.arange(6) % 3).backward()
                optimizer.step()
        return model

    plain, model = fit(None), fit(run)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in plain.state_dict().items())
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    assert not found.uncovered
    assert dtype == torch.float32 or all((layer.error or 0) <= 1e-11 for layer in found.layers), found
    kinds = {layer: entry.kind for layer, entry in memory.layers.items()}
    assert (kinds["positions"], kinds["scale"]) == ("PositionTable", "Elementwise")
    spotlight = memory.attend(model, torch.randn(2, 4, 4, dtype=dtype))
    table, scale = spotlight["positions"], spotlight["scale"]
    close = tolerances(dtype)
    torch.testing.assert_close(table.output(), model.positions.table.detach().expand(2, 5, 6), **close)
    torch.testing.assert_close(scale.output(), scale.queries.reshape(2, 5, 6) * model.scale.gamma.detach(), **close)
    for one in (table, scale):
        totals = one.totals("sample", of="contribution").values.sum(1) + one.start()
        torch.testing.assert_close(totals.reshape(2, 5, 6), one.output(), **close)
        torch.testing.assert_close(one.contributions().sum(1), totals - one.start(), **close)
    kept, left_out = (view.shares() for view in (memory.where(half=0), memory.without(half=0)))
    for parameter, share in memory.shares().items():
        torch.testing.assert_close(kept[parameter] + left_out[parameter], share, **close)
    rows = memory.patterns("positions").slice(0, 30).to_pydict()
    assert rows["sample"] == [i // 5 for i in range(30)]
    assert rows["position"] == [i % 5 for i in range(30)]
    with pytest.raises(dualform.errors.QueryError, match="is not of the linear family"):
        memory.attend(model, torch.randn(2, 4, 4, dtype=dtype), targets=torch.tensor([0, 1]))["scale"].totals(
            "sample", of="effect"
        )


def train(module: nn.Module, inputs: Tensor, run: Path) -> None:
    model = nn.Sequential(module, nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run):
        model(inputs).square().mean().backward()
        optimizer.step()


def test_a_number_of_axes_that_was_not_tried_is_refused(run: Path) -> None:
    with pytest.raises(DualformError, match="recognised as Elementwise for inputs of 1 or 2 or 3 or 4 or 5 axes"):
        train(Scale(6), torch.randn(2, 2, 2, 2, 2, 6), run)


def test_a_module_that_the_trial_could_not_see_through_is_refused_by_its_gradient(run: Path) -> None:
    """It computes something else for large batches."""
    module = Module(lambda x, a: x * a if len(x) < 20 else x * a * a, (6,))
    assert find_kind(module) is not None
    train(module, torch.randn(4, 6), run / "small")
    with pytest.raises(DualformError, match=r"'0\.a' cannot be recorded exactly"):
        train(module, torch.randn(30, 6), run / "large")
