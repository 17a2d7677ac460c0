"""The recorder: a context manager that turns a training loop's hooks into step records.

It decides which patterns exist (accumulated, then stepped), measures what happened to gradients in between, refuses
what the identity does not cover, and hands each finished step to its sink. It stores nothing and derives nothing.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dualform.errors import AnnotationError, DualformError, MediaError, RefusedError
from dualform.record.annotations import Annotator, Binding
from dualform.record.calls import Pending, bring, gather_calls
from dualform.record.estimate import Estimate, estimate
from dualform.record.facts import Situation, gather_facts
from dualform.record.gauge import Gauge
from dualform.record.hooks import Arrival, Hooks
from dualform.record.media import Files, example_files, media_files
from dualform.record.model_state import UncoveredState
from dualform.record.optimizers import pending_scale
from dualform.record.sinks import CallRecord, LayerStart, ParameterFacts, Sink, Start, StepRecord, sample
from dualform.record.spares import Spares
from dualform.record.steps import OpenStep, own, warm_states, with_closure
from dualform.record.trails import Accumulation, Trail, fetched, resolve_all
from dualform.record.transfer import Transfer
from dualform.record.watch import Layers, Watched, covered, report_uncovered, uncovered, watch
from dualform.threads import one_thread

OnFailure = Literal["raise", "detach"]


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
        batch_axis: int = 0,
        on_failure: OnFailure = "raise",
    ) -> None:
        self._model = model
        self._sink = sink
        self._on_failure = on_failure
        self._batch_axis = batch_axis
        self._layers = watch(model, layers)
        self._parameters = covered(self._layers)
        keys_only = all(layer.keys_only for layer in self._layers)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._owned = own(optimizers, self._parameters, keys_only=keys_only)
        self._exact = {name for layer in self._layers if not layer.keys_only for name, _ in layer.parameters.values()}
        self._uncovered = {name: p.numel() for name, p in uncovered(model, optimizers, self._layers).items()}
        self._uncovered_state = UncoveredState(model, optimizers, self._parameters)
        if self._uncovered:
            report_uncovered(self._uncovered, self._parameters, strict=strict)

        self._spares = Spares()
        self._hooks = Hooks(self._layers, self, self._spares)
        self._handles: list[RemovableHandle] = []
        self._pending = Pending()
        self._open = OpenStep()
        self._in_flight: tuple[list[ParameterFacts], list[CallRecord]] | None = None  # of the optimizer that steps now
        self._annotator = Annotator()
        self._graph_of: str | None = None  # a layer whose backward built a graph of itself
        self._gauge = Gauge()
        self._samples: dict[str, Tensor] = {}  # of each parameter after the last step
        self._here = True  # whether all parameters are in the CPU's memory
        self._transfer: Transfer | None = None  # from the GPU, where all parameters are on one
        self._warned: set[str] = set()
        self._step = 0
        self._state: Literal["new", "recording", "closed"] = "new"

    @property
    def step(self) -> int:
        """The number of steps recorded so far, those of a resumed run included."""
        return self._step

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers."""
        return tuple(layer.name for layer in self._layers)

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError("This recorder was used already. Call dualform.record again for another recording.")
        parameters = {name: parameter.detach().cpu() for name, parameter in self._parameters.items()}
        self._step = self._sink.open(
            Start(
                layers={layer.name: _describe(layer) for layer in self._layers},
                parameters=parameters,
                states=warm_states(self._owned),
                optimizers=tuple(owned.name for owned in self._owned),
                uncovered=self._uncovered,
                batch_axis=self._batch_axis,
                state=self._uncovered_state.parts,
            )
        )
        self._samples = {name: sample(parameter) for name, parameter in self._parameters.items()}
        devices = {parameter.device for parameter in self._parameters.values()}
        self._here = all(device.type == "cpu" for device in devices)
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            self._transfer = Transfer(next(iter(devices)))
        self._state = "recording"
        self._hooks.attach()
        for owned in self._owned:
            self._handles.append(owned.optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(owned.optimizer.register_step_post_hook(self._after_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._state != "recording":
            return
        open_step, self._open = self._open, OpenStep()
        self._detach()
        broken = self._in_flight is not None and any(
            not torch.equal(sample(parameter), self._samples[name]) for name, parameter in self._parameters.items()
        )  # the optimizer's step began and did not end: the parameters are those of no step
        try:
            if broken:
                self._sink.abandon()
            else:
                self._commit(open_step)
                self._sink.close({name: parameter.detach().cpu() for name, parameter in self._parameters.items()})
        except DualformError as failure:
            if error is None and self._on_failure == "raise":
                raise
            warnings.warn(f"The recording could not be closed properly: {failure}", stacklevel=2)

    def annotate(self, **columns: Any) -> None:
        """Attach columns to the patterns of the next forward pass.

        Each column is a constant, one entry per row (B,), or one per row and position (B, L), of strings, integers,
        floats or booleans. Call it before the forward pass: it binds to the next one and ends with its backward.
        Several calls before one forward add up.
        """
        if self._state == "new":
            raise AnnotationError("Nothing is being recorded yet. Use the recorder in a with statement.")
        if self._annotator.late and "order" not in self._warned:
            self._warned.add("order")
            warnings.warn(
                "annotate() came after a forward pass whose backward is still to come; its columns go to the next "
                "forward. Call annotate() before the forward.",
                stacklevel=2,
            )
        self._annotator.annotate(columns, self._sink.check if self._state == "recording" else lambda _: None)

    def media(self, **what: Any) -> None:
        """Keep what a person should see: images of training samples, names of labels, or a text and its vocabulary.

            recorder.media(images=pixels, labels=["cat", "dog"], mean=0.13 * 255, deviation=0.31 * 255)
            recorder.media(tokens=corpus, vocabulary=words, documents=[(0, "Robert Boulter"), ...], unit="words")

        `dualform.record.media.media_files` says what each of them is.
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

    # What the hooks report ----------------------------------------------------------------------------------------

    def binding_for_forward(self) -> Binding | None:
        """Return the annotations that a forward call starting now takes."""
        within = torch._C._current_graph_task_id() != -1  # a checkpointed part, computed again in its own backward
        return self._annotator.for_forward(again=within)

    def before_accumulation(self, name: str, parameter: nn.Parameter) -> None:
        """Take a probe of the gradient that is there already. A new backward ends a step that some took part in."""
        if self._open.done:
            with self._guarding():
                self._end_step()
        if self._state == "recording":
            self._trail(name).waiting = self._gauge.probe(name, parameter, size="now")

    def after_accumulation(self, name: str, parameter: nn.Parameter, task: int, arrivals: Sequence[Arrival]) -> None:
        """Take a probe of the accumulated gradient, and of what the patterns predict for it."""
        if self._state != "recording":
            return
        if task not in self._pending.tasks and self._pending.cleared(self._parameters, name):
            self._pending = Pending()  # nothing of what was pending can reach a step any more
        micro = self._pending.micro(task)
        self._annotator.late = False
        patterns = self._pending.arrivals.setdefault(micro, [])
        known = {id(arrival) for arrival in patterns}
        for arrival in arrivals:
            if id(arrival) not in known:
                patterns.append(arrival)
            self._annotator.spend(arrival.call.binding)
        after = self._gauge.probe(name, parameter)
        assert after is not None, "a gradient was just accumulated"
        predicted: Tensor | None = None
        sizes, coarse, terms = [], False, 0
        for arrival in arrivals:
            for role, prediction in self._gauge.predictions(arrival).items():
                if arrival.call.layer.parameters[role][0] == name:
                    predicted = prediction.columns if predicted is None else predicted + prediction.columns
                    sizes.append(prediction.size)
                    coarse = coarse or arrival.call.coarse is not None
                    terms += 0 if arrival.values is None else len(arrival.values)
        trail = self._trail(name)
        predicted = torch.zeros_like(after.columns) if predicted is None else predicted
        trail.accumulations.append(Accumulation(micro, trail.waiting, after, predicted, sizes, coarse, terms))
        trail.waiting = None

    def coarse_seen(self, layer: str) -> None:
        """Refuse a layer whose values cannot be computed again as autocast computed them."""
        with self._guarding():
            raise RefusedError(
                f"Layer {layer!r} ran under autocast, and the errors at a recurrent layer's gates cannot be computed "
                "again in its dtype. Run it outside autocast (torch.autocast(..., enabled=False) around it), or leave "
                "it out of layers=[...]."
            )

    def create_graph_seen(self, layer: str) -> None:
        """Remember that a backward built a graph of itself; what is done with it may not be seen."""
        self._graph_of = layer

    # The optimizer's step -----------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return with_closure(args, kwargs, lambda: self._prepare(optimizer))

    @torch.no_grad()
    def _prepare(self, optimizer: Optimizer) -> None:
        """Resolve what is pending for the optimizer that is about to step."""
        self._in_flight = None
        with self._guarding():
            if id(optimizer) in self._open.done:
                self._end_step()
            owned = next(owned for owned in self._owned if owned.optimizer is optimizer)
            scale, skipped = pending_scale(optimizer)
            groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            mine = owned.parameters
            finals = [
                None if skipped else self._gauge.probe(name, parameter, size="later")
                for name, parameter in mine.items()
            ]
            seen = [(self._trail(name), final) for name, final in zip(mine, finals, strict=True)]
            seen = seen if self._here else fetched(seen)
            situation = Situation(self._exact, self._graph_of, len(self._pending.tasks), scale, skipped)
            self._graph_of = None
            with one_thread():  # what is left of gradients is small
                resolutions = resolve_all(seen)
            facts = [
                gather_facts(owned, name, parameter, groups[id(parameter)], resolution, situation)
                for (name, parameter), resolution in zip(mine.items(), resolutions, strict=True)
            ]
            self._in_flight = facts, self._calls([*self._open.facts, *facts])

    def _calls(self, facts: Sequence[ParameterFacts]) -> list[CallRecord]:
        """Return the calls whose gradient reaches the step through at least one parameter."""
        factors = {fact.parameter: fact.factors for fact in facts if fact.updated}
        calls, misfits = gather_calls(self._pending.arrivals, factors, self._axis)
        for misfit in misfits:
            if misfit.everywhere:
                for arrivals in self._pending.arrivals.values():
                    for arrival in arrivals:
                        if arrival.call.binding is misfit.binding:
                            arrival.call.binding = None  # a second attempt at this step goes through without it
                raise AnnotationError(
                    f"The annotation fits no recorded layer: {misfit.text}. Annotate one entry per row."
                )
            if misfit.text not in self._warned:
                self._warned.add(misfit.text)
                warnings.warn(f"Patterns get no annotations: {misfit.text}.", stacklevel=3)
        return calls

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prepared, self._in_flight = self._in_flight, None
        self._annotator.late = False
        self._graph_of = None
        self._hooks.forget()
        owned = next(owned for owned in self._owned if owned.optimizer is optimizer)
        with one_thread():
            for name, parameter in owned.parameters.items():
                self._pending.trails.pop(name, None)
                self._samples[name] = sample(parameter)
        if prepared is None or self._state != "recording":
            self._pending = Pending()
            return
        self._open.add(optimizer, *prepared)
        if len(self._open.done) == len(self._owned):
            with self._guarding():
                self._end_step()

    def _end_step(self) -> None:
        """Hand the step on that at least one optimizer took part in, and let go of what no other one waits for."""
        if not self._open.done:
            return
        ended, self._open = self._open, OpenStep()
        waiting = {name for owned in self._owned if id(owned.optimizer) not in ended.done for name in owned.parameters}
        self._pending.keep(waiting)
        self._commit(ended)

    def _commit(self, ended: OpenStep) -> None:
        if not ended.done:
            return
        still = [  # parameters whose optimizer did not step are as they were
            ParameterFacts(name, owned.name, False, {}, [])
            for owned in self._owned
            if id(owned.optimizer) not in ended.done
            for name in owned.parameters
        ]
        # A step of another optimizer may hold the same patterns, and so may a backward that is still running.
        shared = bool(self._pending.arrivals) or bool(self._hooks.arrivals)
        calls, samples, brought = bring(ended.calls, dict(self._samples), self._transfer)
        record = StepRecord(
            self._step,
            calls,
            [*ended.facts, *still],
            samples,
            self._snapshot,
            None if shared else self._spares,
            brought,
        )
        self._sink.write(record)
        self._step += 1

    # Small things -------------------------------------------------------------------------------------------------

    def _axis(self, layer: Watched) -> int:
        return self._batch_axis if layer.kind.batch_axis is None else layer.kind.batch_axis

    def _trail(self, name: str) -> Trail:
        trail = self._pending.trails.get(name)
        if trail is None:
            trail = self._pending.trails[name] = Trail(self._parameters[name].shape[1:].numel())
        return trail

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self._parameters.items()}

    def _detach(self) -> None:
        self._state = "closed"
        self._hooks.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._pending = Pending()

    @contextlib.contextmanager
    def _guarding(self) -> Iterator[None]:
        """Let failures out, or with on_failure="detach" stop recording and let training go on."""
        try:
            yield
        except DualformError as error:
            if self._on_failure == "raise" or isinstance(error, AnnotationError):
                raise
            self._detach()
            with contextlib.suppress(DualformError):
                if isinstance(error, RefusedError):  # before the step, so the parameters are those of the last one
                    self._sink.close(self._snapshot())
                else:
                    self._sink.abandon()
            warnings.warn(
                f"Recording stopped at step {self._step} and training goes on without it: {error}",
                stacklevel=4,
            )


def _describe(layer: Watched) -> LayerStart:
    roles = {role: name for role, (name, _) in layer.parameters.items()}
    return LayerStart(layer.kind.name, layer.d_in, layer.d_out, roles, layer.keys_only, layer.kind.optional)
