"""The recorder: a context manager that turns a training loop's hooks into step records.

It decides which patterns exist (accumulated, then stepped), measures what happened to gradients in between, refuses
what the identity does not cover, and hands each finished step to its sink. It stores nothing and derives nothing.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dualform.errors import AnnotationError, DualformError, MediaError, RefusedError, StoreError
from dualform.recording.accumulation import Accumulations
from dualform.recording.alignment import Alignment, batch_rows
from dualform.recording.annotations import Annotator, Binding
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.bystanders import Bystanders
from dualform.recording.changes import Changes, many_evaluations, why_no_final
from dualform.recording.ending import end_when_dropped, leave_in_forks, remove_handles, weak_hook
from dualform.recording.estimate import Estimate, estimate
from dualform.recording.gauge import Gauge
from dualform.recording.hooks import Arrival, Hooks
from dualform.recording.media import Files, example_files, media_files
from dualform.recording.model_state import UncoveredState
from dualform.recording.processes import refuse_several_processes, refuse_wrapped
from dualform.recording.rowcheck import RowCheck
from dualform.recording.rows import input_tensors
from dualform.recording.saying import WarnOnce, warn_user
from dualform.recording.sinks import LayerStart, ParameterFacts, Sink, Start, StepFacts
from dualform.recording.step_in_progress import OptimizersDone, StepInProgress
from dualform.recording.step_preparation import OnFailure, StepPreparation
from dualform.recording.steps import Owned, own, warm_states, with_closure
from dualform.recording.unwrap import unwrap_all
from dualform.recording.watch import Layers, Watched, covered, held, report_joined, report_uncovered, uncovered, watch
from dualform.recording.world import OneProcess, World
from dualform.threads import keeping_modes, restore_threads
from dualform.torch_modes import keeping_grad_mode, without_gradients

INTERRUPTED = StoreError("it was interrupted")
"""Stands for the error of a step that was made while a Ctrl-C kept its recording from ending."""


class Recorder:
    """Record one model's training while the context lasts. Made by `dualform.record`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        sink: Sink,
        *,
        layers: Layers = None,
        strict: bool = False,
        batch_axis: int | None = None,
        check_rows: bool = True,
        on_failure: OnFailure = "raise",
        world: World | None = None,
    ) -> None:
        self._model = model
        self._world = OneProcess() if world is None else world
        self._sink = sink
        self._on_failure = on_failure
        self._batch_axis = 0 if batch_axis is None else batch_axis
        optimizers = unwrap_all(optimizer)
        refuse_wrapped(model)
        self._layers = watch(model, layers, optimizers)
        refuse_several_processes(self._layers, self._world)
        self._alignment = Alignment(model, self._layers, batch_axis, enabled=check_rows)
        self._parameters = covered(self._layers)
        keys_only = all(layer.keys_only for layer in self._layers)
        self._owned = own(optimizers, self._parameters, keys_only=keys_only)
        self._exact = {name for layer in self._layers if not layer.keys_only for name, _ in layer.parameters.values()}
        self._strict = strict
        self._held = held(optimizers)  # ids of parameters
        missing = uncovered(model, optimizers, self._layers)
        self._uncovered = {name: parameter.numel() for name, parameter in missing.items()}
        self._uncovered_state = UncoveredState(model, optimizers, self._parameters)
        if missing:
            report_uncovered(model, missing, self._parameters, strict=strict)

        self._hooks = Hooks(self._layers, weakref.ref(self), BufferPool(), model)
        self._handles: list[RemovableHandle] = []
        self._annotator = Annotator()
        self._samples: dict[str, Tensor] = {}  # of each parameter after the last step
        self._bystanders: Bystanders | None = None
        self._changes = Changes(model, self._layers, self._parameters, self._exact)
        self._on_cpu = True  # whether all parameters are in the CPU's memory
        self._warn_once = WarnOnce()
        self._steps = 0  # taken so far
        self._step_now = StepInProgress()
        gauge = Gauge()
        self._accumulations = Accumulations(self._parameters, self._step_now, sink, gauge)
        self._preparation = StepPreparation(
            self._exact,
            self._alignment,
            gauge,
            self._warn_once,
            batch_axis=self._batch_axis,
            on_failure=on_failure,
        )
        self._state: Literal["new", "recording", "closed", "forked"] = "new"
        # A method would keep this recorder alive for as long as a sink keeps the snapshot.
        self._snapshot = partial(_copies, self._parameters, self._changes)
        self._finalizer: Callable[[], object] = _nothing
        self._lost: DualformError | None = None  # the error that kept a step that was made from being recorded

    @property
    def step(self) -> int:
        """The number of steps recorded so far, those of a resumed run included."""
        return self._steps

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers."""
        return tuple(layer.name for layer in self._layers)

    def __enter__(self) -> Self:
        return self.start()

    @keeping_modes
    def start(self) -> Self:
        """Begin to record, as entering a with statement does; end with `close`.

            recorder = dualform.record(model, optimizer, "runs/mnist").start()
            ...
            recorder.close()

        Keep the recorder: one that nobody refers to any more stops recording.
        """
        if self._state != "new":
            raise RuntimeError("This recorder was used already. Call dualform.record again for another recording.")
        self._samples = self._changes.look(self._owned)
        parameters = {name: parameter.detach().cpu() for name, parameter in self._parameters.items()}
        start = Start(
            layers={layer.name: _describe(layer) for layer in self._layers},
            parameters=parameters,
            states=warm_states(self._owned),
            optimizers=tuple(owned.name for owned in self._owned),
            uncovered=self._uncovered,
            batch_axis=self._batch_axis,
            state=self._uncovered_state.parts,
        )
        opened = False
        try:
            self._steps = self._sink.open(start)
            opened = True
            self._attach_hooks()
            self._finalizer = end_when_dropped(self, self._hooks, self._handles, self._sink)
            leave_in_forks(self)
        except BaseException as error:
            if opened or not isinstance(error, Exception):  # an interrupt may come just after the sink was opened
                self._give_up()
            raise
        return self

    def leave_to_parent(self) -> None:
        """Do nothing any more, in a forked process: the recording, its thread and its lock are the parent's."""
        if self._state == "recording":
            self._state = "forked"
            self._hooks.enabled = False

    def _attach_hooks(self) -> None:
        """Look at the parameters as they are, and put every hook on."""
        updates = self._sink.updates() if self._steps else None
        self._changes.begin(self._owned, self._steps, updates)
        self._bystanders = Bystanders(self._model, self._parameters, self._held)
        self._find_devices()
        self._state = "recording"
        self._hooks.attach()
        for owned in self._owned:
            self._handles.append(owned.optimizer.register_step_pre_hook(weak_hook(self._before_step)))
            self._handles.append(owned.optimizer.register_step_post_hook(weak_hook(self._after_step)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def close(self) -> None:
        """End the recording, as leaving the with statement does. A recorder may be closed more than once."""
        self._close(None)

    @keeping_modes
    def _close(self, error: BaseException | None) -> None:
        """End the recording; failures are only warned of while another error is on its way."""
        restore_threads()
        if self._state == "closed":
            self._give_up()  # a failure or an interrupt may have left hooks, or a sink that is still open
        if self._state != "recording":
            return
        try:
            self._end(error)
        except BaseException:
            self._give_up()
            raise
        self._finalizer()

    def _give_up(self) -> None:
        """Take every hook off, and let the sink publish what it has taken; does nothing where that is done."""
        self._detach()
        self._sink.abandon()
        self._finalizer()

    def _end(self, error: BaseException | None) -> None:
        """Take every hook off, hand on the step that is open, and close the sink."""
        untold = self._bystanders.warning(self._held) if self._bystanders is not None else None
        done = self._step_now.end()
        self._detach()
        # Where the optimizer's step began and did not end, the parameters are those of no step.
        broken = self._step_now.phase == "stepping" and self._changes.is_broken_off()
        try:
            if broken or self._lost is not None:
                self._sink.abandon()
                if self._lost is INTERRUPTED and error is None:
                    raise _after_lost(INTERRUPTED)
            else:
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

    def annotate(self, **columns: Any) -> None:
        """Attach columns to the patterns of the next forward pass.

        Each column is a constant, one entry per row (B,), or one per row and position (B, L), of strings, integers,
        floats or booleans. Call it before the forward pass: it binds to the next one and ends with its backward.
        Several calls before one forward add up.

        Which of a layer's patterns belong to which row is found by a trial at the first step (see `check_rows`). For a
        layer whose rows are not those of the batch (sorted inside the model, say) give them as
        `rows={layer: (n,) the batch's row of each of its patterns, -1 for none}`; alone, `annotate(rows=...)` may also
        come between the forward and its backward.
        """
        if self._state == "new":
            raise AnnotationError("Nothing is being recorded yet. Use the recorder in a with statement.")
        if self._annotator.late and self._warn_once.is_new("order"):
            warnings.warn(
                "annotate() came after a forward pass without annotations and without a backward so far; its columns "
                "go to the next forward. If they are meant for that one, call annotate() before the forward.",
                stacklevel=2,
            )
        self._annotator.annotate(columns, self._sink.check if self._state == "recording" else lambda _: None)

    def media(self, **what: Any) -> None:
        """Keep what a person should see: images of training samples, names of labels, or a text and its vocabulary.

            recorder.media(images=pixels, labels=["cat", "dog"], mean=0.13 * 255, deviation=0.31 * 255)
            recorder.media(tokens=corpus, vocabulary=words, documents=[(0, "Robert Boulter"), ...], unit="words")

        `dualform.recording.media.media_files` says what each of them is.
        """
        self._attach(media_files(**what))

    def tests(self, inputs: Tensor, targets: Tensor | None = None, *, images: Any = None) -> None:
        """Keep test inputs (M, ...), their targets (M,), and images of them; as `Memory.add_tests` does later."""
        self._attach(example_files(inputs, targets, images))

    def _attach(self, files: Files) -> None:
        if self._state == "new":
            raise MediaError("Nothing is being recorded yet. Use the recorder in a with statement.")
        if self._state == "recording":
            with self._guarding():
                self._sink.attach(files)

    @keeping_grad_mode
    def flush(self) -> None:
        """Publish everything recorded so far, and return when it is on disk."""
        if self._state == "recording":
            with self._guarding():
                self._end_step()
                self._sink.flush(self._snapshot)

    def estimate(self, inputs: Any, *, steps: int) -> Estimate:
        """Say how many bytes the run will take, per layer, if every step sees a batch like this one."""
        return estimate(self._model, inputs, steps=steps, layers={
            layer.name: "keys" if layer.keys_only else "keys+values" for layer in self._layers
        }, dtype=getattr(self._sink, "dtype", None))  # fmt: skip

    @keeping_grad_mode
    def check_rows(self, *args: Any, **kwargs: Any) -> dict[str, RowCheck]:
        """Try on a batch which layers have its rows; takes what the model's forward takes.

        A copy of the model runs on the batch and on the same batch permuted. The answer says for each layer whether its
        rows are those of the batch ("proved"), are not ("not aligned"), or could not be tried ("assumed"), and why.
        """
        rows = batch_rows(args, kwargs, self._batch_axis)
        found = self._alignment.look(args, kwargs, rows=rows)
        self._alignment.warnings()  # the caller has the answer
        return found

    # What the hooks report ----------------------------------------------------------------------------------------

    @property
    def forward(self) -> int:
        """The number of the forward of the whole model that is running."""
        return self._annotator.forward

    def before_forward(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward, and find out which rows the layers have, where it is annotated.

        Of several children that are called by themselves for one batch only the first is sure to see its rows.
        """
        binding = self._annotator.begin_forward(input_tensors(args, kwargs))
        if binding is not None and binding.begun_by in (None, name):
            binding.begun_by = name
            try:
                self._alignment.before_forward(binding, (name, module), args, kwargs, step=self._steps)
            except AnnotationError as error:
                if self._on_failure == "raise":
                    raise
                unknown = RowCheck("not aligned", "the batch's rows could not be told")
                binding.checks.update({layer.name: unknown for layer in self._layers})
                self._warn_once(f"Columns per row are left out (null): {error}")
            for text in self._alignment.warnings():
                self._warn_once(text)

    def binding_for_forward(self) -> Binding | None:
        """Return the annotations that a forward call starting now takes."""
        within = torch._C._current_graph_task_id() != -1  # a checkpointed part, computed again in its own backward
        return self._annotator.for_forward(again=within)

    def before_accumulation(self, name: str, parameter: nn.Parameter) -> None:
        """Take a probe of the gradient that is there already. A new backward ends a step that some took part in."""
        if self._changes.is_converted(name, parameter):
            with self._guarding():
                self._follow(name)
        if self._step_now.done.ids:
            with self._guarding():
                self._end_step()
        if self._state == "recording":
            self._accumulations.begin(name, parameter)

    def after_accumulation(self, name: str, parameter: nn.Parameter, task: int, arrivals: Sequence[Arrival]) -> None:
        """Hand over the patterns that were accumulated, and measure the gradient that they made."""
        if self._state != "recording":
            return
        if self._accumulations.is_unstepped(name, task):
            if self._step_now.backwards and (warning := self._changes.unstepped()) is not None:
                warn_user(warning)
            self._accumulations.discard()
        self._annotator.late = False
        for arrival in arrivals:
            self._annotator.spend(arrival.call.binding)
        self._accumulations.end(name, parameter, task, arrivals)

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
        if self._state != "recording":
            return None
        return with_closure(args, kwargs, lambda: self._prepare(optimizer))

    @without_gradients
    def _prepare(self, optimizer: Optimizer) -> None:
        """Find what the optimizer that is about to step will do, or refuse its step."""
        step = self._step_now
        step.prepared = None
        step.evaluations += 1
        with self._guarding(f"A step of {type(optimizer).__name__}"):
            if self._lost is not None:
                raise _after_lost(self._lost)
            if id(optimizer) in step.done.ids:
                self._end_step()
            owned = next(owned for owned in self._owned if owned.optimizer is optimizer)
            try:
                self._look_for_joined(owned)
                self._check_unchanged(owned)
                prepared = self._preparation.prepare(owned, step, self._steps, on_cpu=self._on_cpu)
            except Exception:
                self._world.any(True)  # so that no other process records this step
                raise
            if self._world.any(False):
                raise RefusedError(
                    "Another process of this training cannot record this step, as its own error says; so no process "
                    "records it."
                )
            self._sink.before_step(prepared)
            step.prepared = prepared

    def _look_for_joined(self, owned: Owned) -> None:
        """Tell of parameters that came into an optimizer's groups after the recording began and are not recorded."""
        new = held([owned.optimizer]) - self._held
        if not new:
            return
        missing = uncovered(self._model, [owned.optimizer], self._layers)
        joined = {name: parameter for name, parameter in missing.items() if id(parameter) in new}
        if joined:
            report_joined(self._model, owned.optimizer, joined, strict=self._strict)
        self._held |= new

    @keeping_grad_mode
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._state == "recording":
            with self._guarding(f"A step of {type(optimizer).__name__}", stepped=True):
                before, self._lost = self._lost, INTERRUPTED
                self._finish(optimizer)
                self._lost = before

    @without_gradients
    def _finish(self, optimizer: Optimizer) -> None:
        """Take the step that an optimizer has made."""
        step = self._step_now
        prepared, step.prepared = step.prepared, None
        self._annotator.late = False
        step.graph_of = None
        self._hooks.forget()
        owned = next(owned for owned in self._owned if owned.optimizer is optimizer)
        mine = owned.parameters
        for name in mine:
            step.histories.pop(name, None)
        if prepared is None:
            self._accumulations.discard()
            return
        self._samples |= self._changes.note(owned, mine)
        if step.evaluations > 1:
            self._warn_once(many_evaluations(owned.name, step.evaluations), key="evaluations")
        step.done.add(optimizer, prepared)
        if len(step.done.ids) == len(self._owned):
            self._end_step()

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
        self._sink.step(StepFacts(self._steps, done.calls, facts, dict(self._samples), self._snapshot, rows))
        self._steps += 1

    # Changes that no recorded step made ---------------------------------------------------------------------------

    def _check_unchanged(self, owned: Owned) -> None:
        """Refuse a step if anything but recorded steps has changed what the recording is about."""
        for name, parameter in self._parameters.items():
            if self._changes.is_converted(name, parameter):
                self._follow(name)
        self._changes.check(owned, self._steps)

    def _follow(self, name: str) -> None:
        """Go on where the model was moved to another device between two steps; refuse any other conversion."""
        self._changes.follow(name, self._steps, pending=bool(self._step_now.backwards))
        self._find_devices()

    def _find_devices(self) -> None:
        """Find out whether all parameters are in the CPU's memory."""
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters.values())

    def _close_sink(self) -> str:
        """Close the sink, with final weights only if they are those after the last step; return a warning, or ""."""
        live = {name: parameter.detach().cpu() for name, parameter in self._parameters.items()}
        if changed := self._changes.changed():
            self._sink.close_without_final(why_no_final(changed, self._steps))
        else:
            self._sink.close(live)
        return self._changes.at_closing(self._steps, lambda: self._sink.find_step(live))

    # Small things -------------------------------------------------------------------------------------------------

    def _detach(self, *, in_a_step: bool = False) -> None:
        self._state = "closed"
        self._hooks.detach()
        remove_handles(self._handles, running=in_a_step)
        self._step_now.clear()  # the sink ends, and with it what it has of these backwards

    @contextlib.contextmanager
    def _guarding(self, where: str = "The recording", *, stepped: bool = False) -> Iterator[None]:
        """Let failures out, or with on_failure="detach" stop recording and let training go on."""
        try:
            yield
        except Exception as error:
            self._fail(error, where, stepped=stepped)

    def _fail(self, error: Exception, where: str, *, stepped: bool = False) -> None:
        """Raise an error, one that dualform did not foresee by name; or stop recording and warn.

        Args:
            error: what was raised while recording.
            where: the layer, parameter or optimizer that was recorded.
            stepped: whether the optimizer has moved the parameters beyond the last step that was recorded.
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
        if self._state == "closed":
            return
        done = self._step_now.end()
        self._detach(in_a_step=True)
        try:
            if isinstance(error, RefusedError) and not stepped:  # the parameters are those of the last step
                self._hand_on(done)
                self._close_sink()
        except Exception as another:
            error.add_note(f"While the recording was closed: {another}")
        finally:
            self._sink.abandon()
        self._finalizer()
        warn_user(f"Recording stopped at step {self._steps} and training goes on without it: {error}")


def _copies(parameters: Mapping[str, nn.Parameter], changes: Changes) -> dict[str, Tensor]:
    """Return copies of the parameters as the last step left them; none if they are not those any more."""
    if changes.changed():
        return {}
    return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


def _after_lost(error: Exception) -> DualformError:
    """Return the error of a recording that cannot go on, because an earlier step was not recorded."""
    kind = StoreError if isinstance(error, StoreError) else RefusedError
    return kind(
        f"An earlier step was not recorded ({error}), so later ones cannot be added to it. Continue from a checkpoint "
        "with resume=True."
    )


def _nothing() -> None:
    pass


def _describe(layer: Watched) -> LayerStart:
    uses = tuple(layer.parameters)
    return LayerStart(layer.kind.name, layer.d_in, layer.d_out, uses, layer.keys_only, layer.kind.optional)
