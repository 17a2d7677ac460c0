"""Client programs: small training scripts with the structure of well-known public examples, recorded as they are.

Each test asserts all that a user of such a script relies on: recording leaves the parameters equal to the bit, `verify`
passes and names what it does not cover, annotations are the true ones or null, and warnings are true and few.
"""

import json
import math
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import dualform
from dualform.cli import app
from dualform.errors import AnnotationError, RefusedError, UnknownLayerError
from helpers.loops import gradient_of

B, CLASSES = 6, 4


class Silent:
    """Stands for a recorder where a script runs without recording."""

    def annotate(self, **columns: Any) -> None:
        pass


Script = Callable[[Any], None]  # trains; takes a recorder


def compare(
    make: Callable[[], tuple[nn.Module, Any, Script]], run: Path, *, expect: tuple[str, ...] = (), **options: Any
) -> tuple[dualform.Memory, nn.Module]:
    """Run a script without and with recording; its parameters and buffers must be equal, its warnings the expected."""
    plain, _, script = make()
    script(Silent())
    model, optimizer, script = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dualform.record(model, optimizer, run, **options) as recorder:
            script(recorder)
    told = [str(warning.message) for warning in caught]
    assert len(told) == len(expect), told
    assert all(any(re.search(pattern, text) for text in told) for pattern in expect), told
    assert {warning.filename for warning in caught} <= {__file__}, "warnings point at the script"
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    memory = dualform.open(run)
    assert memory.verify(model).passed
    return memory, model


def column(memory: dualform.Memory, layer: str, name: str = "sample") -> list[Any]:
    table = memory.patterns(layer)
    values: list[Any] = table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
    return values


def spread(samples: list[Tensor], positions: int = 1, *, last: bool = False) -> list[int]:
    """Return the samples of every pattern: each row's positions together, or with `last` each position's rows."""
    return [
        int(sample)
        for batch in samples
        for sample in (batch.repeat(positions) if last else batch.repeat_interleave(positions))
    ]


def images(count: int, seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return images (count, 1, size, size) of a few classes that are easy to tell, and their labels."""
    generator = torch.Generator().manual_seed(7)
    kinds = torch.rand(CLASSES, 1, size, size, generator=generator)
    generator.manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return kinds[labels] + 0.1 * torch.randn(count, 1, size, size, generator=generator), labels


# Image classifiers ---------------------------------------------------------------------------------------------------


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.first, self.second = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(54, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2))
        x = self.second(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def classifier_script(net: Callable[[], nn.Module], order: list[Tensor]) -> tuple[nn.Module, Any, Script]:
    """Two epochs of Adadelta with a schedule, a test after each."""
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    x, y = images(60)

    def script(recorder: Any) -> None:
        for _ in range(2):
            model.train()
            for batch in order:
                recorder.annotate(sample=batch, label=y[batch])
                optimizer.zero_grad()
                F.nll_loss(model(x[batch]), y[batch]).backward()
                optimizer.step()
            accuracy(model, *images(20, seed=5))
            scheduler.step()

    return model, optimizer, script


def mask_by_command(run: Path, condition: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        app, ["mask", str(run), "--without", condition, "--json", "--model", "client_factories:net"]
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


ORDER = list(torch.randperm(60, generator=torch.Generator().manual_seed(3)).split(B))


@pytest.mark.parametrize("layers", [None, ["fc*"]], ids=["every layer", "two of four"])
def test_a_dropout_network_is_masked_by_command_as_it_was_trained(
    run: Path, monkeypatch: pytest.MonkeyPatch, layers: Any
) -> None:
    """The factory makes another random network in training mode each time."""
    factories = types.ModuleType("client_factories")
    factories.net = DropoutNet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "client_factories", factories)
    memory, model = compare(
        lambda: classifier_script(DropoutNet, ORDER),
        run,
        layers=layers,
        factory="client_factories:net",
        expect=() if layers is None else ("4 trained parameters .* are not recorded: 'conv.weight'",),
    )
    for layer, positions in (("conv", 36), ("norm", 36), ("fc1", 1), ("fc2", 1)):
        if layer in memory.layers:
            assert column(memory, layer) == spread(ORDER * 2, positions), layer
    x, y = images(50, seed=9)
    memory.add_tests(x, y)
    truth = accuracy(model, x, y)
    assert truth > 0.5, "the network has learnt something"
    nothing = mask_by_command(run, "step < 0")
    assert nothing["changed"] == 0
    assert nothing["accuracy_before"] == nothing["accuracy_after"] == pytest.approx(truth)
    masked = memory.without(label=[0, 1]).apply(model)
    assert mask_by_command(run, "label in (0, 1)")["accuracy_after"] == pytest.approx(accuracy(masked, x, y))


class RowReader(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 10, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(10), nn.Dropout(0.25)
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x.reshape(-1, 8, 8))
        return F.log_softmax(self.fc(self.drop(self.norm(output[:, -1]))), dim=1)


def test_a_recurrent_reader_of_images(run: Path) -> None:
    memory, model = compare(lambda: classifier_script(RowReader, ORDER), run)
    assert column(memory, "rnn.l0") == spread(ORDER * 2, 8, last=True)
    assert column(memory, "norm") == column(memory, "fc") == spread(ORDER * 2)
    layer = memory.attend(model, images(3)[0])["fc"]
    model.eval()
    torch.testing.assert_close(F.log_softmax(layer.output(), 1), model(images(3)[0]), rtol=0, atol=1e-5)


class Pairs(nn.Module):
    """Two images through one shared network whose activations are in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 5, 3, 2), nn.BatchNorm2d(5), nn.ReLU(inplace=True))
        self.head = nn.Sequential(nn.Linear(90, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        both = torch.cat([self.body(one).flatten(1), self.body(other).flatten(1)], 1)
        return torch.sigmoid(self.head(both))


def test_a_siamese_network_gives_both_images_to_their_pair(run: Path) -> None:
    x, y = images(60)

    def make() -> tuple[nn.Module, Any, Script]:
        torch.manual_seed(1)
        model = Pairs()
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

        def script(recorder: Any) -> None:
            for batch in ORDER:
                other = 59 - batch
                recorder.annotate(sample=batch)
                optimizer.zero_grad()
                same = (y[batch] == y[other]).float()
                F.binary_cross_entropy(model(x[batch], x[other]).squeeze(), same).backward()
                optimizer.step()

        return model, optimizer, script

    memory, _ = compare(make, run)
    assert column(memory, "body.0") == [s for batch in ORDER for s in spread([batch, batch], 9)]
    assert column(memory, "head.0") == spread(ORDER)


# Word language models ------------------------------------------------------------------------------------------------

WORDS = 11


class WordModel(nn.Module):
    """Time first, as torch's recurrent layers are by default."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, 8)
        self.rnn = nn.GRU(8, 8, 2, dropout=0.2)
        self.decoder = nn.Linear(8, WORDS)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), dim=1), hidden


def word_script(
    *, by_hand: bool = False, tied: bool = False, time: int = 5, save: Path | None = None
) -> tuple[nn.Module, Any, Script]:
    torch.manual_seed(1)
    model = WordModel(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    text = torch.randint(WORDS, (12 * time + 1, B), generator=torch.Generator().manual_seed(2))

    def script(recorder: Any) -> None:
        hidden = torch.zeros(2, B, 8)
        for start in range(0, len(text) - 1, time):
            data, target = text[start : start + time], text[start + 1 : start + 1 + time].reshape(-1)
            places = torch.arange(B)[:, None] * len(text) + start + torch.arange(time)
            recorder.annotate(sample=torch.arange(100, 100 + B), place=places, token=data.t())
            model.zero_grad()
            output, hidden = model(data, hidden.detach())
            F.nll_loss(output, target).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            if by_hand:
                for parameter in model.parameters():
                    parameter.data.add_(gradient_of(parameter), alpha=-1.0)
            else:
                optimizer.step()
            if save is not None:
                torch.save(model, save)

    return model, optimizer, script


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("time", [5, B], ids=["other lengths", "as many words as sequences"])
def test_a_word_model_with_time_first(run: Path, tied: bool, time: int) -> None:
    memory, _ = compare(lambda: word_script(tied=tied, time=time), run, batch_axis=1)
    length = 12 * time + 1
    text = torch.randint(WORDS, (length, B), generator=torch.Generator().manual_seed(2)).t().reshape(-1)
    for layer in memory.layers:
        rows = memory.patterns(layer).to_pydict()
        assert rows["sample"] == [100 + row for row in rows["row"]], layer
        assert rows["sample"] == [100 + place // length for place in rows["place"]], layer
        assert rows["token"] == [int(text[place]) for place in rows["place"]], layer
        assert [place % length % time for place in rows["place"]] == rows["position"], layer


def test_a_word_model_whose_batch_axis_is_forgotten_is_refused(run: Path) -> None:
    model, optimizer, script = word_script(time=B)
    with (
        pytest.raises(AnnotationError, match=r"Pass batch_axis=1 to dualform\.record"),
        dualform.record(model, optimizer, run) as recorder,
    ):
        script(recorder)


def test_a_word_model_whose_columns_are_laid_out_like_its_input_is_refused(run: Path) -> None:
    """With as many words as sequences the sizes of a transposed column are right."""
    model, optimizer, _ = word_script()
    words = torch.randint(WORDS, (B, B), generator=torch.Generator().manual_seed(2))
    with dualform.record(model, optimizer, run, batch_axis=1) as recorder:
        recorder.annotate(sample=torch.arange(B), token=words)
        with pytest.raises(AnnotationError, match=r"'token' is laid out as \(positions, rows\)"):
            model(words, torch.zeros(2, B, 8))


def test_a_word_model_that_goes_on_gets_no_transposed_columns(run: Path) -> None:
    model, optimizer, _ = word_script()
    words = torch.randint(WORDS, (B, B), generator=torch.Generator().manual_seed(2))

    def train() -> None:
        with dualform.record(model, optimizer, run, batch_axis=1, on_failure="detach") as recorder:
            for _ in range(3):
                recorder.annotate(sample=torch.arange(B), token=words)
                optimizer.zero_grad()
                model(words, torch.zeros(2, B, 8))[0].sum().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match=r"'token' is laid out as \(positions, rows\)"):
        train()
    memory = dualform.open(run)
    assert memory.step == 3
    for layer in memory.layers:
        assert set(column(memory, layer, "token")) == {None}, layer


def test_a_word_model_that_is_trained_by_hand_is_said_to_be_unrecorded(run: Path) -> None:
    """A gradient step written with p.data, beside an SGD that never steps."""
    model, optimizer, script = word_script(by_hand=True)
    with (
        pytest.warns(UserWarning, match="10 backwards in a row were cleared without a step"),
        pytest.warns(UserWarning, match="No optimizer step was recorded. Yet Parameters 'encoder.weight'"),
        dualform.record(model, optimizer, run, batch_axis=1) as recorder,
    ):
        script(recorder)
    memory = dualform.open(run)
    assert memory.verify().verdict == "files whole; nothing to rebuild: no steps"
    assert not memory.verify(model).passed


def test_a_model_saved_whole_while_it_is_recorded_holds_nothing_of_ours(run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "model.pt"
    _, model = compare(lambda: word_script(save=whole), run, batch_axis=1)
    assert b"dualform" not in whole.read_bytes()
    with torch.serialization.safe_globals([WordModel, nn.Dropout, nn.Embedding, nn.GRU, nn.Linear]):
        loaded = torch.load(whole)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


# Two networks, and many calls to a step ------------------------------------------------------------------------------


def adversaries() -> tuple[nn.ModuleDict, list[torch.optim.Adam], Script]:
    torch.manual_seed(1)
    make = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 4), nn.BatchNorm2d(4), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 4, 2, 1), nn.Tanh()
    )
    judge = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten(),
        nn.Linear(20, 1), nn.Sigmoid(),
    )  # fmt: skip
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_make = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.999))
    x, _ = images(60)

    def script(recorder: Any) -> None:
        for step, batch in enumerate(ORDER[:5]):
            judge.zero_grad()
            recorder.annotate(sample=batch, kind="real")
            F.binary_cross_entropy(judge(x[batch]).view(-1), torch.ones(B)).backward()
            recorder.annotate(sample=1000 * (step + 1) + torch.arange(B), kind="noise")
            fake = make(torch.randn(B, 3, 1, 1))
            recorder.annotate(sample=-1, kind="fake")
            F.binary_cross_entropy(judge(fake.detach()).view(-1), torch.zeros(B)).backward()
            of_judge.step()
            make.zero_grad()
            F.binary_cross_entropy(judge(fake).view(-1), torch.ones(B)).backward()
            of_make.step()

    return nn.ModuleDict({"make": make, "judge": judge}), [of_judge, of_make], script


def test_adversarial_networks(run: Path) -> None:
    memory, model = compare(adversaries, run)
    check = memory.verify(model)
    assert not check.uncovered
    assert check.passed
    noise = [1000 * step + torch.arange(B) for step in range(1, 6)]
    assert column(memory, "make.1") == spread(noise, 16)
    judged = [part for batch in ORDER[:5] for part in (batch, torch.full((B,), -1))]
    assert column(memory, "judge.0") == spread(judged, 16)
    assert column(memory, "judge.5", "kind") == (["real"] * B + ["fake"] * B) * 5


def test_a_policy_gradient_keeps_every_call_of_an_episode(run: Path) -> None:
    lengths = [3, 7, 5]

    def make() -> tuple[nn.Module, Any, Script]:
        torch.manual_seed(1)
        policy = nn.Sequential(nn.Linear(4, 12), nn.Dropout(0.6), nn.ReLU(), nn.Linear(12, 2), nn.Softmax(dim=1))
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

        def script(recorder: Any) -> None:
            for episode, length in enumerate(lengths):
                kept = []
                for time in range(length):
                    recorder.annotate(sample=[10 * episode + time])
                    choice = torch.distributions.Categorical(policy(torch.randn(1, 4)))
                    kept.append(choice.log_prob(choice.sample()) * (length - time))
                optimizer.zero_grad()
                (-torch.cat(kept).sum()).backward()
                optimizer.step()

        return policy, optimizer, script

    memory, _ = compare(make, run)
    calls = [10 * episode + time for episode, length in enumerate(lengths) for time in range(length)]
    assert column(memory, "0") == column(memory, "3") == calls


# Graphs, closures and layers that train themselves -------------------------------------------------------------------


class GraphLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return torch.sparse.mm(graph, self.linear(x))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = GraphLayer(9, 6), GraphLayer(6, CLASSES), nn.Dropout(0.5)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return F.log_softmax(self.second(self.drop(F.relu(self.first(x, graph))), graph), dim=1)


def graph_script(*, sparse: bool) -> tuple[nn.Module, Any, Script]:
    torch.manual_seed(1)
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    x = (torch.rand(12, 9) > 0.6).float()
    graph = (torch.eye(12) + (torch.rand(12, 12) > 0.8).float()).to_sparse()
    labels = torch.randint(CLASSES, (12,))

    def script(recorder: Any) -> None:
        for _ in range(5):
            recorder.annotate(sample=torch.arange(12))
            optimizer.zero_grad()
            F.nll_loss(model(x.to_sparse() if sparse else x, graph)[:8], labels[:8]).backward()
            optimizer.step()

    return model, optimizer, script


def test_a_graph_network_with_dense_nodes_says_that_its_rows_are_assumed(run: Path) -> None:
    memory, _ = compare(lambda: graph_script(sparse=False), run, expect=("'first.linear', 'second.linear' .*sparse",))
    assert column(memory, "first.linear") == column(memory, "second.linear") == list(range(12)) * 5
    assert memory.rows["first.linear"].outcome == "assumed"


def test_a_graph_network_with_sparse_nodes_is_refused_or_goes_on_unrecorded(run: Path, tmp_path: Path) -> None:
    model, optimizer, script = graph_script(sparse=True)
    with (
        pytest.raises(RefusedError, match=r"'first\.linear' got a sparse"),
        dualform.record(model, optimizer, tmp_path / "refused") as recorder,
    ):
        script(recorder)
    plain, _, script = graph_script(sparse=True)
    script(Silent())
    model, optimizer, script = graph_script(sparse=True)
    with (
        pytest.warns(UserWarning, match="Recording stopped at step 0 and training goes on"),
        dualform.record(model, optimizer, run, on_failure="detach") as recorder,
    ):
        script(recorder)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


class Waves(nn.Module):
    """Cells that are called once for every point of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.linear = nn.LSTMCell(1, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(len(x), 7), x.new_zeros(len(x), 7)
        outputs = []
        for point in x.split(1, dim=1):
            h, c = self.cell(point, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, 1)


def wave_script() -> tuple[nn.Module, Any, Script]:
    torch.manual_seed(1)
    model = Waves().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    data = torch.sin(torch.arange(9) / 2 + torch.arange(B)[:, None]).double()

    def script(recorder: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            recorder.annotate(sample=torch.arange(100, 100 + B))
            loss = F.mse_loss(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    return model, optimizer, script


def test_a_closure_that_is_evaluated_often_keeps_its_last_patterns_and_says_so(run: Path, tmp_path: Path) -> None:
    model, optimizer, _ = wave_script()
    with pytest.raises(RefusedError, match="LBFGS is not an optimizer whose coefficients are known"):
        dualform.record(model, optimizer, tmp_path / "exact")
    expect = r"LBFGS evaluated its closure \d+ times in one step; only the patterns of the last"
    memory, _ = compare(wave_script, run, layers={"*": "keys"}, expect=(expect,))
    assert "nothing to compare: keys only" in memory.verify().verdict
    assert column(memory, "linear") == column(memory, "cell") == spread([torch.arange(100, 100 + B)] * 3, 8, last=True)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x / (x.norm(2, 1, keepdim=True) + 1e-4) @ self.weight.T + self.bias)


class Greedy(nn.Module):
    """A block that trains itself: `train` takes good and bad inputs, not a mode."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    def train(self, good: Tensor, bad: Tensor, recorder: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        for _ in range(4):
            recorder.annotate(sample=torch.arange(B), kind="good")
            of_good = self(good).pow(2).mean(1)
            recorder.annotate(sample=torch.arange(B), kind="bad")
            of_bad = self(bad).pow(2).mean(1)
            loss = F.softplus(torch.cat([2 - of_good, of_bad - 2])).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self(good).detach(), self(bad).detach()


class GreedyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Greedy(10, 8), Greedy(8, 6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def train(self, good: Tensor, bad: Tensor, recorder: Any) -> None:  # type: ignore[override]
        for block in self.blocks:
            assert isinstance(block, Greedy)
            good, bad = block.train(good, bad, recorder)


def greedy_script() -> tuple[nn.Module, Any, Script]:
    model = GreedyNet()
    good, bad = torch.randn(2, B, 10, generator=torch.Generator().manual_seed(4))
    return model, [block.optimizer for block in model.blocks], lambda recorder: model.train(good, bad, recorder)


def test_blocks_that_train_themselves_and_call_it_train(run: Path) -> None:
    memory, model = compare(
        greedy_script, run, expect=("annotate.. came after a forward pass without annotations and without a backward",)
    )
    for layer in ("blocks.0.linear", "blocks.1.linear"):
        assert column(memory, layer) == list(range(B)) * 8
        assert column(memory, layer, "kind") == (["good"] * B + ["bad"] * B) * 4
        assert memory.rows[layer].outcome == "proved"
    queries = torch.randn(3, 10)
    expected = model(queries)
    assert memory.attend(model, queries).layers
    assert torch.equal(memory.where("step >= 0").apply(model)(queries).argmax(1), expected.argmax(1))


def test_layers_that_cannot_be_recorded_are_told_apart(run: Path) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(3, 3)]
            self.scale = nn.Parameter(torch.ones(3))

    for model, text in ((OwnLinear(3, 3), "a Linear with a forward of its own"), (Listed(), "use nn.ModuleList")):
        with pytest.raises(UnknownLayerError, match=text):
            dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run)


# Transformers --------------------------------------------------------------------------------------------------------


class Patches(nn.Module):
    """Feeds (batch, patches, width) to attention that expects (patches, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(x), 4, 16)
        hidden = torch.cat([self.token.expand(len(x), 1, 8), self.project(patches)], 1)
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed)[0]
        return F.log_softmax(self.head(hidden.mean(1)), dim=1)


def test_attention_over_the_wrong_axis_gets_no_wrong_samples(run: Path) -> None:
    """Five patches and batches of five: by their sizes rows and patches cannot be told apart."""
    order = [batch[:5] for batch in ORDER]
    memory, model = compare(
        lambda: classifier_script(Patches, order),
        run,
        expect=("1 trained parameters? .* not recorded: 'token'",),
    )
    for layer in memory.layers:
        positions = memory.patterns(layer).num_rows // (2 * len(order) * 5)
        known = column(memory, layer)
        right = spread(order * 2, positions)
        assert all(found in (None, sample) for found, sample in zip(known, right, strict=True)), layer
    assert column(memory, "project") == spread(order * 2, 4)
    assert dict(memory.verify(model).uncovered) == {"token": 8}


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), self.weight)


class CharModel(nn.Module):
    """Tied weights, a table of positions that is looked up once, and a head at the last position without targets."""

    def __init__(self, length: int = B) -> None:
        super().__init__()
        self.block_size = length
        self.wte, self.wpe = nn.Embedding(WORDS, 8), nn.Embedding(length, 8)
        self.norm, self.attend = OwnNorm(), nn.Linear(8, 24, bias=False)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if tokens.shape[1] > self.block_size:
            raise ValueError(f"{tokens.shape[1]} tokens are more than {self.block_size}")
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        q, k, v = self.attend(self.norm(x)).split(8, dim=2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1))


LETTERS = "abcdefghij "
TEXT = torch.randint(WORDS, (200,), generator=torch.Generator().manual_seed(6))


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(LETTERS[int(token)] for token in tokens)


def char_script() -> tuple[nn.Module, Any, Script]:
    """Two micro-batches to a step, clipping, and an estimate of the loss in between."""
    torch.manual_seed(1)
    model = CharModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        places = torch.randint(len(TEXT) - B - 1, (B, 1)) + torch.arange(B)
        return TEXT[places], TEXT[places + 1], places

    def script(recorder: Any) -> None:
        for step in range(6):
            if step % 3 == 0:
                model.eval()
                with torch.no_grad():
                    model(*batch()[:2])
                model.train()
            for _ in range(2):
                x, y, places = batch()
                recorder.annotate(sample=places[:, 0], place=places, token=x)
                (model(x, y)[1] / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return model, optimizer, script


def test_a_character_model_with_as_many_sequences_as_positions(run: Path) -> None:
    memory, model = compare(
        char_script,
        run,
        expect=(r"left out \(null\) in layer 'wpe' \(its patterns belong to no row",),
    )
    assert column(memory, "wpe") == column(memory, "wpe", "place") == [None] * 6 * 2 * B
    for layer in ("wte", "attend", "head"):
        rows = memory.patterns(layer).to_pydict()
        assert [int(TEXT[place]) for place in rows["place"]] == rows["token"], layer
        assert [a + b for a, b in zip(rows["sample"], rows["position"], strict=True)] == rows["place"], layer
    assert memory.without(sample=3).unknown() == {"wpe": 6 * 2 * B}, "a mask says which patterns it cannot decide"

    with pytest.raises(dualform.DualformError, match="does not fit what was recorded"):
        memory.add_corpus(dualform.Corpus.from_tokens(TEXT.roll(5).numpy(), vocabulary=LETTERS, unit="chars"))
    memory.add_corpus(dualform.Corpus.from_tokens(TEXT.numpy(), vocabulary=LETTERS, unit="chars"))
    answer = memory.attend_text(model, "abc def ghij", tokenizer=Letters())
    place = answer["head"].by_pattern[0].attended[0].place
    assert 0 <= place < len(TEXT)

    x, y = TEXT[: 2 * B].view(2, B), TEXT[1 : 2 * B + 1].view(2, B)
    effects = memory.attend(model, (x, y), targets=y, quantity="loss").effects()
    assert all(math.isfinite(value) for value in effects.values.flatten().tolist())
