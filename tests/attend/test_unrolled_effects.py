"""Unrolled effects are the derivative of the trained model by each sample's weight, as other trainings measure it."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend import unrolled_effects
from dualform.attend.answers import Effects
from dualform.attend.spotlight import Spotlight
from dualform.effects import unrolled as unrolled_steps
from dualform.effects.unrolled import Adjoint
from dualform.engine.walk_back import GroupUpdate, RetracedStep
from dualform.errors import QueryError, SelectionError
from dualform.recording.keep import Patterns, Steps
from dualform.replaying.restartable import Restartable
from dualform.replaying.training import record_training
from dualform.store.memory_blobs import MemoryBlobs

SAMPLES, ROWS, STEPS, CLASSES, LENGTH, LETTERS = 16, 6, 9, 3, 4, 7
CHANGE = 1e-5
"""By how much a sample's weight is changed to find a derivative by trainings, in float64."""

Make = Callable[..., Any]


class Mlp(nn.Module):
    """Two linear layers with dropout between them, on four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, CLASSES))

    def forward(self, x: Tensor) -> Tensor:  # (B, LENGTH) letters -> (B, 3)
        logits: Tensor = self.body(x.double() / LETTERS)
        return logits


class Reader(nn.Module):
    """Letters, a recurrent or an attending layer, and a linear layer. Some letters never come: their rows stay."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS + 3, 4)
        self.middle: nn.Module = (
            nn.LSTM(4, 4, batch_first=True)
            if kind == "lstm"
            else nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (B, LENGTH) letters -> (B, 3)
        found = self.middle(self.table(x))
        logits: Tensor = self.head((found[0] if isinstance(found, tuple) else found)[:, -1])
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "lstm": lambda: Reader("lstm"),
    "transformer": lambda: Reader("transformer"),
}
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, maximize=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=0.01),
}
_GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randint(LETTERS, (SAMPLES, LENGTH), generator=_GENERATOR)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=_GENERATOR)
TESTS = torch.randint(LETTERS, (3, LENGTH), generator=_GENERATOR)
TARGETS = torch.tensor([0, 1, 2])
BATCHES = [torch.randperm(SAMPLES, generator=_GENERATOR)[:ROWS] for _ in range(STEPS)]


def make_training(
    kind: str = "mlp",
    optimizer: str = "SGD",
    *,
    weights: Tensor | None = None,
    clip: float | None = None,
    factor: float = 1.0,
    model: Callable[[], nn.Module] | None = None,
    batches: Any = BATCHES,
    **options: Any,
) -> Restartable:
    """Return a training in float64 with noise and a schedule; a sample's weight is 1 unless `weights` (N,) says other.

    Args:
        kind: the model's.
        optimizer: the optimizer's; "A + B" for one of matrices and one of vectors.
        weights: of each sample in the loss.
        clip: the norm that gradients are clipped to.
        factor: what the step multiplies the mean of the losses with.
        model: makes another model.
        batches: the batches.
        options: more options of `Restartable`.
    """

    def init() -> dict[str, Any]:
        torch.manual_seed(3)
        network = (model or MODELS[kind])().double()
        matrices, vectors = ([p for p in network.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        made = [OPTIMIZERS[name](part) for name, part in zip(optimizer.split(" + "), (matrices, vectors), strict=False)]
        if len(made) == 1:
            made = [OPTIMIZERS[optimizer](list(network.parameters()))]
        schedule = torch.optim.lr_scheduler.StepLR(made[0], 4, gamma=0.5)
        return {"model": network, "optimizer": made, "schedule": schedule}

    def step(state: dict[str, Any], rows: Tensor) -> None:
        state["model"].zero_grad()
        losses = sample_losses(state["model"], rows)
        if weights is not None:
            losses = losses * weights[rows]
        (losses.mean() * factor).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(state["model"].parameters(), clip)
        for each in state["optimizer"]:
            each.step()
        state["schedule"].step()

    chosen = {"loss": sample_losses, "columns": lambda rows: {"sample": rows, "label": LABELS[rows]}, **options}
    return Restartable(init, step, batches, **chosen)


def sample_losses(model: nn.Module, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(INPUTS[rows]), LABELS[rows], reduction="none")


def attended(train: Restartable) -> Spotlight:
    """Record a training, and ask about the tests' losses at its end."""
    blobs = MemoryBlobs()
    model: nn.Module = record_training(train, blobs)
    return dualform.open(blobs, train=train).attend(model, TESTS, targets=TARGETS, quantity="loss")


@pytest.fixture(scope="module")
def plain() -> Spotlight:
    """Return a question to the training that `make_training()` makes."""
    return attended(make_training())


def unrolled(train: Restartable, by: Any = None) -> Effects:
    """Record a training, and return the unrolled effects on the tests' losses."""
    return attended(train).effects(by, method="unrolled")


class Unrecorded(contextlib.nullcontext[Any]):
    """Stands for a recorder where nothing is recorded."""

    closed = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(self)

    def annotate(self, **columns: Any) -> None:
        """Take no columns."""


def train_alone(train: Restartable) -> Tensor:
    """Run a training without a recording, and return the tests' losses at its end."""
    model = train.run(Unrecorded)  # type: ignore[arg-type]
    model.eval()
    return functional.cross_entropy(model(TESTS), TARGETS, reduction="none").detach()


def measured(sample: int, *args: Any, **options: Any) -> Tensor:
    """Return the derivative of the tests' losses by a sample's weight, from two trainings."""
    ends = []
    for change in (CHANGE, -CHANGE):
        weights = torch.ones(SAMPLES, dtype=torch.float64)
        weights[sample] += change
        ends.append(train_alone(make_training(*args, weights=weights, **options)))
    return (ends[0] - ends[1]) / (2 * CHANGE)


def assert_measured(
    found: Effects, *args: Any, samples: tuple[int, ...] = (int(BATCHES[0][0]),), **options: Any
) -> None:
    """Compare effects with trainings in which single samples' weights were changed."""
    for sample in samples:
        mine, real = found.values[:, found.groups.index(sample)], measured(sample, *args, **options)
        assert float((mine - real).norm() / real.norm()) < 1e-6


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "Muon"])
def test_effects_are_what_trainings_with_other_weights_say(optimizer: str) -> None:
    every = STEPS if optimizer == "NAdam" else None  # torch loads its product of momenta in another dtype: no restart
    found = unrolled(make_training("mlp", optimizer, every=every))
    assert_measured(found, "mlp", optimizer, samples=(int(BATCHES[0][0]), int(BATCHES[-1][1])))
    assert found.method == "unrolled"
    assert found.error < 1e-7
    assert "this very training" in repr(found)


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_recurrent_and_attending_layers_with_rows_that_never_come(kind: str) -> None:
    found = unrolled(make_training(kind, "AdamW"))
    assert_measured(found, kind, "AdamW")


def test_gradients_that_were_clipped() -> None:
    found = unrolled(make_training(clip=0.2, max_norm=0.2))
    assert_measured(found, clip=0.2)


def test_parameters_that_stay_and_several_groups() -> None:
    def frozen() -> nn.Module:
        model = Mlp()
        model.body[0].weight.requires_grad_(False)
        return model

    found = unrolled(make_training(model=frozen))
    assert_measured(found, model=frozen)


@pytest.mark.parametrize("optimizers", ["AdamW + SGD", "SGD + AdamW"])
def test_several_optimizers_take_a_step_together(optimizers: str) -> None:
    found = unrolled(make_training("mlp", optimizers))
    assert_measured(found, "mlp", optimizers)


def test_many_weights_are_asked_one_input_after_the_other(plain: Spotlight, monkeypatch: pytest.MonkeyPatch) -> None:
    together = plain.effects(method="unrolled")
    monkeypatch.setattr(unrolled_steps, "TOGETHER_ELEMENTS", 0)
    torch.testing.assert_close(plain.effects(method="unrolled").values, together.values)


def test_a_derivative_that_one_step_makes_says_so(plain: Spotlight, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[int, float]] = []

    def warn_always(sizes: Mapping[int, float]) -> list[str]:
        seen.append(sizes)
        return ["step 0 alone"]

    monkeypatch.setattr(unrolled_effects, "step_cautions", warn_always)
    whole = plain.effects(method="unrolled")
    assert whole.cautions == ("step 0 alone",)
    assert "caution: step 0 alone" in repr(whole)
    by_step = plain.effects(dualform.bins("step", width=1), method="unrolled")
    assert list(seen[0]) == sorted(seen[0], reverse=True), "the training is walked back"
    assert set(seen[0]) == {int(group) for group in by_step.groups}
    for place, step in enumerate(by_step.groups):  # rows of a step may cancel each other
        assert float(by_step.values[:, place].abs().sum()) <= seen[0][int(step)] * (1 + 1e-6)


def test_groups_are_sums_of_samples(plain: Spotlight) -> None:
    samples = plain.effects(method="unrolled")
    labels = plain.effects("label", method="unrolled")
    both = plain.effects(["label", dualform.bins("step", width=4)], method="unrolled")
    assert labels.groups == tuple(sorted(set(LABELS.tolist())))
    assert both.groups[0] == (0, 0)
    for place, label in enumerate(labels.groups):
        mine = [g for g, sample in enumerate(samples.groups) if LABELS[sample] == label]
        torch.testing.assert_close(labels.values[:, place], samples.values[:, mine].sum(1))
        mine = [g for g, group in enumerate(both.groups) if group[0] == label]
        torch.testing.assert_close(labels.values[:, place], both.values[:, mine].sum(1))


def test_inputs_are_walked_in_parts_where_they_are_many(plain: Spotlight, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plain.effects(method="unrolled")
    monkeypatch.setattr(unrolled_effects, "ADJOINT_BYTES", 1)
    parts = plain.effects(method="unrolled")
    assert parts.groups == whole.groups
    torch.testing.assert_close(parts.values, whole.values)


def test_an_earlier_horizon_and_the_batches_that_are_asked_for() -> None:
    class Counted:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, number: int) -> Tensor:
            self.asked.append(number)
            return BATCHES[number]

    batches = Counted()
    train = make_training(batches=batches)
    blobs = MemoryBlobs()
    record_training(train, blobs)
    memory = dualform.open(blobs, train=train)
    model = make_training(batches=BATCHES[:5]).run(Unrecorded)  # type: ignore[arg-type]
    batches.asked.clear()
    found = memory.at(step=5).attend(model, TESTS, targets=TARGETS, quantity="loss").effects(method="unrolled")
    assert len(batches.asked) <= 3 * 5  # to the last point, again from point to point, and backwards
    assert_measured(found, batches=BATCHES[:5])


def test_the_generators_stay_as_they_were(plain: Spotlight) -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    expected = (torch.rand(1), np.random.rand())
    torch.manual_seed(11)
    np.random.seed(11)
    plain.effects(method="unrolled")
    assert (torch.rand(1), np.random.rand()) == expected


class WithStatistics(Mlp):
    """A network whose running statistics change as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body.insert(1, nn.BatchNorm1d(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": None}, r"Restartable\(..., loss=loss\)"),
        ({"factor": 6.0}, "the step's is 6 times it"),
        ({"clip": 0.2}, "max_norm"),
        ({"clip": 0.2, "max_norm": 0.3}, "is not the one that the step took"),
        ({"loss": lambda model, rows: sample_losses(model, rows).mean()}, r"expected the loss of each sample"),
        ({"loss": lambda model, rows: sample_losses(model, rows).detach()}, "does not depend on the parameters"),
        ({"loss": lambda model, rows: sample_losses(model, rows.flip(0)) ** 2}, "is not the one that the step took"),
        ({"optimizer": "Muon", "layers": ["body.0", "body.3"], "strict": False}, "differentiate those of Muon"),
        ({"model": WithStatistics}, "BatchNorm"),
        ({"columns": lambda rows: {"label": LABELS[rows]}}, "there is no 'sample'"),
    ],
)
def test_what_cannot_be_unrolled_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((QueryError, SelectionError), match=message):
        unrolled(make_training(**options))


@pytest.mark.filterwarnings("ignore:Columns are left out")
def test_columns_with_several_values_in_a_sample_are_refused() -> None:
    train = make_training("lstm", columns=lambda rows: {"letter": INPUTS[rows], "label": LABELS[rows]})
    with pytest.raises(SelectionError, match="several values in one sample"):
        unrolled(train, by="letter")


def test_changes_beside_the_optimizer_are_seen() -> None:
    """The recording itself refuses them; a state that is changed between the last step and the next is one as well."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    step = RetracedStep(
        number=4,
        names=["w"],
        parameters=[parameter],
        states=[{}],
        gradients=[torch.ones(2, dtype=torch.float64)],
        updates=[GroupUpdate(torch.optim.SGD, {"lr": 0.1, "momentum": 0.0}, [0])],
        after=[torch.full((2,), 0.8, dtype=torch.float64)],
        states_after=[{}],
        buffers={},
        columns={},
        losses=lambda: parameter.sum()[None],
        max_norm=None,
    )
    with pytest.raises(QueryError, match=r"step 4 'w' changed otherwise"):
        Adjoint.at_end([torch.ones(1, 2, dtype=torch.float64)]).step_back(step)


def test_masks_other_models_and_runs_without_steps_are_refused() -> None:
    train = make_training()
    blobs, stored = MemoryBlobs(), MemoryBlobs()
    model = record_training(train, blobs)
    record_training(train, stored, keep=Patterns())
    memory = dualform.open(blobs, train=train)

    def ask(memory: Any, model: nn.Module = model, **options: Any) -> None:
        spotlight = memory.attend(model, TESTS, targets=TARGETS, quantity="loss", other_model=True)
        spotlight.effects(**{"method": "unrolled", **options})

    with pytest.raises(SelectionError, match="a mask leaves patterns out"):
        ask(memory.without(label=1))
    with pytest.raises(QueryError, match="is not what it is after step 8"):
        ask(memory, Mlp().double())
    with pytest.raises(QueryError, match=r"keeps patterns alone\. Record a dualform"):
        ask(dualform.open(stored))
    with pytest.raises(QueryError, match=r'per is .pattern., expected "sample"'):
        ask(memory, per="pattern")
    with pytest.raises(QueryError, match=r"method is 'magic'; expected one of"):
        ask(memory, method="magic")
    with pytest.raises(QueryError, match='without on_difference="report"'):
        ask(dualform.open(blobs, train=train, on_difference="report"))
    with pytest.raises(QueryError, match="Unrolled effects are those on a quantity"):
        memory.attend(model, TESTS).effects(method="unrolled")

    def function(recording: Any) -> nn.Module:
        return train(recording)

    whole = MemoryBlobs()
    record_training(function, whole, keep=Steps())
    with pytest.raises(QueryError, match="which a function cannot"):
        ask(dualform.open(whole, train=function))
