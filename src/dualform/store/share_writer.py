"""The sink of a recording that keeps shares: it folds them while the model trains, and publishes them with the run.

Everything else of the run (facts, columns, media, the patterns of layers that keep them) goes to a `DiskWriter`. Shares
are published after the steps that the user named, with every `flush`, and at the end. Facts are published more often,
so that a killed program may leave a run with more steps than its last shares.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from dualform.binning import Bins
from dualform.errors import RefusedError, ResumeError, StoreError
from dualform.identity.families.optimizer_kind import find_optimizer_kind
from dualform.recording.annotations import Binding
from dualform.recording.keep import Shares
from dualform.recording.live_questions import LiveFollower, SharesNow
from dualform.recording.media import PATHS, Files
from dualform.recording.model_state import StatePart
from dualform.recording.share_fold import FoldState, ShareFold
from dualform.recording.sinks import CallRecord, PreparedStep, Start, StepFacts
from dualform.recording.world import World
from dualform.store.blobs import Blobs
from dualform.store.format import shares_file, shares_state_file
from dualform.store.label_text import label_text
from dualform.store.manifest import GroupColumnEntry, GroupingEntry, Manifest, SharesEntry
from dualform.store.reader import Run
from dualform.store.stored_shares import StoredShares, grouping_names, stored_labels
from dualform.store.tables import check_columns
from dualform.store.tensors import publish_tensors
from dualform.store.writer import DiskWriter

Snapshot = Callable[[], dict[str, Tensor]]
StateNow = Callable[[], dict[str, Tensor]]
OWN_TENSORS = ("share", "keys", "counts", "lowest", "spread", "noise")
"""The tensors of shares that each of several processes keeps of its own patterns; the others are the same in all.

Where processes have rows of the parameters, each keeps everything of its own rows."""


class ShareWriter:
    """A sink that keeps shares by group in a run folder. Made by `dualform.record`."""

    def __init__(self, run: DiskWriter, shares: Shares, model: nn.Module) -> None:
        self.dtype = run.dtype
        self._model = model if shares.paths else None  # until the recording begins
        self._run = run
        self._shares = shares
        self._fold = ShareFold(shares)
        self._kept_layers: set[str] = set()  # whose patterns are kept
        self._columns: dict[str, str] = {}  # of the steps that were taken
        self._kept_calls: dict[int, int] = {}  # number of a call whose patterns are kept -> its backward
        self._published: set[int] = set()  # steps after which shares are published
        self._processes = 1
        self._given: FoldState | None = None  # the state of a checkpoint
        self._broken: BaseException | None = None  # the error that kept a step from being folded to its end
        self._state: StateNow = lambda: {}
        self._late_state: dict[str, Tensor] | None = None  # as a step left it that is folded later
        self._followers: list[LiveFollower] = []

    def open(self, start: Start) -> int:
        """Begin a run, or continue one; return the number of the first step to come."""
        if start.processes > 1 and self._shares.rest:
            raise RefusedError(
                "Shares(rest=True) is not supported for a training in several processes: each would put other groups "
                "into the rest. Record with Shares(groups=...) for all groups, or with coarser groups (dualform.bins)."
            )
        if start.processes > 1 and self._shares.paths:
            raise RefusedError(
                "Shares(paths=...) is not supported for a training in several processes: each of them knows its own "
                "patterns' shares alone. Record without paths."
            )
        if start.divided:
            _refuse_whole(start)
        self._kept_layers = {name for name, layer in start.layers.items() if not layer.shares_only}
        self._run.shares = SharesEntry(self._entries())
        # The fold of groups takes keys, so the run gets them too.
        layers = {name: dataclasses.replace(layer, unfolding=None) for name, layer in start.layers.items()}
        first = self._run.open(dataclasses.replace(start, layers=layers))
        try:
            self._open_fold(start, first)
        except BaseException:
            self._run.abandon()
            raise
        return first

    def _open_fold(self, start: Start, first: int) -> None:
        self._processes = start.processes
        whole = Run(self._run.blobs)
        run = Run(self._run.place, rank=start.rank, others=())  # the files of this process
        if start.divided:
            own = run.own_rows("initial") or {}
            self._fold.open(start, own.__getitem__, lambda: run.states_in(own))
        else:
            self._fold.open(start, lambda name: whole.initial[name], lambda: whole.initial_states)
        sizes = {count for _, count in whole.published.processes}
        if first and len(sizes) > 1:
            raise ResumeError(
                f"{whole.name} keeps shares of {min(sizes)} and {max(sizes)} processes. A recording of shares goes on "
                "in the same number of processes only; continue it so, or record to another folder."
            )
        kinds = [find_optimizer_kind(name) for name in start.optimizers]
        averaged = int(any(kind is not None and kind.average is not None for kind in kinds))
        self._fold.require_memory(dict.fromkeys(start.parameters, averaged))
        kept = run.manifest.shares
        if kept is None or [one.columns for one in kept.groupings] != [one.columns for one in self._entries()]:
            were = "no shares" if kept is None else f"shares by {[list(grouping_names(one)) for one in kept.groupings]}"
            raise ResumeError(f"{run.name} keeps {were}. Resume with the same Shares(by=...), or record elsewhere.")
        self._columns = dict(run.manifest.columns)
        self._published = set(kept.horizons)
        if first:
            self._fold.load(self._state_at(run, first))
        if self._shares.paths:
            self._follow_paths(start, first)
        if first in self._shares.at:  # a process may have been killed between the facts of this step and its shares
            self._publish(lambda: dict(start.parameters))

    def _follow_paths(self, start: Start, first: int) -> None:
        """Begin to follow the path of weights for the questions that are asked of it."""
        if first:
            raise ResumeError(
                "Shares(paths=...) follows a training from its first step, and this recording goes on after step "
                f"{first}. Resume without paths; they have no answer in this run then."
            )
        if start.state is not None:
            self._state = functools.partial(_changing, start.state)
        now = self._now(dict(start.parameters))
        by = self._fold.groupings[0].names
        model, self._model = self._model, None
        assert model is not None, "it is kept where there are questions"
        self._followers = [one.follow(name, model, start, by, now) for name, one in self._shares.paths.items()]

    def _now(self, parameters: Mapping[str, Tensor]) -> SharesNow:
        """Return the training after the last step that was folded, given its parameters."""
        state = self._state() if self._late_state is None else self._late_state
        shares = self._fold.shares_now(parameters)
        return SharesNow(self._fold.steps, self._fold.labels[0], parameters, shares, state)

    def _look(self, followers: Sequence[LiveFollower], snapshot: Snapshot) -> None:
        """Let some questions see the training as it is."""
        if followers:
            now = self._now(snapshot())
            for one in followers:
                one.look(now)

    def _state_at(self, run: Run, step: int) -> FoldState:
        """Return the state of the fold after a step: of the user's checkpoint, or as the run keeps it."""
        if self._given is not None:
            if self._given.step != step:
                raise ResumeError(
                    f"The recorder's state is that of step {self._given.step}, and the model stands at step {step}. "
                    "Load the state of the same checkpoint."
                )
            return self._given
        entry = run.manifest.shares
        found = None if entry is None else StoredShares(run, entry, processes=self._processes).resume_tensors(step)
        if found is None or entry is None:
            raise ResumeError(
                f"{run.name} keeps no shares that can go on after step {step}. Give the recorder the state of your "
                "checkpoint: recorder.load_state_dict(...) with what recorder.state_dict() returned there, before it "
                "is started; or call recorder.flush() with every checkpoint."
            )
        return FoldState(step, tuple(stored_labels(one) for one in entry.groupings), *found)

    def agree(self, world: World) -> None:
        """Agree with the other processes on a step's groups, where each of them has rows of the parameters."""
        self._fold.agree(world)

    def updates(self) -> Mapping[str, int]:
        """Return how many updates of each parameter the run holds."""
        return self._run.updates()

    def check(self, binding: Binding) -> None:
        """Raise `AnnotationError` where a column has changed its type."""
        self._run.check(binding)

    def call(self, record: CallRecord) -> None:
        """Take the patterns of a call that was just accumulated."""
        self._fold.call(record)
        if record.layer in self._kept_layers:
            self._kept_calls[record.number] = record.backward
            self._run.call(record)

    def before_step(self, prepared: PreparedStep) -> None:
        """Find the groups of a step's patterns, and keep what the step is about to overwrite."""
        self._fold.before_step(prepared)
        self._run.before_step(prepared)

    def before_late_step(self, prepared: PreparedStep) -> None:
        """Keep what a step is about to overwrite, whose patterns and factors are told later."""
        self._fold.before_step(prepared, late=True)

    def stepped(self, snapshot: Snapshot) -> None:
        """Keep the optimizer's state as a late step left it, and note that the step was made."""
        self._fold.stepped()
        due = any(one.is_due(self._fold.steps + 1) for one in self._followers)
        self._late_state = self._state() if due else None
        self._run.stepped(snapshot)

    def step(self, facts: StepFacts) -> None:
        """Fold a step, and hand its facts on."""
        with self._fold.together():
            for binding in {id(call.binding): call.binding for call in facts.calls}.values():
                if binding is not None:
                    check_columns(self._columns, binding)
            self._check_whole()
            try:
                self._fold.step(facts)
            except BaseException as error:
                self._broken = error
                raise
        calls = [call for call in facts.calls if call.number in self._kept_calls]
        self._run.step(dataclasses.replace(facts, calls=calls))
        self._look([one for one in self._followers if one.is_due(self._fold.steps)], facts.snapshot)
        self._late_state = None
        if self._fold.steps in self._shares.at:
            self._publish(facts.snapshot)

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise StoreError(
                f"An earlier step was not folded into the shares ({self._broken}), so later ones cannot be added. "
                "What was published before stays readable. Continue from a checkpoint with resume=True."
            )

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of everything that some backwards accumulated."""
        gone = set(backwards)
        self._kept_calls = {number: one for number, one in self._kept_calls.items() if one not in gone}
        self._fold.discard(backwards)
        self._run.discard(backwards)

    def state(self) -> Mapping[str, Any]:
        """Return what the fold needs to go on, in tensors of its own."""
        found = self._fold.result(None)
        copied = [{name: tensor.clone() for name, tensor in part.items()} for part in (found.shares, found.resume)]
        return {"step": found.step, "labels": found.labels, "shares": copied[0], "resume": copied[1]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave an earlier recording."""
        if not {"step", "labels", "shares", "resume"} <= state.keys():
            raise ResumeError(
                "The recorder's state is not that of a recording of shares. Give what recorder.state_dict() returned."
            )
        self._given = FoldState(state["step"], state["labels"], state["shares"], state["resume"])

    def attach(self, files: Files) -> None:
        """Take files that belong to the run but are no patterns."""
        self._run.attach(files)

    def flush(self, snapshot: Snapshot) -> None:
        """Publish all steps so far, and the shares after the last."""
        if not self._publish(snapshot):
            self._run.flush(snapshot)

    def close(self, final: Mapping[str, Tensor]) -> None:
        """Publish everything, the shares at the end, and the final parameters."""
        self._publish(lambda: dict(final), closing=True)
        if self._followers:
            self._look(self._followers, lambda: dict(final))
            answers = [one.answer() for one in self._followers]
            self._run.attach(
                {PATHS: {f"{i}.{name}": tensor for i, one in enumerate(answers) for name, tensor in one.items()}}
            )
        self._run.close(final)

    def close_without_final(self, reason: str) -> None:
        """Publish everything but shares, which cannot be completed without the parameters after the last step."""
        self._run.close_without_final(reason)

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        """Return the published step after which the parameters were these, or None."""
        return self._run.find_step(parameters)

    def abandon(self) -> None:
        """Stop at once, keeping what is published already."""
        self._run.abandon()

    def _publish(self, snapshot: Snapshot, *, closing: bool = False) -> bool:
        """Publish all steps so far and the shares after the last, unless they are published; say whether it was done.

        Earlier shares stay only where the user named their step. At the end of a run that is not to go on rounding is
        left out: it is the difference of the final parameters, which are kept too, and all other parts.
        """
        self._check_whole()
        step = self._fold.steps
        parameters = snapshot()
        if not step or step in self._published or not parameters:
            return False
        found = self._fold.result(parameters)
        tensors = found.shares
        if closing and not self._shares.resumable and step not in self._shares.at:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("rounding.")}
        if self._run.rank and not self._fold.divided:  # the rest is the same in every process
            tensors = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in OWN_TENSORS}
        replaced: list[str] = []

        def publish(blobs: Blobs, manifest: Manifest) -> dict[str, Any]:
            entry = manifest.shares
            before = SharesEntry(()) if entry is None else entry
            # Another process may be killed before it has published these; then the ones before are the last of all.
            last = before.horizons[-1:] if manifest.rank or manifest.processes else ()
            kept = tuple(one for one in before.horizons if one in self._shares.at or one in last)
            files = {name: one for name, one in manifest.files.items() if not name.startswith("shares/")}
            files |= {shares_file(one): manifest.files[shares_file(one)] for one in kept}
            earlier = before.state if before.state in last else None
            if earlier is not None:
                files[shares_state_file(earlier)] = manifest.files[shares_state_file(earlier)]
            replaced.extend(name for name in manifest.files if name not in files)
            files[shares_file(step)] = publish_tensors(blobs, shares_file(step), tensors)
            if self._shares.resumable:
                files[shares_state_file(step)] = publish_tensors(blobs, shares_state_file(step), found.resume)
            state = step if self._shares.resumable else None
            shares = SharesEntry(self._entries(), (*kept, step), state, earlier)
            return {"files": files, "shares": shares, "columns": {**manifest.columns, **self._columns}}

        manifest = self._run.publish_beside(publish, lambda: parameters)
        for name in replaced:
            self._run.place.remove(name)
        self._published = set(manifest.shares.horizons if manifest.shares is not None else ())
        return True

    def _entries(self) -> tuple[GroupingEntry, ...]:
        """Return the groupings with their groups so far, as the manifest has them."""
        found = []
        for grouping in self._fold.groupings:
            columns = tuple(
                GroupColumnEntry(part.column, part.width) if isinstance(part, Bins) else GroupColumnEntry(part)
                for part in grouping.columns
            )
            labels = [label if len(columns) > 1 else (label,) for label in grouping.labels]
            written = tuple(tuple(label_text(part) for part in label) for label in labels)
            found.append(GroupingEntry(columns, written, grouping.has_rest))
        return tuple(found)


def _refuse_whole(start: Start) -> None:
    """Refuse shares of a parameter that every process has whole, where processes have rows of others."""
    for layer in start.layers.values():
        for use in layer.uses if not layer.keys_only else ():
            if use.parameter not in start.divided:
                raise RefusedError(
                    f"Parameter {use.parameter!r} is whole in every process, while others are divided by rows; shares "
                    "of such a model are not supported. Call fully_shard on the whole model, leave the layer out of "
                    "layers=[...], or keep patterns."
                )


def _changing(parts: Callable[..., Mapping[str, StatePart] | None]) -> dict[str, Tensor]:
    """Return copies of the model's uncovered state as it is now, without what is frozen."""
    return {
        name: part.tensor.detach().clone()
        for name, part in (parts(extra=False) or {}).items()
        if part.kind != "frozen" and part.tensor is not None
    }
