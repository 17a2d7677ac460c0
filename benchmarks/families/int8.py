"""What patterns stored as int8 cost and lose, on a classifier of MNIST and an LSTM that reads Aesop.

The same training, to the bit, is recorded in float32, float16 and int8. Every row is about int8; its details have the
same figure for float16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import REPORTED, Goal, Measured, Unit, at_most, row
from benchmarks.stores import MNIST, batches, bytes_of, classifier, images, train
from dualform.engine.reading import read_blocks
from dualform.experiments.models import lstm
from dualform.recording.watch import StoredDtype
from dualform.store.reader import Run

COARSE: tuple[StoredDtype, ...] = ("float16", "int8")
CPU = torch.device("cpu")
STREAMS, UNROLL = 16, 50  # of the LSTM: texts that are read at once, and characters of each in a step


@dataclass(frozen=True, slots=True)
class Recordings:
    """One training, recorded in each dtype; None stands for float32.

    Attributes:
        memories: the recordings.
        sizes: the bytes of each recording, every file counted.
        rebuild: the largest error of a layer's rebuilt parameters in each, relative to their change, and its bound.
        model: the trained model.
        tests: inputs to ask about.
        source: the name of the data.
    """

    memories: Mapping[StoredDtype | None, dualform.Memory]
    sizes: Mapping[StoredDtype | None, int]
    rebuild: Mapping[StoredDtype | None, tuple[float, float]]
    model: nn.Module
    tests: Tensor
    source: str


Training = Callable[[Bench, StoredDtype | None, str], tuple[nn.Module, Tensor, str]]


def _train_classifier(bench: Bench, dtype: StoredDtype | None, folder: str) -> tuple[nn.Module, Tensor, str]:
    """Record the MNIST network of the other rows; return it, tests, and the name of the data."""
    inputs, labels, source = images(bench)
    model, optimizer = classifier(MNIST, CPU)
    order = batches(len(inputs), bench.size(60, 4))
    with dualform.record(model, optimizer, folder, dtype=dtype) as recorder:
        train(model, optimizer, inputs, labels, order, recorder=recorder)
    return model, inputs[-64:], source


def _text(bench: Bench) -> tuple[Tensor, int, str]:
    """Return Aesop's fables as numbers of characters, how many characters there are, and the name of the data."""
    from dualform.experiments.datasets import describe_datasets, load_text

    if not bench.quick and any(known.name == "aesop" and known.available for known in describe_datasets()):
        text = load_text("aesop").train[:200_000]
        numbers = {character: i for i, character in enumerate(sorted(set(text)))}
        return torch.tensor([numbers[character] for character in text]), len(numbers), "Aesop"
    return torch.randint(60, (20_000,), generator=torch.Generator().manual_seed(0)), 60, "random characters"


def _train_lstm(adam: bool) -> Training:
    """Return a training of the study's LSTM (128 units), with Adam as in the study, or with SGD."""

    def run(bench: Bench, dtype: StoredDtype | None, folder: str) -> tuple[nn.Module, Tensor, str]:
        numbers, count, source = bench.once("text", lambda: _text(bench))
        streams = numbers[: len(numbers) // STREAMS * STREAMS].view(STREAMS, -1)
        torch.manual_seed(0)
        model = lstm(tokens=count, embedding=64, units=128)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3) if adam else optimizer
        with dualform.record(model, optimizer, folder, dtype=dtype) as recorder:
            for start in range(0, bench.size(60, 3) * UNROLL, UNROLL):
                tokens, targets = (streams[:, start + i : start + i + UNROLL] for i in (0, 1))
                recorder.annotate(label=tokens)
                loss = functional.cross_entropy(model(tokens)[0].flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return model, streams[:2, -UNROLL:], source

    return run


TRAININGS: Mapping[str, Training] = {
    "mnist": _train_classifier,
    "lstm": _train_lstm(adam=False),
    "lstm-adam": _train_lstm(adam=True),
}


def _recordings(bench: Bench, training: str) -> Recordings:
    """Return one training recorded in each dtype; made once for all rows."""
    return bench.once(("int8", training), lambda: _record(bench, TRAININGS[training]))


def _record(bench: Bench, training: Training) -> Recordings:
    memories, sizes, rebuild = {}, {}, {}
    for dtype in (None, *COARSE):
        folder = bench.new_folder()
        model, tests, source = training(bench, dtype, str(folder))
        memories[dtype] = dualform.open(folder)
        sizes[dtype] = bytes_of(folder)
        layers = memories[dtype].verify(model).layers
        rebuild[dtype] = max((layer.error or 0.0, layer.bound or 0.0) for layer in layers)
    return Recordings(memories, sizes, rebuild, model, tests, source)


_Registered = Callable[[Callable[..., Measured]], Callable[..., Measured]]


def _rows(suffix: str, what: str, against: str, *, goal: Goal = REPORTED, adam: bool = False) -> _Registered:
    """Register a function as the row of each training: of the LSTM with Adam too, if asked for."""
    names = {"mnist": "MNIST network, SGD", "lstm": "LSTM of 128 units on Aesop, SGD"}
    names |= {"lstm-adam": "LSTM of 128 units on Aesop, Adam"} if adam else {}

    def register(measure: Callable[..., Measured]) -> Callable[..., Measured]:
        for training, name in names.items():
            unit: Unit = "percent" if suffix == "top" else "times" if suffix == "bytes" else "plain"
            row(
                f"int8-{training}-{suffix}",
                what=f"{name}, int8: {what}",
                against=against,
                unit=unit,
                cpu=goal,
                training=training,
            )(measure)
        return measure

    return register


@_rows("bytes", "bytes on disk, every file counted", "the same run in float32")
def int8_bytes(bench: Bench, training: str) -> Measured:
    found = _recordings(bench, training)
    exact = found.sizes[None]
    detail: dict[str, float | str] = {"float16": found.sizes["float16"] / exact, "inputs": found.source}
    return Measured(found.sizes["int8"] / exact, None, detail)


@_rows("rebuild", "largest error of a layer's rebuilt parameters", "the change of these parameters", adam=True)
def int8_rebuild(bench: Bench, training: str) -> Measured:
    found = _recordings(bench, training).rebuild
    detail = {"verify's bound": found["int8"][1], "float16": found["float16"][0], "float32": found[None][0]}
    return Measured(found["int8"][0], None, detail)


@_rows(
    "totals",
    "largest error of a total of attention by label",
    "the largest total of its query, in float32",
    goal=at_most(5e-3),
    adam=True,
)
def int8_totals(bench: Bench, training: str) -> Measured:
    found = _recordings(bench, training)
    exact = found.memories[None].attend(found.model, found.tests)
    errors: dict[str, float] = {}
    for dtype in COARSE:
        ours = found.memories[dtype].attend(found.model, found.tests)
        for of in ("attention", "magnitude", "contribution"):
            worst = 0.0
            for layer in exact:
                a, b = (
                    spotlight[layer].totals("label", of=of).values.double().flatten(1) for spotlight in (ours, exact)
                )
                worst = max(worst, float(((a - b).abs().amax(dim=1) / b.abs().amax(dim=1)).max()))
            errors[f"{dtype}, {of}"] = worst
    return Measured(errors["int8, attention"], None, errors)


@_rows("top", "patterns that are among a query's 10 of greatest magnitude in float32 too", "10")
def int8_top(bench: Bench, training: str) -> Measured:
    found = _recordings(bench, training)
    exact = found.memories[None].attend(found.model, found.tests)
    shares: dict[str, float] = {}
    for dtype in COARSE:
        ours = found.memories[dtype].attend(found.model, found.tests)
        for layer in exact:
            best = [spotlight[layer].top(10, of="magnitude").patterns.flatten(1) for spotlight in (ours, exact)]
            both = [len(set(a.tolist()) & set(b.tolist())) / len(a) for a, b in zip(*best, strict=True)]
            shares[f"{dtype}, {layer}"] = sum(both) / len(both)
    return Measured(min(share for name, share in shares.items() if name.startswith("int8")), None, shares)


@_rows(
    "products",
    "root mean square of the error of dot products, key with query, in the worst layer",
    "the product of their lengths",
)
def int8_products(bench: Bench, training: str) -> Measured:
    found = _recordings(bench, training)
    exact = found.memories[None].attend(found.model, found.tests)
    run = Run(found.memories[None].path)
    errors: dict[str, float] = {}
    for layer in exact:
        keys = torch.cat([block.keys for block in read_blocks(run, layer, horizon=run.steps)])
        if not keys.is_floating_point():
            continue  # tokens are stored as they are
        theirs, queries = exact[layer].attention().double(), exact[layer].queries.double()
        size = queries.norm(dim=1)[:, None] * keys.double().norm(dim=1)
        for dtype in COARSE:
            ours = found.memories[dtype].attend(found.model, found.tests)[layer].attention().double()
            relative = ((ours - theirs) / size)[:, size.amin(dim=0) > 0]
            errors[f"{dtype}, {layer}"] = float(relative.square().mean().sqrt())
    return Measured(max(error for name, error in errors.items() if name.startswith("int8")), None, errors)
