"""Small trainings that are the same every time, and what a run folder of each must hold after any number of steps.

Batches, annotations and weights follow from the number of the step alone, so that whatever a killed or interrupted
recording left can be compared with a training that nobody recorded.
"""

import copy
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import dualform
from dualform.attend.memory import Memory
from dualform.recording.recorder import Recorder
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.manifest import SharesEntry
from dualform.store.reader import Run

ROWS = 6
SAMPLES = 10
CACHED = re.compile(r"cache/[0-9a-f]{32}\.safetensors")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """What is there after a step: a model and its optimizers, and more where the recording keeps shares.

    Attributes:
        parameters: of the model.
        optimizers: their states.
        recorder: the state of a recorder of shares, without which it can go on only from what it has published.
        shares: (G, ...) of each parameter by label, in the order of the labels, as a memory of patterns has them.
    """

    parameters: Tensors
    optimizers: Sequence[dict[str, Any]]
    recorder: dict[str, Any] | None = None
    shares: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """One way to train a network of the linear layers "0" and "2"; the fields are what differs."""

    name: str
    optimizers: Callable[[nn.Module], list[Optimizer]]
    width: int = 5  # of the input
    steps: int = 12
    options: Mapping[str, Any] = field(default_factory=dict)  # of dualform.record
    flush_every: int = 0  # steps, where the user publishes in between

    @property
    def exact(self) -> bool:
        """Whether values are recorded, so that weights can be rebuilt."""
        return "layers" not in self.options

    @property
    def keep(self) -> Any:
        """What is kept: `Patterns()`, `Shares(...)` or `Steps()`."""
        return self.options.get("keep", dualform.Patterns())

    def open(self, path: Path) -> Memory:
        """Open a run of this training; one of steps is asked by training again."""
        return dualform.open(path, train=self.train) if self.keep == dualform.Steps() else dualform.open(path)

    def train(self, recording: Any) -> nn.Module:
        """Train from the start to the end, as `dualform.record_training` has it."""
        model = self.network()
        optimizers = self.optimizers(model)
        with recording(model, optimizers) as recorder:
            for _ in self.record(recorder, model, optimizers, 0):
                pass
        return model

    def record(
        self, recorder: Recorder, model: nn.Module, optimizers: Sequence[Optimizer], first: int
    ) -> Iterator[int]:
        """Take all steps from the `first` on, annotated; yield each when it is taken."""
        for step in range(first, self.steps):
            recorder.annotate(**self.columns(step))
            self.take(model, optimizers, step)
            if self.flush_every and step % self.flush_every == self.flush_every - 1:
                recorder.flush()
            yield step

    def network(self) -> nn.Sequential:
        """Return the untrained network."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(self.width, 4), nn.ReLU(), nn.Linear(4, 3))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs (ROWS, width) of a step and their labels (ROWS,); samples come again and again."""
        inputs = torch.stack([self.sample(int(number)) for number in self.numbers(step)])
        return inputs, inputs[:, :3].argmax(dim=1)

    def sample(self, number: int) -> Tensor:
        """Return the input of one sample, (width,)."""
        return torch.randn(self.width, generator=torch.Generator().manual_seed(1000 + number))

    def numbers(self, step: int) -> Tensor:
        """Return which samples a step trains on, (ROWS,)."""
        return (torch.arange(ROWS) + step * ROWS) % SAMPLES

    def columns(self, step: int) -> dict[str, Any]:
        """Return the annotations of a step."""
        return {"sample": self.numbers(step), "label": self.batch(step)[1], "task": "früh" if step < 5 else "spät"}

    def take(self, model: nn.Module, optimizers: Sequence[Optimizer], step: int) -> None:
        """Take one step."""
        inputs, labels = self.batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    def at(self, checkpoint: Checkpoint) -> tuple[nn.Sequential, list[Optimizer]]:
        """Return a network and its optimizers as they were after a step."""
        model = self.network()
        model.load_state_dict(checkpoint.parameters)
        optimizers = self.optimizers(model)
        for optimizer, state in zip(optimizers, checkpoint.optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        return model, optimizers

    def checkpoints(self) -> list[Checkpoint]:
        """Train without recording; return the start and what each step left.

        What a recording of shares has after each step is taken from two more trainings, which are recorded.
        """
        model = self.network()
        optimizers = self.optimizers(model)
        found = [checkpoint(model, optimizers)]
        for step in range(self.steps):
            self.take(model, optimizers, step)
            found.append(checkpoint(model, optimizers))
        if not isinstance(self.keep, dualform.Shares):
            return found
        with tempfile.TemporaryDirectory() as folder:
            states = self._recorder_states(Path(folder) / "shares", self.keep)
            self._recorder_states(Path(folder) / "patterns", dualform.Patterns())
            patterns = dualform.open(Path(folder) / "patterns")
            shares = [shares_by_label(patterns.at(step=step)) for step in range(1, self.steps + 1)]
        more = zip(found[1:], states, shares, strict=True)
        return [found[0], *(replace(one, recorder=state, shares=parts) for one, state, parts in more)]

    def _recorder_states(self, path: Path, keep: Any) -> list[dict[str, Any]]:
        """Record the training; return the recorder's state after each step."""
        model = self.network()
        optimizers = self.optimizers(model)
        with dualform.record(model, optimizers, path, keep=keep) as recorder:
            return [recorder.state_dict() for _ in self.record(recorder, model, optimizers, 0)]


def checkpoint(model: nn.Module, optimizers: Sequence[Optimizer]) -> Checkpoint:
    """Return copies of a model's parameters and its optimizers' states."""
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Checkpoint(parameters, [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers])


def _momentum(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]


def _several(model: nn.Module) -> list[Optimizer]:
    first, _, last = model.children()
    return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.AdamW(last.parameters(), lr=0.01)]


_SHARES = dualform.Shares(by="label", at=[4, 8])
TRAININGS = {
    training.name: training
    for training in (
        Training("momentum", _momentum, options={"shard_bytes": 600}),
        Training("several optimizers", _several, options={"shard_bytes": 900}),
        Training("keys only", _momentum, options={"shard_bytes": 400, "layers": {"*": "keys"}}),
        Training("pools", _momentum, width=40, options={"shard_bytes": 2500}),
        Training("shares", _momentum, options={"shard_bytes": 900, "keep": _SHARES}, flush_every=3),
        Training("shares under Adam", _several, options={"shard_bytes": 900, "keep": _SHARES}, flush_every=5),
        Training("steps", _several, options={"shard_bytes": 300, "keep": dualform.Steps()}),
        Training("published by time", _momentum, steps=100, options={"shard_bytes": 1 << 30}),
    )
}


def examine(training: Training, path: Path, checkpoints: Sequence[Checkpoint], *, ended: bool = False) -> int:
    """Check that a run folder holds exactly its published steps, whole; return their number.

    Args:
        training: the training that was recorded.
        path: the run folder.
        checkpoints: of a training without recording.
        ended: whether the recording came to its end, after which nothing unlisted may be left in the folder.
    """
    memory = training.open(path)
    steps = memory.step
    if isinstance(training.keep, dualform.Shares):
        _examine_shares(memory, checkpoints, ended=ended)
    else:
        verification = memory.verify(checkpoints[steps].parameters)
        if not verification.passed:
            raise AssertionError(f"verify failed at step {steps}:\n{verification}")
        for layer in memory.layers:
            _examine_patterns(training, memory, layer, steps)
    facts = memory.steps()
    pairs = list(zip(facts["step"].to_pylist(), facts["parameter"].to_pylist(), strict=True)) if steps else []
    names = list(checkpoints[0].parameters)
    if sorted(pairs) != sorted((step, name) for step in range(steps) for name in names):
        raise AssertionError(f"the facts of {steps} steps and {len(names)} parameters are not each there once")
    if ended:
        if steps != training.steps:
            raise AssertionError(f"the run ended with {steps} of {training.steps} steps")
        left = {found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file()}
        sums = {name for name in left if CACHED.fullmatch(name)}  # of questions asked meanwhile
        if unlisted := left - sums - {"manifest.json", *Run(FolderBlobs(path)).files()}:
            raise AssertionError(f"files that the manifest does not list are left: {sorted(unlisted)}")
    return steps


def _examine_patterns(training: Training, memory: Memory, layer: str, steps: int) -> None:
    """Check that a layer has the patterns of its published steps, each once, with their annotations."""
    table = memory.patterns(layer)
    wanted = [step for step in range(steps) for _ in range(ROWS)]
    if table["step"].to_pylist() != wanted:
        raise AssertionError(f"layer {layer!r} has other patterns than {ROWS} in each of {steps} steps")
    for column in ("sample", "label") if steps else ():
        expected = [value for step in range(steps) for value in training.columns(step)[column].tolist()]
        if table[column].to_pylist() != expected:
            raise AssertionError(f"layer {layer!r} has other values of {column!r} than the training gave")


def _examine_shares(memory: Memory, checkpoints: Sequence[Checkpoint], *, ended: bool) -> None:
    """Check the shares after every step that the run keeps them of: they sum to the weights, group by group as ever."""
    kept = kept_shares(memory)
    if ended and kept.horizons != (4, 8, len(checkpoints) - 1):
        raise AssertionError(f"the run ended with shares after the steps {kept.horizons}")
    for step in kept.horizons:
        at = memory.at(step=step)
        verification = at.verify(checkpoints[step].parameters)
        if not verification.passed:
            raise AssertionError(f"verify failed at step {step}:\n{verification}")
        assert_same(shares_by_label(at), checkpoints[step].shares)
    if any(step > memory.step for step in kept.horizons):
        raise AssertionError(f"shares after the steps {kept.horizons} of a run of {memory.step}")


def shares_by_label(memory: Memory) -> Tensors:
    """Return the shares of each parameter (G, ...), in the order of their labels."""
    found = {}
    for name, parts in memory.shares(by="label").items():
        order = sorted(range(len(parts.labels)), key=parts.labels.__getitem__)
        found[name] = parts.shares[order]
    return found


def kept_shares(memory: Memory) -> SharesEntry:
    """Return what the manifest of a run says of its shares."""
    assert isinstance(memory._run, Run)
    assert memory._run.manifest.shares is not None
    return memory._run.manifest.shares


def answers(training: Training, path: Path) -> dict[str, Tensor]:
    """Ask the questions whose sums are cached; return the answers by name."""
    model = training.network()
    inputs = torch.stack([training.sample(number) for number in range(3)])
    spotlight = training.open(path).attend(model, inputs, other_model=True)
    found = {}
    for layer in ("0", "2"):
        found[f"{layer} attention"] = spotlight[layer].totals(by="label").values
        if training.exact:
            found[f"{layer} contribution"] = spotlight[layer].totals(by="label", of="contribution").values
    return found


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare answers with those of a run that nobody killed; shards of other sizes are added up in another order."""
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name))
