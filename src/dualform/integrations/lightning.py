"""Record a training by a `Trainer` of Lightning, through a callback.

    trainer = Trainer(callbacks=[RecorderCallback("runs/x", annotate=lambda batch: {"sample": batch[1]})])
    trainer.fit(module, loader)

Lightning tells callbacks of each batch and of exceptions, so a callback is all that is needed. It starts when the
checkpoint to resume from is loaded, and records every optimizer of the trainer.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import dualform
from dualform.integrations.resuming import Resume, decide_resume
from dualform.integrations.trackers import as_trackers, track_end, track_step
from dualform.recording.processes import refuse_several_processes, refuse_wrapped

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the package's older name
    from pytorch_lightning.callbacks import Callback


class RecorderCallback(Callback):
    """Records the training that it is given to as a callback.

    Attributes:
        recorder: the recorder, from the beginning of the training on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        annotate: Callable[[Any], Mapping[str, Any]] | None = None,
        resume: Resume = "auto",
        trackers: Any = None,
        **options: Any,
    ) -> None:
        """Prepare a recording; nothing happens before the training begins.

        Args:
            path: the run folder to make.
            annotate: makes a batch's columns of it, as `Recorder.annotate` takes them. Without it patterns have none;
                `dualform.indexed(dataset)` makes batches of (items, ids).
            resume: continue the run in `path` with the trainer's checkpoint, as `dualform.record` takes it; `"auto"`
                where the trainer resumes from a checkpoint (`ckpt_path`) and there is a run.
            trackers: where to send the recording's numbers: `"loggers"` for those of the trainer; a SummaryWriter of
                TensorBoard, a run of W&B, a function of a step and its numbers; or several in a list.
            options: everything else that `dualform.record` takes: `layers`, `dtype`, `keep`, ...
        """
        self.recorder: dualform.Recorder | None = None
        self._path = path
        self._annotate = annotate
        self._resume = resume
        self._given_trackers = trackers
        self._trackers = [] if trackers == "loggers" else as_trackers(trackers)
        self._options = options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the recorder: the module and its optimizers stand where the training begins, or goes on."""
        refuse_several_processes("Lightning")
        refuse_wrapped(trainer.model)
        if self._given_trackers == "loggers":
            self._trackers = as_trackers(list(trainer.loggers))
        resume = decide_resume(self._resume, self._path, step=trainer.global_step)
        recorder = dualform.record(pl_module, trainer.optimizers, self._path, resume=resume, **self._options)
        self.recorder = recorder.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Annotate the batch that comes next."""
        if self.recorder is not None and self._annotate is not None:
            self.recorder.annotate(**self._annotate(batch))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell the trackers what was recorded."""
        if self.recorder is not None:
            track_step(self._trackers, self.recorder)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Publish what was recorded, so that the run can go on from this checkpoint."""
        if self.recorder is not None and not self.recorder.closed:
            self.recorder.flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the recorder."""
        self._close(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the recorder with the error that ends the training."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self.recorder is None or self.recorder.closed:
            return
        self.recorder.__exit__(None if error is None else type(error), error, None)
        if error is None:
            track_end(self._trackers, self._path)
