"""What may be asked: every kind of input, captured without a trace on the model."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.attend.memory import Memory
from dualform.errors import QueryError
from helpers.paired import Pair
from helpers.small import batch, network, recorded, sgd

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


class Tokens(nn.Module):
    """Two inputs by name, one layer called twice on (B, L, d), one on the flattened batch, dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        z = self.mix(self.drop(torch.relu(self.mix(x + shift))))
        return self.out(z.reshape(-1, 4))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Memory, Tokens]:
    path = tmp_path_factory.mktemp("queries") / "run"
    model = Tokens()
    optimizer = sgd(model, lr=0.02)
    torch.manual_seed(1)
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(5):
            recorder.annotate(sample=torch.arange(3)[:, None].expand(3, 2))
            optimizer.zero_grad()
            model(torch.randn(3, 2, 4)).square().mean().backward()
            optimizer.step()
    return dualform.open(path), model


def test_a_module_called_twice_on_tokens_is_asked_twice(tokens: tuple[Memory, Tokens]) -> None:
    memory, model = tokens
    inputs = torch.randn(7, 2, 4)
    spot = memory.attend(model, inputs)
    model.eval()
    with torch.no_grad():
        first = model.mix(inputs)
        second = model.mix(torch.relu(first))
        last = model(inputs)
    model.train()
    assert spot["mix"].leading == (14, 2)
    torch.testing.assert_close(spot["mix"].output(), torch.cat([first, second]), **CLOSE)
    assert spot["out"].leading == (14,)
    torch.testing.assert_close(spot["out"].output(), last, **CLOSE)
    totals = spot["mix"].totals(by="sample")
    assert totals.values.shape == (28, 3)
    torch.testing.assert_close(totals.values[:14].reshape(7, 2, 3), through(memory, inputs), **CLOSE)


def through(memory: Memory, inputs: Tensor) -> Tensor:
    return memory.attend(queries={"mix": inputs})["mix"].totals(by="sample").values.reshape(*inputs.shape[:-1], 3)


def generator(inputs: Tensor) -> Iterator[Any]:
    yield inputs[:3]
    yield (inputs[3:4],)
    yield {"x": inputs[4:]}


@pytest.mark.parametrize("kind", ["tensor", "tuple", "mapping", "list", "generator", "loader", "queries"])
def test_every_kind_of_input_asks_the_same(tokens: tuple[Memory, Tokens], kind: str) -> None:
    memory, model = tokens
    inputs = torch.randn(6, 2, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=4)
    asked: Any = {
        "tensor": inputs,
        "tuple": (inputs,),
        "mapping": {"x": inputs},
        "list": [inputs[:4], inputs[4:]],
        "generator": generator(inputs),
        "loader": loader,
    }
    if kind == "queries":
        found = memory.attend(queries={"mix": inputs})["mix"].attention()
        expected = memory.attend(model, inputs)["mix"].attention()[:12]
    else:
        found = memory.attend(model, asked[kind])["out"].attention()
        expected = memory.attend(model, inputs)["out"].attention()
    torch.testing.assert_close(found, expected, **CLOSE)


def test_arguments_and_keywords_reach_the_model(tokens: tuple[Memory, Tokens]) -> None:
    memory, model = tokens
    inputs, shift = torch.randn(6, 2, 4), torch.randn(4)
    expected = memory.attend(model, inputs + shift)["out"].attention()
    for asked in (
        (inputs, shift),
        {"x": inputs, "shift": shift},
        [(inputs[:1], shift), {"shift": shift, "x": inputs[1:]}],
    ):
        torch.testing.assert_close(memory.attend(model, asked)["out"].attention(), expected, **CLOSE)


def test_batches_of_different_lengths_are_joined(tokens: tuple[Memory, Tokens]) -> None:
    memory, model = tokens
    spot = memory.attend(model, [torch.randn(2, 3, 4), torch.randn(1, 5, 4)])
    assert spot["mix"].leading == (22,)  # two calls over six and five tokens
    assert spot["mix"].output().shape == (22, 4)


def test_queries_of_any_leading_shape(tokens: tuple[Memory, Tokens]) -> None:
    memory, model = tokens
    for shape in ((4,), (2, 4), (2, 3, 4), (1, 2, 3, 4)):
        queries = torch.randn(*shape)
        layer = memory.attend(queries={"out": queries})["out"]
        assert layer.leading == shape[:-1]
        torch.testing.assert_close(layer.output(), model.out(queries).detach(), **CLOSE)
    halves = torch.randn(3, 4).half()
    torch.testing.assert_close(
        memory.attend(queries={"out": halves})["out"].output(), model.out(halves.float()).detach(), **CLOSE
    )


def test_queries_that_want_a_gradient_are_answered_without_one(tokens: tuple[Memory, Tokens]) -> None:
    memory, _ = tokens
    queries = torch.randn(3, 4, requires_grad=True)
    layer = memory.attend(queries={"out": queries})["out"]
    for of in ("attention", "magnitude", "contribution"):
        totals = layer.totals(by="sample", of=of)
        assert not totals.values.requires_grad
        assert totals.to_arrow().num_rows
    assert queries.grad is None


# No trace on the model --------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("training", [True, False])
def test_the_models_modes_and_gradients_are_as_they_were(tokens: tuple[Memory, Tokens], training: bool) -> None:
    memory, model = tokens
    model.train(training)
    model.drop.train(not training)  # modes may differ inside
    model.zero_grad()
    random = torch.get_rng_state()
    first = memory.attend(model, torch.ones(2, 2, 4))["out"].attention()
    assert (model.training, model.drop.training, model.mix.training) == (training, not training, training)
    assert hooks(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random), "dropout was off"
    second = memory.attend(model, torch.ones(2, 2, 4))["out"].attention()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    model.train()


class Fails(Tokens):
    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        super().forward(x, shift)
        raise ZeroDivisionError("the user's own mistake")


def test_a_failing_model_fails_as_itself_and_is_left_clean(tokens: tuple[Memory, Tokens]) -> None:
    memory, _ = tokens
    model = Fails()
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        memory.attend(model, torch.randn(2, 2, 4))
    assert hooks(model) == 0
    assert model.training


def test_a_failing_generator_leaves_the_model_clean(tokens: tuple[Memory, Tokens]) -> None:
    memory, model = tokens

    def breaks() -> Iterator[Tensor]:
        yield torch.randn(2, 2, 4)
        raise ZeroDivisionError("no more data")

    with pytest.raises(ZeroDivisionError, match="no more data"):
        memory.attend(model, breaks())
    assert hooks(model) == 0


def test_attending_in_the_middle_of_a_recording_records_nothing(run: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    recorded(earlier, 3)
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(3):
            recorder.annotate(label=batch(step)[1])
            dualform.open(earlier).attend(model, batch(99)[0], other_model=True)["2"].top(1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            dualform.open(earlier).attend(model, batch(99)[0], other_model=True)["2"].top(1)
            optimizer.step()
    memory = dualform.open(run)
    assert memory.patterns("0").num_rows == 18
    assert memory.patterns("0")["label"].null_count == 0, "the annotation went to the training pass"
    assert memory.verify(model).passed


class Picks(nn.Module):
    """Calls only one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(5, 4))
        self.add_module("2", nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule("0")(x)
        return found


def test_a_layer_that_the_forward_pass_does_not_call_is_named(pair: Pair) -> None:
    model = Picks().double()
    with pytest.raises(QueryError, match=r"Layer '2' was not called in the forward pass"):
        pair.memory.attend(model, pair.queries("0"))
    assert hooks(model) == 0
    assert set(pair.memory.attend(model, pair.queries("0"), layers=["0"], other_model=True)) == {"0"}


def test_inputs_of_no_known_kind(pair: Pair) -> None:
    with pytest.raises(QueryError, match="Inputs are a float; expected a tensor, a tuple, a mapping, or an iterable"):
        pair.memory.attend(pair.model, 1.5)


def test_a_spotlight_lists_its_layers(pair: Pair) -> None:
    spot = pair.memory.attend(pair.model, pair.queries("0"))
    assert list(spot) == ["0", "2"]
    assert repr(spot).count("4 queries over") == 2
    assert len(spot["0"]) == 4


def test_threads_that_ask_with_one_model_get_their_own_answers(run: Path) -> None:
    model = recorded(run, 3)
    memory = dualform.open(run)
    inputs = [torch.randn(4, 5) for _ in range(2)]
    alone = [memory.attend(model, one)["0"].queries for one in inputs]
    wrong: list[object] = []

    def ask(number: int) -> None:
        for _ in range(60):
            try:
                found = memory.attend(model, inputs[number])["0"].queries
                if not torch.equal(found, alone[number]):
                    wrong.append(found.shape)
            except Exception as error:  # is looked at below
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.backends.mha.get_fastpath_enabled()
