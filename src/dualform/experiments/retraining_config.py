"""The settings of an evaluation of effects: data, network, training, repetitions. Read from a TOML file and checked."""

import dataclasses
import gzip
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualform.errors import DataError
from dualform.experiments.character_model import characters, encode_characters
from dualform.experiments.datasets import load, standardised
from dualform.experiments.models import mlp
from dualform.experiments.retraining_networks import CharacterLSTM, ResidualMLP, SmallCNN

OPTIMIZERS = ("SGD", "AdamW")
DATA = ("digits", "mnist", "fashion-mnist", "text")
NETWORKS = {"mlp": "images", "cnn": "images", "residual": "images", "transformer": "text", "lstm": "text"}
"""Each network, and the kind of data that it takes."""
WIDTHS = {"cnn": 3, "residual": 1, "transformer": 1, "lstm": 2}
"""How many widths each network has; an MLP has any number."""


@dataclass(frozen=True, slots=True)
class RetrainingConfig:
    """The settings of one evaluation of effects against retraining.

    Attributes:
        name: of its folder and its row in the tables.
        data: the data set.
        train: how many training samples, drawn anew for each split.
        tests: how many test inputs.
        network: one of `NETWORKS`; by default an MLP for images and a Transformer for text.
        hidden: units of an MLP's hidden layers; the two channels and the units of a CNN; the width of a residual
            network or Transformer; the widths of the embedding and of the LSTM.
        blocks: of a residual network or Transformer.
        optimizer: SGD or AdamW.
        learning_rate: of the optimizer, without a schedule.
        momentum: of SGD.
        weight_decay: of the optimizer.
        batch: samples a step.
        epochs: how often each sample is seen.
        subsets: random halves of the training samples, for each of which networks are retrained.
        seeds: networks retrained for each half.
        recordings: networks that are recorded, and whose effects are evaluated.
        models: networks trained on all samples for the peers that want several.
        splits: repetitions with new samples, tests and halves.
        length: characters of a sample, for text.
        text: for text, the file below the folder that DUALFORM_DATA names; may be gzipped.
        path: whether path contributions of samples are scored too, which cost as much as many trainings.
    """

    name: str
    data: str
    epochs: int
    train: int = 1000
    tests: int = 100
    network: str = ""
    hidden: tuple[int, ...] = (128,)
    blocks: int = 2
    optimizer: str = "SGD"
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch: int = 64
    subsets: int = 64
    seeds: int = 6
    recordings: int = 3
    models: int = 10
    splits: int = 3
    length: int = 32
    text: str = ""
    path: bool = False

    def __post_init__(self) -> None:
        if self.data not in DATA or self.optimizer not in OPTIMIZERS:
            raise DataError(
                f"{self.name} wants {self.data} trained by {self.optimizer}; expected one of {', '.join(DATA)} and of "
                f"{', '.join(OPTIMIZERS)}."
            )
        if not self.network:
            object.__setattr__(self, "network", "transformer" if self.data == "text" else "mlp")
        kind = "text" if self.data == "text" else "images"
        if NETWORKS.get(self.network) != kind or len(self.hidden) != WIDTHS.get(self.network, len(self.hidden)):
            fitting = ", ".join(name for name, takes in NETWORKS.items() if takes == kind)
            raise DataError(
                f"{self.name} wants the network {self.network!r} with {len(self.hidden)} widths for {self.data}; "
                f"expected one of {fitting}, with {', '.join(f'{n} for {name}' for name, n in WIDTHS.items())}."
            )
        if self.seeds < 2 or self.subsets < 4 or self.train < 4 or min(self.tests, self.recordings, self.splits) < 1:
            raise DataError(f"{self.name} is too small: at least 2 seeds, 4 subsets, 4 samples, and one of the others.")

    def make_model(self) -> nn.Module:
        """Make an untrained network."""
        d_in = {"digits": 64}.get(self.data, 784)
        if self.network == "cnn":
            return SmallCNN(d_in, (self.hidden[0], self.hidden[1]), self.hidden[2], 10)
        if self.network == "residual":
            return ResidualMLP(d_in, self.hidden[0], self.blocks, 10)
        if self.network == "lstm":
            return CharacterLSTM(self.hidden[0], self.hidden[1])
        if self.network == "transformer":
            return characters(width=self.hidden[0], length=self.length, blocks=self.blocks)
        return mlp([d_in, *self.hidden, 10])


def read_config(path: Path) -> RetrainingConfig:
    """Read a configuration: the fields of `Truth`, in TOML."""
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read as a TOML file: {error}.") from error
    known = {field.name for field in dataclasses.fields(RetrainingConfig)}
    if unknown := sorted(set(found) - known):
        raise DataError(f"{path} has the settings {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
    if "hidden" in found:
        found["hidden"] = tuple(found["hidden"])
    try:
        return RetrainingConfig(**{"name": path.stem, **found})
    except TypeError as error:
        raise DataError(f"{path} is no evaluation: {error}.") from error


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The data of one repetition."""

    train: Tensor  # (N, ...)
    train_targets: Tensor
    test: Tensor  # (M, ...)
    test_targets: Tensor
    halves: Tensor  # (K, N / 2) rows of train


def make_split(config: RetrainingConfig, number: int) -> Split:
    """Draw the samples, the tests and the halves of a split."""
    generator = torch.Generator().manual_seed(7_000 + number)
    inputs, targets, test, test_targets = _samples(config)
    if len(inputs) < config.train or len(test) < config.tests:
        raise DataError(f"{config.data} has {len(inputs)} + {len(test)} samples; {config.name} wants more.")
    rows = torch.randperm(len(inputs), generator=generator)[: config.train]
    chosen = torch.randperm(len(test), generator=generator)[: config.tests]
    halves = [torch.randperm(config.train, generator=generator)[: config.train // 2] for _ in range(config.subsets)]
    return Split(inputs[rows], targets[rows], test[chosen], test_targets[chosen], torch.stack(halves))


def _samples(config: RetrainingConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if config.data == "text":
        return _passages(config)
    images = load(config.data)
    train, test = standardised(images)
    return train, torch.from_numpy(images.train_labels), test, torch.from_numpy(images.test_labels)


def _passages(config: RetrainingConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return passages of a text and, for each place, the next character; the last tenth of the text is for tests."""
    path = Path(os.environ.get("DUALFORM_DATA", ".")) / config.text
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. {config.name} needs it below DUALFORM_DATA.") from error
    codes = encode_characters(content.decode("utf-8"))
    length = config.length + 1
    passages = codes[: len(codes) // length * length].reshape(-1, length)
    cut = len(passages) * 9 // 10
    train, test = passages[:cut], passages[cut:]
    return train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]
