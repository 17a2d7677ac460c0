"""`dualform.record`: a recorder over a disk writer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch import nn
from torch.optim import Optimizer

from dualform.errors import RefusedError, ResumeError, RunFactoryError
from dualform.recording.check_schedule import Check
from dualform.recording.keep import Keep, Shares, Steps, as_keeps, divided
from dualform.recording.processes import refuse_some_of_all, unwrap_model
from dualform.recording.recorder import Recorder
from dualform.recording.step_preparation import OnFailure
from dualform.recording.watch import Dtype, Layers, StoredDtype, stored_dtype
from dualform.store.places import Place, as_blobs
from dualform.store.share_writer import ShareWriter
from dualform.store.writer import DiskWriter

_STORED_DTYPES = (None, *get_args(StoredDtype))


def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: Place,
    *,
    keep: Keep | Sequence[Keep] | None = None,
    layers: Layers = None,
    dtype: Dtype = None,
    strict: bool = False,
    batch_axis: int | None = None,
    check_rows: bool = True,
    resume: bool | int = False,
    on_failure: OnFailure = "raise",
    check: Check = "sampled",
    steps: int | None = None,
    shard_bytes: int = 128 << 20,
    queue_bytes: int = 512 << 20,
    factory: str | None = None,
    factory_arguments: Mapping[str, Any] | None = None,
    training: str | None = None,
) -> Recorder:
    """Record a training run while the returned context lasts.

        with dualform.record(model, optimizer, "runs/mnist") as recorder:
            for images, labels, ids in loader:
                recorder.annotate(sample=ids, label=labels)
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad(); loss.backward(); optimizer.step()

    The loop is otherwise untouched, and the trained parameters are the same to the bit with and without recording.

    Args:
        model: the model that is trained.
        optimizer: its optimizer, or several in a list, each with parameters of its own; a framework's wrapper will do.
        path: the run folder to make; an address in object storage, "s3://bucket/run" (also gs:// and az://, with the
            package extra `cloud`); or the `Blobs` to keep the run in.
        keep: what is kept of the training: `dualform.Patterns()`, every key and value, the default;
            `dualform.Shares(by="source")`, what each group of patterns made of every weight, in constant size; or a
            list of both. `dualform.Steps()`, facts and marks of the steps, whose patterns come back when the training
            is replayed; or a list of it and of `dualform.Patterns(layers=...)`, for the layers to store.
        layers: nothing, or `"trained"`, for every supported layer of which the optimizer holds a parameter; a name or
            pattern such as `"encoder.*"`, or several; or a mapping from names or patterns to `"keys+values"` or
            `"keys"` (attention only), of which the first match decides.
        dtype: store in the dtype that is trained, or in row-scaled `"float16"` or `"int8"`; or a mapping from names or
            patterns of layers to one of these, of which the first match decides. int8 is rounded at random: sums over
            many patterns average its errors out, and what is left `verify` measures and reports.
        strict: raise, instead of warning, when trained parameters are not covered.
        batch_axis: which leading axis of an input is the batch: 0 for (B, L, d), the default, 1 for (L, B, d).
        check_rows: find out by a trial at the first annotated step which layers have the rows of the batch: a copy of
            the model runs on the batch, and on the batch permuted. Without it annotations are matched by row number.
        resume: continue the run in `path` at the step where the model's own checkpoint stands (found from its weights,
            or given as a number); later patterns are dropped.
        on_failure: `"raise"` at the next step, or `"detach"`: warn, stop recording and let training go on.
        check: how often every gradient is compared with the sum of its patterns: in the first 20 steps, after anything
            unusual and in a random one of 16 steps (`"sampled"`), or in `"every"` step, which is also how a recording
            with values in int8 is checked. docs/math.md says what each refuses, and when.
        steps: the planned number of steps, if known: the first step then checks that the disk holds them all.
        shard_bytes: how much is collected before it is published.
        queue_bytes: how much may wait to be written before training has to wait.
        factory: `"package.module:function"` that makes the model, so that the command line can.
        factory_arguments: its keyword arguments, of JSON types.
        training: with `Steps()`, `"package.module:function"` that runs this training; see `dualform.record_training`.
    """
    keeps = as_keeps(keep)
    again = any(isinstance(one, Steps) for one in keeps)
    if again and any(isinstance(one, Shares) for one in keeps):
        raise RefusedError(
            "keep has both Shares(...) and Steps(). Record them in two runs: a replay brings either back."
        )
    if again and resume is not False:
        raise ResumeError(
            "A recording that keeps steps cannot be resumed: a replay runs the whole training, from its first step. "
            "Record all of it in one go."
        )
    patterns, shares = divided([one for one in keeps if not isinstance(one, Steps)] or None)
    if patterns is not None and shares is None and not again:
        layers = patterns.layers if layers is None else layers
    if patterns is not None and patterns.dtype is not None:
        dtype = patterns.dtype
    unknown = [
        found for found in (dtype.values() if isinstance(dtype, Mapping) else [dtype]) if found not in _STORED_DTYPES
    ]
    if unknown:
        raise ValueError(f'dtype is {unknown[0]!r}; expected None (the dtype that is trained), "float16" or "int8".')
    if on_failure not in ("raise", "detach"):
        raise ValueError(f'on_failure is {on_failure!r}; expected "raise" or "detach".')
    if check not in ("sampled", "every"):
        raise ValueError(f'check is {check!r}; expected "sampled" or "every".')
    if factory is not None and (not isinstance(factory, str) or ":" not in factory):
        raise RunFactoryError(f'factory is {factory!r}; expected the name of one, "package.module:function".')
    try:
        json.dumps(dict(factory_arguments or {}))
    except TypeError as error:
        raise RunFactoryError(f"factory_arguments are no JSON: {error}. Give numbers, strings, lists.") from error
    writer = DiskWriter(
        as_blobs(path),
        dtype=dtype,
        shard_bytes=shard_bytes,
        queue_bytes=queue_bytes,
        resume=resume,
        steps=steps,
        factory=factory,
        factory_arguments=factory_arguments or {},
        keep=keeps,
        training=training,
    )
    recorder = Recorder(
        model,
        optimizer,
        writer if shares is None else ShareWriter(writer, shares, unwrap_model(model)),
        patterns=None if shares is None else False if patterns is None else patterns.layers,
        layers=layers,
        strict=strict,
        batch_axis=batch_axis,
        check_rows=check_rows,
        on_failure=on_failure,
        check=check,
        stored_loosely=lambda layer: stored_dtype(dtype, layer) == "int8",
    )
    if again:
        refuse_some_of_all(recorder.world)
    return recorder
