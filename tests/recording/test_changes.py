"""What anything but a recorded step changes is refused by name before the next step, or said at closing."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import dualform
from dualform.errors import QueryError, RefusedError
from dualform.recording.sinks import Start, sample
from dualform.store.format import FINAL
from dualform.store.manifest import Manifest
from dualform.store.writer import DiskWriter
from helpers.loops import assert_exact, batches, counts, gradient_of, leftovers, loss_of, mlp, record, sgd, state, train

SOUND = 3  # steps before a change
BETWEEN = f"between step {SOUND} and step {SOUND + 1}"
Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]


def adam(model: nn.Module, **settings: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), **{"lr": 1e-2, **settings})


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 5) -> None:
    """Take one ordinary step."""
    train(model, optimizer, batches(1, seed=seed))


# Parameters that something else changes -----------------------------------------------------------------------------


def added_to_data(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("0.weight").data.add_(0.01)


def one_element(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("0.weight").data[3, 2] *= 1.001


def weight_clipping(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def decay_by_hand(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1 - 1e-4)


def average_copied_back(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(0.9 * parameter.data)


def other_checkpoint(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(mlp(seed=7).state_dict())


def exchanged_data(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.get_parameter("0.weight").data = model.get_parameter("0.weight").data * 1.01


def shared_memory(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """As another process does that trains the same memory: no object of this process hears of it."""
    version = model[0].weight._version
    torch.from_numpy(model.get_parameter("0.weight").detach().numpy())[0] += 0.01
    assert model[0].weight._version == version


def optimizer_that_is_not_recorded(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.SGD(model[0].parameters(), lr=0.1)
    loss_of(model(batches(1, seed=9)[0])).backward()
    other.step()
    other.zero_grad()
    optimizer.zero_grad()


CHANGES: tuple[Change, ...] = (
    added_to_data,
    one_element,
    weight_clipping,
    decay_by_hand,
    average_copied_back,
    other_checkpoint,
    exchanged_data,
    shared_memory,
    optimizer_that_is_not_recorded,
)
each_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@each_change
@pytest.mark.parametrize("make", [sgd, adam], ids=["SGD", "Adam"])
def test_a_changed_parameter_is_refused_at_the_next_step(run: Path, change: Change, make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    after: list[dict[str, Tensor]] = []

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(SOUND))
            after.append(state(model))
            change(model, optimizer)
            step_on(model, optimizer)

    with pytest.raises(RefusedError, match=rf"'0.weight'.* changed {BETWEEN} by something other than .*record\(\)"):
        recording()
    assert leftovers(model, optimizer) == []
    memory = dualform.open(run)
    assert memory.step == SOUND
    assert counts(memory) == {"0": 4 * SOUND, "2": 4 * SOUND}
    assert memory.verify(after[0]).passed, "the steps before the change are there"


@each_change
def test_detaching_lets_training_go_on_to_the_bit(run: Path, change: Change) -> None:
    results = []
    for recording in (True, False):
        model = mlp()
        optimizer = sgd(model)
        if recording:
            with dualform.record(model, optimizer, run, on_failure="detach"):
                train(model, optimizer, batches(SOUND))
                after = state(model)
                change(model, optimizer)
                with pytest.warns(UserWarning, match=f"training goes on without it: .*'0.weight'.*{BETWEEN}"):
                    step_on(model, optimizer)
                train(model, optimizer, batches(2, seed=6))
        else:
            train(model, optimizer, batches(SOUND))
            change(model, optimizer)
            step_on(model, optimizer)
            train(model, optimizer, batches(2, seed=6))
        results.append(state(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    memory = dualform.open(run)
    assert memory.step == SOUND
    assert memory.verify(after).passed
    with pytest.raises(
        QueryError, match=rf"after {SOUND} steps: Parameters? '0.weight'.* had changed since step {SOUND}"
    ):
        memory.verify()


@each_change
def test_keys_alone_are_recorded_whatever_changes_the_weights(run: Path, change: Change) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers={"*": "keys"}):
        train(model, optimizer, batches(SOUND))
        change(model, optimizer)
        step_on(model, optimizer)
        change(model, optimizer)
    memory = dualform.open(run)
    assert memory.step == SOUND + 1
    assert memory.info().closed
    torch.testing.assert_close(memory.trained(mlp(seed=2)).state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_refused_recording_does_not_go_on(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(SOUND))
        kept = state(model)
        added_to_data(model, optimizer)
        for _ in range(2):
            with pytest.raises(RefusedError, match=BETWEEN):
                step_on(model, optimizer)
        with torch.no_grad():
            model.get_parameter("0.weight").copy_(kept["0.weight"])  # unless the change is taken back
        train(model, optimizer, batches(2, seed=6))
    assert_exact(dualform.open(run), model)


def test_only_exact_layers_are_held_to_it(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers={"0": "keys", "2": "keys+values"}):
        train(model, optimizer, batches(SOUND))
        added_to_data(model, optimizer)
        train(model, optimizer, batches(SOUND))
    assert_exact(dualform.open(run), model)


@pytest.mark.parametrize("few", [1, 40], ids=["an element", "a row"])
def test_an_edit_outside_the_sample_is_found(run: Path, few: int) -> None:
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 3))
    optimizer = sgd(model)

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(SOUND, 4, 40))
            before = sample(model.get_parameter("0.weight"))
            model.get_parameter("0.weight").data.view(-1)[1 : 9 * few : 9][:few].mul_(1.5)
            assert torch.equal(sample(model.get_parameter("0.weight")), before)
            train(model, optimizer, batches(1, 4, 40))

    with pytest.raises(RefusedError, match=r"Parameter '0.weight' changed"):
        recording()


def test_a_weight_that_is_transposed_in_its_own_memory_is_refused(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5))
    optimizer = sgd(model)
    weight = model.get_parameter("0.weight")

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(torch.randn(4, 5))).backward()
        optimizer.step()

    with dualform.record(model, optimizer, run):
        step()
        weight.data = weight.data.t()
        with pytest.raises(RefusedError, match=r"'0\.weight' changed between step"):
            step()


def test_a_layer_that_is_made_narrower_in_its_own_memory_is_refused(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(next(iter(batches(1)))).square().mean().backward()
        optimizer.step()

    with dualform.record(model, optimizer, run):
        step()
        optimizer.zero_grad()
        for parameter in model[2].parameters():
            parameter.data = parameter.data[:1]
        with pytest.raises(RefusedError, match="changed between step"):
            step()


def test_a_weight_whose_memory_holds_negated_numbers_is_recorded(run: Path) -> None:
    model = mlp()
    weight = model.get_parameter("2.weight")
    weight.data = torch._neg_view(-weight.detach())
    memory = record(run, model, sgd(model))
    assert_exact(memory, model)


def test_a_frozen_layer_that_is_changed(run: Path) -> None:
    """As the averaged copy of a network is, that no optimizer holds."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    with dualform.record(model, optimizer, run, layers="*"):
        train(model, optimizer, batches(SOUND))
        added_to_data(model, optimizer)
        with pytest.raises(RefusedError, match=r"'0.weight' changed"):
            step_on(model, optimizer)


def test_a_parameter_of_one_optimizer_is_watched_at_the_steps_of_all(run: Path) -> None:
    model = mlp()
    first, second = sgd(model[0]), adam(model[2])
    with dualform.record(model, [first, second], run):
        for x in batches(SOUND):
            model.zero_grad()
            loss_of(model(x)).backward()
            first.step()
            second.step()
        model.zero_grad()
        loss_of(model(batches(1)[0])).backward()
        first.step()
        model.get_parameter("2.weight").data.mul_(1.01)
        with pytest.raises(RefusedError, match=r"'2.weight' changed"):
            second.step()
    assert dualform.open(run).step == SOUND + 1


def test_a_group_that_is_added_later_is_watched_too(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model[0])
    with dualform.record(model, optimizer, run, layers="*"):
        train(model, optimizer, batches(SOUND))
        optimizer.add_param_group({"params": list(model[2].parameters())})
        model.zero_grad()
        train(model, optimizer, batches(SOUND))
        model.get_parameter("2.weight").data.mul_(1.01)
        with pytest.raises(RefusedError, match=r"'2.weight' changed"):
            step_on(model, optimizer)
        model.get_parameter("2.weight").data.div_(1.01)


# What is none of that -----------------------------------------------------------------------------------------------


def same_values(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)


def same_checkpoint(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def own_state(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def average_for_an_evaluation(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    kept = state(model)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    model(batches(1)[0])
    model.load_state_dict(kept)


def averaged_model(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)


def moved_to_where_it_is(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.to("cpu").float().train()


def other_memory(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def other_strides(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for name in ("0.weight", "2.weight"):
        weight = model.get_parameter(name)
        weight.data = weight.data.t().contiguous().t()


def sharpness_aware(restore: str) -> Change:
    def climb(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        """Perturb the weights, take the gradient there, put the weights back, and step."""
        kept = state(model)
        optimizer.zero_grad()
        loss_of(model(batches(1)[0])).backward()
        moves = {name: 0.05 * gradient_of(parameter).sign() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(moves[name])
        optimizer.zero_grad()
        loss_of(model(batches(1)[0])).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name]) if restore == "copy" else parameter.sub_(moves[name])
        optimizer.step()

    climb.__name__ = f"sharpness_aware_{restore}"
    return climb


HARMLESS: tuple[Change, ...] = (
    same_values,
    same_checkpoint,
    own_state,
    average_for_an_evaluation,
    averaged_model,
    moved_to_where_it_is,
    other_memory,
    other_strides,
    sharpness_aware("copy"),
    sharpness_aware("subtraction"),
)


@pytest.mark.parametrize("harmless", HARMLESS, ids=lambda harmless: harmless.__name__)
@pytest.mark.parametrize("make", [sgd, adam], ids=["SGD", "Adam"])
def test_what_leaves_the_weights_as_they_are_is_recorded(run: Path, harmless: Change, make: Any) -> None:
    model = mlp()
    optimizer = make(model)
    with dualform.record(model, optimizer, run):
        for x in batches(2 * SOUND):
            train(model, optimizer, [x])
            harmless(model, optimizer)
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert memory.verify().passed
    assert not memory.info().no_final


# Nothing but hand-written updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["exact", "keys"])
def test_hand_written_updates_are_noticed_while_they_go_on_and_at_closing(run: Path, layers: Any) -> None:
    model = mlp()

    def by_hand() -> None:
        for x in batches(30):
            model.zero_grad()
            loss_of(model(x)).backward()
            for parameter in model.parameters():
                parameter.data.add_(gradient_of(parameter), alpha=-0.1)

    recorder = dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run, layers=layers)
    recorder.__enter__()
    with pytest.warns(UserWarning, match=r"'0.weight'.*gradients of 10 backwards in a row were cleared without a step"):
        by_hand()
    with pytest.warns(UserWarning, match=r"No optimizer step was recorded. Yet Parameters '0.weight'.*never stepped"):
        recorder.__exit__(None, None, None)
    memory = dualform.open(run)
    assert memory.step == 0


def test_gradients_that_are_thrown_away_are_no_matter(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        for x in batches(30):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
    assert dualform.open(run).step == 0


# At closing ---------------------------------------------------------------------------------------------------------


def test_the_best_weights_loaded_at_the_end_are_not_the_final_ones(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run)
    recorder.__enter__()
    train(model, optimizer, batches(3))
    best = state(model)
    train(model, optimizer, batches(4, seed=2))
    last = state(model)
    model.load_state_dict(best)
    with pytest.warns(UserWarning, match=r"at closing are not those after step 7: .*'0.weight'.* those after step 3 "):
        recorder.__exit__(None, None, None)
    memory = dualform.open(run)
    assert memory.info().closed
    assert not (run / FINAL).exists()
    assert "no final weights were kept: Parameters '0.weight'" in repr(memory.info())
    with pytest.raises(QueryError, match=r"after 7 steps: .*'0.weight'.* had changed since step 7"):
        memory.verify()
    assert memory.verify(last).passed
    assert memory.at(step=3).verify(model).passed
    torch.testing.assert_close(dict(memory.trained(model).named_parameters()), last, rtol=1e-4, atol=1e-6)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, resume=True) as recorder:
        assert recorder.step == 3
        train(model, optimizer, batches(2))
    memory = dualform.open(run)
    assert memory.verify().passed
    assert memory.info().no_final == ""


def test_weights_of_no_step_at_closing(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    after: list[dict[str, Tensor]] = []

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(2))
            after.append(state(model))
            model.get_parameter("2.bias").data.zero_()

    with pytest.warns(UserWarning, match=r"not those after step 2: Parameter '2.bias' changed since") as caught:
        recording()
    assert "They are those" not in str(caught[0].message)
    assert caught[0].filename == __file__
    assert dualform.open(run).verify(after[0]).passed


def test_a_shard_that_is_sealed_while_other_weights_are_there_does_not_vouch_for_them(run: Path) -> None:
    """The checksums beside a shard prove a checkpoint when a run is resumed."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, batches(2))
        kept = state(model)
        model.get_parameter("0.weight").data.mul_(2.0)
        recorder.flush()
        model.load_state_dict(kept)
        train(model, optimizer, batches(1))
    shards = Manifest.read(run).shards
    assert [bool(shard.parameters) for shard in shards] == [False, True]


def test_a_model_that_is_moved_to_a_lower_precision_at_the_end(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    after: list[dict[str, Tensor]] = []

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(2))
            after.append(state(model))
            model.half()

    with pytest.warns(UserWarning, match="not those after step 2"):
        recording()
    assert dualform.open(run).verify(after[0]).passed


# Modules and parameters that are exchanged --------------------------------------------------------------------------


def exchange_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(7, 3)


def exchange_parameter(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model.get_parameter("2.weight").detach().clone())


def take_out_module(model: nn.Sequential) -> None:
    del model[2]


def take_out_parameter(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[2], "weight", amount=0.3)


def wrap_module(model: nn.Sequential) -> None:
    model[2] = nn.Sequential(model[2], nn.Dropout(0.0))


@pytest.mark.parametrize(
    "exchange",
    [exchange_module, exchange_parameter, take_out_module, take_out_parameter, wrap_module],
    ids=lambda exchange: exchange.__name__,
)
@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["exact", "keys"])
def test_an_exchanged_layer_is_refused_by_name(run: Path, exchange: Any, layers: Any) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers=layers):
        train(model, optimizer, batches(SOUND))
        exchange(model)
        with pytest.raises(RefusedError, match=f"Layer '2' is not the recorded one any more: .*{BETWEEN}"):
            step_on(model, optimizer)
    assert dualform.open(run).step == SOUND


def test_a_new_optimizer_for_an_exchanged_layer_is_noticed_at_closing(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    after: list[dict[str, Tensor]] = []

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(SOUND))
            after.append(state(model))
            exchange_module(model)
            train(model, sgd(model), batches(SOUND))

    with pytest.warns(UserWarning, match="Layer '2' is not the recorded one any more.* before the recording") as caught:
        recording()
    assert "not those after step 3: Parameters '0.weight', '0.bias' changed since" in str(caught[0].message)
    assert dualform.open(run).verify(after[0]).passed


def test_a_tied_weight_that_is_untied(run: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, on_failure="detach"):
        train(model, optimizer, batches(SOUND))
        model[2].weight = nn.Parameter(model.get_parameter("0.weight").detach().clone())
        with pytest.warns(UserWarning, match="Layer '2' .*parameter '0.weight' was exchanged"):
            step_on(model, optimizer)
    assert dualform.open(run).verify().passed


# The optimizer's state ----------------------------------------------------------------------------------------------


def cleared(model: nn.Sequential, optimizer: torch.optim.Optimizer, earlier: dict[str, Any]) -> None:
    optimizer.state.clear()


def exchanged_mapping(model: nn.Sequential, optimizer: torch.optim.Optimizer, earlier: dict[str, Any]) -> None:
    optimizer.state = type(optimizer.state)(dict)


def reloaded(model: nn.Sequential, optimizer: torch.optim.Optimizer, earlier: dict[str, Any]) -> None:
    optimizer.load_state_dict(earlier)


def edited(model: nn.Sequential, optimizer: torch.optim.Optimizer, earlier: dict[str, Any]) -> None:
    for entries in optimizer.state.values():
        next(entry for name, entry in entries.items() if name in ("exp_avg", "momentum_buffer")).mul_(0.5)


@pytest.mark.parametrize("meddle", [cleared, exchanged_mapping, reloaded, edited], ids=lambda meddle: meddle.__name__)
@pytest.mark.parametrize("make", [sgd, adam, torch.optim.Adagrad], ids=["SGD", "Adam", "Adagrad"])
def test_a_state_that_no_step_left_is_refused(run: Path, meddle: Any, make: Any) -> None:
    model = mlp()
    optimizer = make(model) if make is not torch.optim.Adagrad else make(model.parameters())
    if make is torch.optim.Adagrad and meddle is edited:
        pytest.skip("has no first moment")

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(SOUND - 1))
            earlier = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, batches(1, seed=2))
            meddle(model, optimizer, earlier)
            train(model, optimizer, batches(2, seed=3))

    if make is sgd and meddle in (cleared, exchanged_mapping):
        recording()  # whether a buffer exists is logged at every step
        assert dualform.open(run).step == SOUND + 2
    else:
        with pytest.raises(
            RefusedError, match=rf"The state of {type(optimizer).__name__} for .*'0.weight' .*{BETWEEN}"
        ):
            recording()
        assert dualform.open(run).step == SOUND
    assert_exact(dualform.open(run), model)


@pytest.mark.parametrize("make", [sgd, adam], ids=["SGD", "Adam"])
def test_a_state_that_is_loaded_after_the_recording_began(run: Path, make: Any) -> None:
    model = mlp()
    warm = make(model)
    train(model, warm, batches(2))
    optimizer = make(model)
    optimizer.zero_grad()
    with dualform.record(model, optimizer, run, on_failure="detach"):
        optimizer.load_state_dict(warm.state_dict())
        with pytest.warns(UserWarning, match=r"was loaded .*before step 1: .*before record\(\)"):
            step_on(model, optimizer)


@pytest.mark.parametrize("loaded", ["the right one", "before record", "an earlier one", "nothing"])
def test_a_resumed_run_needs_the_state_of_its_step(run: Path, loaded: str) -> None:
    """A trainer may load the optimizer's checkpoint after the recording has begun."""
    model = mlp()
    optimizer = adam(model)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(SOUND - 1))
        earlier = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, batches(1, seed=2))
        right = copy.deepcopy(optimizer.state_dict())
    optimizer = adam(model)
    model.zero_grad()

    def recording() -> None:
        if loaded == "before record":
            optimizer.load_state_dict(right)
        with dualform.record(model, optimizer, run, resume=True) as recorder:
            assert recorder.step == SOUND
            if loaded != "nothing" and loaded != "before record":
                optimizer.load_state_dict(right if loaded == "the right one" else earlier)
            train(model, optimizer, batches(2, seed=3))

    if loaded in ("the right one", "before record"):
        recording()
        assert dualform.open(run).step == SOUND + 2
    else:
        what = {"nothing": "is empty, though the run holds 3 updates", "an earlier one": "counts 2 updates, though"}
        with pytest.raises(RefusedError, match=f"The state of Adam .*{what[loaded]}"):
            recording()
        assert dualform.open(run).step == SOUND
    assert_exact(dualform.open(run), model)


@pytest.mark.parametrize("meddle", [cleared, reloaded, edited], ids=lambda meddle: meddle.__name__)
def test_keys_alone_need_no_state(run: Path, meddle: Any) -> None:
    model = mlp()
    optimizer = adam(model)
    with dualform.record(model, optimizer, run, layers={"*": "keys"}):
        train(model, optimizer, batches(SOUND))
        meddle(model, optimizer, copy.deepcopy(optimizer.state_dict()))
        step_on(model, optimizer)
    assert dualform.open(run).step == SOUND + 1


# Conversions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["exact", "keys"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_converted_model_is_refused_with_both_dtypes(run: Path, dtype: torch.dtype, layers: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after: list[dict[str, Tensor]] = []

    def recording() -> None:
        with dualform.record(model, optimizer, run, layers=layers):
            train(model, optimizer, batches(SOUND))
            after.append(state(model))
            model.to(dtype)
            train(model, optimizer, batches(1, dtype=dtype))

    with pytest.raises(RefusedError, match=rf"was torch.float32 and is {dtype} now: .*model.double\(\).* {BETWEEN}"):
        recording()
    assert leftovers(model, optimizer) == []
    memory = dualform.open(run)
    assert memory.step == SOUND
    assert memory.verify(after[0]).passed


def test_a_converted_model_trains_on_when_detached(run: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run, on_failure="detach"):
        train(model, optimizer, batches(SOUND))
        model.double()
        with pytest.warns(UserWarning, match="was torch.float32 and is torch.float64 now"):
            train(model, optimizer, batches(2, dtype=torch.float64))
    assert dualform.open(run).step == SOUND


# Closures -----------------------------------------------------------------------------------------------------------


def test_the_evaluations_of_a_closure_that_are_not_kept_are_counted(run: Path) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=12)
    evaluated: list[int] = []

    def body(x: Tensor) -> None:
        def closure() -> Tensor:
            evaluated[-1] += 1
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        evaluated.append(0)
        optimizer.step(closure)

    with pytest.warns(UserWarning, match="evaluated its closure") as caught:
        memory = record(run, model, optimizer, body, steps=3, layers={"*": "keys"})
    assert evaluated[0] > 1
    told = [str(warning.message) for warning in caught]
    assert len(told) == 1, told
    assert f"LBFGS evaluated its closure {evaluated[0]} times in one step" in told[0]
    assert f"1 of {evaluated[0]}" in told[0]
    assert counts(memory) == {"0": 12, "2": 12}


def test_one_evaluation_is_kept_and_nothing_is_said(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)

    def body(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        optimizer.step(closure)

    assert_exact(record(run, model, optimizer, body), model)


def test_weights_that_change_while_the_run_is_opened_are_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another process trains shared weights while this one writes its initial ones."""
    model = mlp()
    optimizer = sgd(model)
    opened = DiskWriter.open

    def open_slowly(writer: DiskWriter, start: Start) -> int:
        step = opened(writer, start)
        model.get_parameter("0.weight").data.add_(0.01)
        return step

    monkeypatch.setattr(DiskWriter, "open", open_slowly)
    with (
        dualform.record(model, optimizer, run),
        pytest.raises(RefusedError, match=r"'0.weight' changed after the recording began and before step 1"),
    ):
        step_on(model, optimizer)
