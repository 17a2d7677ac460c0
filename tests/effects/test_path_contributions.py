"""Path contributions against brute force: shares by retaking every step by hand, integrals by many points."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.path import PathContributions
from dualform.effects import path_contributions
from dualform.errors import QueryError, SelectionError
from dualform.store import kept_state

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}
STEPS = 12


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 5, generator=generator, dtype=torch.float64), torch.arange(24) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch_of(step: int) -> Tensor:
    return torch.arange(8) * 3 % 24 + step % 3 if step % 2 else torch.arange(8) + 8 * (step % 3)


def train(run: Path, optimizer: str, *, flipped: int | None = None, model: nn.Module | None = None) -> nn.Module:
    x, y = data()
    model = network() if model is None else model
    trained = OPTIMIZERS[optimizer](model.parameters())
    with dualform.record(model, trained, run) as recorder:
        for step in range(STEPS):
            rows = batch_of(step)
            recorder.annotate(sample=rows, label=y[rows])
            losses = functional.cross_entropy(model(x[rows]), y[rows], reduction="none")
            if flipped is not None:
                losses = torch.where(rows == flipped, -losses, losses)
            trained.zero_grad()
            losses.mean().backward()
            trained.step()
    return model


Move = Callable[[Tensor, Tensor, Tensor | None, Any], tuple[Tensor, Tensor]]


def step_of(optimizer: str, trained: torch.optim.Optimizer) -> Move:
    """Return the linear map of the step that was just taken: a share and its average, its gradient, and the state."""
    settings = trained.param_groups[0]

    def adamw(share: Tensor, average: Tensor, g: Tensor | None, state: Any) -> tuple[Tensor, Tensor]:
        average = 0.9 * average + (0 if g is None else 0.1 * g)
        t = float(state["step"])
        size = settings["lr"] / (1 - 0.9**t) / ((state["exp_avg_sq"] / (1 - 0.999**t)).sqrt() + 1e-8)
        return (1 - settings["lr"] * settings["weight_decay"]) * share - size * average, average

    def sgd(share: Tensor, average: Tensor, g: Tensor | None, _: Any) -> tuple[Tensor, Tensor]:
        mu = settings["momentum"]
        d = settings["weight_decay"] * share + (0 if g is None else g)
        average = mu * average + d
        moved = d + mu * average if settings["nesterov"] else average if mu else d
        return share - settings["lr"] * moved, average

    return adamw if optimizer == "adamw" else sgd


def brute_force(optimizer: str, groups: Tensor, queries: Tensor, unit: int, *, points: int = 12) -> dict[str, Tensor]:
    """Return start, output and each group's part: every step's map by hand, and integrals by many points."""
    x, y = data()
    model = network()
    parameters = list(model.parameters())
    trained = OPTIMIZERS[optimizer](parameters)
    count = int(groups.max()) + 1
    shares = [[torch.zeros_like(p) for p in parameters] for _ in range(count)]
    averages = [[torch.zeros_like(p) for p in parameters] for _ in range(count)]
    starts, start_averages = [p.detach().clone() for p in parameters], [torch.zeros_like(p) for p in parameters]

    def output(weights: list[Tensor]) -> Tensor:
        named = dict(zip([n for n, _ in model.named_parameters()], weights, strict=True))
        return torch.func.functional_call(model, named, (queries,))[:, unit]

    before = output([p.detach() for p in parameters]).detach()
    parts = torch.zeros(len(queries), count, dtype=torch.float64)
    of_start = torch.zeros(len(queries), dtype=torch.float64)
    for step in range(STEPS):
        rows = batch_of(step)
        gradients = []
        for group in range(count):
            mine = groups[rows] == group
            losses = functional.cross_entropy(model(x[rows]), y[rows], reduction="none")
            total = (losses * mine).sum() / len(rows)
            gradients.append([g.detach() for g in torch.autograd.grad(total, parameters)])
        whole = [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]
        old = [p.detach().clone() for p in parameters]
        for p, g in zip(parameters, whole, strict=True):
            p.grad = g.clone()
        trained.step()
        new = [p.detach().clone() for p in parameters]
        move = step_of(optimizer, trained)
        states = [trained.state.get(p) for p in parameters]
        deltas = []
        for group in range(count):
            moved = []
            for i in range(len(parameters)):
                after, averages[group][i] = move(shares[group][i], averages[group][i], gradients[group][i], states[i])
                moved.append(after - shares[group][i])
                shares[group][i] = after
            deltas.append(moved)
        start_delta = []
        for i in range(len(parameters)):
            after, start_averages[i] = move(starts[i], start_averages[i], None, states[i])
            start_delta.append(after - starts[i])
            starts[i] = after
        nodes, weights = np.polynomial.legendre.leggauss(points)
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            at = [torch.lerp(a, b, float(node)).requires_grad_() for a, b in zip(old, new, strict=True)]
            for query, one in enumerate(output(at)):
                gradient = torch.autograd.grad(one, at, retain_graph=True)
                for group, delta in [*enumerate(deltas), (-1, start_delta)]:
                    found = sum(float((g * d).sum()) for g, d in zip(gradient, delta, strict=True)) * float(weight)
                    if group >= 0:
                        parts[query, group] += found
                    else:
                        of_start[query] += found
    return {"start": before + of_start, "parts": parts, "output": output([p.detach() for p in parameters]).detach()}


def ask(run: Path, model: nn.Module, by: Any, **options: Any) -> PathContributions:
    x, _ = data()
    memory = dualform.open(run)
    spotlight = memory.attend(model, x[:4] * 0.9, quantity=lambda outputs, _: outputs[:, 1])
    return spotlight.path_contributions(by=by, **options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("by", ["label", "sample"])
def test_parts_equal_brute_force(tmp_path: Path, optimizer: str, by: str) -> None:
    model = train(tmp_path / "run", optimizer)
    x, y = data()
    wanted = brute_force(optimizer, y if by == "label" else torch.arange(24), x[:4] * 0.9, 1)
    torch.testing.assert_close(wanted["start"] + wanted["parts"].sum(1), wanted["output"], rtol=0, atol=1e-9)
    found = ask(tmp_path / "run", model, by, tolerance=1e-9)
    torch.testing.assert_close(found.values, wanted["parts"], rtol=0, atol=1e-8)
    torch.testing.assert_close(found.start, wanted["start"], rtol=0, atol=1e-8)
    torch.testing.assert_close(found.output, wanted["output"], rtol=0, atol=1e-10)
    assert float(found.residual.abs().max()) < 1e-8
    assert float(found.rest.abs().max()) < 1e-10
    torch.testing.assert_close(found.by_layer.sum(2), found.values)


def test_a_coarse_path_says_how_far_its_parts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_contributions, "FEWEST_SEGMENTS", 1)
    model = train(tmp_path / "run", "sgd")
    exact = ask(tmp_path / "run", model, "label", tolerance=1e-9)
    coarse = ask(tmp_path / "run", model, "label", tolerance=0.9)
    assert coarse.evaluations < exact.evaluations
    far = float((coarse.values - exact.values).abs().sum() / exact.values.abs().sum())
    assert 0.2 * coarse.parts_error < far < 5 * coarse.parts_error
    whole = coarse.start + coarse.values.sum(1) + coarse.state + coarse.rest + coarse.residual
    torch.testing.assert_close(whole, coarse.output)


def test_bins_of_steps_sum_to_the_parts(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "adamw")
    found = ask(tmp_path / "run", model, "label", over=dualform.bins("step", width=5))
    assert found.by_step is not None
    assert list(found.steps) == [0, 5, 10]
    torch.testing.assert_close(found.by_step.sum(2), found.values)
    early = dualform.open(tmp_path / "run").at(step=5)
    x, _ = data()
    with pytest.warns(UserWarning, match="is not the recorded one"):
        spotlight = early.attend(model, x[:4] * 0.9, quantity=lambda outputs, _: outputs[:, 1])
    torch.testing.assert_close(
        spotlight.path_contributions(by="label").values, found.by_step[:, :, 0], rtol=1e-2, atol=1e-3
    )


def test_a_reference_is_subtracted(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "sgd")
    memory = dualform.open(tmp_path / "run")
    x, y = data()
    spotlight = memory.attend(model, x[:3], targets=y[:3], quantity="logit")
    found = spotlight.path_contributions(by="label", against=x[10:14], tolerance=1e-6)
    alone = spotlight.path_contributions(by="label", tolerance=1e-6)
    for i in range(3):
        others = memory.attend(model, x[10:14], targets=y[i].expand(4), quantity="logit")
        reference = others.path_contributions(by="label", tolerance=1e-6)
        torch.testing.assert_close(found.values[i], alone.values[i] - reference.values.mean(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(found.output[i], alone.output[i] - reference.output.mean(), rtol=0, atol=1e-9)


def test_a_contrast_is_a_difference_of_logits(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "plain")
    memory = dualform.open(tmp_path / "run")
    x, _ = data()
    found = memory.attend(model, x[:3], quantity=dualform.contrast(2, 0)).path_contributions(by="label", tolerance=1e-6)
    one, other = (
        memory.attend(model, x[:3], targets=torch.full((3,), k), quantity="logit").path_contributions(
            by="label", tolerance=1e-6
        )
        for k in (2, 0)
    )
    torch.testing.assert_close(found.values, one.values - other.values, rtol=0, atol=1e-5)
    assert found.quantity == "logit of 2 rather than 0"
    with pytest.raises(QueryError, match="names a class that the model does not have"):
        memory.attend(model, x[:3], quantity=dualform.contrast(3, 0))


def test_a_flipped_sample_moves_its_own_part(tmp_path: Path) -> None:
    """One sample's loss is turned round in a training that is otherwise the same, for one late step."""
    last = STEPS - 1
    rows = batch_of(last)
    chosen = int(rows[2])
    x, y = data()

    def trained(run: Path, *, flip: bool) -> nn.Module:
        model = network()
        optimizer = OPTIMIZERS["plain"](model.parameters())
        with dualform.record(model, optimizer, run) as recorder:
            for step in range(STEPS):
                mine = batch_of(step)
                recorder.annotate(sample=mine)
                losses = functional.cross_entropy(model(x[mine]), y[mine], reduction="none")
                if flip and step == last:
                    losses = torch.where(mine == chosen, -losses, losses)
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
        return model

    plain, flipped = (trained(tmp_path / str(flip), flip=flip) for flip in (False, True))
    before, after = (ask(tmp_path / str(flip), m, "sample") for flip, m in ((False, plain), (True, flipped)))
    moved = (after.values - before.values).abs().amax(0)
    at = before.groups.index(chosen)
    others = torch.cat([moved[:at], moved[at + 1 :]])
    assert float(moved[at]) > 20 * float(others.max())


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.conv(x.reshape(-1, 1, 5, 1).expand(-1, 1, 5, 5)))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x[..., None])[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tokens((x * 2).long().clamp(-3, 3) + 3))
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("network_type", [BatchNormed, Recurrent, Attending])
def test_parts_are_complete_in_every_layer_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network_type: Callable[[], nn.Module]
) -> None:
    monkeypatch.setattr(path_contributions, "FEWEST_SEGMENTS", 1)
    torch.manual_seed(0)
    model = network_type().double()
    train(tmp_path / "run", "adamw", model=model)
    found = ask(tmp_path / "run", model, "label")
    exact = ask(tmp_path / "run", model, "label", tolerance=1e-6)  # every step, at four points and more
    far = float((found.values - exact.values).abs().sum() / exact.values.abs().sum())
    assert found.evaluations < exact.evaluations
    assert far < 0.02
    assert found.residual_error < 0.01
    assert found.parts_error < 0.02
    assert bool(found.state.abs().sum() > 0) == (network_type is BatchNormed)
    whole = found.start + found.values.sum(1) + found.state + found.rest + found.residual
    torch.testing.assert_close(whole, found.output)


@pytest.mark.filterwarnings("ignore:.*joined SGD after the recording began:UserWarning")
def test_a_layer_that_is_trained_from_some_step_on_is_not_recorded_and_counts_as_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data()
    model = network()
    assert isinstance(model, nn.Sequential)
    begun = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(STEPS):
            if step == 5:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.3})
            rows = batch_of(step)
            recorder.annotate(label=y[rows])
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    outcome = dualform.open(tmp_path / "run").verify(model)
    assert outcome.uncovered == {"0.weight": 30, "0.bias": 6}
    assert "not recorded: 2 parameters" in str(outcome)
    found = ask(tmp_path / "run", model, "label")
    before = torch.func.functional_call(model, begun, (x[:4] * 0.9,))[:, 1]
    torch.testing.assert_close(found.start, before.detach(), rtol=0, atol=1e-12)
    assert float(found.state.abs().max()) > 0.01
    whole = found.start + found.values.sum(1) + found.state + found.rest + found.residual
    torch.testing.assert_close(whole, found.output)

    monkeypatch.setattr(kept_state, "FROZEN", "nowhere")  # as where it was too large to be kept
    with pytest.warns(UserWarning, match=r"does not keep '0\.bias' .* as it was before the first step"):
        ask(tmp_path / "run", model, "label", tolerance=0.03)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "plain")
    memory = dualform.open(tmp_path / "run")
    x, _ = data()
    with pytest.raises(QueryError, match="Path contributions are those to a quantity"):
        memory.attend(model, x[:2]).path_contributions(by="label")
    with pytest.raises(SelectionError, match="A masked view is no training"):
        memory.without(label=1).attend(model, x[:2], quantity="loss").path_contributions(by="label")
    spotlight = memory.attend(model, x[:2], quantity="loss")
    with pytest.raises(SelectionError, match="expected dualform"):
        spotlight.path_contributions(by="label", over=dualform.bins("sample", width=2))
    with pytest.raises(QueryError, match="tolerance is 2"):
        spotlight.path_contributions(by="label", tolerance=2)
    with pytest.raises(QueryError, match="against is empty"):
        spotlight.path_contributions(by="label", against=x[:0])


def test_the_answer_as_table_text_and_picture(tmp_path: Path) -> None:
    model = train(tmp_path / "run", "plain")
    found = ask(tmp_path / "run", model, "label")
    table = found.to_arrow()
    assert table.num_rows == 4 * (3 + 4)
    assert "It is no prediction" in repr(found)
    figure = found.waterfall(1)
    bars = list(figure.axes[0].patches)
    assert len(bars) == 3 + 5  # groups; start, state, rest, residual, output
    heights = [bar.get_width() for bar in bars]
    assert sum(heights[:-1]) == pytest.approx(float(found.output[1]), abs=1e-9)
