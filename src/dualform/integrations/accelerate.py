"""Record a training loop whose model and optimizer were prepared by an `Accelerator`.

`dualform.record(model, optimizer, path)` takes prepared objects as they are. This one also unwraps the model by the
accelerator, and sends the recording's numbers to the trackers that the accelerator began
(`accelerator.init_trackers`). In several processes each of them calls it, with the same path.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator

import dualform
from dualform.integrations.trackers import as_trackers, track_end


@contextlib.contextmanager
def record(
    accelerator: Accelerator, model: Any, optimizer: Any, path: str | os.PathLike[str], **options: Any
) -> Iterator[dualform.Recorder]:
    """Record a training of prepared objects while the context lasts.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with record(accelerator, model, optimizer, "runs/x") as recorder:
            for (images, labels), ids in loader: ...

    Args:
        accelerator: what prepared the model and the optimizer.
        model: the prepared model.
        optimizer: its prepared optimizer, or several in a list.
        path: the run folder to make.
        options: everything else that `dualform.record` takes.
    """
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    with dualform.record(plain, optimizer, path, **options) as recorder:
        yield recorder
    track_end(as_trackers(list(accelerator.trackers)), path)
