"""A memory: an opened run and a view of it (mask and horizon), with everything that can be asked of it.

Views are cheap and immutable. A mask leaves recorded updates out of the sum and holds everything else of the trajectory
as it was; it does not retrain.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import pyarrow as pa
import torch
from torch import Tensor, nn

from dualform.attend import text
from dualform.attend.conditions import Condition, condition
from dualform.attend.cost import count_rounds
from dualform.attend.groups import Table
from dualform.attend.info import Info, describe_run
from dualform.attend.layer import LayerSpotlight
from dualform.attend.path import Asked, PathContributions
from dualform.attend.path_question import read_paths
from dualform.attend.prompts import PromptLike
from dualform.attend.queries import batches, capture_queries, given_queries
from dualform.attend.questions import Question
from dualform.attend.recognition import differing_parts, logged_marks, other_model_text
from dualform.attend.spotlight import Spotlight
from dualform.attend.sums import view_parts
from dualform.attend.text_answers import TextSpotlight
from dualform.attend.training_history import TrainingHistory, find_training_history
from dualform.attend.view_shares import ViewShares
from dualform.attend.warn import MaskWarning, OtherModelWarning
from dualform.attend.weights import GroupWeights
from dualform.binning import By, grouping_columns
from dualform.corpus import Corpus
from dualform.effects.moments import outside
from dualform.effects.output_gradients import OutputGradients, Quantity, find_output_gradients
from dualform.engine import rebuild
from dualform.engine.answer_cache import AnswerCache
from dualform.engine.beside_patterns import KnownState, Media, lossy_text
from dualform.engine.coverage import Coverage, coverage
from dualform.engine.description import LayerEntry, RowsEntry
from dualform.engine.explanation import Explanation
from dualform.engine.fingerprints import matching_steps
from dualform.engine.jobs import Executor
from dualform.engine.local import LocalExecutor
from dualform.engine.reducers import PlaceState
from dualform.engine.share_source import ParameterShares
from dualform.engine.source import Cost, PatternSource
from dualform.engine.verification import (
    LayerCheck,
    Verification,
    by_layer,
    compare,
    compare_shares,
    percent_text,
    verify,
)
from dualform.errors import QueryError, SelectionError
from dualform.lazy import compute as pc
from dualform.pieces import Tokenizer
from dualform.printable import cut
from dualform.recording.media import example_files, media_files
from dualform.recording.user_warnings import warn_user
from dualform.recording.watch import plain_name
from dualform.threads import in_own_dtype, keeping_modes
from dualform.torch_modes import without_gradients


class Memory:
    """A recorded training run, or a view of it. Made by `dualform.open`."""

    def __init__(
        self,
        source: PatternSource,
        executor: Executor | None = None,
        *,
        conditions: tuple[Condition, ...] = (),
        horizon: int | None = None,
        shared: "_Shared | None" = None,
    ) -> None:
        self._run = source
        self._shared = shared or _Shared(AnswerCache(source), executor or LocalExecutor())
        self._cache = self._shared.cache
        self._conditions = conditions
        self._horizon = source.last_step if horizon is None else horizon
        self._table = Table(source, conditions, self._horizon, self._shared.executor)
        self._parts: dict[str, rebuild.ParameterParts] | None = None

    # What there is ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The run folder. Of a run elsewhere `location` has the address."""
        return Path(self._run.name)

    @property
    def location(self) -> str:
        """The run folder, or the address of the run in object storage, as text."""
        return self._run.name

    @property
    def step(self) -> int:
        """The horizon: how many steps this view looks back on."""
        return self._horizon

    @property
    def layers(self) -> Mapping[str, LayerEntry]:
        """The recorded layers by name."""
        return MappingProxyType(self._run.layers)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that patterns have."""
        return self._table.names

    @property
    def kept_groupings(self) -> tuple[tuple[str, ...], ...]:
        """The groupings by which the run keeps shares; none where it keeps patterns alone."""
        return () if self._run.kept_shares is None else self._run.kept_shares.groupings

    @property
    def rows(self) -> Mapping[str, RowsEntry]:
        """Whether each layer's rows are those of the annotated batches, as a trial found it, for layers tried."""
        return MappingProxyType(self._run.description.rows)

    @property
    def factory(self) -> tuple[str, Mapping[str, Any]] | None:
        """The `"package.module:function"` that makes the model, and its arguments, where the run knows them."""
        found = self._run.description
        return None if found.factory is None else (found.factory, found.factory_arguments)

    @property
    def batch_axis(self) -> int:
        """Which leading axis of the model's inputs counts the rows of a batch."""
        return self._run.description.batch_axis

    @property
    def created(self) -> str:
        """When the recording began, as an ISO date."""
        return self._run.description.created

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of what recorded it."""
        return MappingProxyType(self._run.description.versions)

    @cached_property
    def coverage(self) -> Coverage:
        """How much of what was trained the recorded layers cover."""
        return coverage(self._run)

    @cached_property
    def explanation(self) -> Explanation | None:
        """How much of the change between checkpoints patterns explain, where `dualform.from_checkpoints` made the run.

        None where the training was recorded: its patterns explain all of it, as `verify` proves.
        """
        return self._run.explanation()

    def info(self) -> Info:
        """Describe the memory."""
        return describe_run(self._run, self._describe())

    def manifest_checksum(self) -> str:
        """Return the xxh3 checksum of the run's list of files, which names all of its content."""
        return self._run.require_files().manifest_checksum()

    def patterns(self, layer: str, *, columns: Collection[str] | None = None) -> pa.Table:
        """Return the pattern table of a layer in this view: addresses and annotations, a row per pattern."""
        self._run.layer(layer)
        return self._table.rows(layer, None if columns is None else list(columns))

    def count_groups(self, layer: str, by: By) -> int:
        """Return how many groups the patterns of a layer fall into."""
        return len(self._table.group(layer, by).labels)

    def training_history(self, *, width: int) -> TrainingHistory:
        """Return the history of the run in bins of `width` steps: how large its errors were, its epochs and tasks."""
        return find_training_history(self._table, width=width)

    def steps(self) -> pa.Table:
        """Return the optimizer facts of every (step, parameter) up to the horizon."""
        table = self._run.steps_table
        return table.filter(pc.field("step") < self._horizon) if table.num_rows else table

    def add_tests(self, inputs: Tensor, targets: Tensor | None = None, *, images: Any = None) -> None:
        """Keep test inputs (M, ...) and their targets (M,) in the run, for the command line and the viewer.

        Args:
            inputs: what the model takes, one row per test.
            targets: the right answers.
            images: (M, H, W) or (M, H, W, 3) of uint8, what a person should see of the inputs.
        """
        self._run.require_files().attach(example_files(inputs, targets, images))

    def add_media(self, **what: Any) -> None:
        """Keep images of training samples, names of labels, or a text in the run; see `Recorder.media`."""
        self._run.require_files().attach(media_files(**what))

    def tests(self) -> tuple[Tensor, Tensor | None]:
        """Return the test inputs that the run keeps and, where they are known, their targets."""
        found = self._run.require_files().tests()
        return found.inputs, found.targets

    def test_images(self) -> Tensor | None:
        """Return what a person should see of the test inputs, (M, H, W[, 3]) uint8, where the run keeps it."""
        return self._run.require_files().tests().images

    @property
    def media(self) -> Media:
        """What the run keeps for people to look at."""
        return self._run.require_files().media()

    def add_corpus(self, corpus: Corpus) -> None:
        """Keep the text that a language model was trained on in the run; patterns are annotated with its places.

        A text that does not fit is refused: every pattern's `token` must be the text's token at its `place`.
        """
        self._run.require_files().add_corpus(corpus)

    def corpus(self) -> Corpus:
        """Return the text that the run keeps, whether it fits the recorded places or not."""
        return self._run.require_files().corpus(fitting=False)

    def _restore(self, model: nn.Module) -> dict[str, str]:
        return {} if self._run.run_files is None else self._run.run_files.restore(model)

    # Views --------------------------------------------------------------------------------------------------------

    def where(self, sql: str | None = None, /, **equal: Any) -> "Memory":
        """Keep only the patterns for which a condition holds: SQL text, column values (or lists of them), or both."""
        return self._view(condition(sql, equal, negated=False))

    def without(self, sql: str | None = None, /, **equal: Any) -> "Memory":
        """Leave out the patterns for which a condition holds; the complement of `where`."""
        return self._view(condition(sql, equal, negated=True))

    def at(self, *, step: int) -> "Memory":
        """Look at the memory as it was after `step` steps."""
        if not 0 <= step <= self._run.steps:
            raise SelectionError(f"Step {step} is outside the memory, which has steps 0 to {self._run.steps}.")
        view = Memory(self._run, conditions=self._conditions, horizon=step, shared=self._shared)
        view._require_kept()
        return view

    def _view(self, more: Condition) -> "Memory":
        self._table.require(name for name, _ in more.equal)
        view = Memory(self._run, conditions=(*self._conditions, more), horizon=self._horizon, shared=self._shared)
        if more.sql is not None and self._run.parts():
            # One part is enough to find a malformed condition now rather than at the first question.
            view._table.mask(self._run.parts()[0], next(iter(self.layers)))
        view._require_kept()
        return view

    def _require_kept(self) -> None:
        """Raise where the run keeps shares alone, and not those of this view."""
        if self.layers and all(entry.store == "shares" for entry in self.layers.values()):
            self._table.kept_groups(None)

    def unknown(self, layers: str | Collection[str] | None = None) -> dict[str, int]:
        """Return how many patterns of each layer this view's mask cannot decide, for want of a value in its columns.

        `without` keeps such a pattern and `where` leaves it out. Layers that have none are left out.
        """
        names = list(self.layers) if layers is None else _layer_names(layers)
        counts = {name: self._table.unknown(name) for name in names}
        return {name: count for name, count in counts.items() if count}

    def unwarned(self) -> "Memory":
        """Return this view, which will not warn of patterns that its mask cannot decide: the caller says it."""
        self._shared.said.add(self._conditions)
        return self

    def unknown_text(self, layers: str | Collection[str] | None = None) -> str:
        """Say how many patterns this view's mask cannot decide, and what to do; nothing where it decides all."""
        return undecided_text(self.unknown(layers)) if self._conditions else ""

    # Weights ------------------------------------------------------------------------------------------------------

    @overload
    def shares(self) -> dict[str, Tensor]: ...

    @overload
    def shares(self, by: By) -> dict[str, ParameterShares]: ...

    @in_own_dtype
    def shares(self, by: By | None = None) -> dict[str, Tensor] | dict[str, ParameterShares]:
        """Return what the view's patterns add to each parameter; those of `where` and `without` sum to the whole.

        Args:
            by: a column, `dualform.bins(column, width=...)`, or several of these: each group's share then, beside what
                is left of the start, what no pattern explains, and rounding. All of them sum to the parameter.
        """
        if by is None:
            return {name: part.share.to(self._dtype(name), copy=True) for name, part in self._exact_parts().items()}
        source = self.share_source(by)
        return {name: source.shares(name, source.groupings[0]) for name in self._run.exact_parameters()}

    def share_source(self, *by: By) -> ViewShares:
        """Return the sums of this view by one or several groupings: shares of parameters, and of keys."""
        self._require_values()
        return ViewShares(self._table, self._cache, [grouping_columns(one) for one in by])

    @in_own_dtype
    def weights(self) -> dict[str, Tensor]:
        """Return each parameter as this view implies it: what is left of the start, plus the view's patterns.

        What an optimizer's own coarse rounding left (Muon's) is no pattern's; like the start it is in every view.
        """
        return {name: part.whole.to(self._dtype(name)) for name, part in self._exact_parts().items()}

    @in_own_dtype
    def group_weights(self, by: By, *, budget: int = 512 << 20) -> GroupWeights:
        """Return each group's share of every parameter, by bins of steps, as finely as a budget of bytes allows.

        With them a mask of groups and steps is a subtraction; see `GroupWeights`.
        """
        return GroupWeights(self._table, self._cache, grouping_columns(by), budget=budget)

    @in_own_dtype
    def rebuild_errors(self, weights: GroupWeights) -> dict[str, LayerCheck]:
        """Compare what group weights add up to with the parameters at the end, by layer; files are not checked."""
        final = self._run.final
        if final is None or self._conditions or self._horizon != self._run.steps:
            return {}
        rebuilt = {n: part for n, part in weights.rebuilt().items() if n not in self._run.shared_parameters()}
        checks = compare(self._run, rebuilt, final, self._shared.executor, horizon=self._horizon)
        return by_layer(self._run, checks | compare_shares(self._run, final, horizon=self._horizon))

    @in_own_dtype
    def apply(self, model: nn.Module, *, layers: str | Collection[str] | None = None) -> nn.Module:
        """Return a copy of the model with this view's weights.

        Args:
            model: the trained model; parameters that the memory does not cover are taken from it as they are.
            layers: the layers whose weights to replace; by default all that were recorded.
        """
        names = list(self.layers) if layers is None else _layer_names(layers)
        wanted = {p for name in names for p in self._run.require_values(name).parameters.values()}
        weights = self.weights()
        return _with_parameters(model, {name: weights[name] for name in wanted})

    def trained(self, model: nn.Module, *, accept_unknown: bool = False) -> nn.Module:
        """Return a copy of the model as the recording left it, to the bit: recorded parameters and all other state.

        A recording that was cut off kept no final parameters; they are rebuilt then. Uncovered parameters and buffers
        are those that the run keeps. Where it keeps only a checksum, the model's own values must agree with it.

        Args:
            model: a model of the same structure, as its factory makes it.
            accept_unknown: take the model's own values for what the run neither keeps nor can compare, instead of
                raising `QueryError`.
        """
        trained, doubts = self.restored(model)
        if doubts and not accept_unknown:
            raise QueryError(
                f"{unknown_text(doubts)} Give a model with your checkpoint loaded, or pass accept_unknown=True to take "
                "this model's own values for them."
            )
        return trained

    @keeping_modes
    def restored(self, model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
        """Return a copy of the model as the recording left it, and the parts of its state that are not, with reasons.

        The parts that are not are parameters and buffers that no recorded layer covers: the run does not keep their
        values, or keeps a checksum that the model's own values do not have.
        """
        parameters = (
            self._run.final if self._run.final is not None else Memory(self._run, shared=self._shared).weights()
        )
        trained = _with_parameters(model, parameters)
        found = {plain_name(name): parameter for name, parameter in trained.named_parameters()}
        lossy = {name: lossy_text(found[name], tensor) for name, tensor in parameters.items()}
        return trained, {name: why for name, why in lossy.items() if why} | self._restore(trained)

    @in_own_dtype
    def verify(self, model: nn.Module | Mapping[str, Tensor] | None = None) -> Verification:
        """Check every file, rebuild every parameter from the patterns, and compare with the live ones.

        Args:
            model: the model (or its state dictionary) as it was at this view's step; by default the parameters
                that were stored when the recording was closed.
        """
        if self._conditions:
            raise SelectionError("A masked view has no live weights to compare with. Verify the whole memory.")
        live: Mapping[str, Tensor]
        if isinstance(model, nn.Module):
            live = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        elif model is not None:
            live = {plain_name(name): tensor for name, tensor in model.items()}
        elif self._run.final is not None and self._horizon == self._run.steps:
            live = self._run.final
        elif self._horizon == 0:
            live = self._run.initial
        else:
            why = self._run.description.no_final if self._horizon == self._run.steps else ""
            raise QueryError(
                f"Nothing to compare with after {self._horizon} steps: "
                f"{cut(why, 300) or 'the recording was not closed there'}. "
                "Give the model or a checkpoint of that step: memory.at(step=...).verify(model)."
            )
        missing = [name for name in self._run.description.parameters if name not in live]
        if missing:
            merged = (
                " If adapters were merged into the base (merge_and_unload), verify before merging, or verify() against "
                "the parameters that were stored at the end."
                if any("lora_" in name or "adapter" in name for name in missing)
                else ""
            )
            raise QueryError(f"The model lacks the recorded parameters {', '.join(map(repr, missing))}.{merged}")
        for name, entry in self._run.description.parameters.items():
            if tuple(live[name].shape) != entry.shape:
                raise QueryError(
                    f"Parameter {name!r} is {entry.shape} in the memory, but {tuple(live[name].shape)} in this model."
                )
        outcome = verify(self._run, live, self._shared.executor, horizon=self._horizon)
        if outcome.passed or model is None or outcome.explained is not None:
            return outcome
        recorded = {name: live[name] for name in self._run.description.parameters}
        return dataclasses.replace(outcome, hint=_other_step(matching_steps(self._run, recorded) - {self._horizon}))

    @property
    def paths(self) -> Mapping[str, PathContributions]:
        """The answers to questions about the path of weights that were asked before the training.

        They are asked by `keep=dualform.Shares(..., paths={"why 9": dualform.PathQuestion(...)})`.
        """
        files = self._run.run_files
        return {} if files is None else read_paths(files.paths(), self._run.name)

    def plan(self, question: Question, *, layers: str | Collection[str] | None = None) -> Cost:
        """Say what a question takes at most: replays of the training, seconds for them, and bytes of patterns.

        >>> memory.plan(dualform.Top(10))  # doctest: +SKIP

        Args:
            question: `dualform.Totals(...)` or `dualform.Top(...)`.
            layers: the layers that are asked about; by default all that were recorded.
        """
        names = list(self.layers) if layers is None else _layer_names(layers)
        for name in names:
            self._run.layer(name)
        return self._run.cost(names, count_rounds(self._run, question, names))

    # Attention ----------------------------------------------------------------------------------------------------

    @keeping_modes
    def attend(
        self,
        model: nn.Module | None = None,
        inputs: Any = None,
        *,
        targets: Tensor | None = None,
        quantity: Quantity | None = None,
        queries: Mapping[str, Tensor] | None = None,
        layers: str | Collection[str] | None = None,
        chunk_size: int | None = None,
        other_model: bool = False,
    ) -> Spotlight:
        """Ask what inputs attend to.

        Args:
            model: the trained model; one forward pass in eval mode captures each layer's queries, on its device.
            inputs: a tensor; a tuple of the model's arguments; a mapping of its keywords; or an iterable of batches.
            targets: for effects and path contributions: the class (or the classes of all tokens) of each input; by
                default the model's own.
            quantity: what they are effects on, or contributions to. `"margin"`, the target's logit less the log-sum-exp
                of the others (the default where targets are given); `"logit"`, the target's logit; `"loss"`, the
                cross-entropy; `dualform.contrast(9, 7)`, a difference of two logits; or a function of the model's
                outputs and the targets that returns a number per input, (B,). One backward pass finds its gradients.
            queries: query tensors (..., d_in) by layer, instead of a model and inputs.
            layers: the layers to look at; by default all that were recorded.
            chunk_size: patterns per chunk of a pass; chosen by default, and no answer depends on it.
            other_model: whether the model is meant to be another than the recorded one at this view's step, such as one
                that a masked view's `apply` returned; otherwise a warning says where it differs.
        """
        if (model is None or inputs is None) == (queries is None):
            raise QueryError("Give either a model and inputs, or queries={layer: tensor}.")
        names = _layer_names(layers) if layers is not None else list(queries if queries is not None else self.layers)
        if queries is not None and (lacking := [name for name in names if name not in queries]):
            raise QueryError(f"There are no queries for the layers {', '.join(map(repr, lacking))}.")
        entries = {name: self._run.layer(name) for name in names}
        if queries is not None:
            captured = given_queries({name: queries[name] for name in names}, entries)
        else:
            assert model is not None, "checked above"
            inputs = list(batches(inputs))
            captured = capture_queries(model, inputs, entries)
        gradients: Mapping[str, OutputGradients] = {}
        asked: Asked | None = None
        if targets is not None or quantity is not None:
            if model is None:
                raise QueryError("Effects need a model and inputs: queries alone have no gradients.")
            linear = {name: entry for name, entry in entries.items() if outside(self._run, name) is None}
            axis = self._run.description.batch_axis
            asked = Asked(model, inputs, targets, quantity or "margin")
            gradients = find_output_gradients(model, inputs, targets, asked.quantity, linear, batch_axis=axis)
        if model is not None and not other_model:
            self._say_other_model(model)
        self._say_unknown(names)
        return Spotlight(
            {
                name: LayerSpotlight(
                    self._table,
                    self._cache,
                    name,
                    rows,
                    gradients=gradients.get(name),
                    chunk_size=chunk_size,
                )
                for name, rows in captured.items()
            },
            asked,
            self._states,
            self._cache,
        )

    def _states(self) -> Sequence[tuple[int, Mapping[str, Tensor]]]:
        """Return the uncovered state wherever the run keeps it, and after how many steps it was so."""
        files = self._run.run_files
        return () if files is None else files.known_states()

    @in_own_dtype
    def attend_text(
        self,
        model: nn.Module,
        prompt: PromptLike,
        *,
        layers: str | Collection[str] | None = None,
        top: int = 5,
        around: int = 20,
        goes_on: int | None = None,
        context: int | None = None,
        tokenizer: Tokenizer | None = None,
        other_model: bool = False,
        scores: Mapping[str, PlaceState] | None = None,
    ) -> TextSpotlight:
        """Ask which passages of the training text the last token of a prompt attends to.

        Args:
            model: the trained language model: tokens (B, L) in; logits (B, L, V) out, or those of the last position
                only. They may come alone, first of a tuple, or as the entry or attribute `logits`.
            prompt: what to ask about: a text, the numbers of its tokens (L,), or the messages of a chat, as the
                tokenizer's `apply_chat_template` takes them.
            layers: the layers to look at. By default all that can be asked, and a note says which were left out: those
                whose patterns have no place in the text, and those in which the last token's row cannot be told.
            top: how many passages, documents, tokens and guesses.
            around: how many tokens of a passage to show on either side of the attended one.
            goes_on: how many tokens the model goes on with; by default ten words, twenty pieces or forty characters.
            context: how many tokens the model takes at most; by default read from the model or its configuration.
            tokenizer: turns the prompt into tokens where the text is in a tokenizer's pieces: an object with
                `encode` and `decode`.
            other_model: whether the model is meant to be another than the recorded one; see `attend`.
            scores: layer -> the prompt's attention to each token of the training text, as `place_scores` returned it
                for the layer's query at the prompt's last token. No pattern is read for these layers.
        """
        chosen = text.check_layers(self.layers if layers is None else _layer_names(layers), self.layers)
        found = text.attend_text(
            self._table,
            chosen,
            self._run.require_files().corpus(fitting=True),
            model,
            prompt,
            required=() if layers is None else tuple(chosen),
            top=top,
            around=around,
            goes_on=goes_on,
            context=context,
            tokenizer=tokenizer,
            scores=scores,
        )
        if not other_model:
            self._say_other_model(model)
        self._say_unknown(list(chosen))
        return found

    @in_own_dtype
    def place_scores(self, queries: Mapping[str, Tensor]) -> dict[str, PlaceState]:
        """Return how much each layer's queries (Q, d_in) attend to each of the N tokens of the training text.

        All layers are answered by one reading of the patterns: of a run of steps, by one replay. Per layer the answer
        has the total over a token's patterns (Q, N + 1), the largest attention to one of them (Q, N + 1), and the
        number of patterns (N + 1,); the last of the N + 1 is for patterns that have no place in the text.
        """
        text.check_layers(list(queries), self.layers)
        return text.score_places(self._table, queries, self._run.require_files().corpus(fitting=True))

    @in_own_dtype
    def place_totals(self, layer: str, queries: Tensor) -> Tensor:
        """Return the total attention of queries (Q, d_in) to each token of the training text, (Q, N)."""
        return text.place_totals(self._table, layer, queries, self._run.require_files().corpus(fitting=True))

    @in_own_dtype
    def place_counts(self, layer: str) -> Tensor:
        """Return how many patterns each token of the training text has in this view, (N,)."""
        return text.place_counts(self._table, layer, self._run.require_files().corpus(fitting=True))

    def __repr__(self) -> str:
        view = self._describe()
        unknown = sum(self.unknown().values()) if self._conditions else 0
        more = f"; {unknown:,} patterns have no value in the mask's columns" if unknown else ""
        return f"Memory({self.location!r}, {self._run.steps} steps{', ' + view if view else ''}{more})"

    def _describe(self) -> str:
        parts = [str(one) for one in self._conditions]
        if self._horizon != self._run.steps:
            parts.append(f"at step {self._horizon}")
        return "; ".join(parts)

    def differing(self, model: nn.Module) -> list[str]:
        """Return the names of a model's parts that are not those of the recording at this view's step.

        A few hundred elements of each recorded parameter are compared with what was logged; and at the end of a closed
        run the other parameters and the buffers with the values that the run keeps.
        """
        if self._horizon not in self._shared.marks:
            self._shared.marks[self._horizon] = logged_marks(self._run, self._horizon)
        state = None
        if self._run.run_files is not None and self._run.description.closed and self._horizon == self._run.steps:
            if self._shared.state is None:
                self._shared.state = self._run.require_files().known_state() or KnownState()
            state = self._shared.state
        return differing_parts(self._run, model, self._shared.marks[self._horizon], state)

    def other_model_text(self, model: nn.Module) -> str:
        """Say that a model is not the recorded one at this view's step, and where; nothing where it is."""
        names = self.differing(model)
        return other_model_text(self._run, model, names, self._horizon) if names else ""

    def _say_other_model(self, model: nn.Module) -> None:
        """Warn once of a model that is not the recorded one at this view's step."""
        message = self.other_model_text(model)
        if message and message not in self._shared.said:
            self._shared.said.add(message)
            warn_user(message, OtherModelWarning)

    def _say_unknown(self, layers: Collection[str] | None = None) -> None:
        """Warn once for each mask of the patterns that it cannot decide."""
        if not self._conditions or self._conditions in self._shared.said:
            return
        message = self.unknown_text(layers)
        if message:
            self._shared.said.add(self._conditions)
            warn_user(f"The mask {self._describe()}: {message}", MaskWarning)

    def _say_unexplained(self) -> None:
        """Warn once of a mask on patterns that explain only a part of the change between checkpoints."""
        explanation = self.explanation if self._conditions else None
        if explanation is None or "explanation" in self._shared.said:
            return
        if explanation.explained == 0:
            raise QueryError(
                f"{self.location} was made from checkpoints, and its patterns explain nothing of the change of the "
                "weights: a mask on them would say nothing of the training. Give dualform.from_checkpoints the data "
                "and the optimizer's settings of this training."
            )
        self._shared.said.add("explanation")
        warn_user(
            f"The memory was made from checkpoints, and its patterns explain {percent_text(explanation.explained)} of "
            "the change of the weights. A mask takes away the updates of these patterns, and nothing of the rest.",
            MaskWarning,
        )

    def _require_values(self) -> None:
        """Raise where no layer's values are kept."""
        if not self._run.exact_parameters():
            self._run.require_values(next(iter(self.layers)))

    def _exact_parts(self) -> dict[str, rebuild.ParameterParts]:
        if self._parts is None:
            self._require_values()
            self._say_unexplained()
            self._parts = view_parts(self._table)
            self._say_unknown()
        return self._parts

    def _dtype(self, parameter: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._run.description.parameters[parameter].dtype)
        return dtype


@dataclasses.dataclass(slots=True)
class _Shared:
    """What all views of one opened run share.

    Attributes:
        cache: derived sums.
        executor: runs jobs over the patterns.
        said: masks and messages that the user was warned of already.
        marks: horizon -> the fingerprints of the recorded parameters there.
        state: what the run knows of uncovered state at its end, once it was asked for.
    """

    cache: AnswerCache
    executor: Executor
    said: set[object] = dataclasses.field(default_factory=set)
    marks: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)
    state: KnownState | None = None


def undecided_text(unknown: Mapping[str, int]) -> str:
    """Say how many patterns a mask cannot decide, given their number by layer; nothing where there are none."""
    if not unknown:
        return ""
    layers = ", ".join(f"{count:,} in layer {name!r}" for name, count in unknown.items())
    return (
        f"{sum(unknown.values()):,} patterns have no value in the mask's columns ({layers}). `without` keeps them and "
        '`where` leaves them out; name them to decide otherwise, for example without("label = 3 or label is null").'
    )


def _layer_names(layers: str | Collection[str]) -> list[str]:
    return [layers] if isinstance(layers, str) else list(layers)


def _other_step(steps: Collection[int]) -> str:
    """Say which recorded steps the weights that did not pass belong to."""
    if not steps:
        return "These are the weights of no recorded step."
    step = max(steps)
    when = f"after step {step}" if step else "before the first step"
    return f"These are the weights {when}: memory.at(step={step}).verify(model), or dualform verify --at {step}."


def unknown_text(doubts: Mapping[str, str], *, most: int = 4) -> str:
    """Say which parts of a model's state are not known to be those of the recording, the first few by name."""
    named = [f"{name!r} {reason}" for name, reason in list(doubts.items())[:most]]
    more = f"; and {len(doubts) - most} more" if len(doubts) > most else ""
    parts = "1 part" if len(doubts) == 1 else f"{len(doubts)} parts"
    return f"The run does not know {parts} of the trained model: {'; '.join(named)}{more}."


@without_gradients
def _with_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    changed = copy.deepcopy(model)
    found = {plain_name(name): parameter for name, parameter in changed.named_parameters()}
    for name, tensor in tensors.items():
        if name not in found or found[name].shape != tensor.shape:
            shape = tuple(found[name].shape) if name in found else "missing"
            raise QueryError(f"Parameter {name!r} is {tuple(tensor.shape)} in the memory, but {shape} in this model.")
        if found[name].is_meta:
            raise QueryError(f"Parameter {name!r} of this model is on the meta device. Give it memory first.")
        found[name].copy_(tensor)
    return changed
