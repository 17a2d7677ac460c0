"""A residual network of which only checkpoints are left: how much of its training do they and its data explain?

The network is trained plainly. Then memories are made of its checkpoints, with the batches as they were, with the same
samples in another order, with other samples, and with wrong labels. The first of them is the recorded memory.
"""

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.attend.memory import Memory
from dualform.engine.explanation import Explanation
from dualform.errors import DataError
from dualform.experiments.datasets import load, standardised
from dualform.experiments.findings import Clock, Row, describe_machine, exactness, make_room, store_findings
from dualform.experiments.models import residual
from dualform.opening import from_checkpoints
from dualform.show.predictions import predict_units
from dualform.show.terminal_tables import plain

FACTORY = "dualform.experiments.models:residual"
TESTED = 24
"""Number of test images whose contributions are compared with those of the recorded memory."""
SAME, REORDERED, OTHERS, WRONG = (
    "the same batches",
    "the same samples in another order",
    "other samples of the data set",
    "the same samples with wrong labels",
)
State = Mapping[str, Tensor]
Contributions = dict[Any, Tensor]  # of each group, to each input (Q,)
Batch = tuple[Tensor, Tensor, Tensor]  # images (B, 1, H, W), labels (B,), numbers of the samples (B,)


@dataclass(frozen=True, slots=True)
class CheckpointStudy:
    """What is trained, and where the checkpoints are.

    Attributes:
        data: the image set.
        widths: of the residual blocks.
        checkpoints: how many there are after the start.
        steps: between two checkpoints.
        batch: samples in a step.
        learning_rate: SGD's, falling to 0 along a cosine.
        momentum: SGD's.
        decay: SGD's weight decay.
    """

    data: str = "fashion-mnist"
    widths: tuple[int, ...] = (8, 16, 16)
    checkpoints: int = 10
    steps: int = 24
    batch: int = 64
    learning_rate: float = 0.05
    momentum: float = 0.9
    decay: float = 5e-4

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        part = torch.tensor(torch.pi * step / (self.checkpoints * self.steps), dtype=torch.float64)
        return float(self.learning_rate * (1 + torch.cos(part)) / 2)

    def make_optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """Return the optimizer of a network."""
        return torch.optim.SGD(
            model.parameters(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.decay
        )


@dataclass(frozen=True, slots=True, eq=False)
class StudyImages:
    """An image set as the network sees it: standardised, with one channel."""

    train: Tensor  # (N, 1, H, W)
    labels: Tensor  # (N,)
    test: Tensor  # (M, 1, H, W)
    test_labels: Tensor  # (M,)
    classes: int

    @classmethod
    def read(cls, name: str) -> "StudyImages":
        """Read an image set by its name."""
        images = load(name)
        shape = images.train_images.shape[1:3]
        train, test = (part.reshape(-1, 1, *shape) for part in standardised(images))
        labels = (torch.from_numpy(part).long() for part in (images.train_labels, images.test_labels))
        train_labels, test_labels = labels
        return cls(train, train_labels, test, test_labels, len(images.class_names))

    def batch(self, rows: Tensor, labels: Tensor | None = None) -> Batch:
        """Return some samples; with labels of all samples, these instead of the true ones."""
        return self.train[rows], (self.labels if labels is None else labels)[rows], rows


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of a batch."""
    device = next(model.parameters()).device
    return functional.cross_entropy(model(batch[0].to(device)), batch[1].to(device))


def draw_rows(study: CheckpointStudy, count: int, generator: torch.Generator) -> list[list[Tensor]]:
    """Return the samples of every step, by interval: each interval draws its samples without putting them back."""
    size = study.steps * study.batch
    if size > count:
        raise DataError(
            f"{study.data} has {count} training images; an interval of {study.steps} steps takes {size} of them."
        )
    return [
        list(torch.randperm(count, generator=generator)[:size].split(study.batch)) for _ in range(study.checkpoints)
    ]


def reordered(rows: Sequence[Sequence[Tensor]], generator: torch.Generator) -> list[list[Tensor]]:
    """Return the samples of each interval in another order, and so in other batches."""
    found = []
    for steps in rows:
        every = torch.cat(list(steps))
        found.append(list(every[torch.randperm(len(every), generator=generator)].split(len(steps[0]))))
    return found


def train_plainly(
    study: CheckpointStudy, images: StudyImages, rows: Sequence[Sequence[Tensor]], make: Callable[[], nn.Module]
) -> list[State]:
    """Train as one does who records nothing; return the network's states at the start and at each checkpoint."""
    model = make()
    optimizer = study.make_optimizer(model)
    states: list[State] = [copy.deepcopy(model.state_dict())]
    step = 0
    for interval in rows:
        for chosen in interval:
            optimizer.param_groups[0]["lr"] = study.rate(step)
            optimizer.zero_grad()
            batch_loss(model, images.batch(chosen)).backward()
            optimizer.step()
            step += 1
        states.append(copy.deepcopy(model.state_dict()))
    return states


def explained_at_checkpoints(
    study: CheckpointStudy,
    images: StudyImages,
    states: Sequence[State],
    rows: Sequence[Sequence[Tensor]],
    make: Callable[[], nn.Module],
) -> list[float]:
    """Return the share that gradients explain which are all taken at the checkpoint before, by interval and at the end.

    `dualform.from_checkpoints` takes steps from the checkpoint on instead; this is what it is compared with. The shares
    are 1 − ‖rest‖² / ‖change‖² and may be negative.
    """
    network, stepping = make(), make()
    optimizer = study.make_optimizer(stepping)
    names = [name for name, _ in network.named_parameters()]
    stepping.load_state_dict(states[0])
    found, step, before = [], 0, torch.cat([states[0][name].flatten() for name in names])
    first, position = before, before
    for k, interval in enumerate(rows):
        network.load_state_dict(states[k])
        for chosen in interval:
            optimizer.param_groups[0]["lr"] = study.rate(step)
            network.zero_grad()
            batch_loss(network, images.batch(chosen)).backward()
            for mine, other in zip(network.parameters(), stepping.parameters(), strict=True):
                other.grad = None if mine.grad is None else mine.grad.clone()
            optimizer.step()
            step += 1
        after = torch.cat([states[k + 1][name].flatten() for name in names])
        now = torch.cat([parameter.detach().flatten() for parameter in stepping.parameters()])
        found.append(_explained(after - before, now - position))
        before, position = after, now
    return [*found, _explained(before - first, position - first)]


def _explained(change: Tensor, made: Tensor) -> float:
    return 1 - float((change - made).square().sum()) / float(change.square().sum())


def shares_of(explanation: Explanation) -> Row:
    """Return the explained share of every layer and of all, in each interval and in the whole training."""
    every = (*explanation.intervals, explanation.whole)
    layers = {name: [one.explained(*names) for one in every] for name, names in explanation.layers.items()}
    return {"layers": layers, "all": [one.explained() for one in every], "rest": explanation.whole.unexplained()}


def contributions_by(memory: Memory, model: nn.Module, inputs: Tensor, by: str) -> Contributions:
    """Return what each group of patterns adds, in the last layer, to the logit of each input's predicted class."""
    device = next(model.parameters()).device
    layer = memory.attend(model, inputs.to(device), layers=["head"])["head"]
    totals = layer.totals(by=by, of="contribution")  # (Q, G, classes)
    units = layer.output().argmax(dim=1).cpu()
    mine = totals.values.cpu().double()[torch.arange(len(units)), :, units]  # (Q, G)
    return dict(zip(totals.groups, mine.T, strict=True))


def correlation_of(first: Contributions, second: Contributions) -> float:
    """Return the correlation of two memories' contributions over the groups that both have, the mean over inputs."""
    shared = [group for group in first if group in second]
    pairs = zip(*(torch.stack([one[group] for group in shared], dim=1) for one in (first, second)), strict=True)
    return float(torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean())


def _memory_of(
    study: CheckpointStudy,
    images: StudyImages,
    states: Sequence[State],
    rows: Sequence[Sequence[Tensor]],
    labels: Tensor | None,
    make: Callable[[], nn.Module],
    place: Path,
    arguments: Mapping[str, Any],
) -> Memory:
    """Make a memory of checkpoints and of samples between them, with the labels of all samples where they are wrong."""
    return from_checkpoints(
        make,
        states,
        lambda interval: (images.batch(some, labels) for some in rows[interval]),
        batch_loss,
        study.make_optimizer,
        place,
        rates=study.rate,
        columns=lambda batch: {"label": batch[1], "sample": batch[2]},
        dtype="float16",
        factory=FACTORY,
        factory_arguments=arguments,
    )


def reproduce_checkpoints(
    study: CheckpointStudy, folder: Path, *, seed: int, device: str = "cpu", keep: bool = True
) -> Row:
    """Run the study with one seed and return its findings; arguments as those of `reproduce_language`."""
    found = make_room(folder, study, seed=seed, keep=keep)
    if found is not None:
        return found
    clock = Clock({})
    images = StudyImages.read(study.data)
    arguments: dict[str, Any] = {"widths": list(study.widths), "classes": images.classes}

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return residual(**arguments).to(device)

    generator = torch.Generator().manual_seed(seed)
    rows = draw_rows(study, len(images.train), generator)
    order, others = reordered(rows, generator), draw_rows(study, len(images.train), generator)
    wrong = images.labels[torch.randperm(len(images.labels), generator=generator)]
    states = clock("training", lambda: train_plainly(study, images, rows, make))
    model = make()
    model.load_state_dict(states[-1])
    model.eval()
    variants: dict[str, tuple[Sequence[Sequence[Tensor]], Tensor | None]] = {
        SAME: (rows, None),
        REORDERED: (order, None),
        OTHERS: (others, None),
        WRONG: (order, wrong),
    }
    findings: Row = {"study": plain(study), "seed": seed, "variants": {}}
    recorded: dict[str, Contributions] = {}
    for name, (chosen, labels) in variants.items():
        place = folder / ("run" if name == REORDERED else f"run-{len(findings['variants'])}")
        make_memory = partial(_memory_of, study, images, states, chosen, labels, make, place, arguments)
        memory = clock("memories", make_memory)
        assert memory.explanation is not None, "the run was made from checkpoints"
        found_here = {by: contributions_by(memory, model, images.test[:TESTED], by) for by in ("label", "sample")}
        recorded = recorded or found_here
        findings["variants"][name] = {
            **shares_of(memory.explanation),
            "agreement": {by: correlation_of(recorded[by], found_here[by]) for by in recorded},
        }
        if name == SAME:
            verification = clock("verify", partial(memory.verify, model))
            findings |= {"verified": verification.passed, "layers": exactness(verification)}
        if name != REORDERED:
            shutil.rmtree(place)
    findings["at_checkpoints"] = {
        name: clock(
            "gradients at checkpoints",
            partial(explained_at_checkpoints, study, images, states, variants[name][0], make),
        )
        for name in (SAME, REORDERED)
    }
    findings["accuracy"] = float((predict_units(model, images.test) == images.test_labels).double().mean())
    findings["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    result = store_findings(folder, findings | {"seconds": clock.seconds, "machine": describe_machine(device)})
    if not keep:
        shutil.rmtree(folder / "run")
    return result
