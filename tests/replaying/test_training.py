"""A training as a function: what it must do, what of it is remembered, and what it keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import QueryError, RefusedError, ReplayError, ResumeError
from dualform.recording.keep import Patterns, Shares, Steps
from dualform.replaying.training import Recording, record_training
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.small import network, sgd
from helpers.trainings import make_training, train_mlp


def test_recording_steps_leaves_the_training_as_it_is_to_the_bit() -> None:
    patterns, steps = (record_training(make_training(), MemoryBlobs(), keep=keep) for keep in (Patterns(), Steps()))
    for one, other in zip(patterns.parameters(), steps.parameters(), strict=True):
        assert torch.equal(one, other)


def test_no_pattern_is_stored(tmp_path: Path) -> None:
    for name, keep in (("steps", None), ("patterns", Patterns())):
        record_training(make_training("cnn"), tmp_path / name, keep=keep)
    sizes = {
        name: sum(f.stat().st_size for f in (tmp_path / name / "shards").iterdir()) for name in ("steps", "patterns")
    }
    assert 4 * sizes["steps"] < sizes["patterns"]
    run = Run(tmp_path / "steps")
    assert {entry.store for entry in run.manifest.layers.values()} == {"steps"}
    assert run.count("conv") == 7 * 4 * 4
    memory = dualform.open(tmp_path / "steps")
    assert memory.patterns("conv").num_rows == 7 * 4 * 4  # addresses and annotations need no replay
    assert "steps" in repr(memory.info())


def test_a_function_that_can_be_imported_is_remembered_and_called_where_the_run_is_trusted() -> None:
    blobs = MemoryBlobs()
    record_training(train_mlp, blobs)
    assert Run(blobs).description.training is not None
    assert Run(blobs).manifest.training.function == "helpers.trainings:train_mlp"  # type: ignore[union-attr]
    memory = dualform.open(blobs)
    with pytest.raises(QueryError, match=r"its training is run by calling helpers\.trainings:train_mlp.*trust=True"):
        memory.weights()
    assert dualform.open(blobs, trust=True).verify().passed
    assert dualform.open(blobs, train=train_mlp).verify().passed


def test_a_function_inside_another_is_not_remembered() -> None:
    blobs = MemoryBlobs()
    record_training(make_training(), blobs)
    with pytest.raises(ReplayError, match=r"does not know its training.*train=train"):
        dualform.open(blobs, trust=True).weights()


def test_a_training_opens_its_recording_exactly_once() -> None:
    def twice(recording: Recording) -> None:
        model = network()
        recording(model, sgd(model))
        recording(model, sgd(model))

    with pytest.raises(ReplayError, match="opens a second recording"):
        record_training(twice, MemoryBlobs())
    with pytest.raises(ReplayError, match="has ended without opening its recording"):
        record_training(lambda recording: None, MemoryBlobs())


@pytest.mark.parametrize(
    ("options", "inside", "error", "message"),
    [
        ({"layers": "head"}, {}, TypeError, "record_training got 'layers'.*inside the training"),
        ({"keep": [Shares(by="label"), Steps()]}, {}, RefusedError, "both Shares"),
        ({"keep": []}, {}, ValueError, "keep is empty"),
        ({"keep": "steps"}, {}, ValueError, "keep is 's'; expected Patterns"),
        ({}, {"resume": True}, ResumeError, "cannot be resumed"),
        ({}, {"layers": {"*": "keys"}}, RefusedError, "Layer '0' is recorded with its keys only"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    options: dict[str, Any], inside: dict[str, Any], error: type[Exception], message: str
) -> None:
    def train(recording: Recording) -> nn.Module:
        model = network()
        with recording(model, sgd(model), **inside):
            pass
        return model

    with pytest.raises(error, match=message):
        record_training(train, MemoryBlobs(), **options)


@pytest.mark.parametrize("keep", [Steps(), [Steps(), Patterns(layers="0")]], ids=["steps", "steps and patterns"])
def test_a_step_that_was_broken_off_between_two_optimizers_is_left_out(keep: Any) -> None:
    """A replay makes each step with both: a run that ends with half a step could not be asked at all."""

    def train(recording: Recording, *, fail: bool = False) -> nn.Module:
        model = network()
        optimizers = [sgd(model[0]), torch.optim.AdamW(model[2].parameters(), lr=0.01)]
        with recording(model, optimizers) as recorder:
            for step in range(4):
                recorder.annotate(sample=torch.arange(6))
                model(torch.randn(6, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
                optimizers[0].step()
                if fail and step == 2:
                    raise KeyboardInterrupt
                optimizers[1].step()
                model.zero_grad()
                states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model

    states: list[dict[str, torch.Tensor]] = []
    blobs = MemoryBlobs()
    with pytest.raises(KeyboardInterrupt):
        record_training(lambda recording: train(recording, fail=True), blobs, keep=keep)
    memory = dualform.open(blobs, train=train)
    assert memory.step == 2
    assert memory.verify(states[1]).passed
    with pytest.raises(QueryError, match="step 2 was broken off between two optimizers"):
        memory.verify()
