"""An opened run that is asked many questions: memory, model, tests, and caches of intermediate answers.

Safe to use from many threads: captures of queries and gradients take turns, everything that is shared is computed once.
The viewer holds a session while it runs, a report while it is written.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dualform.attend.context import context_of
from dualform.attend.memory import Memory
from dualform.attend.removal import Removal
from dualform.attend.spotlight import Spotlight
from dualform.attend.weights import GroupWeights
from dualform.effects.output_gradients import Quantity
from dualform.effects.slopes import output_rows, slopes
from dualform.errors import QueryError
from dualform.modes import evaluation_copy
from dualform.pieces import Tokenizer
from dualform.recording.module_hooks import hook_forward, temporary_hooks
from dualform.recording.watch import plain_name
from dualform.show.grouping import GroupingColumns, unit_name
from dualform.show.held_out import held_out_windows, shorten_to_context
from dualform.show.lru_cache import LruCache
from dualform.show.predictions import model_failures_named, predict_units, run_model
from dualform.show.preparation import QUICK_SECONDS, Preparation
from dualform.show.session_media import SessionMedia, as_images


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """One input that questions are about: a test example, or an input that was drawn or typed."""

    key: tuple[Any, ...]  # equal for equal inputs
    inputs: Tensor  # (1, ...)
    target: int | None = None
    test: int | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """The patterns that are left out, and the layers in which they are; no layers mean all of them."""

    removal: Removal
    layers: tuple[str, ...] = ()


class Session:
    """One run, opened at its last published step, with its model.

    The caller makes the model: `warnings` say where it is not the recorded one, and stand in every answer.
    """

    def __init__(
        self,
        memory: Memory,
        model: nn.Module,
        *,
        budget: int,
        warnings: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.memory = memory
        self.warnings = tuple(warnings)  # which parts of the model are not those of the recording
        self.model = evaluation_copy(model)
        self._watched = copy.deepcopy(self.model)  # hooks go on this one, and only under the lock
        self.budget = budget
        self.media = SessionMedia(memory.media, tokenizer)
        self._watched_lock = threading.Lock()
        self._spotlights: LruCache[dict[str, Any]] = LruCache(24)
        self._masked: LruCache[nn.Module] = LruCache(4)
        self._weights: LruCache[GroupWeights] = LruCache(2)
        self._preparations: LruCache[Preparation] = LruCache(8, dropped=Preparation.cancel)
        self._slopes: LruCache[dict[str, Tensor]] = LruCache(24)
        self.path_seconds: float | None = None  # how long the last path contributions took
        self.replayed: dict[str, Any] = {}  # the answers and refusals of replays, by question
        self.answers: LruCache[Any] = LruCache(64)  # small answers that do not depend on a test

    # Tests --------------------------------------------------------------------------------------------------------

    @cached_property
    def tests(self) -> Tensor:
        """The test inputs, (M, ...): those that the run keeps, or else windows of its held-out text."""
        return self._examples[0]

    @cached_property
    def targets(self) -> Tensor | None:
        """The tests' targets, (M,), where they are numbers of classes; the viewer has no use for others."""
        found = self._examples[1]
        return found if found is not None and found.dim() == 1 and not found.is_floating_point() else None

    @cached_property
    def test_images(self) -> Tensor | None:
        """The tests as images for people, (M, H, W[, 3]): those that the run keeps, or inputs that look like images."""
        return as_images(self.tests) if self._kept_images is None else self._kept_images

    @cached_property
    def _kept_images(self) -> Tensor | None:
        try:
            return self.memory.test_images()
        except QueryError:
            return None

    @property
    def shows_inputs(self) -> bool:
        """Whether the images of tests are the model's own inputs, since the run keeps none."""
        return self._kept_images is None and self.test_images is not None

    @cached_property
    def context(self) -> int | None:
        """The largest number of tokens that the model takes; None if the model does not declare it."""
        return context_of(self.model)

    @cached_property
    def _examples(self) -> tuple[Tensor, Tensor | None]:
        try:
            return self.memory.tests()
        except QueryError:
            corpus = self.media.text
            if corpus is None or self.memory.batch_axis != 0:  # tests are rows of (M, L)
                return torch.zeros(0), None
            found = held_out_windows(corpus, self.context)
            return found if self.context is not None else shorten_to_context(self.model, *found)

    def predictions(self) -> Tensor:
        """Return the model's output for every test, (M,)."""
        found: Tensor = self.answers.get("predictions", lambda: predict_units(self.model, self.tests))
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
        return output_rows(run_model(model, subject.inputs))[-1].float()

    def spotlight(self, subject: Subject, *, row: int | None = None) -> tuple[Spotlight, dict[str, tuple[int, int]]]:
        """Return the spotlight on one query row of each layer; and layer -> (that row, number of rows).

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

    def margin_spotlight(self, subject: Subject, unit: int) -> Spotlight:
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

    def path_spotlight(
        self, subject: Subject, quantity: Quantity, targets: Tensor | None = None, *, own_model: bool = False
    ) -> Spotlight:
        """Return the spotlight that path contributions to a quantity are asked of.

        Args:
            subject: the input.
            quantity: the quantity of the model's output.
            targets: the quantity's targets, one for each input.
            own_model: ask with a copy of the model that no other thread has: to find contributions, which takes long.
        """
        if own_model:
            with model_failures_named(subject.inputs):
                model = copy.deepcopy(self.model)
                return self.memory.attend(model, subject.inputs, targets=targets, quantity=quantity, other_model=True)
        with self._watched_lock, model_failures_named(subject.inputs):
            return self.memory.attend(
                self._watched, subject.inputs, targets=targets, quantity=quantity, other_model=True
            )

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
        with self._watched_lock, temporary_hooks() as handles:
            hook_forward(handles, modules[last], lambda _m, _a, _k, output: seen.append(output))
            outputs = output_rows(run_model(self._watched, self.tests[:1]))
        same = bool(seen) and isinstance(seen[-1], Tensor) and torch.equal(output_rows(seen[-1]), outputs)
        return last if same else None

    # Masks --------------------------------------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether every layer has its values, so that masks can be asked for."""
        return all(entry.store != "keys" for entry in self.memory.layers.values())

    @property
    def replays(self) -> bool:
        """Whether some layer's patterns are not stored and come back with a replay of the training."""
        return any(entry.store == "steps" for entry in self.memory.layers.values())

    @property
    def shares_only(self) -> bool:
        """Whether some layer keeps shares and no patterns, so that masks are unions of its groups."""
        return any(entry.store == "shares" for entry in self.memory.layers.values())

    def weights(self, by: GroupingColumns) -> GroupWeights:
        """Return the group weights by these columns; they are ready when `prepare` was called."""
        return self._weights.get(by, lambda: self.memory.group_weights(list(by), budget=self.budget))

    def prepare(self, by: GroupingColumns) -> Preparation:
        """Begin to prepare the group weights by these columns, unless that has begun already and did not fail."""

        def begin() -> Preparation:
            return Preparation(self.memory, self.weights(by))

        preparation = self._preparations.get(by, begin)
        if preparation.may_be_repeated():
            self._preparations.drop(by, preparation)
            preparation = self._preparations.get(by, begin)
            preparation.thread.join(QUICK_SECONDS)  # a failure that is still one is told at once
        return preparation

    def cancel(self) -> None:
        """Stop the preparations of group weights at their next step."""
        for preparation in self._preparations.values():
            preparation.cancel()

    def close(self) -> None:
        """Stop the preparations of group weights, and wait for their threads to end."""
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
        """Return the name of an output unit."""
        return unit_name(self.media, unit)
