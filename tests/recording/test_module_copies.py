"""Copies of modules are what `copy.deepcopy` makes, whatever a module says about its copying."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.recording.module_copies import deep_copy
from dualform.recording.sharded_modules import plain_copy
from helpers.loops import sgd


class Tied(nn.Module):
    """Modules, parameters and containers that are there twice, and a module outside of `_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.other = nn.Linear(3, 3)
        self.other.weight = self.first.weight
        self.aside = [nn.Linear(2, 2), self.first]
        self.empty: list[int] = []
        self.same_empty = self.empty
        self.names = {"a": [1, 2], "b": self.empty}
        self.register_buffer("scale", torch.ones(3))


class Saying(nn.Module):
    """Says itself how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.said = [False]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Saying":
        made = Saying()
        made.said = [True]
        made.load_state_dict(self.state_dict())
        return made


class Leaving(nn.Module):
    """Leaves an attribute out of its state, and notes that it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Any] = [1]
        self.inner = nn.Linear(2, 2)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["cache"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cache = ["set"]


class Pairing(Leaving):
    """Has a state that is no dictionary."""

    def __getstate__(self) -> Any:
        return super().__getstate__(), 1

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])


class Slotted(nn.Module):
    """Keeps an attribute in a slot."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.kept = [1, 2]


class Delegating(nn.Module):
    """Finds in its child what it has not itself; the child says how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Saying()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Ordered(OrderedDict[str, int]):
    """A dictionary of a class of its own."""


def with_attributes() -> nn.Module:
    module: Any = nn.Linear(2, 2)
    module.hooks = OrderedDict()
    vars(module.hooks)["note"] = [1]
    module.mine = Ordered()
    module.forward = nn.Linear(2, 2).forward
    module.itself = [module]
    return cast("nn.Module", module)


def reducing_itself() -> nn.Module:
    module: Any = nn.Linear(2, 2)
    module.__reduce_ex__ = lambda protocol: (nn.Identity, ())
    return nn.Sequential(module)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "saying": lambda: nn.Sequential(Saying(), nn.Linear(2, 2)),
    "leaving": lambda: nn.Sequential(Leaving()),
    "pairing": lambda: nn.Sequential(Pairing()),
    "reducing itself": reducing_itself,
    "slotted": lambda: nn.Sequential(Slotted()),
    "delegating": lambda: nn.Sequential(Delegating()),
    "attributes": with_attributes,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
    "recurrent": lambda: nn.Sequential(nn.LSTM(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "frozen": lambda: nn.Linear(2, 2).requires_grad_(False),
}


def described(value: Any, seen: dict[int, int]) -> Any:
    """Return a value as plain data in which the same object has the same number wherever it is met."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    kept = described(getattr(value, "kept", None), seen) if isinstance(value, Slotted) else None
    if isinstance(value, nn.Module):
        return type(value), kept, [(name, described(part, seen)) for name, part in vars(value).items()]
    if isinstance(value, Tensor):
        return type(value), value.detach().tolist(), value.requires_grad, value.is_leaf
    if isinstance(value, dict):
        own = vars(value) if isinstance(value, OrderedDict) else {}
        return type(value), [(key, described(part, seen)) for key, part in [*value.items(), *own.items()]]
    if isinstance(value, list | tuple):
        return type(value), [described(part, seen) for part in value]
    return type(value), getattr(value, "__qualname__", None)


@pytest.mark.parametrize("name", MODULES)
def test_a_copy_is_what_deepcopy_makes(name: str) -> None:
    module = MODULES[name]()
    before = described(module, {})
    made, expected = deep_copy(module, {}), copy.deepcopy(module)
    assert described(made, {}) == described(expected, {})
    assert described(module, {}) == before
    mine = {id(part) for part in module.modules()} | {tensor.data_ptr() for tensor in module.state_dict().values()}
    theirs = {id(part) for part in made.modules()} | {tensor.data_ptr() for tensor in made.state_dict().values()}
    assert not mine & theirs


def test_plain_modules_are_copied_without_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is not plain goes to `copy.deepcopy`; else it would be no faster."""
    slow: list[object] = []
    deepcopy = copy.deepcopy

    def noted(value: Any, memo: dict[int, Any]) -> Any:
        slow.append(value)
        return deepcopy(value, memo)

    monkeypatch.setattr(copy, "deepcopy", noted)
    deep_copy(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU()), {})
    assert not any(isinstance(value, nn.Module | nn.Parameter) for value in slow), slow


def test_a_copy_of_a_model_that_is_recorded_holds_no_hook_of_ours(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with dualform.record(model, sgd(model), tmp_path / "run"):
        assert model[0]._forward_hooks
        made = plain_copy(model)
    assert not made[0]._forward_hooks


def test_what_was_copied_before_is_not_copied_again() -> None:
    module = Tied()
    weight = nn.Parameter(torch.zeros(3, 3))
    memo: dict[int, Any] = {id(module.first.weight): weight}
    made = plain_copy(module, memo)
    assert made.first.weight is made.other.weight is weight
    assert memo[id(module.first)] is made.first
