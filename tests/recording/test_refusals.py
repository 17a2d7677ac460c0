"""What the identity does not cover is refused by name; keys-only recordings and detached trainings go on."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.errors import RefusedError
from helpers.loops import assert_exact, batches, counts, gradient_of, leftovers, loss_of, mlp, record, sgd, state, train

Sabotage = Callable[[nn.Sequential, torch.optim.Optimizer, Tensor], None]
SOUND = 3  # steps before the sabotage


# Each of these does a whole step ------------------------------------------------------------------------------------


def clip_by_value(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()


def clip_by_value_then_accumulate(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    clip_then = [x, 2 * x]
    loss_of(model(clip_then[0])).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    loss_of(model(clip_then[1])).backward()
    optimizer.step()


def noise(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    for parameter in model.parameters():
        gradient_of(parameter).add_(1e-4 * torch.randn_like(parameter))
    optimizer.step()


def edit_of_one_element(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    gradient_of(model.get_parameter("0.weight"))[2, 1] += 1e-3
    optimizer.step()


def edit_through_data(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    version = gradient_of(model.get_parameter("2.bias"))._version
    gradient_of(model.get_parameter("2.bias")).data[0] += 1e-3
    assert gradient_of(model.get_parameter("2.bias"))._version == version  # a counter does not see it
    optimizer.step()


def replaced_gradient(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    model.get_parameter("0.weight").grad = torch.randn_like(model.get_parameter("0.weight"))
    optimizer.step()


def invented_gradient(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model.get_parameter("0.weight").grad = torch.randn_like(model.get_parameter("0.weight"))
    optimizer.step()


def l2_in_the_loss(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (loss_of(model(x)) + 1e-4 * penalty).backward()
    optimizer.step()


def l1_of_a_bias_in_the_loss(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (loss_of(model(x)) + 1e-4 * model.get_parameter("0.bias").abs().sum()).backward()
    optimizer.step()


def functional_use(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    hidden = functional.relu(functional.linear(x, model.get_parameter("0.weight"), model.get_parameter("0.bias")))
    (loss_of(model(x)) + loss_of(model[2](hidden))).backward()
    optimizer.step()


def functional_use_only(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    hidden = functional.relu(functional.linear(x, model.get_parameter("0.weight"), model.get_parameter("0.bias")))
    loss_of(model[2](hidden)).backward()
    optimizer.step()


def parameter_hook(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    handle = model.get_parameter("0.weight").register_hook(lambda gradient: gradient.sign() * 0.01)
    try:
        loss_of(model(x)).backward()
    finally:
        handle.remove()
    optimizer.step()


def bias_hook(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    handle = model.get_parameter("2.bias").register_hook(lambda gradient: gradient + 1e-3)
    try:
        loss_of(model(x)).backward()
    finally:
        handle.remove()
    optimizer.step()


def accumulation_hook(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def clamp(parameter: Tensor) -> None:
        gradient_of(parameter).clamp_(-0.01, 0.01)

    handle = model.get_parameter("0.weight").register_post_accumulate_grad_hook(clamp)
    try:
        loss_of(model(x)).backward()
    finally:
        handle.remove()
    optimizer.step()


def changed_output(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    handle = model[0].register_forward_hook(lambda module, args, output: output * 2, prepend=True)
    try:
        loss_of(model(x)).backward()
    finally:
        handle.remove()
    optimizer.step()


def uncleared_gradient(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.step()
    loss_of(model(x)).backward()  # without zero_grad: the first batch's patterns would count twice
    optimizer.step()


def step_without_backward(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.step()


def create_graph(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a reference cycle
        loss_of(model(x)).backward(create_graph=True)
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()


def gradient_penalty(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = loss_of(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    optimizer.step()


def overflow(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    (loss_of(model(x)) * torch.inf).backward()
    optimizer.step()


EXPLAIN = "patterns do not explain its gradient"
UNSEEN = "no recorded pattern explains its gradient: .*functional call, began before the recording, or was compiled"
FACTOR = "changed between backward and step by something other than one factor"
TWICE = "not cleared after the previous step"
REFUSED: dict[Sabotage, tuple[str, str]] = {  # -> (what the message says, the parameters it may name)
    clip_by_value: (FACTOR, "0.weight"),
    clip_by_value_then_accumulate: (FACTOR, "0.weight"),
    noise: (FACTOR, "0.weight"),
    edit_of_one_element: (FACTOR, "0.weight"),
    edit_through_data: (FACTOR, "2.bias"),
    replaced_gradient: (FACTOR, "0.weight"),
    invented_gradient: ("set by hand", "0.weight"),
    l2_in_the_loss: (EXPLAIN, "0.weight"),
    l1_of_a_bias_in_the_loss: (EXPLAIN, "0.bias"),
    functional_use: (EXPLAIN, "0.weight"),
    functional_use_only: (UNSEEN, "0.weight"),
    parameter_hook: (EXPLAIN, "0.weight"),
    bias_hook: (EXPLAIN, "2.bias"),
    accumulation_hook: (FACTOR, "0.weight"),
    changed_output: (EXPLAIN, "0.weight"),
    uncleared_gradient: (TWICE, "0.weight"),
    step_without_backward: (TWICE, "0.weight"),
    create_graph: (r"create_graph=True", "0.weight"),
    gradient_penalty: (r"create_graph=True", "0.weight"),
    overflow: ("not finite", "0.weight"),
}
CHANGES_THE_MODEL_FIRST = (uncleared_gradient, step_without_backward)  # by a sound step
each = pytest.mark.parametrize("sabotage", REFUSED, ids=lambda sabotage: sabotage.__name__)


@each
def test_is_refused_by_name(run: Path, sabotage: Sabotage) -> None:
    what, parameter = REFUSED[sabotage]
    torch.manual_seed(3)
    model = mlp()
    optimizer = sgd(model, lr=0.01)
    sound = SOUND + (sabotage in CHANGES_THE_MODEL_FIRST)

    def recording() -> None:
        with dualform.record(model, optimizer, run):
            train(model, optimizer, batches(SOUND))
            optimizer.zero_grad()
            sabotage(model, optimizer, batches(1, seed=5)[0])

    with pytest.raises(RefusedError, match=f"Parameter '{parameter}' cannot be recorded exactly: .*{what}"):
        recording()
    assert leftovers(model, optimizer) == []
    memory = dualform.open(run)  # what came before is there, and nothing of the refused step is
    assert memory.step == sound
    assert counts(memory) == {"0": 4 * sound, "2": 4 * sound}
    assert_exact(memory, model)


@each
def test_training_can_go_on_without_the_refused_step(run: Path, sabotage: Sabotage) -> None:
    model = mlp()
    optimizer = sgd(model, lr=0.01)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(SOUND))
        optimizer.zero_grad()
        with pytest.raises(RefusedError):
            sabotage(model, optimizer, batches(1, seed=5)[0])
        train(model, optimizer, batches(SOUND, seed=6))
    assert_exact(dualform.open(run), model)


@each
def test_keys_only_is_recorded(run: Path, sabotage: Sabotage) -> None:
    model = mlp()
    optimizer = sgd(model, lr=0.01)
    with dualform.record(model, optimizer, run, layers={"*": "keys"}):
        train(model, optimizer, batches(SOUND))
        optimizer.zero_grad()
        sabotage(model, optimizer, batches(1, seed=5)[0])
    memory = dualform.open(run)
    assert memory.step > SOUND
    attention = memory.attend(queries={"0": torch.eye(5)})["0"].attention()
    torch.testing.assert_close(attention[:, : 4 * SOUND].T, torch.cat(batches(SOUND)), rtol=0, atol=0)


@each
def test_detaching_lets_training_go_on(run: Path, sabotage: Sabotage) -> None:
    what, parameter = REFUSED[sabotage]
    results = []
    for recording in (True, False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = sgd(model, lr=0.01)
        torch.manual_seed(3)
        x = batches(1, seed=5)[0]
        if recording:
            with dualform.record(model, optimizer, run, on_failure="detach"):
                train(model, optimizer, batches(SOUND))
                optimizer.zero_grad()
                with pytest.warns(UserWarning, match=f"training goes on without it: .*'{parameter}'.*{what}"):
                    sabotage(model, optimizer, x)
                assert leftovers(model, optimizer) == []
                train(model, optimizer, batches(2, seed=6))
        else:
            train(model, optimizer, batches(SOUND))
            optimizer.zero_grad()
            sabotage(model, optimizer, x)
            train(model, optimizer, batches(2, seed=6))
        results.append(state(model))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)
    memory = dualform.open(run)
    sound = SOUND + (sabotage in CHANGES_THE_MODEL_FIRST)
    assert memory.step == sound
    assert counts(memory) == {"0": 4 * sound, "2": 4 * sound}
    assert memory.verify().passed
    assert memory.attend(queries={"0": torch.eye(5)})["0"].output().shape == (5, 7)


def test_one_layer_keys_only_and_the_other_exact(run: Path) -> None:
    """Only the layers that are to be exact are held to it."""
    model = mlp()

    def body(x: Tensor) -> None:
        loss_of(model(x)).backward()
        nn.utils.clip_grad_value_(model[0].parameters(), 0.01)
        optimizer.step()

    optimizer = sgd(model)
    memory = record(run, model, optimizer, body, layers={"0": "keys", "*": "keys+values"})
    assert set(memory.weights()) == {"2.weight", "2.bias"}
    assert_exact(memory, model)
    with pytest.raises(dualform.DualformError, match="keys only"):
        memory.attend(queries={"0": torch.eye(5)})["0"].output()


# Before the first step ----------------------------------------------------------------------------------------------


def test_a_graph_from_before_the_recording(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    loss = loss_of(model(batches(1)[0]))
    with dualform.record(model, optimizer, run):
        loss.backward()
        with pytest.raises(RefusedError, match=UNSEEN):
            optimizer.step()


def test_a_model_that_was_compiled_and_run_before_the_recording(run: Path) -> None:
    """Its code was compiled without hooks, and compiled code is not compiled again for them."""
    model = mlp()
    optimizer = sgd(model)
    compiled: Any = torch.compile(model, backend="eager")
    try:
        train(compiled, optimizer, batches(1))
        with dualform.record(model, optimizer, run), pytest.raises(RefusedError, match=UNSEEN):
            train(compiled, optimizer, batches(1))
    finally:
        torch._dynamo.reset()


def test_a_gradient_from_before_the_recording(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    loss_of(model(batches(1)[0])).backward()
    with dualform.record(model, optimizer, run):
        loss_of(model(batches(1)[0])).backward()
        with pytest.raises(RefusedError, match=TWICE):
            optimizer.step()


def test_a_weight_that_an_unrecorded_embedding_shares(run: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 5)
            self.output = nn.Linear(5, 6, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.output(self.embedding(tokens))

    model = Tied()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers="output"):
        loss_of(model(torch.arange(4))).backward()
        with pytest.raises(RefusedError, match=f"Parameter 'embedding.weight' .*{EXPLAIN}"):
            optimizer.step()


def test_a_weight_shared_with_a_layer_that_is_not_recorded(run: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    with pytest.warns(UserWarning, match=r"not recorded: '2.bias'"):
        recorder = dualform.record(model, optimizer, run, layers="0")
    with pytest.raises(RefusedError, match=f"'0.weight'.*{EXPLAIN}"), recorder:
        train(model, optimizer, batches(1))


def test_a_shared_weight_is_stored_one_way(run: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    with pytest.raises(RefusedError, match=r"Layers '2' and '0' share parameter '0.weight'.*keys only"):
        dualform.record(model, sgd(model), run, layers={"0": "keys", "2": "keys+values"})
    assert counts(record(run, model, sgd(model), layers={"*": "keys"})) == {"0": 24, "2": 24}


@pytest.mark.parametrize("make", [torch.optim.ASGD, torch.optim.Rprop])
def test_optimizers_without_known_coefficients(run: Path, make: Any) -> None:
    model = mlp()
    optimizer = make(model.parameters(), lr=0.01)
    with pytest.raises(
        RefusedError, match=rf'^{make.__name__} is .*supported: Adadelta, .*SGD\..*layers={{"\*": "keys"}}'
    ):
        dualform.record(model, optimizer, run)
    with pytest.raises(RefusedError, match=make.__name__):
        dualform.record(model, optimizer, run, layers={"0": "keys", "2": "keys+values"})
    assert not run.exists()
    memory = record(run, model, optimizer, layers={"*": "keys"})
    assert counts(memory) == {"0": 24, "2": 24}
    assert memory.verify(model).passed
    assert memory.attend(model, batches(1)[0])["2"].totals(by="step").values.shape == (4, 6)


def test_a_subclass_of_sgd(run: Path) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = mlp()
    optimizer = Mine(model.parameters(), lr=0.1)
    with pytest.raises(RefusedError, match=r"Mine is not an optimizer .*from SGD and has its own 'step'.*: .*SGD"):
        dualform.record(model, optimizer, run)
    assert counts(record(run, model, optimizer, layers={"*": "keys"})) == {"0": 24, "2": 24}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_low_precision(run: Path, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    optimizer = sgd(model)
    with pytest.raises(RefusedError, match=rf"Layer '0' .*{dtype}.*keys only"):
        dualform.record(model, optimizer, run)
    memory = record(run, model, optimizer, layers={"*": "keys"})
    assert counts(memory) == {"0": 24, "2": 24}
    keys = memory.attend(queries={"0": torch.eye(5)})["0"].attention().T
    torch.testing.assert_close(keys, torch.cat(batches(6, dtype=dtype)).float(), rtol=0, atol=0)


def test_one_layer_of_low_precision_beside_an_exact_one(run: Path) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(5, 5, dtype=torch.bfloat16)
            self.high = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x.bfloat16()).float())

    torch.manual_seed(0)
    model = Cast()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers={"low": "keys", "high": "keys+values"}):
        train(model, optimizer, batches(6))
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert set(memory.weights()) == {"high.weight", "high.bias"}


@pytest.mark.parametrize("layers", [None, {"*": "keys"}], ids=["keys+values", "keys"])
def test_data_parallel(run: Path, layers: Any) -> None:
    model = mlp()
    wrapped = nn.DataParallel(model)
    with pytest.raises(RefusedError, match="DataParallel is not supported"):
        dualform.record(wrapped, sgd(model), run, layers=layers)
    inside = nn.Sequential(wrapped, nn.Linear(3, 2))
    with pytest.raises(RefusedError, match=r"DataParallel \('0'\) is not supported"):
        dualform.record(inside, sgd(inside), run, layers=layers)


def test_layers_without_a_shape_yet(run: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(RefusedError, match=r"Layer '0' is not initialised.*Run the model once"):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run)
    model(batches(1)[0])
    assert_exact(record(run, model, torch.optim.SGD(model.parameters(), lr=0.1)), model)


def test_keys_under_autocast_are_those_of_the_forward(run: Path) -> None:
    """Autocast saves its own copy of the input, so the user may overwrite the batch before the backward."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers={"*": "keys"}):
        for x in batches(3):
            optimizer.zero_grad()
            buffer = x.clone()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model(buffer))
            buffer.zero_()
            loss.backward()
            optimizer.step()
    attention = dualform.open(run).attend(queries={"0": torch.eye(5)})["0"].attention()
    seen = torch.cat(batches(3)).bfloat16().float()  # as the layer saw them
    torch.testing.assert_close(attention.T, seen, rtol=0, atol=0)


# No false alarm -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    seed=st.integers(0, 10_000),
    sizes=st.tuples(*[st.sampled_from([1, 2, 7, 40])] * 3),
    rows=st.sampled_from([1, 2, 9]),
    float64=st.booleans(),
    magnitude=st.integers(-12, 4),
    tricks=st.sets(st.sampled_from(["clip", "accumulate", "scale", "unscale", "keep zeros", "drop", "scale by hand"])),
)
@settings(max_examples=120)
def test_ordinary_training_is_never_refused(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    seed: int,
    sizes: tuple[int, int, int],
    rows: int,
    float64: bool,
    magnitude: int,
    tricks: set[str],
) -> None:
    torch.manual_seed(seed)
    d_in, hidden, d_out = sizes
    dtype = torch.float64 if float64 else torch.float32
    model = nn.Sequential(nn.Linear(d_in, hidden), nn.Tanh(), nn.Linear(hidden, d_out)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3, enabled="scale" in tricks)
    with dualform.record(model, optimizer, tmp_path_factory.mktemp("sound") / "run"):
        for step in range(6):
            optimizer.zero_grad(set_to_none="keep zeros" not in tricks)
            if "drop" in tricks and step % 2:
                model(torch.randn(rows, d_in, dtype=dtype)).sum().backward()
                optimizer.zero_grad(set_to_none="keep zeros" not in tricks)
            for _ in range(3 if "accumulate" in tricks else 1):
                x = torch.randn(rows, d_in, dtype=dtype) + step
                scaler.scale(10.0**magnitude * loss_of(model(x))).backward()
            # A training that diverges is refused, and by name; a gradient scaler leaves such a step out.
            assume("scale" in tricks or all(gradient_of(p).isfinite().all() for p in model.parameters()))
            if "unscale" in tricks or "clip" in tricks:
                scaler.unscale_(optimizer)
            if "scale by hand" in tricks:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= 3
            if "clip" in tricks:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
