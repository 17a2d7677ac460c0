"""A replay that is not the recorded training is found at the first step that differs, and named."""

from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import ReplayError
from dualform.recording.keep import Patterns
from dualform.recording.surroundings import find_surroundings
from dualform.replaying import step_proof
from dualform.replaying.replay_sink import ReplaySink
from dualform.replaying.replayed_patterns import ReplayWarning, run_again
from dualform.replaying.training import Recording, Train, record_training
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
