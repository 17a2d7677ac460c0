"""A pattern exists when its gradient was accumulated into a parameter that then stepped, and only then."""

import copy
import gc
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.recording import module_hooks
from dualform.recording.hooks import Arrival
from helpers.loops import assert_exact, batches, counts, loss_of, mlp, record, sgd, state, train

ROWS, STEPS = 4, 6


# Only what was accumulated and stepped ------------------------------------------------------------------------------


def test_plain_training_has_a_pattern_per_row_and_step(run: Path) -> None:
    model = mlp()
    memory = record(run, model, sgd(model))
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


def test_keys_and_values_are_inputs_and_errors(run: Path) -> None:
    model = mlp(dtype=torch.float64)
    kept: list[tuple[Tensor, Tensor]] = []

    def body(x: Tensor) -> None:
        hidden = model[1](model[0](x))
        output = model[2](hidden)
        output.retain_grad()
        loss_of(output).backward()
        kept.append((hidden.detach().clone(), output.grad))
        optimizer.step()

    optimizer = sgd(model, lr=1.0, momentum=0.0)
    memory = record(run, model, optimizer, body)
    queries = torch.eye(7, dtype=torch.float64)
    layer = memory.attend(queries={"2": queries})["2"]
    torch.testing.assert_close(layer.attention().T, torch.cat([keys for keys, _ in kept]), rtol=0, atol=0)
    zero = memory.attend(queries={"2": torch.zeros(1, 7)})["2"]  # what is left is the bias's share, -lr · value
    torch.testing.assert_close(-zero.contributions()[0], torch.cat([errors for _, errors in kept]), rtol=0, atol=0)


@pytest.mark.parametrize("inplace", [False, True])
def test_values_are_the_errors_that_hooks_on_an_output_return(inplace: bool, run: Path) -> None:
    """A hook that clips errors is put on after the layer was called, and still comes before its value is taken."""
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)

    def body(x: Tensor) -> None:
        hidden = model[0](x)
        hidden.register_hook(lambda error: error.clamp(-1e-3, 1e-3))
        output = model[2](functional.relu(hidden, inplace=inplace))
        output.register_hook(lambda error: 0.5 * error)
        loss_of(output).backward()
        optimizer.step()

    assert_exact(record(run, model, optimizer, body, check="every"), model)


def test_forward_passes_without_gradients_leave_nothing(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        with torch.no_grad():
            model(2 * x)
        with torch.inference_mode():
            model(3 * x)
        model(4 * x)  # a graph that is never used
        loss_of(model(x)).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


def test_gradients_taken_by_autograd_grad_leave_nothing(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
        saliency = (2 * x).requires_grad_()
        torch.autograd.grad(loss_of(model(saliency)), saliency)
        loss = loss_of(model(x))
        torch.autograd.grad(loss, model.get_parameter("0.weight"), retain_graph=True)
        loss.backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


def test_torch_func_leaves_nothing(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return loss_of(torch.func.functional_call(model, parameters, (x,)))

        torch.func.grad(loss)(parameters, x)
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        loss_of(model(x)).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


def test_input_gradients_alone_leave_nothing(run: Path) -> None:
    """backward(inputs=...) brings errors to every layer, and accumulates into none of them."""
    model = mlp()

    def body(x: Tensor) -> None:
        x = x.clone().requires_grad_()
        loss_of(model(x)).backward(inputs=[x])
        loss_of(model(x)).backward(inputs=[model[2].weight, model[2].bias])
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": 0, "2": ROWS * STEPS}
    assert_exact(memory, model)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_without_a_step_leave_nothing(run: Path, *, to_none: bool) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        for factor in (2, 3):
            loss_of(model(factor * x)).backward()
            optimizer.zero_grad(set_to_none=to_none)
        loss_of(model(x)).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


def test_a_part_of_the_gradients_zeroed_leaves_its_part(run: Path) -> None:
    """Only the last layer keeps its first backward."""
    model = mlp()

    def body(x: Tensor) -> None:
        loss_of(model(2 * x)).backward()
        model[0].zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": 2 * ROWS * STEPS}
    assert_exact(memory, model)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_pending_does_not_grow(run: Path, *, to_none: bool) -> None:
    model = mlp()
    optimizer = sgd(model)
    alive: list[int] = []
    with dualform.record(model, optimizer, run):
        for x in batches(30):
            loss_of(model(x)).backward()
            optimizer.zero_grad(set_to_none=to_none)
            if len(alive) % 10 == 9:
                gc.collect()
            alive.append(sum(type(found) is Arrival for found in gc.get_objects()) if len(alive) % 10 == 9 else 0)
        train(model, optimizer, batches(3))
    assert max(alive) <= 2  # one backward's two layers
    assert_exact(dualform.open(run), model)


def test_a_backward_that_raises_leaves_nothing(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    with dualform.record(model, optimizer, run) as recorder:
        for x in batches(STEPS):
            hidden = model[1](model[0](2 * x))
            hidden.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                loss_of(model[2](hidden)).backward()
            optimizer.zero_grad()
            train(model, optimizer, [x])
            del hidden
            recorder._sink._queue.join()  # type: ignore[attr-defined]  # a thread that makes a tuple may fail meanwhile
            gc.collect()
            assert not any(type(found) is Arrival for found in gc.get_objects())
    memory = dualform.open(run)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


# Many of them -------------------------------------------------------------------------------------------------------


def test_several_backwards_are_micros_of_a_step(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        for part in x.split(1):
            loss_of(model(part)).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    table = memory.patterns("0").to_pydict()
    assert table["micro"] == list(range(ROWS)) * STEPS
    assert table["row"] == [0] * (ROWS * STEPS)
    assert_exact(memory, model)


def test_a_graph_that_is_used_twice_counts_twice(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory)["0"] == 2 * ROWS * STEPS
    assert_exact(memory, model)


def test_a_graph_that_outlives_a_step_counts_again(run: Path) -> None:
    model = mlp()
    layer = model[0]  # its input is the batch itself, so the graph stays valid when weights change

    def body(x: Tensor) -> None:
        loss = loss_of(layer(x)[:, :3])
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    optimizer = sgd(layer)
    memory = record(run, layer, optimizer, body)
    assert counts(memory) == {"": 2 * ROWS * STEPS}
    assert_exact(memory, layer)


def test_several_forwards_before_one_backward(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        losses = [loss_of(model(part)) for part in x.split(2)]
        torch.stack(losses).sum().backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    table = memory.patterns("2").to_pydict()
    assert table["call"] == [0, 0, 1, 1] * STEPS
    assert table["micro"] == [0] * (ROWS * STEPS)
    assert_exact(memory, model)


def test_interleaved_forwards_and_backwards(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        first, second = (loss_of(model(part)) for part in x.split(2))
        second.backward()
        first.backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert_exact(memory, model)


def test_calls_are_numbered_as_the_module_was_called(run: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)

    def body(x: Tensor) -> None:
        for _ in range(3):
            x = torch.tanh(layer(x))
        loss_of(x).backward()
        optimizer.step()

    optimizer = sgd(layer)
    memory = record(run, layer, optimizer, body)
    assert memory.patterns("").to_pydict()["call"] == ([0] * ROWS + [1] * ROWS + [2] * ROWS) * STEPS
    assert_exact(memory, layer)


# Layers in unusual circumstances ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 3, 2, 5)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("operation", ["none", "relu_", "mul_", "a view's view"])
def test_in_place_operations_on_outputs(run: Path, shape: tuple[int, ...], operation: str, *, bias: bool) -> None:
    """`F.linear` returns a view for some of these, and an in-place operation moves a view's place in the graph."""
    model = mlp(bias=bias, dtype=torch.float64)
    optimizer = sgd(model)
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda z: z,
        "relu_": functional.relu_,
        "mul_": lambda z: z.mul_(0.5).add_(1),
        "a view's view": lambda z: (z.view(-1)[:7].mul_(0.5), z.relu_())[1],
    }
    with dualform.record(model, optimizer, run):
        for x in batches(STEPS, *shape, dtype=torch.float64):
            optimizer.zero_grad()
            hidden = operations[operation](model[0](x))
            loss_of(model[2](hidden)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory)["0"] == STEPS * torch.Size(shape[:-1]).numel()
    assert_exact(memory, model)


def test_inputs_that_are_not_contiguous_or_broadcast(run: Path) -> None:
    model = mlp(dtype=torch.float64)

    def body(x: Tensor) -> None:
        loss_of(model(x.T.contiguous().T)).backward()
        loss_of(model(x[:1].expand(3, 5))).backward()
        loss_of(model(x.expand(2, 4, 5).transpose(0, 1))).backward()
        model(x).sum().backward()  # an error with strides of zero
        optimizer.step()

    optimizer = sgd(model, lr=0.01)
    assert_exact(record(run, model, optimizer, body), model)


def test_keyword_input(run: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)

    def body(x: Tensor) -> None:
        loss_of(layer(input=x)).backward()
        optimizer.step()

    optimizer = sgd(layer)
    assert_exact(record(run, layer, optimizer, body), layer)


def test_the_users_hooks_before_and_after(run: Path) -> None:
    """A pre-hook may replace the input and a forward hook the output; the layer itself is what is recorded."""
    model = mlp()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    model[2].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    optimizer = sgd(model, lr=0.01)
    assert_exact(record(run, model, optimizer), model)


def test_a_batch_buffer_that_is_reused(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    buffer = torch.empty(ROWS, 5)
    with dualform.record(model, optimizer, run):
        for x in batches(STEPS):
            optimizer.zero_grad()
            for part in (x, 2 * x):
                buffer.copy_(part)
                loss_of(model(buffer)).backward()
                buffer.fill_(torch.nan)
            optimizer.step()
    assert_exact(dualform.open(run), model)


def test_an_error_that_is_overwritten_after_the_backward(run: Path) -> None:
    """The last layer's error may be the user's own tensor."""
    model = mlp()
    optimizer = sgd(model)
    error = torch.empty(ROWS, 3)
    with dualform.record(model, optimizer, run):
        for x in batches(STEPS):
            optimizer.zero_grad()
            for part in (x, 2 * x):
                output = model(part)
                error.copy_(output.detach() - 1)
                output.backward(error)
                error.fill_(torch.nan)
            optimizer.step()
    assert_exact(dualform.open(run), model)


def test_a_frozen_weight_with_a_trained_bias(run: Path) -> None:
    """Autograd keeps no input for a frozen weight, so the user may overwrite it before the backward."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    optimizer = sgd(model)
    expected = []
    with dualform.record(model, optimizer, run):
        for x in batches(STEPS):
            optimizer.zero_grad()
            x = x.clone()
            expected.append(x.clone())
            loss = loss_of(model(x))
            x.fill_(torch.nan)
            loss.backward()
            optimizer.step()
    memory = dualform.open(run)
    assert_exact(memory, model)
    attention = memory.attend(queries={"0": torch.eye(5)})["0"].attention()
    torch.testing.assert_close(attention.T, torch.cat(expected), rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_frozen_bias_with_a_trained_weight(run: Path, accumulate: int) -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)

    def body(x: Tensor) -> None:
        for part in x.chunk(accumulate):
            loss_of(model(part)).backward()
        optimizer.step()

    optimizer = sgd(model)
    assert_exact(record(run, model, optimizer, body), model)


def test_layers_in_eval_mode_that_train(run: Path) -> None:
    model = mlp().eval()
    assert_exact(record(run, model, sgd(model)), model)


def test_tied_weights(run: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.second = nn.Linear(5, 5, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model = Tied()
    memory = record(run, model, sgd(model), steps=40)
    assert set(memory.weights()) == {"first.weight", "first.bias"}
    assert counts(memory) == {"first": 40 * ROWS, "second": 40 * ROWS}
    assert_exact(memory, model)


def test_a_module_under_two_names(run: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    memory = record(run, model, sgd(model))
    assert counts(memory) == {"0": 2 * ROWS * STEPS}
    assert_exact(memory, model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(run: Path, *, reentrant: bool) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=reentrant)
        loss_of(model[2](hidden)).backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it, and hides that by default
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["record(compiled)", "record(model)"])
def test_a_compiled_model(run: Path, backend: str, *, wrapped: bool) -> None:
    model = mlp()
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    try:
        with dualform.record(compiled if wrapped else model, optimizer, run):
            train(compiled, optimizer, batches(STEPS))
    finally:
        torch._dynamo.reset()
    memory = dualform.open(run)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)
    assert memory.verify(compiled).passed


def test_batch_of_no_rows(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        model(x[:0]).square().sum().backward()
        loss_of(model(x)).backward()
        model(torch.empty(2, 0, 5)).square().sum().backward()
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": ROWS * STEPS, "2": ROWS * STEPS}
    assert_exact(memory, model)


def test_a_run_of_nothing_but_empty_batches(run: Path) -> None:
    model = mlp()

    def body(x: Tensor) -> None:
        model(x[:0]).square().sum().backward()
        optimizer.step()

    optimizer = sgd(model, weight_decay=0.1)
    memory = record(run, model, optimizer, body)
    assert counts(memory) == {"0": 0, "2": 0}
    assert memory.verify(model).passed


# Copies of the model ------------------------------------------------------------------------------------------------


def test_deep_copies_train_on_their_own(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(2))
        twin = copy.deepcopy(model)
        other = sgd(twin)
        for x in batches(STEPS):
            train(twin, other, [2 * x])
            train(model, optimizer, [x])
    memory = dualform.open(run)
    assert counts(memory) == {"0": ROWS * (STEPS + 2), "2": ROWS * (STEPS + 2)}
    assert_exact(memory, model)
    assert not torch.equal(twin.get_parameter("0.weight"), model.get_parameter("0.weight"))


def test_replicas_with_parameters_of_their_own(run: Path) -> None:
    """A shallow copy shares the module's hooks, but need not share its parameters."""
    model = mlp()
    replica = copy.copy(model[0])
    replica._parameters = {name: nn.Parameter(parameter.clone()) for name, parameter in model[0].named_parameters()}
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        replica._forward_hooks = model[0]._forward_hooks
        replica._forward_hooks_with_kwargs = model[0]._forward_hooks_with_kwargs
        for x in batches(STEPS):
            optimizer.zero_grad()
            (loss_of(model(x)) + loss_of(model[2](torch.tanh(replica(x))))).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert counts(memory) == {"0": ROWS * STEPS, "2": 2 * ROWS * STEPS}
    assert_exact(memory, model)


def test_copies_and_pickles_hold_nothing_of_the_recording(run: Path) -> None:
    """A whole model is a common checkpoint; it is loaded where nothing records."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, batches(2))
        file = io.BytesIO()
        torch.save(model, file)
        twin = copy.deepcopy(model)
        train(model, optimizer, batches(1))
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    at_save = dualform.open(run).at(step=2)
    for restored in (loaded, twin):
        assert at_save.verify(restored).passed
        train(restored, sgd(restored), batches(2))
        held = [found for hook in restored[0]._forward_hooks.values() for found in gc.get_referents(hook)]
        assert not any(found is recorder or (callable(found) and hasattr(found, "__closure__")) for found in held)
    assert_exact(dualform.open(run), model)


def test_two_recordings_of_one_training(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "a"):
        train(model, optimizer, batches(2))
        with dualform.record(model, optimizer, tmp_path / "b"):
            train(model, optimizer, batches(3))
    for name, steps in (("a", 5), ("b", 3)):
        memory = dualform.open(tmp_path / name)
        assert counts(memory)["0"] == ROWS * steps
        assert_exact(memory, model)


def test_a_graph_that_outlives_the_recording(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(3))
        x = batches(1)[0].requires_grad_()
        loss = loss_of(model(x))
    before = state(model)
    held: list[bool] = []
    x.register_hook(lambda _: held.append(any(type(found) is Arrival for found in gc.get_objects())))
    loss.backward()
    assert held == [False]
    memory = dualform.open(run)
    assert counts(memory) == {"0": 3 * ROWS, "2": 3 * ROWS}
    assert memory.verify(before).passed


def test_a_scripted_child_and_a_forward_that_is_not_written_in_python_are_let_be(run: Path) -> None:
    class Times(nn.Module):
        """Has a forward without a signature."""

        forward = torch.mul

        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(5, 4), nn.ReLU())), nn.Linear(4, 3))
        model.add_module("times", Times())
        optimizer = sgd(model)
        with dualform.record(model, optimizer, run):
            for x in batches(2):
                optimizer.zero_grad()
                loss_of(model[1](model[0](x))).backward()
                optimizer.step()
    assert "1" in dualform.open(run).layers


def test_an_interrupt_at_any_line_leaves_no_hook() -> None:
    """An interrupt comes at each line in turn, in our code and in torch's, while hooks are put on or taken off."""
    layer = nn.Linear(2, 2)
    optimizer = sgd(layer)
    before, after = (lambda *_: None), (lambda *_: None)

    def live() -> None:
        handles: list[Any] = []
        try:
            try:
                module_hooks.hook_forward(handles, layer, before, always_call=True)
                module_hooks.hook_before_forward(handles, layer, before)
                module_hooks.hook_accumulation(handles, layer.weight, before, after)
                module_hooks.hook_step(handles, optimizer, before, after)
            finally:
                module_hooks.remove_hooks(handles)
        finally:
            module_hooks.remove_hooks(handles)  # as closing does after an interrupt

    def interrupted_at(line: int) -> bool:
        left = line

        def trace(*_: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            live()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    lines = 0
    while interrupted_at(lines + 1):
        lines += 1
        for name in (*module_hooks._AFTER, *module_hooks._BEFORE):
            hooks = getattr(layer, name)
            assert not hooks
            assert not vars(hooks)
        assert not layer.weight._backward_hooks
        assert not layer.weight._post_accumulate_grad_hooks
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert lines > 100
