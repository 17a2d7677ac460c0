"""Recording changes nothing: training is the same to the bit, and nothing stays on the model, whatever happens."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.recording.check_schedule import FIRST_STEPS
from helpers.loops import batches, counts, leftovers, loss_of, mlp, record, sgd, state, train

STEPS = 12


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.step()


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for part in x.chunk(2):
        loss_of(model(part)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def _checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(checkpoint(model, x, use_reentrant=False)).backward()
    optimizer.step()


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), Tensor)  # type: ignore[arg-type]


def _scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model(x))).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def _dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, affine=False), nn.Dropout(0.5), nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any], Callable[..., None]]] = {
    "plain": (mlp, (4, 5), {}, _plain),
    "in-place ReLU": (lambda: mlp(inplace=True), (4, 5), {}, _plain),
    "in-place ReLU on 3-D": (lambda: mlp(inplace=True), (4, 3, 5), {}, _plain),
    "3-D": (mlp, (4, 3, 5), {}, _plain),
    "clipping and accumulation": (lambda: mlp(inplace=True), (4, 5), {"nesterov": True}, _clipped),
    "dropout": (_dropout, (6, 5), {"weight_decay": 0.1}, _plain),
    "closure": (mlp, (4, 5), {}, _closure),
    "scaled loss": (mlp, (4, 5), {}, _scaled),
    "fused": (mlp, (4, 5), {"fused": True}, _clipped),
    "fused and scaled": (mlp, (4, 5), {"fused": True}, _scaled),
    "foreach": (mlp, (4, 5), {"foreach": True, "nesterov": True}, _plain),
    "checkpointing": (mlp, (4, 5), {}, _checkpointed),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["keys+values", "keys"])
def test_training_is_the_same_to_the_bit(run: Path, case: str, layers: Any) -> None:
    make, shape, settings, body = CASES[case]
    results = []
    for recording in (False, True):
        model = make()
        optimizer = sgd(model, **settings)
        torch.manual_seed(7)
        with dualform.record(model, optimizer, run, layers=layers) if recording else nullcontext() as recorder:
            for i, x in enumerate(batches(STEPS, *shape)):
                if recorder is not None:
                    recorder.annotate(label=i)
                optimizer.zero_grad()
                body(model, optimizer, x)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        momenta = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        results.append((state(model), buffers, momenta, torch.rand(3)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert counts(dualform.open(run))[next(iter(dualform.open(run).layers))] == STEPS * torch.Size(shape[:-1]).numel()


def test_keys_only_under_any_optimizer_is_the_same_to_the_bit(run: Path) -> None:
    results = []
    for recording in (False, True):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with dualform.record(model, optimizer, run, layers={"*": "keys"}) if recording else nullcontext():
            train(model, optimizer, batches(STEPS))
        results.append(state(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


# Nothing stays ------------------------------------------------------------------------------------------------------


def test_nothing_stays_on_the_model(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        assert leftovers(model, optimizer)  # or the test below would show nothing
        train(model, optimizer, batches(2))
    assert leftovers(model, optimizer) == []


def test_the_users_own_hooks_stay(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    model[0].register_forward_hook(lambda module, args, output: None)
    model.get_parameter("0.weight").register_hook(lambda gradient: None)
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda parameter: None)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    before = leftovers(model, optimizer)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(2))
    assert leftovers(model, optimizer) == before
    assert before == [
        "0._forward_hooks",
        "0.weight._backward_hooks",
        "2.weight._post_accumulate_grad_hooks",
        "_optimizer_step_pre_hooks",
    ]


class Stop(BaseException):
    """Something that no handler of ours expects, like Ctrl-C."""


def _in_forward(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    hidden = model[0](x)
    raise Stop(hidden)


def _between_backward_and_step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    raise Stop


def _in_backward(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    hidden = model[:2](x)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    hidden.register_hook(fail)
    try:
        loss_of(model[2](hidden)).backward()
    except ZeroDivisionError as error:
        raise Stop from error


def _in_closure(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def closure() -> float:
        loss_of(model(x)).backward()
        raise Stop

    optimizer.step(closure)


def _in_a_step_hook(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def fail(*_: object) -> None:
        raise Stop

    loss_of(model(x)).backward()
    handle = optimizer.register_step_pre_hook(fail)
    try:
        optimizer.step()
    finally:
        handle.remove()


def _in_an_annotation(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    raise dualform.DualformError


@pytest.mark.parametrize(
    "interrupt",
    [_in_forward, _between_backward_and_step, _in_backward, _in_closure, _in_a_step_hook, _in_an_annotation],
    ids=lambda function: function.__name__.strip("_"),
)
@pytest.mark.parametrize("on_failure", ["raise", "detach"])
def test_an_exception_in_mid_step_leaves_the_memory_readable(
    run: Path, interrupt: Callable[..., None], on_failure: Any
) -> None:
    model = mlp()
    optimizer = sgd(model)
    x = batches(1)[0]

    def interrupted() -> Iterator[None]:
        with dualform.record(model, optimizer, run, on_failure=on_failure):
            train(model, optimizer, batches(3))
            optimizer.zero_grad()
            yield
            interrupt(model, optimizer, x)

    steps = interrupted()
    next(steps)
    last = state(model)
    with pytest.raises((Stop, dualform.DualformError)):
        next(steps)
    assert leftovers(model, optimizer) == []
    memory = dualform.open(run)
    assert memory.step == 3
    assert counts(memory) == {"0": 12, "2": 12}
    assert memory.verify(last).passed
    assert memory.verify().passed


def test_training_goes_on_after_an_interrupted_step(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        for interrupt in (_in_forward, _between_backward_and_step, _in_backward, _in_closure, _in_a_step_hook):
            train(model, optimizer, batches(2))
            optimizer.zero_grad()
            with pytest.raises(Stop):
                interrupt(model, optimizer, batches(1)[0])
        train(model, optimizer, batches(2))
    memory = dualform.open(run)
    assert memory.step == 12
    assert memory.verify(model).passed


def test_a_recorder_is_used_once(run: Path) -> None:
    model = mlp()
    recorder = dualform.record(model, sgd(model), run)
    with recorder:
        pass
    with pytest.raises(RuntimeError, match="used already"), recorder:
        pass


def test_nothing_stays_when_the_recording_does_not_begin(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    record(run, model, optimizer)
    with pytest.raises(dualform.DualformError, match="holds a recorded run"), dualform.record(model, optimizer, run):
        pass
    assert leftovers(model, optimizer) == []


def test_a_step_that_breaks_in_the_middle_leaves_no_final_parameters(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    steps: list[int] = []

    def fail(*_: object) -> None:  # runs before the recorder's own hook, after the parameters moved
        steps.append(1)
        if len(steps) > 3:
            raise Stop

    optimizer.register_step_post_hook(fail)
    with pytest.raises(Stop), dualform.record(model, optimizer, run):
        train(model, optimizer, batches(5))
    memory = dualform.open(run)
    assert memory.step == 3
    assert not memory.info().closed
    assert not memory.verify(model).passed


def test_the_memory_of_gradients_can_still_be_given_back(run: Path) -> None:
    """numpy may not read a gradient itself: torch never again resizes memory that numpy has seen."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        for x in batches(
            FIRST_STEPS + 10
        ):  # beyond those that are checked in full, which read no elements by themselves
            loss_of(model(x)).backward()
            optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.untyped_storage().resize_(0)
                parameter.grad = None
    assert dualform.open(run).verify(model).passed
