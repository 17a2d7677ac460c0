"""A training is run again: to prove that it made some weights, or to store patterns that were not kept."""

from pathlib import Path

import pytest
import torch

import dualform
from dualform.errors import QueryError, ReplayError, RunExistsError
from dualform.recording.keep import Patterns, Shares, Steps
from dualform.replaying.replay_training import replay
from dualform.replaying.training import record_training
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.trainings import make_training, train_mlp


def test_a_model_that_was_never_recorded_can_be_asked_when_its_training_ends_with_it() -> None:
    model = record_training(make_training("cnn", "AdamW"), MemoryBlobs())  # as if it had been trained plainly
    blobs, train = MemoryBlobs(), make_training("cnn", "AdamW")
    outcome = replay(train, blobs, expect=model.state_dict())
    assert outcome.equal
    assert str(outcome) == "the end is the expected one, to the bit, in all of 4 tensors"
    memory = dualform.open(blobs, train=train)
    assert memory.verify(model).passed
    assert {entry.store for entry in memory.layers.values()} == {"steps"}
    assert not replay(train, MemoryBlobs()).equal  # nothing was expected


def test_another_end_is_measured() -> None:
    model = record_training(make_training(), MemoryBlobs())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["1.weight"][0, 0] += 0.5
    del state["3.bias"]
    outcome = replay(make_training(), MemoryBlobs(), expect=state, keep=Patterns())
    assert not outcome.equal
    (found,) = outcome.differences
    assert (found.name, outcome.unknown) == ("1.weight", ("3.bias",))
    assert found.size == pytest.approx(0.5, rel=1e-6)
    assert "1 of 3 tensors differ: '1.weight' by 5.0e-01" in str(outcome)
    with pytest.raises(ReplayError, match="Let the training function return its model"):
        replay(lambda recording: [make_training()(recording)], MemoryBlobs(), expect=state)


def test_patterns_of_some_layers_are_stored_by_a_replay() -> None:
    steps, stored, train = MemoryBlobs(), MemoryBlobs(), make_training("cnn")
    model = record_training(train, steps)
    replay(train, steps, keep=Patterns(layers="head"), to=stored)
    memory = dualform.open(stored)
    assert {name: entry.store for name, entry in memory.layers.items()} == {"conv": "steps", "head": "keys+values"}
    everything = MemoryBlobs()
    record_training(train, everything, keep=Patterns())
    queries = {"head": torch.rand(2, 8)}
    assert torch.equal(
        memory.attend(queries=queries)["head"].attention(),
        dualform.open(everything).attend(queries=queries)["head"].attention(),
    )
    assert dualform.open(stored, train=train).verify(model).passed


@pytest.mark.parametrize(
    ("broken", "message"), [({"swapped": 4}, "in step 4"), ({"steps": 5}, "it took 5 steps"), ({"seed": 2}, "starts")]
)
def test_what_is_not_the_recorded_training_is_not_stored_as_it(broken: dict[str, int], message: str) -> None:
    steps, stored = MemoryBlobs(), MemoryBlobs()
    record_training(make_training(), steps)
    with pytest.raises(ReplayError, match=message):
        replay(make_training(**broken), steps, keep=Patterns(), to=stored)  # type: ignore[arg-type]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record_training(train_mlp, run)
    with pytest.raises(ReplayError, match="Say where the new one goes"):
        replay(train_mlp, run, keep=Patterns())
    with pytest.raises(ReplayError, match=r"expected keep=Patterns"):
        replay(train_mlp, run, keep=Steps(), to=tmp_path / "new")
    with pytest.raises(ReplayError, match=r"expected keep=Patterns"):
        replay(train_mlp, run, keep=Shares(by="label"), to=tmp_path / "new")
    with pytest.raises(ReplayError, match="holds no run to replay"):
        replay(train_mlp, tmp_path / "nothing", to=tmp_path / "new")
    with pytest.raises(QueryError, match="trust=True"):
        replay(None, run, keep=Patterns(), to=tmp_path / "new")
    replay(None, run, keep=Patterns(), to=tmp_path / "new", trust=True)
    assert Run(tmp_path / "new").count("1")
    with pytest.raises(RunExistsError):
        replay(train_mlp, run, keep=Patterns(), to=tmp_path / "new")
