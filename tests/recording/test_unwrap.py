"""What may be given as optimizer: wrappers, subclasses that change nothing; and clear sentences for the rest."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import dualform
from dualform.errors import DualformError, OptimizerError, RefusedError
from dualform.recording.optimizers import changed_names, kind_of, known_type
from dualform.recording.unwrap import unwrap, unwrap_all
from helpers.loops import assert_exact, batches, loss_of, mlp, sgd, train


class Accelerated(Optimizer):
    """A framework's wrapper: no state and no step hooks of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps = 0

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return self.optimizer.step(closure)


class Imitating:
    """A framework's wrapper that makes itself a subclass of the optimizer inside, and steps with a closure."""

    def __init__(self, optimizer: Any) -> None:
        self._inside = optimizer
        self.__class__ = type("Framework" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._inside

    def step(self, closure: Any = None) -> Any:
        return self._inside.step(closure or (lambda: None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)


class Warmup:
    """A plain object that sets the rate and steps the optimizer inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * self.count
        self.optimizer.step()


@pytest.mark.parametrize("wrap", [Accelerated, Imitating, Warmup, lambda inner: Accelerated(Imitating(inner))])
@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["keys+values", "keys"])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_wrapped_optimizer_is_recorded(run: Path, wrap: Any, layers: Any, kind: Any) -> None:
    model = mlp()
    inner = kind(model.parameters(), lr=0.01)
    optimizer = wrap(inner)
    assert unwrap_all(optimizer) == unwrap_all([optimizer]) == [inner]
    with dualform.record(model, optimizer, run, layers=layers) as recorder:
        train(model, optimizer, batches(5))
    assert recorder.step == 5
    memory = dualform.open(run)
    assert memory.info().optimizers == (kind.__name__,)
    if layers is None:
        assert_exact(memory, model)


def test_two_wrapped_optimizers(run: Path) -> None:
    model = mlp()
    first, second = Accelerated(sgd(model[0])), Warmup(AdamW(model[2].parameters()))
    optimizers: list[Any] = [first, second]
    with dualform.record(model, optimizers, run):
        for x in batches(3):
            model.zero_grad()
            loss_of(model(x)).backward()
            first.step()
            second.step()
    assert_exact(dualform.open(run), model)


# Subclasses ---------------------------------------------------------------------------------------------------------


class Renamed(AdamW):
    """Changes nothing but how it is made and shown."""

    favourite = 3

    def __init__(self, parameters: Any, rate: float = 0.01) -> None:
        super().__init__(parameters, lr=rate, weight_decay=0.1)

    def __repr__(self) -> str:
        return "mine"

    def report(self) -> int:
        return self.favourite


def test_a_subclass_that_changes_nothing_is_recorded_as_its_base(run: Path) -> None:
    model = mlp()
    optimizer = Renamed(model.parameters())
    assert known_type(optimizer) is AdamW
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(5))
    memory = dualform.open(run)
    assert memory.info().optimizers == ("AdamW",)
    assert_exact(memory, model)


def test_a_subclass_whose_step_torch_has_wrapped_is_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps the step of the first class that is made, which may be the subclass or the base."""

    class Base(SGD):
        pass

    class First(Base):
        pass

    parameters = [nn.Parameter(torch.zeros(1))]
    assert known_type(First(parameters)) is SGD
    assert known_type(Base(parameters)) is SGD
    wrapped: Any = SGD.step
    monkeypatch.setattr(SGD, "step", wrapped.__wrapped__)  # as before any SGD was made
    assert known_type(First(parameters)) is SGD
    assert "step" in vars(First)


def subclasses() -> dict[str, type[Optimizer]]:
    class OwnStep(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Disguised(SGD):
        @functools.wraps(SGD.step)
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return None

    class OwnGroup(Adam):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    class Intercepting(SGD):
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    class ProbeSpec(SGD):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    class Scaling(SGD):
        _step_supports_amp_scaling = True

    class Stepping:
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)  # type: ignore[misc]

    class Mixed(Stepping, SGD):
        pass

    class Between(Optimizer):
        def add_param_group(self, group: Any) -> None:
            super().add_param_group(group)

    class Below(SGD, Between):
        pass

    return {
        "step": OwnStep,
        "step under another name": Disguised,
        "groups": OwnGroup,
        "missing attributes": Intercepting,
        "attributes": ProbeSpec,
        "scaling": Scaling,
        "a mixin": Mixed,
        "a base between": Below,
    }


@pytest.mark.parametrize("case", subclasses())
def test_a_subclass_that_might_change_a_step_is_refused(run: Path, case: str) -> None:
    kind = subclasses()[case]
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    assert kind_of(optimizer) is None
    base = Adam if case == "groups" else SGD
    assert changed_names(kind, base)
    with pytest.raises(
        RefusedError, match=rf"^{kind.__name__} is not .*derives from {base.__name__} and has its own '"
    ):
        dualform.record(model, optimizer, run)
    assert unwrap(optimizer) is optimizer


def test_a_known_type_is_not_taken_for_its_base() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert known_type(AdamW(parameters)) is AdamW
    assert known_type(Adam(parameters)) is Adam
    assert known_type(torch.optim.Rprop(parameters)) is None


# No optimizer at all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: None, r"^record\(\) got None as optimizer; expected .*create_optimizer\(\)"),
        (lambda model: model.parameters(), r"^record\(\) got the model's parameters as optimizer"),
        (lambda model: model.named_parameters(), r"^record\(\) got the model's parameters as optimizer"),
        (lambda model: list(model.parameters()), r"^record\(\) got the model's parameters as optimizer"),
        (lambda model: model[0].weight, r"^record\(\) got the model's parameters as optimizer"),
        (lambda model: [{"params": model.parameters()}], r"^record\(\) got groups of parameters as optimizer"),
        (lambda model: model, r"^record\(\) got the model of type Sequential as optimizer"),
        (lambda model: [sgd(model), None], r"got an object of type NoneType as optimizer"),
        (lambda model: "SGD", r"got an object of type str as optimizer"),
        (lambda model: SGD, r"got an object of type type as optimizer"),
        (lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1), r"of type StepLR as optimizer"),
    ],
)
def test_what_is_no_optimizer_is_named_in_one_sentence(run: Path, make: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(OptimizerError, match=message) as caught:
        dualform.record(model, make(model), run)
    assert isinstance(caught.value, DualformError)
    assert isinstance(caught.value, TypeError)
    assert "tensor(" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not run.exists()


def test_no_optimizers(run: Path) -> None:
    with pytest.raises(ValueError, match="at least one optimizer"):
        dualform.record(mlp(), [], run)
