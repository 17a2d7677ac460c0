"""The study of fine-tuning: do unrolled effects foretell the very same run, same seed and order, with samples left out?

A network is trained on one data set and fine-tuned on a few samples of another. Then the fine-tuning is run again, from
the same start with the same order and noise, for many random subsets of its samples, whose others have weight zero. A
method is scored by the rank correlation, over the subsets, of what it predicts for a test input with what happened.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.spotlight import Spotlight
from dualform.effects.output_gradients import Quantity, measure_quantity
from dualform.errors import DataError
from dualform.experiments.character_model import characters, encode_characters
from dualform.experiments.datasets import load, load_text, standardised
from dualform.experiments.findings import Clock, Row, describe_machine, store_findings
from dualform.experiments.peer_influence import ekfac_is_installed, find_ekfac_effects
from dualform.progress import bar
from dualform.show.terminal_tables import plain

QUANTITY: Quantity = "loss"
"""What is asked about each test input."""


@dataclass(frozen=True, slots=True)
class TuningCase:
    """A fine-tuning.

    Attributes:
        name: in the tables.
        data: "text" for a character Transformer, "digits" for an MLP.
        optimizer: AdamW or SGD (with momentum 0.9).
        learning_rate: of the fine-tuning.
        samples: how many samples it has.
        batch: samples of a step.
        epochs: how often each sample is seen.
        pretraining: steps of the training before.
        dropout: of the MLP.
        eps: what AdamW adds to the root of its second moments.
    """

    name: str
    data: str
    optimizer: str
    learning_rate: float
    samples: int = 256
    batch: int = 16
    epochs: int = 3
    pretraining: int = 500
    dropout: float = 0.0
    eps: float = 1e-8


@dataclass(frozen=True, slots=True)
class TuningStudy:
    """What to do.

    Attributes:
        cases: the fine-tunings.
        subsets: trainings with samples left out, for each share.
        shares: the shares of the samples that are left out.
        tests: test inputs.
        width: of the Transformer.
        length: characters of a passage.
    """

    cases: tuple[TuningCase, ...] = (
        TuningCase("digits, SGD", "digits", "SGD", 0.02, epochs=5, pretraining=300),
        TuningCase("digits, AdamW, dropout", "digits", "AdamW", 1e-3, epochs=5, pretraining=300, dropout=0.1),
        TuningCase("characters, AdamW", "text", "AdamW", 1e-3),
        TuningCase("characters, SGD", "text", "SGD", 0.05),
        TuningCase("characters, 1500 steps before, AdamW", "text", "AdamW", 1e-3, pretraining=1500),
        TuningCase("characters, 1500 steps before, AdamW, eps 1e-6", "text", "AdamW", 1e-3, pretraining=1500, eps=1e-6),
    )
    subsets: int = 32
    shares: tuple[float, ...] = (0.5, 0.05)
    tests: int = 16
    width: int = 48
    length: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """A fine-tuning, ready to be run.

    Attributes:
        start: the pre-trained network's state.
        make: makes an untrained network.
        train: (N, ...) samples.
        targets: (N, ...)
        test: (M, ...) test inputs.
        test_targets: (M, ...)
        rows: (S, B) the samples of each step.
        optimizer: makes the optimizer of some parameters.
        seed: of dropout.
    """

    start: Mapping[str, Tensor]
    make: Callable[[], nn.Module]
    train: Tensor
    targets: Tensor
    test: Tensor
    test_targets: Tensor
    rows: Tensor
    optimizer: Callable[[Any], torch.optim.Optimizer]
    seed: int

    def training(self, weights: Tensor | None = None) -> dualform.Restartable:
        """Return the fine-tuning; each sample has a weight (N,) in the loss, by default 1."""

        def init() -> dict[str, Any]:
            model = self.make()
            model.load_state_dict(self.start)
            torch.manual_seed(self.seed)
            return {"model": model.train(), "optimizer": self.optimizer(model.parameters())}

        def step(state: dict[str, Any], rows: Tensor) -> None:
            state["optimizer"].zero_grad()
            losses = self.losses(state["model"], rows)
            (losses if weights is None else losses * weights[rows]).mean().backward()
            state["optimizer"].step()

        return dualform.Restartable(init, step, self.rows, columns=lambda rows: {"sample": rows}, loss=self.losses)

    def losses(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Return the loss of each of some samples, (B,); of a passage, the mean over its characters."""
        logits, targets = model(self.train[rows]), self.targets[rows]
        each = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return each.view(len(rows), -1).mean(dim=1)

    def end(self, weights: Tensor) -> Tensor:
        """Run the fine-tuning with samples' weights, and return the quantity of each test input, (M,)."""
        model = self.training(weights).run(_Unrecorded)  # type: ignore[arg-type]
        return self.measure(model)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> Tensor:
        """Return the quantity of each test input, (M,)."""
        return measure_quantity(model.eval()(self.test), self.test_targets, QUANTITY).double()


class _Unrecorded(contextlib.nullcontext[Any]):
    """Stands for a recorder where a training is run again and nothing is recorded."""

    closed = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(self)

    def annotate(self, **columns: Any) -> None:
        """Take no columns."""


def reproduce_tuning(study: TuningStudy, folder: Path, *, seed: int, keep: bool = True) -> Row:
    """Run the study with one seed and return its findings; cases that the folder holds already are not run again.

    Args:
        study: what to do.
        folder: gets the runs and the findings.
        seed: of pre-training, samples, order and subsets.
        keep: keep the recorded run of the first case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock({})
    rows = []
    for at, case in enumerate(study.cases):
        about = plain({"study": dataclasses.replace(study, cases=(case,)), "seed": seed})
        path = folder / f"{case.name.replace(' ', '-').replace(',', '')}.json"
        done = json.loads(path.read_text()) if path.is_file() else None
        if done is None or done["about"] != about:
            run = folder / "run"
            shutil.rmtree(run, ignore_errors=True)
            found = clock(case.name, partial(_case_findings, study, case, run, seed=seed))
            done = plain({"about": about, "found": found, "seconds": clock.seconds[case.name]})
            path.write_text(json.dumps(done, indent=1) + "\n")
            if at or not keep:
                shutil.rmtree(run)
        rows.append(done["found"])
        clock.seconds[case.name] = done["seconds"]
    findings = {"study": study, "seed": seed, "cases": rows, "seconds": clock.seconds}
    return store_findings(folder, findings | {"machine": describe_machine("cpu")})


def _case_findings(study: TuningStudy, case: TuningCase, folder: Path, *, seed: int) -> Row:
    """Return the scores and the seconds of all methods for one fine-tuning."""
    tuning = make_tuning(study, case, seed=seed)
    seconds: dict[str, float] = {}

    def timed(what: str, action: Callable[[], Any]) -> Any:
        start = process_time()
        result = action()
        seconds[what] = process_time() - start
        return result

    ones = torch.ones(case.samples)
    whole = timed("one fine-tuning", lambda: tuning.end(ones))
    before = tuning.make()
    before.load_state_dict(tuning.start)
    methods = find_methods(tuning, folder, timed)
    lds: dict[str, dict[str, float]] = {name: {} for name in [*methods, "unrolled, samples shuffled"]}
    change: dict[str, float] = {}
    generator = torch.Generator().manual_seed(seed + 77)
    shuffled = methods["unrolled effects"][:, torch.randperm(case.samples, generator=generator)]
    for share in study.shares:
        left_out = torch.zeros(study.subsets, case.samples, dtype=torch.float64)
        for row in left_out:
            row[torch.randperm(case.samples, generator=generator)[: round(share * case.samples)]] = 1.0
        ends = []
        with bar(f"{case.name}: fine-tuning without {share:.0%}", total=study.subsets) as advance:
            for row in left_out:
                ends.append(tuning.end((1 - row).float()))
                advance(1)
        happened = torch.stack(ends) - whole  # (K, M)
        change[f"{share:g}"] = float(happened.abs().mean())
        for name, effects in {**methods, "unrolled, samples shuffled": shuffled}.items():
            lds[name][f"{share:g}"] = rank_correlation(-left_out @ effects.T, happened)
        predicted = -left_out @ methods["unrolled effects"].T
        slope = float((predicted * happened).sum() / predicted.square().sum())
        change[f"{share:g} slope"] = slope
    return {
        "name": case.name,
        "parameters": sum(parameter.numel() for parameter in before.parameters()),
        "steps": len(tuning.rows),
        "before": float(tuning.measure(before).mean()),
        "after": float(whole.mean()),
        "change": change,
        "lds": _best_damping(lds),
        "seconds": seconds,
    }


def find_methods(tuning: Tuning, folder: Path, timed: Callable[[str, Callable[[], Any]], Any]) -> dict[str, Tensor]:
    """Return what each method says of every sample and test input, as effects on the quantity, (M, N).

    Args:
        tuning: the fine-tuning.
        folder: gets its recordings.
        timed: runs something, and notes how long it took.
    """
    train = tuning.training()
    model = dualform.record_training(train, folder / "steps")
    memory = dualform.open(folder / "steps", train=train)
    spotlight = memory.attend(model, tuning.test, targets=tuning.test_targets, quantity=QUANTITY)
    found = {"unrolled effects": by_sample(tuning, timed("unrolled effects", lambda: _unrolled(spotlight)))}
    dualform.record_training(train, folder / "patterns", keep=dualform.Patterns())
    stored = dualform.open(folder / "patterns")
    spotlight = stored.attend(model, tuning.test, targets=tuning.test_targets, quantity=QUANTITY)
    found["effects"] = by_sample(tuning, timed("effects", lambda: spotlight.effects()))
    found["path contributions"] = by_sample(
        tuning, timed("path contributions", lambda: spotlight.path_contributions(per="sample"))
    )
    found["direct contributions (no filter)"] = _direct(tuning, spotlight)
    if ekfac_is_installed():
        train_rows, test_rows = (tuning.train, tuning.targets), (tuning.test, tuning.test_targets)
        scores = timed("EK-FAC", lambda: find_ekfac_effects(model, train_rows, test_rows, QUANTITY))
        found |= {f"EK-FAC, damping {damping}": each for damping, each in scores.items()}
    return found


def _unrolled(spotlight: Spotlight) -> Any:
    return spotlight.effects(method="unrolled")


def by_sample(tuning: Tuning, answer: Any) -> Tensor:
    """Return the values of an answer by sample, (M, N), in the samples' order."""
    found = torch.zeros(len(tuning.test), len(tuning.train), dtype=torch.float64)
    return found.index_add_(1, torch.tensor(answer.groups), answer.values)


def _direct(tuning: Tuning, spotlight: Spotlight) -> Tensor:
    """Return effects without their filter: what each sample's updates add to the quantity, the rest held as it was."""
    found = torch.zeros(len(tuning.test), len(tuning.train), dtype=torch.float64)
    outside = spotlight.outside()
    for name, layer in spotlight.layers.items():
        if name not in outside:
            grouping = layer._group("sample")
            plain = dataclasses.replace(layer._require_asked(), filtering="none")
            found.index_add_(1, torch.tensor(grouping.labels), plain.totals(grouping))
    return found


def rank_correlation(predicted: Tensor, happened: Tensor) -> float:
    """Return the mean over test inputs of the rank correlation over subsets, of (K, M) and (K, M)."""

    def ranks(values: Tensor) -> Tensor:
        order = values.argsort(dim=0).argsort(dim=0).double()
        return order - order.mean(dim=0)

    mine, real = ranks(predicted), ranks(happened)
    each = (mine * real).sum(0) / (mine.square().sum(0) * real.square().sum(0)).sqrt()
    return float(each.mean())


def _best_damping(lds: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """Return the scores with the best damping of EK-FAC alone, for each share that was left out."""
    found = {name: scores for name, scores in lds.items() if not name.startswith("EK-FAC")}
    tried = [scores for name, scores in lds.items() if name.startswith("EK-FAC")]
    if tried:
        found["EK-FAC, best damping"] = {share: max(scores[share] for scores in tried) for share in tried[0]}
    return found


def make_tuning(study: TuningStudy, case: TuningCase, *, seed: int) -> Tuning:
    """Pre-train a network, and draw the samples and the order of its fine-tuning."""
    generator = torch.Generator().manual_seed(seed)
    if case.data == "text":
        before, train, test = _texts(study.length)

        def make() -> nn.Module:
            return characters(width=study.width, length=study.length)

        first, wanted = (before[:, :-1], before[:, 1:])
        rows = torch.randperm(len(train), generator=generator)[: case.samples]
        tests = torch.randperm(len(test), generator=generator)[: study.tests]
        samples, targets = train[rows, :-1], train[rows, 1:]
        test, test_targets = test[tests, :-1], test[tests, 1:]
    elif case.data == "digits":
        first, wanted, samples, targets, test, test_targets = _digits(study, case, generator)

        def make() -> nn.Module:
            return _digit_network(study.width, case.dropout)
    else:
        raise DataError(f"{case.name} wants {case.data}; expected text or digits.")
    torch.manual_seed(seed)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with bar(f"{case.name}: pre-training", total=case.pretraining) as advance:
        for _ in range(case.pretraining):
            rows = torch.randint(len(first), (32,), generator=generator)
            logits = model(first[rows])
            optimizer.zero_grad()
            functional.cross_entropy(logits.flatten(0, -2), wanted[rows].flatten()).backward()
            optimizer.step()
            advance(1)
    epochs = [torch.randperm(case.samples, generator=generator) for _ in range(case.epochs)]
    order = torch.cat([epoch[: case.samples // case.batch * case.batch].view(-1, case.batch) for epoch in epochs])

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        if case.optimizer == "SGD":
            return torch.optim.SGD(parameters, lr=case.learning_rate, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=case.learning_rate, weight_decay=0.01, eps=case.eps)

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Tuning(start, make, samples, targets, test, test_targets, order, make_optimizer, seed)


def _texts(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return passages of WikiText-2, and of Aesop's fables for training and for tests, (N, length + 1) each."""

    def passages(text: str) -> Tensor:
        codes = encode_characters(text)
        return codes[: len(codes) // (length + 1) * (length + 1)].view(-1, length + 1)

    tuned = load_text("aesop")
    return passages(load_text("wikitext-2").train[:1_000_000]), passages(tuned.train), passages(tuned.test)


def _digits(study: TuningStudy, case: TuningCase, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return digits 0 to 4 for pre-training, samples of all ten, and tests, with the labels of each."""
    images = load("digits")
    train, test = standardised(images)
    labels = torch.from_numpy(np.asarray(images.train_labels)).long()
    test_labels = torch.from_numpy(np.asarray(images.test_labels)).long()
    order = torch.randperm(len(train), generator=generator)
    rows, others = order[: case.samples], order[case.samples :]
    before = others[labels[others] < 5]
    tests = torch.randperm(len(test), generator=generator)[: study.tests]
    return train[before], labels[before], train[rows], labels[rows], test[tests], test_labels[tests]


def _digit_network(width: int, dropout: float) -> nn.Module:
    """Return an MLP of two hidden layers with dropout behind each."""
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 10),
    )
