"""The steps of a recording: what the hooks and the optimizers report becomes calls and facts for the sink.

Decides which patterns exist (accumulated, then stepped), refuses what the identity does not cover, and hands each
finished step to its sink. It stores nothing and derives nothing. The recorder that a user has is around it
(`dualform.recording.recorder`); the hooks refer to this object only weakly, so it is collected when its owner is.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import AnnotationError, DualformError, RefusedError, StoreError
from dualform.identity.parameter_use import takes_ids
from dualform.identity.unfolding import Unfolding
from dualform.recording.accumulation import Accumulations
from dualform.recording.agreement import join_samples
from dualform.recording.alignment import Alignment
from dualform.recording.annotations import Annotator, Binding
from dualform.recording.argument_tensors import input_tensors
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.changes import Changes, many_evaluations, why_no_final
from dualform.recording.check_schedule import CheckOrNone, CheckSchedule
from dualform.recording.collection_pause import pausing_collection
from dualform.recording.divided import OwnRows, localized, reduces_coarsely
from dualform.recording.ending import end_when_dropped, leave_in_forks, remove_handles, weak_hook
from dualform.recording.gradient_check import GradientCheck
from dualform.recording.hooks import Arrival, Hooks
from dualform.recording.host_clock import HostClock
from dualform.recording.joint_preparation import JointPreparation
from dualform.recording.joint_start import open_together
from dualform.recording.joint_uneven import (
    JoinHook,
    UnevenWorld,
    begin_join,
    note_ended,
    refuse_join,
    refuse_moved,
    refuse_to_join,
    state_digest,
)
from dualform.recording.late_steps import LateStep
from dualform.recording.made_steps import MadeSteps
from dualform.recording.media import Files
from dualform.recording.module_hooks import HookHandle, hook_step
from dualform.recording.processes import rounds_reduced
from dualform.recording.proven_steps import KnownSteps, ProvenAccumulations, ProvenChanges, ProvenPreparation
from dualform.recording.recorded_optimizers import RecordedOptimizer, with_closure
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sharded_modules import reshard
from dualform.recording.sinks import (
    AgreeingSink,
    LateSink,
    LateWatchingSink,
    ParameterFacts,
    PreparedStep,
    RepeatingSink,
    SelectiveSink,
    Sink,
    Start,
    StepFacts,
    WholeStepSink,
)
from dualform.recording.step_in_progress import OptimizersDone, StepInProgress
from dualform.recording.step_preparation import OnFailure, StepPreparation
from dualform.recording.unclaimed_parameters import UnclaimedParameters
from dualform.recording.user_warnings import WarnOnce, warn_user
from dualform.recording.watch import Watched, What, covered, held, report_joined, uncovered
from dualform.recording.world import World
from dualform.threads import in_own_dtype
from dualform.torch_modes import keeping_grad_mode, without_gradients

INTERRUPTED = StoreError("it was interrupted")
"""Stands for the error of a step that was made while a Ctrl-C kept its recording from ending."""


CAPTURED = (
    "A backward is being captured into a CUDA graph. A graph that is launched again runs no hook and overwrites the "
    "layers' inputs, so its patterns would be lost. Train without torch.cuda.graph, or leave the layers that are "
    "captured out of layers=[...]."
)


def is_capturing() -> bool:
    """Say whether what is computed now on the current GPU is captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def _unfoldings(sink: RepeatingSink, layers: Sequence[Watched]) -> dict[str, Unfolding]:
    """Return how keys are taken from inputs, of the layers whose inputs the sink takes."""
    found = {layer.name: layer.kind.unfolding(layer.module) for layer in layers}
    return {name: one for name, one in found.items() if one is not None and sink.takes_inputs(name)}


def _wants_values(sink: SelectiveSink, schedule: CheckSchedule, layer: str) -> bool:
    """Say whether the values of a layer are wanted now: for a check of the step to come, or by the sink."""
    return schedule.next_is_full or sink.wants_values(layer)


class StepRecorder:
    """Records the steps of one training, from `start` to `end`; the hooks and the optimizers report to it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Watched],
        optimizers: Sequence[RecordedOptimizer],
        sink: Sink,
        alignment: Alignment,
        world: World,
        *,
        wrapper: nn.Module,
        strict: bool,
        on_failure: OnFailure,
        check: CheckOrNone,
        known: KnownSteps | None = None,
        needed: Mapping[str, What] | None = None,
        own_rows: Mapping[str, OwnRows] = MappingProxyType({}),
    ) -> None:
        """Prepare a recording; nothing is attached before `start`.

        Args:
            model: the model that is trained.
            layers: its layers that are recorded.
            optimizers: the recorded optimizers.
            sink: takes the patterns and the steps.
            alignment: finds out which rows the layers have.
            world: the processes that train together.
            wrapper: the model as the user has it, with what several processes wrap it in.
            strict: whether to raise, instead of warning, where parameters join an optimizer that are not recorded.
            on_failure: whether to raise failures, or to stop recording and let training go on.
            check: which steps are checked in full.
            known: of a training whose every step the sink proves to be one of an earlier recording, what this one
                found of the steps; nothing is checked again then.
            needed: the layers whose rows the sink needs, and which; None for all.
            own_rows: this process's rows of the parameters that are divided among processes.
        """
        self.state: Literal["new", "recording", "closed", "forked"] = "new"
        self.steps = 0  # recorded so far, those of a resumed run included
        self.last_facts: Sequence[ParameterFacts] = ()  # of the last recorded step
        self.annotator = Annotator()
        self.warn_once = WarnOnce()
        self.clock = HostClock()
        self._model = model
        self._wrapper = wrapper
        self._layers = layers
        self._owned = optimizers
        self._sink = sink
        self._late = isinstance(sink, LateSink)  # asked once: Python looks at every member of a protocol each time
        self._watches_late = isinstance(sink, LateWatchingSink)
        self._alignment = alignment
        self._world = world
        self._strict = strict
        self._on_failure = on_failure
        self._own_rows = own_rows
        self._parameters = localized(covered(layers), own_rows)
        self._held = held([owned.optimizer for owned in optimizers])  # ids of parameters
        self._looked: dict[int, Mapping[str, nn.Parameter]] = {}  # optimizer -> its parameters when they were looked at
        exact = {name for layer in layers if not layer.keys_only for name, _ in layer.parameters.values()}
        measured = {name for layer in layers if layer.shares_only for name, _ in layer.parameters.values()}
        self._proven = known is not None
        changes = Changes if known is None else ProvenChanges
        self._changes = changes(model, layers, self._parameters, exact)
        self._samples: Mapping[str, Tensor] = {}  # of each parameter after the last step; never changed in place
        self._unclaimed: UnclaimedParameters | None = None
        self._on_cpu = True  # whether all parameters are in the CPU's memory
        self._on_gpu = False  # whether all of them are on one GPU
        self._step_now = StepInProgress()
        if exact <= measured:  # what patterns do not explain is measured in every step
            check = "never"
        by_ids = {
            name for layer in layers if takes_ids(list(layer.parameters)) for name, _ in layer.parameters.values()
        }
        several = world.size > 1 or bool(own_rows)
        gradient_check = GradientCheck(by_elements=() if several else measured - by_ids, projected=several)
        seed = world.gather(torch.initial_seed())[0] if several else torch.initial_seed()
        schedule = CheckSchedule(check, seed)
        accumulations = Accumulations if known is None else ProvenAccumulations
        self._accumulations = accumulations(self._parameters, self._step_now, sink, gradient_check, schedule)
        settings: dict[str, Any] = {"batch_axis": alignment.batch_axis, "on_failure": on_failure}
        shared = exact, measured, alignment, gradient_check, schedule, self.warn_once
        joint = several and known is None  # a replay knows from the recording all that processes tell each other
        self._joint = JointPreparation(*shared, world, own_rows, **settings) if joint else None
        preparation = StepPreparation if known is None else partial(ProvenPreparation, known)
        self._preparation = self._joint or preparation(*shared, **settings)
        self._hooks = Hooks(layers, weakref.ref(self), BufferPool(), model, needed, divided=own_rows, clock=self.clock)
        if isinstance(sink, SelectiveSink):
            self._hooks.wants_values = partial(_wants_values, sink, schedule)
        self._handles: list[HookHandle] = []
        # A method would keep this object alive for as long as a sink keeps the snapshot.
        self._snapshot = partial(_copies, self._parameters, self._changes)
        self._made = MadeSteps(self._preparation, self._changes, alignment, sink, self._snapshot, self._parameters)
        self._finalizer: Callable[[], object] = lambda: None
        self._lost: DualformError | None = None  # the error that kept a step that was made from being recorded
        self._untold: Exception | None = None  # a failure that the other processes hear of at the next step
        self._joining: Any = None  # how the wrapper joins processes without batches, where the recorder takes part
        self._unlike = isinstance(world, UnevenWorld)  # whether processes may have other states, as after a join
        self._missed: Mapping[str, Tensor] | None = None  # samples after the last step that others made alone

    # The beginning and the end ------------------------------------------------------------------------------------

    def look(self) -> Mapping[str, Tensor]:
        """Keep the parameters as they are before the sink is opened, which may take a while; return their samples."""
        self._samples = dict(self._changes.look(self._owned)) | join_samples(self._world, self._own_rows)
        return self._samples

    def start(self, start: Start) -> None:
        """Open the sink, and put every hook on."""
        opened = False
        try:
            self.steps = open_together(self._world, self._sink, start)
            opened = True
            if isinstance(self._sink, RepeatingSink):
                self._hooks.unfoldings = _unfoldings(self._sink, self._layers)
            self._attach_hooks()
            self._finalizer = end_when_dropped(self, self._hooks, self._handles, self._sink, self._made.hand_on)
            leave_in_forks(self)
        except BaseException as error:
            if opened or not isinstance(error, Exception):  # an interrupt may come just after the sink was opened
                self.give_up()
            raise

    def leave_to_parent(self) -> None:
        """Do nothing any more, in a forked process: the recording, its thread and its lock are the parent's."""
        if self.state == "recording":
            self.state = "forked"
            self._hooks.enabled = False

    def _attach_hooks(self) -> None:
        """Look at the parameters as they are, and put every hook on."""
        updates = self._sink.updates() if self.steps else None
        self._changes.begin(self._owned, self.steps, updates)
        self._unclaimed = UnclaimedParameters(self._model, covered(self._layers), self._held)
        self._find_devices()
        self.state = "recording"
        self._hooks.attach()
        for owned in self._owned:
            hook_step(self._handles, owned.optimizer, weak_hook(self._before_step), weak_hook(self._after_step))

    def close(self, error: BaseException | None) -> None:
        """End the recording; failures are only warned of while another error is on its way."""
        if self.state == "closed":
            self.give_up()  # a failure or an interrupt may have left hooks, or a sink that is still open
        if self.state != "recording":
            return
        try:
            self._end(error)
        except BaseException:
            self.give_up()
            raise
        self._finalizer()
        if error is None:
            self._world.barrier()  # so that the run is closed when the first process goes on

    def give_up(self) -> None:
        """Take every hook off, and let the sink publish what it has taken; does nothing where that is done."""
        self._detach()
        self._sink.abandon()
        self._finalizer()

    def _end(self, error: BaseException | None) -> None:
        """Take every hook off, hand on the step that is open, and close the sink."""
        reshard(self._model)
        untold = self._unclaimed.warning(self._held) if self._unclaimed is not None else None
        done = self._step_now.end()
        self._detach()
        # Where the optimizer's step began and did not end, the parameters are those of no step.
        broken = self._step_now.phase == "stepping" and self._changes.is_broken_off()
        try:
            if broken or self._lost is not None or self._untold is not None:
                self._sink.abandon()
                if self._untold is not None:
                    warn_user(f"Recording stopped at step {self.steps}: {self._untold}")
                if self._lost is INTERRUPTED and error is None:
                    raise _after_lost(INTERRUPTED)
            else:
                self._settle()
                if error is not None and self._is_useless(done):
                    self._sink.close_without_final(f"step {self.steps} was broken off between two optimizers")
                    return
                self._hand_on(done)
                if (warning := self._close_sink()) and error is None:
                    warn_user(warning)
        except Exception as failure:
            self._sink.abandon()
            if isinstance(failure, Warning):
                raise
            if not isinstance(failure, DualformError) or (error is None and self._on_failure == "raise"):
                raise
            warn_user(f"The recording could not be closed properly: {failure}")
        if untold is not None and error is None:
            warn_user(untold)

    def _is_useless(self, done: OptimizersDone) -> bool:
        """Say whether a step that was broken off is of no use to the sink: some optimizers made it, others did not."""
        some = 0 < len(done.ids) < len(self._owned)
        return some and isinstance(self._sink, WholeStepSink) and self._sink.needs_whole_steps()

    def attach(self, files: Files) -> None:
        """Hand files that are no patterns to the sink."""
        with self._guarding():
            self._sink.attach(files)

    def flush(self) -> None:
        """End the step that some optimizers took part in, and let the sink publish everything."""
        with self._guarding():
            self._end_step()
            self._settle()
            self._sink.flush(self._snapshot)

    def sink_state(self) -> Mapping[str, Any]:
        """Return what the sink needs to go on from the last step; a step that some optimizers took part in ends."""
        with self._guarding():
            self._end_step()
            self._settle()
        return self._sink.state()

    def check_columns(self, binding: Binding) -> None:
        """Let the sink check a batch's columns, while anything is recorded."""
        if self.state == "recording":
            self._sink.check(binding)

    # What the hooks report ----------------------------------------------------------------------------------------

    def before_forward(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward, and find out which rows the layers have, where it is annotated.

        Of several children that are called by themselves for one batch only the first is sure to see its rows.
        """
        binding = self.annotator.begin_forward(input_tensors(args, kwargs))
        if binding is not None and binding.begun_by in (None, name):
            binding.begun_by = name
            try:
                self._alignment.before_forward(binding, (name, module), args, kwargs, step=self.steps)
            except AnnotationError as error:
                if self._on_failure == "raise":
                    raise
                unknown = RowCheck("not aligned", "the batch's rows could not be told")
                binding.learn({layer.name: unknown for layer in self._layers})
                self.warn_once(f"Columns per row are left out (null): {error}")
            for text in self._alignment.warnings():
                self.warn_once(text)

    def binding_for_forward(self) -> tuple[Binding | None, int]:
        """Return the annotations that a layer's call takes, and the number of the model's forward that it is in."""
        within = torch._C._current_graph_task_id() != -1  # a checkpointed part, computed again in its own backward
        annotator = self.annotator
        return annotator.for_forward(again=within), annotator.forward

    def before_accumulation(self, name: str, parameter: nn.Parameter) -> None:
        """Take a probe of the gradient that is there already. A new backward ends a step that some took part in."""
        parameter = self._parameters[name]
        dtype, device = self._changes.kinds[name]
        if parameter.dtype is not dtype or parameter.device != device:
            with self._guarding():
                self._follow(name)
        if parameter.is_cuda and is_capturing():
            raise RefusedError(CAPTURED)
        if self._step_now.done.ids:
            with self._guarding():
                self._end_step()
        if self.state == "recording":
            self._accumulations.begin(name, parameter)

    def after_accumulation(self, name: str, parameter: nn.Parameter, task: int, arrivals: Sequence[Arrival]) -> None:
        """Hand over the patterns that were accumulated, and measure the gradient that they made."""
        if self.state != "recording":
            return
        if self._accumulations.is_unstepped(name, task):
            if self._step_now.backwards and (warning := self._changes.unstepped()) is not None:
                warn_user(warning)
            self._accumulations.discard()
        self.annotator.late = False
        if new := [arrival.call.binding for arrival in arrivals if arrival.backward is None]:
            self.annotator.spend(new)
        self._accumulations.end(name, self._parameters[name], task, arrivals)

    def coarse_seen(self, layer: str) -> None:
        """Refuse a layer whose values cannot be computed again as autocast computed them."""
        with self._guarding():
            raise RefusedError(
                f"Layer {layer!r} ran under autocast, and the errors at a recurrent layer's gates cannot be computed "
                "again in its dtype. Run it outside autocast (torch.autocast(..., enabled=False) around it), or leave "
                "it out of layers=[...]."
            )

    def hook_failed(self, where: str, error: Exception) -> None:
        """Raise an error that a hook met, or with on_failure="detach" stop recording."""
        self._fail(error, where)

    def create_graph_seen(self, layer: str) -> None:
        """Remember that a backward built a graph of itself; what is done with it may not be seen."""
        self._step_now.graph_of = layer

    # The optimizer's step -----------------------------------------------------------------------------------------

    @keeping_grad_mode
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._step_now.evaluations = 0
        if self.state != "recording":
            return None
        return with_closure(args, kwargs, lambda: self._prepare(optimizer))

    @in_own_dtype
    @pausing_collection
    @without_gradients
    def _prepare(self, optimizer: Optimizer) -> None:
        """Find what the optimizer that is about to step will do, or refuse its step."""
        with self.clock:
            self._prepare_step(optimizer)

    def _prepare_step(self, optimizer: Optimizer) -> None:
        step = self._step_now
        step.prepared = None
        step.evaluations += 1
        with self._guarding(f"A step of {type(optimizer).__name__}", told=True):
            owned = next(owned for owned in self._owned if owned.optimizer is optimizer)
            if self._joint is not None:
                step.prepared = self._prepare_together(self._joint, owned)
                return
            if self._lost is not None:
                raise _after_lost(self._lost)
            self._settle()
            if id(optimizer) in step.done.ids:
                self._end_step()
            for rows in self._own_rows.values():
                rows.follow()
            self._look_for_joined(owned)
            self._follow_moved()
            if self._may_be_late(optimizer):
                comparisons = self._changes.check_later(owned, self.steps)
                late = self._preparation.begin(owned, step, self.steps, comparisons)
                if self._watches_late:
                    self._sink.before_late_step(self._preparation.foresee(late))  # type: ignore[attr-defined]
                step.prepared = late
                return
            self._changes.check(owned, self.steps)
            prepared = self._preparation.prepare(owned, step, self.steps, on_cpu=self._on_cpu)
            self._sink.before_step(prepared)
            step.prepared = prepared

    def _prepare_together(self, joint: JointPreparation, owned: RecordedOptimizer) -> PreparedStep:
        """Return what an optimizer is about to do in all processes, or refuse its step in all of them."""
        refuse_join(self._wrapper, self._joining)
        step = self._step_now
        if id(owned.optimizer) in step.done.ids:
            try:
                self._end_step()
            except Exception as error:
                self._untold = error

        def look_first() -> None:
            for rows in self._own_rows.values():
                rows.follow()
            if self._untold is not None:
                raise self._untold
            if self._lost is not None:
                raise _after_lost(self._lost)
            self._look_for_joined(owned)
            self._follow_moved()
            self._changes.check(owned, self.steps)

        prepared = joint.prepare_together(
            owned,
            step,
            self.steps,
            on_cpu=self._on_cpu,
            coarse=rounds_reduced(self._wrapper) or reduces_coarsely(self._model),
            look_first=look_first,
            then=self._sink.before_step,
            state_mark=lambda: state_digest(self._owned, self._parameters) if self._unlike else 0,
        )
        if isinstance(self._sink, AgreeingSink):
            self._sink.agree(self._world)
        self._unlike = False
        return prepared

    def _may_be_late(self, optimizer: Optimizer) -> bool:
        """Say whether the numbers of a step may be read at the next step, so that nobody waits for the GPU now.

        The sink has to know of such steps. Where several optimizers share a step, or a gradient scaler decides whether
        there is one, its numbers are needed at once; several processes exchange them. A proven step reads none.
        """
        return (
            self._on_gpu
            and not self._proven
            and len(self._owned) == 1
            and getattr(optimizer, "grad_scale", None) is None
            and getattr(optimizer, "found_inf", None) is None
            and self._late
        )

    def _look_for_joined(self, owned: RecordedOptimizer) -> None:
        """Tell of parameters that came into an optimizer's groups after the recording began and are not recorded."""
        mine = owned.parameters
        if self._looked.get(id(owned)) is mine:
            return
        new = held([owned.optimizer]) - self._held
        if not new:
            self._looked[id(owned)] = mine
            return
        missing = uncovered(self._model, [owned.optimizer], self._layers)
        joined = {name: parameter for name, parameter in missing.items() if id(parameter) in new}
        if joined:
            report_joined(self._model, owned.optimizer, joined, strict=self._strict)
        self._held |= new

    @keeping_grad_mode
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.state == "recording":
            with self._guarding(f"A step of {type(optimizer).__name__}", stepped=True):
                before, self._lost = self._lost, INTERRUPTED
                self._finish(optimizer)
                self._lost = before

    @pausing_collection
    @without_gradients
    def _finish(self, optimizer: Optimizer) -> None:
        """Take the step that an optimizer has made."""
        earlier = self.steps
        with self.clock:
            self._finish_step(optimizer)
        if self.steps > earlier:
            self.clock.end_step()

    def _finish_step(self, optimizer: Optimizer) -> None:
        step = self._step_now
        prepared, step.prepared = step.prepared, None
        self.annotator.late = False
        step.graph_of = None
        self._hooks.forget()
        owned = next(owned for owned in self._owned if owned.optimizer is optimizer)
        mine = owned.parameters
        step.histories = {name: history for name, history in step.histories.items() if name not in mine}
        if prepared is None:
            self._accumulations.discard()
            return
        self._note_samples(owned, mine)
        if step.evaluations > 1:
            self.warn_once(many_evaluations(owned.class_name, step.evaluations), key="evaluations")
        if isinstance(prepared, LateStep):
            self._made.note(prepared, step.clear(), self._samples)
            self.steps += 1
            self._sink.stepped(partial(_copies, self._parameters, None))  # type: ignore[attr-defined]
            return
        step.done.add(optimizer, prepared)
        if len(step.done.ids) == len(self._owned):
            self._end_step()

    def _note_samples(self, owned: RecordedOptimizer, mine: Mapping[str, nn.Parameter]) -> None:
        """Keep the samples of the parameters that an optimizer has just moved."""
        samples: Mapping[str, Tensor] = self._changes.note(owned, mine)
        if rows := {name: one for name, one in self._own_rows.items() if name in mine}:
            samples = {**samples, **join_samples(self._world, rows)}
        alone = len(self._owned) == 1 and set(samples) == set(self._samples)
        self._samples = samples if alone else {**self._samples, **samples}

    def _end_step(self) -> None:
        """Hand the step on that at least one optimizer took part in, and let go of what no other one waits for."""
        if not self._step_now.done.ids:
            return
        before, self._lost = self._lost, INTERRUPTED
        done = self._step_now.end()
        waiting = {name for owned in self._owned if id(owned.optimizer) not in done.ids for name in owned.parameters}
        gone = self._step_now.keep(waiting)
        try:
            self._hand_on(done)
        except Exception:
            self._lost = before  # the error itself tells what became of the step
            raise
        finally:
            if gone:
                self._sink.discard(gone)
        self._lost = before

    def _settle(self) -> None:
        """Hand on the step whose numbers had to come from the GPU first, if there is one; or refuse it, after it."""
        before, self._lost = self._lost, INTERRUPTED
        try:
            self._made.hand_on()
        except Exception as error:
            self._lost = before  # a sink knows itself what it missed
            if not isinstance(error, StoreError):
                self._lost = error if isinstance(error, DualformError) else RefusedError(str(error))
            raise
        self._lost = before

    def _hand_on(self, done: OptimizersDone) -> None:
        """Give the sink the facts of a step that at least one optimizer took part in."""
        if not done.ids:
            return
        still = [  # parameters whose optimizer did not step are as they were
            ParameterFacts(name, owned.name, False, {}, [])
            for owned in self._owned
            if id(owned.optimizer) not in done.ids
            for name in owned.parameters
        ]
        facts = [*done.facts, *still]
        rows = dict(self._alignment.outcomes)
        self._sink.step(StepFacts(self.steps, done.calls, facts, self._samples, self._snapshot, rows, self._parameters))
        self.steps += 1
        self.last_facts = facts
        if isinstance(self._world, UnevenWorld):
            self._world.tell(facts, self._samples)

    # Processes that run out of batches ------------------------------------------------------------------------------

    def join_hook(self) -> JoinHook:
        """Return what this recording does when its process has no batches left; or refuse."""
        recording, detaches = self.state == "recording", self._on_failure == "detach"
        world = refuse_to_join(self._world, self._sink, len(self._owned), recording=recording, detaches=detaches)
        return JoinHook(world, self._take_elsewhere, self._go_on)

    def join(self, config: Any) -> None:
        """Begin to tell processes without batches of every exchange."""
        begin_join(self._world, config)
        self._joining = getattr(self._wrapper, "_join_config", None)

    def _take_elsewhere(self, facts: Sequence[ParameterFacts], samples: Mapping[str, Tensor]) -> None:
        """Hand on a step that other processes have made, of which this one has no patterns."""
        if self.state == "recording":
            rows = dict(self._alignment.outcomes)
            self._sink.step(StepFacts(self.steps, [], facts, samples, dict, rows, self._parameters))
            self.steps += 1
            self._missed = samples

    def _go_on(self) -> None:
        """Go on after a join, with the parameters that the last process has given all of them."""
        self._unlike = True
        note_ended(self._wrapper)
        missed, self._missed = self._missed, None
        if missed is not None and self.state == "recording":
            for owned in self._owned:
                self._samples = {**self._samples, **self._changes.note(owned, owned.parameters)}
            self._changes.forget_states()  # they may be loaded now, and are compared at the next step
            self._untold = self._untold or refuse_moved(missed, self._samples)

    # Changes that no recorded step made ---------------------------------------------------------------------------

    def _follow_moved(self) -> None:
        """Go on where the model was moved to another device; refuse a step where it was converted."""
        for name in self._changes.converted():
            if self._changes.is_converted(name, self._parameters[name]):  # no longer, once another one was followed
                self._follow(name)

    def _follow(self, name: str) -> None:
        """Go on where the model was moved to another device between two steps; refuse any other conversion."""
        self._changes.follow(name, self.steps, pending=bool(self._step_now.backwards))
        self._find_devices()

    def _find_devices(self) -> None:
        """Find out whether all parameters are in the CPU's memory, or on one GPU."""
        devices = {parameter.device for parameter in self._parameters.values()}
        self._on_cpu = all(device.type == "cpu" for device in devices)
        self._on_gpu = is_one_gpu(devices)

    def _close_sink(self) -> str:
        """Close the sink, with final weights only if they are those after the last step; return a warning, or ""."""
        live = {name: parameter.detach().cpu() for name, parameter in self._parameters.items()}
        if changed := self._changes.changed():
            self._sink.close_without_final(why_no_final(changed, self.steps))
        else:
            self._sink.close(live)
        return self._changes.at_closing(self.steps, lambda: None if self._own_rows else self._sink.find_step(live))

    # Small things -------------------------------------------------------------------------------------------------

    def _detach(self, *, in_a_step: bool = False) -> None:
        self.state = "closed"
        self._hooks.detach()
        remove_handles(self._handles, running=in_a_step)
        self._step_now.clear()  # the sink ends, and with it what it has of these backwards

    @contextlib.contextmanager
    def _guarding(self, where: str = "The recording", *, stepped: bool = False, told: bool = False) -> Iterator[None]:
        """Let failures out, or with on_failure="detach" stop recording and let training go on."""
        try:
            yield
        except Exception as error:
            self._fail(error, where, stepped=stepped, told=told)

    def _fail(self, error: Exception, where: str, *, stepped: bool = False, told: bool = False) -> None:
        """Raise an error, one that dualform did not foresee by name; or stop recording and warn.

        Args:
            error: what was raised while recording.
            where: the layer, parameter or optimizer that was recorded.
            stepped: whether the optimizer has moved the parameters beyond the last step that was recorded.
            told: whether all processes that train together know of the failure.
        """
        if isinstance(error, Warning):  # one of ours, which the user's filters made an error
            raise error
        if not isinstance(error, DualformError):
            unforeseen = RefusedError(
                f"{where} cannot be recorded: {type(error).__name__}: {str(error).strip().rstrip('.')}. Leave its "
                'layer out of layers=[...], or pass on_failure="detach" to train on without recording.'
            )
            unforeseen.__cause__ = error
            error = unforeseen
        if self._on_failure == "raise":
            if stepped:
                self._lost = error if isinstance(error, RefusedError) else None  # a sink knows itself what it missed
            raise error
        if self.state == "closed":
            return
        if self._joint is not None and not told:
            self._untold = error  # all processes stop recording together, at the next step
            return
        done = self._step_now.end()
        self._detach(in_a_step=True)
        try:
            # The parameters are those of the last step, unless an earlier one was refused after it was made.
            if isinstance(error, RefusedError) and not stepped and self._lost is None:
                self._settle()
                self._hand_on(done)
                self._close_sink()
        except Exception as another:
            error.add_note(f"While the recording was closed: {another}")
        finally:
            self._sink.abandon()
        self._finalizer()
        warn_user(f"Recording stopped at step {self.steps} and training goes on without it: {error}")


def is_one_gpu(devices: Collection[torch.device]) -> bool:
    """Say whether there is one device, and it is a GPU of CUDA."""
    return len(devices) == 1 and all(device.type == "cuda" for device in devices)


def _copies(parameters: Mapping[str, nn.Parameter], changes: Changes | None) -> dict[str, Tensor]:
    """Return copies of the parameters as the last step left them; none if they are not those any more.

    Args:
        parameters: the parameters.
        changes: knows how the last step left them; None where it has just been made.
    """
    if changes is not None and changes.changed():
        return {}
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _after_lost(error: Exception) -> DualformError:
    """Return the error of a recording that cannot go on, because an earlier step was not recorded."""
    kind = StoreError if isinstance(error, StoreError) else RefusedError
    return kind(
        f"An earlier step was not recorded ({error}), so later ones cannot be added to it. Continue from a checkpoint "
        "with resume=True."
    )
