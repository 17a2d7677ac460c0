"""A replay that is not the recorded training is found at the first step that differs, and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualform
from dualform.errors import ReplayError
from dualform.recording.keep import Patterns
from dualform.recording.surroundings import find_surroundings
from dualform.replaying import step_proof
from dualform.replaying.replay_sink import ReplaySink
from dualform.replaying.replayed_patterns import ReplayWarning, run_again
from dualform.replaying.training import Recording, Train, record_training
from dualform.store import shard_writing, tables
from dualform.store.blobs import Blobs
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.trainings import STEPS, make_training


@pytest.fixture(scope="module")
def recorded() -> Blobs:
    blobs = MemoryBlobs()
    record_training(make_training(), blobs)
    return blobs


def ask(blobs: Blobs, train: Train, **options: Any) -> None:
    dualform.open(blobs, train=train, **options).weights()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"seed": 1}, r"before its first step, parameter '.*' starts elsewhere.*another number"),
        ({"swapped": 4}, r"in step 4, the network's inputs are not those that were recorded.*loader"),
        ({"shifted_sample": 2}, r"in step 2, the annotations are not those that were recorded"),
        ({"annotate": False}, r"in step 0, the annotations are not"),
        ({"lr": 0.05}, r"in step 3, lr of '1\.weight' is 0\.05; recorded was 0\.1.*schedule"),
        ({"steps": STEPS - 2}, rf"it took {STEPS - 2} steps; recorded were {STEPS}"),
        ({"steps": STEPS + 1}, None),  # the recorded steps are all there
        ({"kind": "cnn"}, r"has no layer '1'"),
        ({"optimizer": "AdamW"}, r"trains with .*AdamW.*recorded was .*SGD"),
    ],
)
def test_a_break_is_found_and_named(recorded: Blobs, broken: dict[str, Any], message: str | None) -> None:
    train = make_training(**broken)
    if message is None:
        ask(recorded, train)
    else:
        with pytest.raises(ReplayError, match=message):
            ask(recorded, train)


def test_a_generator_that_nobody_seeds_is_found_by_the_size_of_what_it_does() -> None:
    blobs = MemoryBlobs()
    torch.manual_seed(5)
    train = make_training(noise=0.1)
    record_training(train, blobs)
    with pytest.raises(ReplayError, match=r"in step 0, parameter '.*' is off by about \S+ \(\S+ of its size\).*seeded"):
        ask(blobs, train)


def test_a_difference_can_be_reported_with_the_drift_of_the_weights() -> None:
    blobs = MemoryBlobs()
    torch.manual_seed(5)
    train = make_training(noise=0.01)
    record_training(train, blobs)
    with pytest.warns(ReplayWarning, match=r"in step 0, parameter.* it drifts by: '"):
        ask(blobs, train, on_difference="report")
    with pytest.raises(ReplayError, match="annotations"):  # whose patterns have no place among the recorded ones
        ask(blobs, make_training(annotate=False), on_difference="report")
    with pytest.raises(ValueError, match="on_difference is 'go on'"):
        ask(blobs, train, on_difference="go on")


def test_changed_settings_are_named_first(recorded: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_surroundings()
    other = {**real, "threads": "64", "precision of float32 products": "high"}
    monkeypatch.setattr(step_proof, "find_surroundings", lambda: other)
    with pytest.raises(
        ReplayError, match=r"Usual reasons: threads: 1 when it was recorded, 64 now; precision of.*high"
    ):
        ask(recorded, make_training(seed=1))
    ask(recorded, make_training())  # settings alone are no difference


def test_a_run_without_marks_cannot_be_proved() -> None:
    blobs = MemoryBlobs()
    record_training(make_training(), blobs, keep=Patterns())
    run = Run(blobs)
    sink = ReplaySink(run, {}, lambda step, calls: None, steps=run.steps, on_difference="stop")
    with pytest.raises(ReplayError, match=r"keeps no checksum of its steps"):
        run_again(make_training(), sink)


def test_clipping_and_other_seeds_of_the_checks_are_no_difference() -> None:
    """Recording checks gradients at random steps, which measures the factors of clipping on more of their elements."""

    def train(recording: Recording) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        model = nn.Linear(30, 40)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording(model, optimizer):
            for _ in range(30):
                optimizer.zero_grad()
                model(torch.randn(8, 30, generator=generator)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
        return model

    blobs = MemoryBlobs()
    torch.manual_seed(1)
    record_training(train, blobs)
    torch.manual_seed(2)
    assert dualform.open(blobs, train=train).verify().passed


class TwoTables(nn.Module):
    """Two layers of letters whose sum is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.letters = nn.Embedding(4, 3), nn.Embedding(6, 3)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.places(torch.arange(4)) + self.letters(letters)
        return found


def accumulating(
    case: str, order: tuple[int, int] = (0, 1), *, other_targets: bool = False
) -> Callable[[Recording], None]:
    """Return a training of two micro-batches a step, whose order can be changed; only some layers are recorded."""

    def train(recording: Recording) -> None:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        batch = torch.randint(6, (3, 2, 5, 4), generator=generator)
        inputs: torch.Tensor = batch if case in ("places", "lstm") else batch.float()
        targets = torch.randint(3, batch.shape if case in ("places", "lstm") else (3, 2, 5), generator=generator)
        lstm = nn.LSTM(5, 3, batch_first=True)
        models: dict[str, Callable[[], nn.Module]] = {
            "head": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
            "places": TwoTables,
            "lstm": lambda: nn.Sequential(nn.Embedding(6, 5), lstm, _First()),
        }
        layers = {"head": "2", "places": "places", "lstm": "1.l0"}
        model = models[case]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording(model, optimizer, layers=[layers[case]]):
            for step in range(3):
                optimizer.zero_grad()
                for micro in order:
                    target = targets[step, 1 - micro if other_targets else micro]
                    output = model(inputs[step, 0 if other_targets else micro])
                    functional.cross_entropy(output.flatten(0, -2), target.flatten()).backward()
                optimizer.step()

    return train


class _First(nn.Module):
    def forward(self, both: tuple[torch.Tensor, object]) -> torch.Tensor:
        return both[0]


UNRECORDED = pytest.mark.filterwarnings("ignore:.* trained parameters .* are not recorded")


@UNRECORDED
@pytest.mark.parametrize("case", ["head", "places", "lstm"])
def test_two_micro_batches_that_change_places_are_found(case: str) -> None:
    """Each parameter moves as it did, to the bit, and no recorded layer takes the network's inputs."""
    blobs = MemoryBlobs()
    record_training(accumulating(case), blobs)
    assert dualform.open(blobs, train=accumulating(case)).verify().passed
    with pytest.raises(ReplayError, match=r"in step 0, its backwards are others .* sum is the same.*changed places"):
        ask(blobs, accumulating(case, (1, 0)))
    with pytest.warns(ReplayWarning, match="in step 0, its backwards are others"):
        ask(blobs, accumulating(case, (1, 0)), on_difference="report")


@UNRECORDED
def test_targets_of_one_batch_that_change_places_are_found() -> None:
    """Two micro-batches have the same inputs: their errors alone tell them apart."""
    blobs = MemoryBlobs()
    record_training(accumulating("places", other_targets=True), blobs)
    assert dualform.open(blobs, train=accumulating("places", other_targets=True)).verify().passed
    with pytest.raises(ReplayError, match="its backwards are others"):
        ask(blobs, accumulating("places", (1, 0), other_targets=True))


@UNRECORDED
def test_runs_without_marks_of_backwards_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runs have none; what they mark is compared as before."""
    blobs = MemoryBlobs()
    with monkeypatch.context() as patch:
        whole = tables.steps_table
        patch.setattr(shard_writing, "steps_table", lambda records: whole(records).drop_columns(["backwards"]))
        record_training(accumulating("head"), blobs)
    assert "backwards" not in Run(blobs).steps_table.column_names
    assert dualform.open(blobs, train=accumulating("head")).verify().passed
    ask(blobs, accumulating("head", (1, 0)))  # as before: nothing in such a run tells
