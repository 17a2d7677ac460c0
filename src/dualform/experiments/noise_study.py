"""The study of bad data: planted wrong labels and a bad source are looked for, taken out, and the network retrained.

A tenth of the labels is replaced by other classes. Each method ranks all training samples, and the first of a ranking
are looked at: how many have a wrong label, and how good are networks that are trained without them? Then the samples
come from ten sources, one of which has half of its labels wrong: the source with the most harmful effect is taken out.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.experiments.datasets import load, standardised
from dualform.experiments.findings import Clock, Row, describe_machine, make_room, store_findings
from dualform.experiments.models import mlp
from dualform.experiments.peer_influence import ekfac_is_installed, find_ekfac_effects
from dualform.progress import bar

CLASSES = 10
FOLDS = 5
"""Parts of the data that are predicted by networks trained on the others, for confident learning."""

CHECKPOINTS = 5
"""Checkpoints of TracInCP."""

Scores = Mapping[str, Tensor]
"""How suspicious each training sample is, (N,), by method."""


@dataclass(frozen=True, slots=True)
class NoiseStudy:
    """What to do.

    Attributes:
        data: digits, mnist or fashion-mnist.
        train: training samples.
        held: held-out samples with labels that are right, which harm is measured on.
        noise: the share of the labels that is wrong.
        sources: sources of the samples, in the second part.
        source_noise: the share of wrong labels in the bad source.
        hidden: units of the hidden layer.
        epochs: of each training.
        batch: samples of a step.
        learning_rate: of SGD with momentum 0.9.
        retrainings: networks trained anew for each choice of samples, with seeds of their own.
    """

    data: str = "digits"
    train: int = 1000
    held: int = 400
    noise: float = 0.1
    sources: int = 10
    source_noise: float = 0.5
    hidden: int = 64
    epochs: int = 15
    batch: int = 50
    learning_rate: float = 0.05
    retrainings: int = 4

    @property
    def planted(self) -> int:
        """How many labels are wrong."""
        return round(self.noise * self.train)


@dataclass(frozen=True, slots=True, eq=False)
class NoisyData:
    """Samples with planted wrong labels.

    Attributes:
        inputs: (N, d)
        labels: (N,) as they are given to the training.
        wrong: (N,) which of them are wrong.
        sources: (N,) the source of each sample.
        held: (H, d) held-out inputs.
        held_labels: (H,), right.
        test: (M, d) test inputs, which no method sees.
        test_labels: (M,), right.
    """

    inputs: Tensor
    labels: Tensor
    wrong: Tensor
    sources: Tensor
    held: Tensor
    held_labels: Tensor
    test: Tensor
    test_labels: Tensor


def reproduce_noise(study: NoiseStudy, folder: Path, *, seed: int, keep: bool = True) -> Row:
    """Run the study with one seed and return its findings; those that the folder holds already are not made again.

    Args:
        study: what to do.
        folder: gets the recorded run and the findings.
        seed: of the data, the wrong labels and the training.
        keep: keep the recorded run.
    """
    found = make_room(folder, study, seed=seed, keep=keep)
    if found is not None:
        return found
    folder.mkdir(parents=True)
    clock = Clock({})
    labels = clock("labels", lambda: _label_findings(study, folder / "run", seed, clock))
    sources = clock("sources", lambda: _source_findings(study, folder / "sources", seed))
    if not keep:
        shutil.rmtree(folder / "run")
    findings = {"study": study, "seed": seed, "labels": labels, "source": sources, "seconds": clock.seconds}
    return store_findings(folder, findings | {"machine": describe_machine("cpu")})


def _label_findings(study: NoiseStudy, run: Path, seed: int, clock: Clock) -> Row:
    """Rank the samples by every method, look for the planted ones, and retrain without the first of each ranking."""
    data = plant_wrong_labels(study, seed=seed)
    scores = rank_samples(study, data, run, seed=seed, clock=clock)
    count = study.planted
    rows = []
    everything = torch.ones(study.train, dtype=torch.bool)
    with bar("retraining", total=(len(scores) + 2) * study.retrainings) as advance:

        def accuracy(kept: Tensor) -> float:
            found = mean_accuracy(study, data, kept, seed=seed)
            advance(study.retrainings)
            return found

        for name, each in scores.items():
            order = each.argsort(descending=True, stable=True)
            rows.append(
                {
                    "method": name,
                    "half": float(data.wrong[order[: count // 2]].double().mean()),
                    "all": float(data.wrong[order[:count]].double().mean()),
                    "average": average_precision(each, data.wrong),
                    "accuracy": accuracy(everything.index_fill(0, order[:count], 0)),
                }
            )
        ends = {"nothing": accuracy(everything), "the wrong labels": accuracy(~data.wrong)}
    return {"rows": rows, "accuracy": ends}


def _source_findings(study: NoiseStudy, run: Path, seed: int) -> Row:
    """Find the bad source by effects, take each source out in turn, and retrain."""
    data = plant_bad_source(study, seed=seed)
    _, memory = train_on(study, data.inputs, data.labels, seed=seed, run=run, sources=data.sources)
    model = memory[0]
    spotlight = memory[1].attend(model, data.held, targets=data.held_labels, quantity="loss")
    found = spotlight.effects(by="source")
    harm = {int(group): float(found.values[:, at].mean()) for at, group in enumerate(found.groups)}
    shutil.rmtree(run)
    everything = torch.ones(study.train, dtype=torch.bool)
    whole = mean_accuracy(study, data, everything, seed=seed)
    without = {source: mean_accuracy(study, data, data.sources != source, seed=seed) for source in sorted(harm)}
    bad = int(data.sources[data.wrong][0])
    return {
        "bad": bad,
        "found": max(harm, key=lambda source: harm[source]),
        "harm": [harm[source] for source in sorted(harm)],
        "all": whole,
        "without": [without[source] for source in sorted(without)],
        "without_bad": without[bad],
        "without_other": mean(value for source, value in without.items() if source != bad),
    }


def rank_samples(study: NoiseStudy, data: NoisyData, run: Path, *, seed: int, clock: Clock | None = None) -> Scores:
    """Train once and record it; return how suspicious each sample is by every method.

    Args:
        study: how to train.
        data: samples and labels.
        run: the run folder to make.
        seed: of the training.
        clock: takes the seconds of each method.
    """
    clock = clock or Clock({})
    checkpoints, (model, memory) = train_on(study, data.inputs, data.labels, seed=seed, run=run)
    found: dict[str, Tensor] = {}
    ways: dict[str, Callable[[], Tensor]] = {
        "effects on held-out loss": lambda: effects_on(memory, model, data.held, data.held_labels).sum(0),
        "effects on its own loss": lambda: -effects_on(memory, model, data.inputs, data.labels).diagonal(),
        "path contributions to held-out loss": lambda: _paths(memory, model, data).sum(0),
        "loss of the sample": lambda: sample_losses(model, data.inputs, data.labels),
        "TracInCP on held-out loss": lambda: tracin(study, checkpoints, data, own=False),
        "TracInCP on its own loss": lambda: tracin(study, checkpoints, data, own=True),
        "confident learning": lambda: confident_learning(study, data, seed=seed),
    }
    if ekfac_is_installed():
        train = (data.inputs, data.labels)
        ways["EK-FAC on held-out loss"] = lambda: _ekfac(model, train, (data.held, data.held_labels)).sum(0)
        ways["EK-FAC on its own loss"] = lambda: -_ekfac(model, train, train).diagonal()
    for name, way in ways.items():
        found[name] = clock(name, way)
    generator = torch.Generator().manual_seed(seed + 5)
    found["random order"] = torch.rand(study.train, generator=generator)
    return found


def effects_on(memory: Memory, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the effect of every training sample on the loss of each of some inputs, (M, N), by sample number."""
    answer = memory.attend(model, inputs, targets=labels, quantity="loss").effects()
    return answer.values[:, torch.tensor(answer.groups).argsort()]


def _paths(memory: Memory, model: nn.Module, data: NoisyData) -> Tensor:
    """Return the path contribution of every sample to the loss of some held-out inputs, (M, N)."""
    some = slice(PATH_INPUTS)
    spotlight = memory.attend(model, data.held[some], targets=data.held_labels[some], quantity="loss")
    answer = spotlight.path_contributions(per="sample")
    return answer.values[:, torch.tensor(answer.groups).argsort()]


PATH_INPUTS = 60
"""Held-out inputs whose path contributions are summed: each costs most of a training."""


def _ekfac(model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """Return EK-FAC influences with kronfluence's own damping, (M, N)."""
    (found,) = find_ekfac_effects(model, train, test, "loss", dampings=(None,)).values()
    return found


@torch.no_grad()
def sample_losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample, (N,)."""
    return functional.cross_entropy(model.eval()(inputs), labels, reduction="none")


def tracin(study: NoiseStudy, checkpoints: Sequence[Mapping[str, Tensor]], data: NoisyData, *, own: bool) -> Tensor:
    """Return TracInCP: the sum over checkpoints of rate · ⟨gradient of the sample, gradient of the question⟩, (N,).

    Args:
        study: how the network was trained.
        checkpoints: its state at some steps.
        data: the samples.
        own: ask about the sample's own loss (the larger, the more suspicious), or about the held-out loss (likewise,
            what raises it).
    """
    skeleton = _network(study, data.inputs.shape[1])

    def loss(state: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(skeleton, dict(state), (one[None],)), label[None])

    each: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, 0, 0))

    def flat(state: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([one.flatten(1) for one in each(state, inputs, labels).values()], dim=1).double()

    total = torch.zeros(len(data.inputs), dtype=torch.float64)
    for state in checkpoints:
        mine = flat(state, data.inputs, data.labels)
        if own:
            total += study.learning_rate * mine.square().sum(1)
        else:
            total -= study.learning_rate * (mine @ flat(state, data.held, data.held_labels).sum(0))
    return total


def confident_learning(study: NoiseStudy, data: NoisyData, *, seed: int) -> Tensor:
    """Return how suspicious each label is by confident learning (Northcutt et al. 2021), (N,).

    Probabilities are those of networks that have not seen the sample. A class's threshold is its mean probability where
    it is the label; a sample whose most probable class above its threshold is another one comes first, and within both
    parts samples come in the order of their margin.
    """
    generator = torch.Generator().manual_seed(seed + 3)
    fold = torch.randperm(study.train, generator=generator) % FOLDS
    probabilities = torch.zeros(study.train, CLASSES)
    for number in range(FOLDS):
        seen = fold != number
        model = train_unrecorded(study, data.inputs[seen], data.labels[seen], seed=seed + 100 + number)
        with torch.no_grad():
            probabilities[~seen] = model(data.inputs[~seen]).softmax(dim=1)
    labels = data.labels[:, None]
    given = probabilities.gather(1, labels)[:, 0]
    others = probabilities.scatter(1, labels, 0.0).amax(dim=1)
    thresholds = torch.stack([given[data.labels == label].mean() for label in range(CLASSES)])
    above = probabilities.where(probabilities >= thresholds, 0.0)
    flagged = (above.amax(dim=1) > 0) & (above.argmax(dim=1) != data.labels)
    return (others - given) + 2.0 * flagged  # a margin lies between -1 and 1


def average_precision(scores: Tensor, wanted: Tensor) -> float:
    """Return the mean, over the wanted samples, of the precision at their place in the ranking.

    >>> average_precision(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([True, False, True]))
    0.8333333333333333
    """
    hits = wanted[scores.argsort(descending=True, stable=True)].double()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / hits.sum())


def mean_accuracy(study: NoiseStudy, data: NoisyData, kept: Tensor, *, seed: int) -> float:
    """Return the share of test inputs that networks get right which are trained on the kept samples (N,) alone."""
    rights = []
    for number in range(study.retrainings):
        model = train_unrecorded(study, data.inputs[kept], data.labels[kept], seed=1000 * (seed + 1) + number)
        with torch.no_grad():
            rights.append(float((model(data.test).argmax(dim=1) == data.test_labels).double().mean()))
    return mean(rights)


def _draw(study: NoiseStudy, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return training, held-out and test inputs with their labels."""
    images = load(study.data)
    train, test = standardised(images)
    labels, test_labels = (
        torch.from_numpy(np.asarray(each)).long() for each in (images.train_labels, images.test_labels)
    )
    rows = torch.randperm(len(train), generator=generator)[: study.train + study.held]
    mine, held = rows[: study.train], rows[study.train :]
    return train[mine], labels[mine], train[held], labels[held], test, test_labels


def plant_wrong_labels(study: NoiseStudy, *, seed: int) -> NoisyData:
    """Return samples a part of whose labels are replaced by another class, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels, *others = _draw(study, generator)
    wrong = torch.zeros(study.train, dtype=torch.bool)
    wrong[torch.randperm(study.train, generator=generator)[: study.planted]] = True
    sources = torch.zeros(study.train, dtype=torch.int64)
    return NoisyData(inputs, _replaced(labels, wrong, generator), wrong, sources, *others)


def plant_bad_source(study: NoiseStudy, *, seed: int) -> NoisyData:
    """Return samples from several sources, one of which has a part of its labels wrong."""
    generator = torch.Generator().manual_seed(seed + 50)
    inputs, labels, *others = _draw(study, generator)
    sources = torch.arange(study.train) % study.sources
    bad = int(torch.randint(study.sources, (), generator=generator))
    wrong = (sources == bad) & (torch.rand(study.train, generator=generator) < study.source_noise)
    return NoisyData(inputs, _replaced(labels, wrong, generator), wrong, sources, *others)


def _replaced(labels: Tensor, wrong: Tensor, generator: torch.Generator) -> Tensor:
    """Return labels, the wrong ones moved on by 1 to 9 classes."""
    moved = (labels + torch.randint(1, CLASSES, labels.shape, generator=generator)) % CLASSES
    return torch.where(wrong, moved, labels)


def _network(study: NoiseStudy, width: int) -> nn.Module:
    return mlp([width, study.hidden, CLASSES])


def _batches(study: NoiseStudy, count: int, seed: int) -> list[Tensor]:
    """Return the rows of every step: whole epochs, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [
        rows
        for _ in range(study.epochs)
        for rows in torch.randperm(count, generator=generator).split(study.batch)
        if len(rows) == study.batch
    ]


def train_unrecorded(study: NoiseStudy, inputs: Tensor, labels: Tensor, *, seed: int) -> nn.Module:
    """Train a network without recording it."""
    torch.manual_seed(seed)
    model = _network(study, inputs.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=study.learning_rate, momentum=0.9)
    for rows in _batches(study, len(inputs), seed):
        _step(model, optimizer, inputs[rows], labels[rows])
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def train_on(
    study: NoiseStudy, inputs: Tensor, labels: Tensor, *, seed: int, run: Path, sources: Tensor | None = None
) -> tuple[list[dict[str, Tensor]], tuple[nn.Module, Memory]]:
    """Train a network and record it; return some checkpoints, the network and its memory."""
    torch.manual_seed(seed)
    model = _network(study, inputs.shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=study.learning_rate, momentum=0.9)
    steps = _batches(study, len(inputs), seed)
    ends = {round(len(steps) * (number + 1) / CHECKPOINTS) for number in range(CHECKPOINTS)}
    checkpoints: list[dict[str, Tensor]] = []
    with dualform.record(model, optimizer, run) as recorder, bar("recording", total=len(steps)) as advance:
        for number, rows in enumerate(steps, start=1):
            columns: dict[str, Any] = {"sample": rows, "label": labels[rows]}
            recorder.annotate(**columns, **({} if sources is None else {"source": sources[rows]}))
            _step(model, optimizer, inputs[rows], labels[rows])
            if number in ends:
                checkpoints.append({name: one.detach().clone() for name, one in model.named_parameters()})
            advance(1)
    return checkpoints, (model, dualform.open(run))
