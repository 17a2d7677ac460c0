"""The small run that the clients' viewer shows: recorded once, then continued by resumed recordings.

The run has everything that a viewer can be asked about: images, labels, a text, test examples, several columns. Data,
batches and training are the same each time, so that a continued run gives the same answers whenever it is continued.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dualform
from dualform.experiments.models import mlp

STEPS = 40  # of the run at first
GROWN = 2  # more steps of a continued run, each published on its own
SAMPLES, SIDE, CLASSES, ROWS = 160, 6, 5, 16
WORDS = ("zero", "one", "two", "three", "four")
TESTS = 24
OTHER_TESTS = 15  # of the other test examples, which replace the first ones


def images() -> Tensor:
    """Return the images of all samples, (SAMPLES, SIDE, SIDE) uint8."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (SAMPLES, SIDE, SIDE), generator=generator, dtype=torch.uint8)


def inputs_of(pixels: Tensor) -> Tensor:
    """Return the model's inputs (N, SIDE * SIDE) for images."""
    return (pixels.flatten(1).float() - 128.0) / 64.0


def labels_of(inputs: Tensor) -> Tensor:
    """Return the classes (N,) that the model is to learn."""
    return inputs[:, :CLASSES].argmax(dim=1)


def test_examples(first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return test inputs, targets and images: samples from number `first` on, upside down."""
    pixels = images()[first : first + count].flip(1)
    return inputs_of(pixels), labels_of(inputs_of(pixels)), pixels


def record_base(folder: Path, checkpoint: Path) -> None:
    """Record the run, and keep the model and its optimizer as they are at its end."""
    torch.manual_seed(0)
    model, optimizer = _made()
    with dualform.record(model, optimizer, folder, shard_bytes=60_000, **_factory()) as recorder:
        labels = labels_of(inputs_of(images()))
        recorder.media(
            images=images(),
            samples=torch.arange(SAMPLES),
            labels=list(WORDS),
            mean=128.0,
            deviation=64.0,
            tokens=labels,
            vocabulary=WORDS,
            documents=[(0, "first half"), (SAMPLES // 2, "second half")],
        )
        inputs, targets, pixels = test_examples(0, TESTS)
        recorder.tests(inputs, targets, images=pixels)
        _train(recorder, model, optimizer, range(STEPS))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)


def grow(folder: Path, checkpoint: Path, copies: Path | None = None) -> None:
    """Continue the recording, one published shard per step; copy the run folder as it is after each, where asked."""
    model, optimizer = _made()
    found = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    with dualform.record(model, optimizer, folder, shard_bytes=1, resume=True, **_factory()) as recorder:
        for step in range(STEPS, STEPS + GROWN):
            _copy(folder, copies, step)
            _train(recorder, model, optimizer, [step])
            _wait_for(folder, step + 1)
        _copy(folder, copies, STEPS + GROWN)


def _copy(folder: Path, copies: Path | None, step: int) -> None:
    if copies is not None:
        shutil.copytree(folder, copies / f"open at {step}", ignore=shutil.ignore_patterns(".partial-*"))


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(_widths())
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _widths() -> list[int]:
    return [SIDE * SIDE, 16, CLASSES]


def _factory() -> dict[str, Any]:
    return {"factory": "dualform.experiments.models:mlp", "factory_arguments": {"widths": _widths()}}


def _train(
    recorder: dualform.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> None:
    inputs = inputs_of(images())
    labels = labels_of(inputs)
    for step in steps:
        rows = (torch.arange(ROWS) * 7 + step * 13) % SAMPLES
        recorder.annotate(
            sample=rows,
            label=labels[rows],
            task=["even" if row % 2 == 0 else "odd" for row in rows.tolist()],
            place=rows,
            token=labels[rows],
            score=inputs[rows, 0],
        )
        loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _wait_for(folder: Path, steps: int) -> None:
    """Wait until so many steps are published."""
    deadline = time.monotonic() + 60
    while json.loads((folder / "manifest.json").read_bytes())["steps"] < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} has not published step {steps} after 60 s.")
        time.sleep(0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=grow.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path)
    torch.set_num_threads(1)
    options = parser.parse_args()
    grow(options.folder, options.checkpoint)
