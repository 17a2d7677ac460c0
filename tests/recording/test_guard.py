"""Whatever goes wrong inside a hook of the recording: refused by name, or with on_failure="detach" only warned of."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import dualform
from dualform.errors import AnnotationError, RefusedError
from dualform.recording import hooks, step_preparation, step_recorder
from dualform.recording.accumulation import Accumulations
from dualform.recording.layers import recurrent
from dualform.recording.layers.linear import Linear
from helpers.loops import batches, counts, leftovers, loss_of, mlp, sgd, state, train

STOPPED = "training goes on without it"


# Sparse and nested inputs -------------------------------------------------------------------------------------------


def graph_network() -> nn.Sequential:
    """Return a network whose first layer may be fed sparse features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["keys+values", "keys"])
def test_a_sparse_input_is_refused_by_name(run: Path, layers: Any) -> None:
    model = graph_network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers=layers):
        train(model, optimizer, batches(2))
        with pytest.raises(RefusedError, match=r"Layer '0' got a sparse \(torch.sparse_coo\) input.*to_dense\(\)"):
            model(batches(1)[0].to_sparse())
        train(model, optimizer, batches(1))
    memory = dualform.open(run)
    assert counts(memory)["0"] == 12
    assert memory.verify(model).passed


def test_a_sparse_input_of_a_layer_that_is_not_trained_is_let_through(run: Path) -> None:
    model = graph_network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with dualform.record(model, optimizer, run):
        loss_of(model(batches(1)[0].to_sparse())).backward()
        optimizer.step()
    assert dualform.open(run).verify(model).passed


def test_a_nested_input_is_refused_by_name(run: Path) -> None:
    model = graph_network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        rows = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)])
    with dualform.record(model, sgd(model), run), pytest.raises(RefusedError, match=r"Layer '0' got a nested input"):
        model(rows)


def test_a_sparse_input_detaches_and_training_goes_on(run: Path) -> None:
    plain, model = graph_network(), graph_network()
    for network in (plain, model):
        optimizer = sgd(network)
        sparse = batches(1)[0].to_sparse()
        if network is plain:
            train(network, optimizer, [*batches(2), sparse, *batches(2)])
            continue
        with dualform.record(network, optimizer, run, on_failure="detach") as recording:
            train(network, optimizer, batches(2))
            before = state(network)
            with pytest.warns(UserWarning, match=rf"{STOPPED}: Layer '0' got a sparse") as caught:
                train(network, optimizer, [sparse])
            assert [Path(warning.filename).name for warning in caught] == ["loops.py"]
            assert leftovers(network, optimizer) == []
            train(network, optimizer, batches(2))
        assert recording.step == 2
    torch.testing.assert_close(state(model), state(plain), rtol=0, atol=0)
    memory = dualform.open(run)
    assert memory.info().closed
    assert memory.verify().passed
    assert memory.verify(before).passed


# Errors that nobody foresaw, in every kind of hook ------------------------------------------------------------------


class Unforeseen(Exception):
    """Something that dualform never raises."""


def fail(*_: Any, **__: Any) -> Any:
    raise Unforeseen("the cause")


def lstm() -> nn.Module:
    class Last(nn.LSTM):
        """An LSTM whose result is its outputs."""

    torch.manual_seed(0)
    return Last(5, 4)


def cell() -> nn.Module:
    torch.manual_seed(0)
    return nn.GRUCell(5, 4)


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    return outputs[0] if isinstance(outputs, tuple) else outputs


HOOKS: dict[str, tuple[Callable[[], nn.Module], object, str, str]] = {
    # where it fails: a model, what breaks, and who the message names
    "forward": (mlp, Linear, "inputs", "Layer '0'"),
    "output": (mlp, hooks, "Arrival", "Layer '2'"),
    "before accumulation": (mlp, Accumulations, "begin", "Parameter '2.bias'"),
    "after accumulation": (mlp, hooks, "copy_patterns", "Parameter '2.bias'"),
    "before the step": (mlp, step_preparation, "follow_all", "A step of SGD"),
    "composite, before": (lstm, recurrent.Recurrent, "trace", "Layer 'l0'"),
    "composite, inside": (lstm, recurrent, "_unrolled", "Layer 'l0'"),
    "cell, inside": (cell, recurrent, "Unrolled", "Layer ''"),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for x in batches(count):
        optimizer.zero_grad()
        loss_of(outputs_of(model, x)).backward()
        optimizer.step()


@pytest.mark.parametrize("case", HOOKS)
def test_an_unforeseen_error_is_refused_by_name(run: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make, owner, name, named = HOOKS[case]
    model = make()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        steps(model, optimizer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RefusedError, match=rf"{named}.* cannot be recorded: Unforeseen: the cause") as caught:
                steps(model, optimizer, 1)
            assert isinstance(caught.value.__cause__, Unforeseen)
            assert 'on_failure="detach"' in str(caught.value)
        assert not _get_current_function_mode_stack()
        steps(model, optimizer, 1)
    memory = dualform.open(run)
    assert memory.step == 3
    assert memory.verify(model).passed


@pytest.mark.parametrize("case", HOOKS)
def test_an_unforeseen_error_detaches(run: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make, owner, name, named = HOOKS[case]
    plain, model = make(), make()
    optimizer = sgd(plain)
    steps(plain, optimizer, 2)
    steps(plain, optimizer, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, on_failure="detach"):
        steps(model, optimizer, 2)
        before = state(model)
        monkeypatch.setattr(owner, name, fail)
        with pytest.warns(UserWarning, match=rf"stopped at step 2 and {STOPPED}: {named}.*Unforeseen: the cause"):
            steps(model, optimizer, 3)
        assert not _get_current_function_mode_stack()
        monkeypatch.undo()
    assert leftovers(model, optimizer) == []
    torch.testing.assert_close(state(model), state(plain), rtol=0, atol=0)
    memory = dualform.open(run)
    assert memory.step == 2
    assert memory.info().closed
    assert memory.verify(before).passed


@pytest.mark.parametrize("on_failure", ["raise", "detach"])
def test_an_error_after_the_step_leaves_no_final_parameters(
    run: Path, monkeypatch: pytest.MonkeyPatch, on_failure: Any
) -> None:
    """The parameters have moved, and that step is in no pattern."""
    model = mlp()
    optimizer = sgd(model)
    monkeypatch.setattr(step_recorder, "StepFacts", fail)
    with dualform.record(model, optimizer, run, on_failure=on_failure):
        expected = pytest.warns(UserWarning, match=rf"{STOPPED}: A step of SGD.*the cause")
        refused = pytest.raises(RefusedError, match=r"A step of SGD cannot be recorded: Unforeseen: the cause")
        with expected if on_failure == "detach" else refused:
            train(model, optimizer, batches(1))
        monkeypatch.undo()
        if on_failure == "raise":
            with pytest.raises(RefusedError, match=r"An earlier step was not recorded \(A step of SGD.*resume=True"):
                train(model, optimizer, batches(1))
    memory = dualform.open(run)
    assert not memory.info().closed
    assert memory.step == 0


@pytest.mark.parametrize("where", ["before", "after"])
def test_detaching_in_a_step_leaves_the_users_later_hooks_running(
    run: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """An optimizer goes through its hooks as they are called: none of them may vanish meanwhile."""
    model = mlp()
    optimizer = sgd(model)
    called: list[str] = []
    with dualform.record(model, optimizer, run, on_failure="detach"):
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        broken = (step_preparation, "follow_all") if where == "before" else (step_recorder, "StepFacts")
        monkeypatch.setattr(*broken, fail)
        with pytest.warns(UserWarning, match=STOPPED):
            train(model, optimizer, batches(1))
        train(model, optimizer, batches(1))
    assert called == ["before", "after"] * 2
    assert leftovers(model, optimizer) == ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1


def test_what_one_optimizer_did_before_the_other_was_refused_is_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    with dualform.record(model, [first, second], run, on_failure="detach"):
        loss_of(model(batches(1)[0])).backward()
        first.step()
        before = state(model)
        monkeypatch.setattr(step_preparation, "follow_all", fail)
        with pytest.warns(UserWarning, match=STOPPED):
            second.step()
    memory = dualform.open(run)
    assert memory.step == 1
    assert memory.verify(before).passed
    assert memory.verify().passed


def test_annotations_that_do_not_fit_never_break_a_training_that_asked_for_detach(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, on_failure="detach") as recording:
        recording.annotate(label=[1, 2, 3, 4])
        train(model, optimizer, batches(1))
        recording.annotate(label=[1, 2, 3])
        with pytest.warns(UserWarning, match=r"patterns of step 1 get no annotations.*'label' has shape \(3,\)"):
            train(model, optimizer, batches(1))
        recording.annotate(label=[1, 2, 3])
        train(model, optimizer, batches(1))  # said once
        recording.annotate(label=[5, 6, 7, 8])
        train(model, optimizer, batches(1))
        with pytest.raises(AnnotationError, match="already"):
            recording.annotate(step=1)
    memory = dualform.open(run)
    assert memory.step == 4
    assert memory.verify(model).passed
    labels = memory.patterns("0").column("label").to_pylist()
    assert labels == [1, 2, 3, 4] + [None] * 8 + [5, 6, 7, 8]


def test_an_interrupt_in_a_recurrent_layer_leaves_nothing_behind(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls no hook after Ctrl-C in a forward, so nothing tells the end of the call."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    model = lstm()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        steps(model, optimizer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(recurrent, "_unrolled", interrupt)
            with pytest.raises(KeyboardInterrupt):
                steps(model, optimizer, 1)
        steps(model, optimizer, 1)
        assert not _get_current_function_mode_stack()
    memory = dualform.open(run)
    assert counts(memory) == {"l0": 8}
    assert memory.verify(model).passed


def test_a_warning_that_is_an_error_is_not_renamed(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, on_failure="detach"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=f"^Recording stopped at step 0 and {STOPPED}"):
            model(batches(1)[0].to_sparse())


def test_saving_an_output_warns_of_no_hook(run: Path, tmp_path: Path) -> None:
    model = mlp()
    with dualform.record(model, sgd(model), run):
        outputs = model(batches(1)[0])
        torch.save(outputs, tmp_path / "outputs.pt")
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), outputs, rtol=0, atol=0)
