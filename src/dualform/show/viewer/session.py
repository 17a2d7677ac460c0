"""The opened run behind the viewer: memory, model, tests, and what is worth keeping between questions.

Safe to use from many threads: captures of queries and gradients take turns, everything that is shared is computed once.
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attend.context import context_of
from dualform.attend.groups import Bins
from dualform.attend.memory import Memory
from dualform.attend.removal import Removal
from dualform.attend.slopes import output_rows, slopes
from dualform.attend.spotlight import Spotlight
from dualform.attend.weights import GroupWeights
from dualform.errors import DualformError, QueryError
from dualform.modes import evaluation_copy
from dualform.record.watch import plain_name
from dualform.show.passages import column_name
from dualform.show.viewer.job import Cancelled
from dualform.show.viewer.kept import Kept
from dualform.show.viewer.preparing import Preparation
from dualform.store.corpus import Corpus
from dualform.tokens import visible

By = tuple[str | Bins, ...]
WINDOWS = 500  # of a held-out text that are tests
WINDOW_LENGTHS = {"words": 24, "chars": 80, "pieces": 32}  # tokens of such a test


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """What is asked about: a test example, or an input that was drawn or typed."""

    key: tuple[Any, ...]  # equal where the input is
    inputs: Tensor  # (1, ...)
    target: int | None = None
    test: int | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """What is left out, and in which layers (in all of them without any)."""

    removal: Removal
    layers: tuple[str, ...] = ()


class Session:
    """One run, opened at its last published step.

    The model is the caller's affair: `warnings` say where it is not the recorded one, and stand in every answer.
    """

    def __init__(self, memory: Memory, model: nn.Module, *, budget: int, warnings: Sequence[str] = ()) -> None:
        self.memory = memory
        self.warnings = tuple(warnings)  # which parts of the model are not those of the recording
        self.model = evaluation_copy(model)
        self._watched = copy.deepcopy(self.model)  # hooks go on this one, and only under the lock
        self.budget = budget
        self.media = memory.media
        self._watched_lock = threading.Lock()
        self._spotlights: Kept[dict[str, Any]] = Kept(24)
        self._masked: Kept[nn.Module] = Kept(4)
        self._weights: Kept[GroupWeights] = Kept(2)
        self._preparations: Kept[Preparation] = Kept(8, dropped=Preparation.cancel)
        self._slopes: Kept[dict[str, Tensor]] = Kept(24)
        self.answers: Kept[Any] = Kept(64)  # small answers that do not depend on a test

    # Tests --------------------------------------------------------------------------------------------------------

    @cached_property
    def tests(self) -> Tensor:
        """The test inputs, (M, ...); windows of the held-out text where the run keeps that instead."""
        return self._examples[0]

    @cached_property
    def targets(self) -> Tensor | None:
        """The tests' targets, (M,), where they are numbers of classes; the viewer has no use for others."""
        found = self._examples[1]
        return found if found is not None and found.dim() == 1 and not found.is_floating_point() else None

    @cached_property
    def test_images(self) -> Tensor | None:
        """What a person should see of the tests, (M, H, W[, 3])."""
        try:
            return self.memory.test_images()
        except QueryError:
            return None

    @cached_property
    def context(self) -> int | None:
        """How many tokens the model takes at most, where it says."""
        return context_of(self.model)

    @cached_property
    def _examples(self) -> tuple[Tensor, Tensor | None]:
        try:
            return self.memory.tests()
        except QueryError:
            corpus = self.media.text
            if corpus is None or self.memory.batch_axis != 0:  # tests are rows of (M, L)
                return torch.zeros(0), None
            found = windows(corpus, self.context)
            return found if self.context is not None else _shortened(self.model, *found)

    def predictions(self) -> Tensor:
        """Return the model's output for every test, (M,)."""
        found: Tensor = self.answers.get("predictions", lambda: predicted(self.model, self.tests))
        return found

    # One input ----------------------------------------------------------------------------------------------------

    def test(self, number: int) -> Subject:
        """Return a test example."""
        if not 0 <= number < len(self.tests):
            raise QueryError(f"There is no test {number}; there are {len(self.tests)}.")
        target = None if self.targets is None else int(self.targets[number])
        return Subject(("test", number), self.tests[number : number + 1], target, number)

    def outputs(self, subject: Subject, mask: Mask | None = None) -> Tensor:
        """Return the model's outputs for an input, (classes,): the last row's, under a mask if there is one."""
        model = self.model if mask is None or mask.removal.nothing else self.masked(mask)
        return output_rows(forward_once(model, subject.inputs))[-1].float()

    def spotlight(self, subject: Subject, *, row: int | None = None) -> tuple[Spotlight, dict[str, tuple[int, int]]]:
        """Return the spotlight on one query row of each layer, and which row of how many it is.

        A layer that sees many rows of one input (tokens, patches) is asked about one of them: `row`, or the last of a
        text, or the middle of an image.
        """
        found = self._spotlights.get((subject.key, row), lambda: self._look(subject, row))
        return found["spotlight"], found["rows"]

    def _look(self, subject: Subject, row: int | None) -> dict[str, Any]:
        with self._watched_lock, model_failures_named(subject.inputs):
            whole = self.memory.attend(self._watched, subject.inputs, other_model=True)
        tokens = not subject.inputs.is_floating_point()
        rows: dict[str, tuple[int, int]] = {}
        queries = {}
        for name, layer in whole.layers.items():
            count = len(layer)
            default = count - 1 if tokens else count // 2
            at = default if row is None else min(row, count - 1)
            rows[name] = (at, count)
            queries[name] = layer.queries[at : at + 1]
        return {"spotlight": self.memory.attend(queries=queries), "rows": rows, "whole": whole}

    def whole(self, subject: Subject) -> Spotlight:
        """Return the spotlight on every query row of each layer."""
        found: Spotlight = self._spotlights.get((subject.key, None), lambda: self._look(subject, None))["whole"]
        return found

    def asked(self, subject: Subject, unit: int) -> Spotlight:
        """Return the spotlight that knows how the margin of the model's output `unit` moves with every layer."""

        def compute() -> dict[str, Any]:
            with self._watched_lock, model_failures_named(subject.inputs):
                targets = torch.tensor([unit])
                whole = self.memory.attend(
                    self._watched, subject.inputs, targets=targets, quantity="margin", other_model=True
                )
                return {"whole": whole}

        found: Spotlight = self._spotlights.get((subject.key, f"margin of {unit}"), compute)["whole"]
        return found

    def slopes(self, subject: Subject, unit: int) -> dict[str, Tensor]:
        """Return how the model's output `unit` moves with each layer's output, layer -> (rows, d_out)."""

        def compute() -> dict[str, Tensor]:
            with self._watched_lock, model_failures_named(subject.inputs):
                return slopes(self._watched, subject.inputs, list(self.memory.layers), unit=unit)

        return self._slopes.get((subject.key, unit), compute)

    @cached_property
    def output_layer(self) -> str | None:
        """The layer whose outputs are the model's outputs, if there is one."""
        last = list(self.memory.layers)[-1]
        modules = {plain_name(name): module for name, module in self._watched.named_modules()}
        seen: list[Tensor] = []
        if not len(self.tests) or last not in modules:
            return None
        with self._watched_lock:
            handle = modules[last].register_forward_hook(lambda _m, _i, output: seen.append(output))
            try:
                outputs = output_rows(forward_once(self._watched, self.tests[:1]))
            finally:
                handle.remove()
        same = bool(seen) and isinstance(seen[-1], Tensor) and torch.equal(output_rows(seen[-1]), outputs)
        return last if same else None

    # Masks --------------------------------------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether every layer has its values, so that masks can be asked for."""
        return all(entry.store != "keys" for entry in self.memory.layers.values())

    def weights(self, by: By) -> GroupWeights:
        """Return the group weights by these columns; they are ready when `prepare` was called."""
        return self._weights.get(by, lambda: self.memory.group_weights(list(by), budget=self.budget))

    def prepare(self, by: By) -> Preparation:
        """Begin to prepare the group weights by these columns, unless that has begun already."""
        return self._preparations.get(by, lambda: Preparation(self.memory, self.weights(by)))

    def cancel(self) -> None:
        """Stop the preparations in the background at their next step."""
        for preparation in self._preparations.values():
            preparation.cancel()

    def close(self) -> None:
        """Stop the preparations in the background, and wait for their end."""
        self.cancel()
        for preparation in self._preparations.values():
            preparation.thread.join(10)

    @cached_property
    def final(self) -> dict[str, Tensor]:
        """The trained parameters."""
        return {plain_name(name): parameter.detach() for name, parameter in self.model.named_parameters()}

    def masked(self, mask: Mask) -> nn.Module:
        """Return the model under a mask: a copy of its own, so that threads do not meet."""
        return self._masked.get(mask, lambda: self._apply(mask))

    def _apply(self, mask: Mask) -> nn.Module:
        layers = mask.layers or tuple(self.memory.layers)
        entries = [self.memory.layers[name] for name in layers]
        if any(entry.store == "keys" for entry in entries):
            raise QueryError("A layer was recorded with its keys only, so nothing can be taken out of its weights.")
        wanted = {parameter for entry in entries for parameter in entry.parameters.values()}
        weights = self.weights(mask.removal.by).apply(self.final, mask.removal)
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if (name := plain_name(path)) in wanted:
                    parameter.copy_(weights[name])
        return model

    # Names --------------------------------------------------------------------------------------------------------

    def name(self, unit: int) -> str:
        """Return what an output unit stands for."""
        if self.media.labels is not None and 0 <= unit < len(self.media.labels):
            return self.media.labels[unit]
        if self.media.text is not None and 0 <= unit < len(self.media.text.vocabulary):
            return visible(self.media.text.vocabulary[unit])
        return str(unit)


def group_name(session: Session, by: By, group: Any) -> str:
    """Return a group as people read it: classes, tokens and documents by their names."""
    parts = list(group) if isinstance(group, list | tuple) else [group]
    names = []
    for column, part in zip(map(str, by), parts, strict=False):
        if part is None:
            names.append("(none)")
        elif column == "label" and isinstance(part, int):
            names.append(session.name(part))
        else:
            names.append(column_name(session.media.text, column, part) or str(part))
    return " · ".join(names)


def windows(corpus: Corpus, context: int | None = None) -> tuple[Tensor, Tensor]:
    """Return prompts from all over the held-out text, (M, L), and the token that follows each, (M,).

    Args:
        corpus: the text.
        context: how many tokens the model takes at most, if it has a limit.
    """
    length = WINDOW_LENGTHS[corpus.unit] if context is None else min(context, WINDOW_LENGTHS[corpus.unit])
    held = torch.from_numpy(corpus.test)
    count = min(WINDOWS, max(len(held) - 1, 0) // length)
    if not count:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    starts = torch.linspace(0, len(held) - length - 1, count).long()
    return torch.stack([held[start : start + length] for start in starts.tolist()]), held[starts + length]


def _shortened(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts (M, L) cut from the front, by half each time, to a length that the model takes."""
    while len(tokens):
        try:
            forward_once(model, tokens[:1])
            break
        except QueryError:
            if tokens.shape[1] == 1:
                raise
            tokens = tokens[:, -(tokens.shape[1] // 2) :]
    return tokens, targets


def forward_once(model: nn.Module, inputs: Tensor) -> Any:
    """Run a model that is in eval mode already; unlike `forward` this changes no mode that another thread relies on."""
    device = next((parameter.device for parameter in model.parameters()), inputs.device)
    with torch.no_grad(), model_failures_named(inputs):
        return model(inputs.to(device))


@contextmanager
def model_failures_named(inputs: Tensor) -> Iterator[None]:
    """Turn whatever a model raises on these inputs into a `QueryError` that says so."""
    try:
        yield
    except (DualformError, Cancelled, OSError):
        raise
    except Exception as error:
        raise QueryError(
            f"The model failed on inputs {tuple(inputs.shape)}: {type(error).__name__}: {error}. Keep test examples "
            "that it takes (memory.add_tests), or give a shorter prompt."
        ) from error


def predicted(model: nn.Module, inputs: Tensor, *, batch: int = 2048) -> Tensor:
    """Return the largest output for each input, (M,); that of the last position where there are several."""
    if not len(inputs):
        return torch.zeros(0, dtype=torch.int64)
    parts = []
    for rows in inputs.split(batch if inputs.dim() < 3 or inputs.is_floating_point() else 64):
        outputs = output_rows(forward_once(model, rows))
        parts.append(outputs.reshape(len(rows), -1, outputs.shape[-1])[:, -1].argmax(dim=1).cpu())
    return torch.cat(parts)


def grouping_columns(memory: Memory, layer: str, *, most: int = 50_000) -> list[dict[str, Any]]:
    """Return what patterns can be grouped by, with the number of groups; the finest last."""
    user = [name for name in memory.columns if name not in ("pattern", "step", "micro", "call", "row", "position")]
    found: list[dict[str, Any]] = []
    candidates: list[list[str]] = [[name] for name in user if name not in ("sample", "place")]
    if "task" in user and "label" in user:
        candidates.insert(0, ["task", "label"])
    for columns in candidates:
        try:
            count = memory.count_groups(layer, columns)
        except DualformError:
            continue
        if 1 < count <= most or columns == ["label"]:
            found.append({"by": ",".join(columns), "groups": count})
    order: Sequence[str] = ("task,label", "label", "task", "document", "token")
    tasks = next((entry["groups"] for entry in found if entry["by"] == "task"), 1)
    if tasks < 2:
        found = [entry for entry in found if entry["by"] not in ("task,label", "task")]
    found.sort(key=lambda entry: order.index(entry["by"]) if entry["by"] in order else len(order))
    return found
