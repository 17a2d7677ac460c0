"""The recorder that a user has: a context manager around a training loop, and what can be told to it meanwhile.

It chooses the layers, describes the start of the recording to its sink, and leaves the steps to `StepRecorder`.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import AnnotationError, MediaError
from dualform.recording.alignment import Alignment, batch_rows
from dualform.recording.annotations import RANK
from dualform.recording.check_schedule import CheckOrNone
from dualform.recording.divided import find_own_rows, localized
from dualform.recording.estimate import Estimate, estimate
from dualform.recording.joint_uneven import JoinHook, UnevenWorld
from dualform.recording.media import Files, example_files, media_files
from dualform.recording.model_state import UncoveredState
from dualform.recording.processes import find_world, refuse_whole_matrix_steps, refuse_wrapped, unwrap_model
from dualform.recording.proven_steps import KnownSteps, ProvenAlignment
from dualform.recording.recorded_optimizers import divide_parameters, warm_states
from dualform.recording.rowcheck import RowCheck
from dualform.recording.sharded_modules import reshard
from dualform.recording.sinks import RESIDUAL, DividedStart, LayerStart, Sink, Start
from dualform.recording.step_preparation import OnFailure
from dualform.recording.step_recorder import StepRecorder
from dualform.recording.unwrap import unwrap_all
from dualform.recording.watch import Layers, Watched, What, covered, report_uncovered, uncovered, watch
from dualform.recording.world import OneProcess, World
from dualform.threads import keeping_modes, restore_threads
from dualform.torch_modes import keeping_grad_mode


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
        check: CheckOrNone = "sampled",
        stored_loosely: Callable[[str], bool] = lambda layer: False,
        world: World | None = None,
        patterns: Layers | Literal[False] = None,
        known: KnownSteps | None = None,
        needed: Mapping[str, What] | None = None,
    ) -> None:
        """Prepare a recording; `dualform.record` says what most of the arguments are.

        Args:
            model: the model that is trained.
            optimizer: its optimizer, or several.
            sink: takes the recording.
            layers: which layers to record.
            strict: raise, instead of warning, when trained parameters are not covered.
            batch_axis: which leading axis of an input is the batch.
            check_rows: find out by a trial which layers have the rows of the batch.
            on_failure: `"raise"` or `"detach"`.
            check: how often every gradient is compared with the sum of its patterns.
            stored_loosely: says of a layer whether its patterns are stored so coarsely that every step is checked.
            world: the processes that train together; by default those that torch.distributed knows of.
            patterns: the layers whose patterns the sink keeps, nothing for all and False for none. Of the others it
                keeps sums, and a gradient that patterns do not explain is measured there, and not refused.
            known: of a training whose every step the sink proves to be one of an earlier recording, what this one
                found of the steps; nothing is checked again then.
            needed: the layers whose rows the sink needs, and which; None for all rows of all layers.
        """
        wrapper, model = model, unwrap_model(model)
        self._model = model
        self._sink = sink
        self._batch_axis = 0 if batch_axis is None else batch_axis
        optimizers = unwrap_all(optimizer)
        refuse_wrapped(model)
        reshard(model)
        self._layers = watch(model, layers, optimizers, patterns=patterns)
        if world is None:  # a replay is one process's own, whatever the program around it does
            world = OneProcess() if known is not None else find_world(wrapper, self._layers)
        self._wrapper = wrapper
        self._world = world if wrapper is model else UnevenWorld(world)
        if known is None or known.rows is None:
            self._alignment = Alignment(model, self._layers, batch_axis, enabled=check_rows)
        else:
            self._alignment = ProvenAlignment(model, self._layers, batch_axis, known.rows)
        self._own_rows = find_own_rows(model, covered(self._layers))
        self._parameters = localized(covered(self._layers), self._own_rows)
        keys_only = all(layer.keys_only for layer in self._layers)
        if any(stored_loosely(layer.name) for layer in self._layers if not layer.keys_only):
            check = "every"  # `verify` cannot find a small edit of a gradient afterwards
        self._owned = divide_parameters(optimizers, covered(self._layers), keys_only=keys_only)
        refuse_whole_matrix_steps(self._owned, self._own_rows)
        missing = uncovered(model, optimizers, self._layers)
        self._uncovered = {name: parameter.numel() for name, parameter in missing.items()}
        self._uncovered_state = UncoveredState(model, optimizers, self._parameters)
        if missing:
            report_uncovered(model, missing, covered(self._layers), strict=strict)
        self._steps = StepRecorder(
            model,
            self._layers,
            self._owned,
            sink,
            self._alignment,
            self._world,
            wrapper=wrapper,
            strict=strict,
            on_failure=on_failure,
            check=check,
            known=known,
            needed=needed,
            own_rows=self._own_rows,
        )

    @property
    def step(self) -> int:
        """The number of steps recorded so far, those of a resumed run included."""
        return self._steps.steps

    @property
    def closed(self) -> bool:
        """Whether the recording has ended: it was closed, or a failure ended it."""
        return self._steps.state not in ("new", "recording")

    @property
    def taken_bytes(self) -> int:
        """Bytes of keys and values of all steps recorded since the start, before they are encoded for storing."""
        return int(getattr(self._sink, "taken_bytes", 0))

    @property
    def unexplained(self) -> float:
        """The norm of what the patterns leave of the last step's gradients, where autocast rounded them; else 0.0.

        Any other gradient that its patterns do not explain up to rounding is refused.
        """
        return math.hypot(*(facts.settings.get(RESIDUAL, 0.0) for facts in self._steps.last_facts))

    @property
    def overhead(self) -> float:
        """Seconds that the last step, from the end of the one before it on, spent inside of the recorder.

        It is the host's time: on a GPU, the time to launch what the recorder computes there, not to compute it.
        """
        return self._steps.clock.step_seconds

    @property
    def world(self) -> World:
        """The processes that train together, of which this recorder is in one."""
        return self._world

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
        if self._steps.state != "new":
            raise RuntimeError("This recorder was used already. Call dualform.record again for another recording.")
        samples = self._steps.look()
        start = Start(
            layers={layer.name: _describe(layer) for layer in self._layers},
            parameters={name: parameter.detach().cpu() for name, parameter in self._parameters.items()},
            states=warm_states(self._owned),
            optimizers=tuple(owned.name for owned in self._owned),
            uncovered=self._uncovered,
            batch_axis=self._batch_axis,
            state=self._uncovered_state.parts,
            devices={name: parameter.device for name, parameter in self._parameters.items()},
            rank=self._world.rank,
            processes=self._world.size,
            divided={
                name: DividedStart(tuple(rows.whole), rows.first, samples[name])
                for name, rows in self._own_rows.items()
            },
        )
        self._steps.start(start)
        return self

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
        self._steps.close(error)

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
        if self._steps.state == "new":
            raise AnnotationError("Nothing is being recorded yet. Use the recorder in a with statement.")
        if self._world.size > 1 and RANK in columns:
            raise AnnotationError(
                f"{RANK!r} cannot be a column of a training in several processes: every pattern has one of that name, "
                "the number of its process. Choose another name."
            )
        annotator = self._steps.annotator
        if annotator.late and self._steps.warn_once.is_new("order"):
            warnings.warn(
                "annotate() came after a forward pass without annotations and without a backward so far; its columns "
                "go to the next forward. If they are meant for that one, call annotate() before the forward.",
                stacklevel=2,
            )
        with self._steps.clock:
            annotator.annotate(columns, self._steps.check_columns)

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
        if self._steps.state == "new":
            raise MediaError("Nothing is being recorded yet. Use the recorder in a with statement.")
        if self._steps.state == "recording":
            self._steps.attach(files)

    @keeping_grad_mode
    def flush(self) -> None:
        """Publish everything recorded so far, and return when it is on disk."""
        if self._steps.state == "recording":
            with self._steps.clock:
                self._steps.flush()

    @keeping_modes
    def state_dict(self) -> dict[str, Any]:
        """Return what your checkpoint has to hold so that a recording of shares can go on from it.

        Save it with the model's and the optimizer's own, and give it to `load_state_dict` of the recorder that resumes.
        A recording of patterns alone needs nothing: they are in the run folder.
        """
        if self._steps.state != "recording":
            raise RuntimeError("The state of a recording can be had while it records, between two steps.")
        return {"step": self.step, "sink": self._steps.sink_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of an earlier recording of the same run; call it before the recording is started."""
        if self._steps.state != "new":
            raise RuntimeError("Load the state before the recorder is started.")
        self._sink.load_state(state["sink"])

    # What `with torch.distributed.algorithms.join.Join([model, recorder]):` asks for, where processes may run out of
    # batches at different times.

    @property
    def join_process_group(self) -> Any:
        """The processes that train together, as the model's DistributedDataParallel has them."""
        return getattr(self._wrapper, "join_process_group", None)

    @property
    def join_device(self) -> Any:
        """The device on which the model's DistributedDataParallel counts the processes that have batches."""
        return getattr(self._wrapper, "join_device", None)

    def join_hook(self, **_: Any) -> JoinHook:
        """Return what this recorder does when its process has no batches left."""
        return self._steps.join_hook()

    @property
    def _join_config(self) -> Any:
        return None

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._steps.join(config)

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


def _describe(layer: Watched) -> LayerStart:
    uses = tuple(layer.parameters)
    return LayerStart(
        layer.kind.name,
        layer.d_in,
        layer.d_out,
        uses,
        layer.keys_only,
        layer.kind.optional,
        layer.shares_only,
        layer.kind.unfolding(layer.module),
    )
