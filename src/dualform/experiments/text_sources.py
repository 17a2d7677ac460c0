"""A small GPT trained on several texts at once, of which only each text's share is kept: what does it owe to which?

Every row of a batch comes from one text, and belongs to one of several groups that are drawn without regard to the text
and have the texts' sizes: to leave out such a group is the control for leaving out a text.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.errors import DataError
from dualform.experiments.datasets import load_text
from dualform.experiments.findings import Clock, Row, finish_study, make_room, verified_findings
from dualform.experiments.models import transformer
from dualform.progress import bar

SYMBOLS = 256  # a text is read as the bytes of its UTF-8
LAST_LAYER = "softmax"
CONTROL = "random rows, as many as of "
TESTED_WINDOWS = 128  # of each text's held-out part
WINDOWS_AT_ONCE = 16
FACTORY = "dualform.experiments.models:transformer"


@dataclass(frozen=True, slots=True)
class TextSourcesStudy:
    """What is trained on which texts.

    Attributes:
        texts: the texts, and the part of all rows that comes from each.
        width: of the Transformer.
        blocks: how many.
        heads: of its attention.
        context: bytes in a row.
        batch: rows in an update.
        updates: how many.
        learning_rate: AdamW's, after a warm-up over a tenth of the updates, and falling to 0.
        decay: AdamW's weight decay.
        clip: the norm that gradients are clipped at.
    """

    texts: Mapping[str, float] = field(
        default_factory=lambda: {"wikitext-2": 0.4, "moby-dick": 0.25, "standard-library": 0.25, "aesop": 0.1}
    )
    width: int = 384
    blocks: int = 6
    heads: int = 6
    context: int = 256
    batch: int = 64
    updates: int = 2000
    learning_rate: float = 1e-3
    decay: float = 0.1
    clip: float = 1.0

    @property
    def arguments(self) -> dict[str, Any]:
        """The model's arguments."""
        return {
            "tokens": SYMBOLS,
            "width": self.width,
            "heads": self.heads,
            "blocks": self.blocks,
            "context": self.context,
        }


@dataclass(frozen=True, slots=True)
class TextBytes:
    """A text as numbers: the bytes to train on, and those that are held out."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """The rows of one update.

    Attributes:
        tokens: (B, L + 1) the bytes, with the one that follows.
        source: (B,) the text that each row comes from.
        control: (B,) the group that each row was put in at random.
    """

    tokens: Tensor
    source: list[str]
    control: list[str]


def read_texts(study: TextSourcesStudy) -> dict[str, TextBytes]:
    """Return a study's texts.

    Raises:
        DataError: a text is shorter than one row.
    """
    found = {}
    for name in study.texts:
        text = load_text(name)
        parts = [torch.from_numpy(np.frombuffer(part.encode(), np.uint8).copy()) for part in (text.train, text.test)]
        if min(map(len, parts)) <= study.context:
            raise DataError(f"{name} has {min(map(len, parts))} bytes in a part; one row takes {study.context + 1}.")
        found[name] = TextBytes(*parts)
    return found


def mixed_batches(study: TextSourcesStudy, texts: Mapping[str, TextBytes], *, seed: int) -> Iterator[MixedBatch]:
    """Yield the rows of every update."""
    generator = torch.Generator().manual_seed(seed)
    names, weights = list(study.texts), torch.tensor(list(study.texts.values()), dtype=torch.float64)
    for _ in range(study.updates):
        source, control = (torch.multinomial(weights, study.batch, True, generator=generator).tolist() for _ in "ab")
        rows = []
        for i in source:
            text = texts[names[i]].train
            start = int(torch.randint(len(text) - study.context, (), generator=generator))
            rows.append(text[start : start + study.context + 1])
        yield MixedBatch(torch.stack(rows).long(), [names[i] for i in source], [CONTROL + names[i] for i in control])


def train_on_texts(
    study: TextSourcesStudy, texts: Mapping[str, TextBytes], folder: Path, *, seed: int, device: str
) -> nn.Module:
    """Train a model, and keep the share of each text and of each control group of rows."""
    torch.manual_seed(seed)
    model = transformer(**study.arguments).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=study.learning_rate, weight_decay=study.decay)
    warm = max(1, study.updates // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, (study.updates - i) / max(1, study.updates - warm))
    )
    recorder = dualform.record(
        model,
        optimizer,
        folder,
        keep=dualform.Shares(by=[("source",), ("control",)]),
        strict=True,
        factory=FACTORY,
        factory_arguments=study.arguments,
    )
    with bar("training", total=study.updates) as advance, recorder:
        for batch in mixed_batches(study, texts, seed=seed):
            recorder.annotate(source=batch.source, control=batch.control)
            tokens = batch.tokens.to(device)
            logits, _ = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), study.clip)
            optimizer.step()
            schedule.step()
            advance(1)
    return model.eval()


def spaced_windows(study: TextSourcesStudy, text: TextBytes) -> Tensor:
    """Return evenly spaced windows of a text's held-out part, (W, L + 1)."""
    last = len(text.test) - study.context - 1
    starts = torch.linspace(0, last, min(TESTED_WINDOWS, last // study.context + 1)).long()
    return torch.stack([text.test[start : start + study.context + 1] for start in starts.tolist()]).long()


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: Tensor) -> float:
    """Return how many bits of each byte a model does not know."""
    device = next(model.parameters()).device
    total = 0.0
    for part in windows.to(device).split(WINDOWS_AT_ONCE):
        logits, _ = model(part[:, :-1])
        total += float(functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / windows[:, 1:].numel() / math.log(2)


def margins_by_text(memory: Memory, model: nn.Module, windows: Tensor) -> Row:
    """Return what each text's share of the last layer adds to the true byte's logit beyond the mean logit, on average.

    The parts sum to the model's own margin, which is returned beside them.
    """
    device = next(model.parameters()).device
    parts: dict[str, float] = {}
    for some in windows.split(WINDOWS_AT_ONCE):
        true = some[:, 1:].flatten()
        layer = memory.attend(model, some[:, :-1].to(device), layers=[LAST_LAYER])[LAST_LAYER]
        totals = layer.totals(by="source", of="contribution")  # (Q, G, V)
        found = dict(zip(map(str, totals.groups), totals.values.unbind(1), strict=True))
        found["start and the rest"] = layer.output().reshape(len(true), -1) - sum(found.values())
        for name, logits in found.items():
            logits = logits.cpu().double()
            margin = logits.gather(1, true[:, None])[:, 0] - logits.mean(1)
            parts[name] = parts.get(name, 0.0) + float(margin.sum()) / windows[:, 1:].numel()
    return {"parts": parts, "sum": sum(parts.values())}


def reproduce_text_sources(
    study: TextSourcesStudy, folder: Path, *, seed: int, device: str = "cpu", keep: bool = True
) -> Row:
    """Run the study with one seed and return its findings; arguments as those of `reproduce_language`."""
    found = make_room(folder, study, seed=seed, keep=keep)
    if found is not None:
        return found
    clock = Clock({})
    texts = read_texts(study)
    windows = {name: spaced_windows(study, text) for name, text in texts.items()}
    model = clock("training", lambda: train_on_texts(study, texts, folder / "run", seed=seed, device=device))
    memory = dualform.open(folder / "run")
    findings: Row = {
        **verified_findings(memory, model, study, clock, seed=seed),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file()),
        "margins": clock(
            "margins", lambda: {name: margins_by_text(memory, model, part) for name, part in windows.items()}
        ),
        "masks": clock("masks", lambda: _masks(memory, model, study, windows)),
    }
    return finish_study(folder, findings, clock, device=device, keep=keep)


def _masks(memory: Memory, model: nn.Module, study: TextSourcesStudy, windows: Mapping[str, Tensor]) -> list[Row]:
    """Return the bits per byte of every text, for the whole memory and without each group.

    Without a group in all layers, and in the last layer alone, where a mask of this size breaks less.
    """

    def measured(masked: nn.Module, **row: Any) -> Row:
        return {**row, **{name: bits_per_byte(masked, part) for name, part in windows.items()}}

    rows = [measured(model, without=None, layer=None)]
    for layer in (None, LAST_LAYER):
        for name in study.texts:
            masked = memory.without(source=name).apply(model, layers=layer)
            rows.append(measured(masked, without=name, layer=layer))
        for name in study.texts:
            masked = memory.without(control=CONTROL + name).apply(model, layers=layer)
            rows.append(measured(masked, without=CONTROL + name, layer=layer))
    return rows
