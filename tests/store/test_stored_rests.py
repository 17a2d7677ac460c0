"""What no pattern explains of a run made from checkpoints is kept in files, which are believed only if they fit."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import CorruptError, FormatError
from dualform.store.format import unexplained_file
from dualform.store.manifest import Manifest, sealed
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile, publish_tensors


@pytest.fixture
def blobs() -> MemoryBlobs:
    """Return a run that was made from two checkpoints, one step apart."""
    made = MemoryBlobs()
    states = [{"weight": torch.eye(2), "bias": torch.zeros(2)}, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}]
    dualform.from_checkpoints(
        lambda: nn.Linear(2, 2),
        states,
        [[torch.ones(1, 2)]],
        lambda model, batch: model(batch).sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        made,
    )
    return made


def test_the_rest_is_the_checkpoint_less_what_the_patterns_made(blobs: MemoryBlobs) -> None:
    run = Run(blobs)
    found = run.unexplained("weight", 1)
    assert found is not None
    assert torch.equal(found, torch.ones(2, 2) - (torch.eye(2) - 0.5) + torch.zeros(2, 2, dtype=torch.float64))
    start = run.unexplained("weight", 0)
    assert start is not None
    assert not start.any()
    for name, weight in dualform.open(blobs).weights().items():
        assert torch.equal(weight, torch.ones_like(weight)), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"unexplained.0": torch.zeros(3, 2)}, "'unexplained.0' is ((3, 2)"),
        ({"unexplained.1": torch.zeros(2, dtype=torch.float64)}, "'unexplained.1'"),
        ({"interval_rest": torch.zeros(1, dtype=torch.float64)}, "'interval_rest'"),
        ({"more": torch.zeros(1)}, "'more'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(blobs: MemoryBlobs, wrong: dict[str, torch.Tensor], message: str) -> None:
    run = Run(blobs)
    name = unexplained_file(1)
    tensors = TensorFile(run.blob(name)).tensors() | wrong
    blobs.remove(name)
    entry = publish_tensors(blobs, name, tensors)
    changed = dataclasses.replace(run.manifest, files={**run.manifest.files, name: entry})
    changed.publish(blobs, was=run.manifest_tag)
    with pytest.raises(CorruptError, match=re.escape(message)):
        Run(blobs).unexplained("weight", 1)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [([], "not among both"), ([2], "not among both"), ([1, 1], "ascending steps from 1"), ([-1], "checkpoints")],
)
def test_checkpoints_that_cannot_be_are_refused(blobs: MemoryBlobs, checkpoints: list[int], message: str) -> None:
    raw = json.loads(Manifest.read(blobs).to_json())
    with pytest.raises(FormatError, match=message):
        Manifest.from_json(sealed({**raw, "checkpoints": checkpoints}), path="manifest.json")


def test_checkpoints_need_patterns_of_all_layers(blobs: MemoryBlobs) -> None:
    raw = json.loads(Manifest.read(blobs).to_json())
    raw["layers"][""]["store"] = "keys"
    with pytest.raises(FormatError, match="does not keep the patterns of all layers"):
        Manifest.from_json(sealed(raw), path="manifest.json")
