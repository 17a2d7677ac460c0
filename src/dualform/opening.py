"""Open a recorded run: the place where a store, an executor and a memory are put together."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.attend.ensemble import Ensemble
from dualform.attend.memory import Memory
from dualform.engine.jobs import Executor
from dualform.errors import CorruptError, QueryError
from dualform.recording.watch import Dtype, Layers
from dualform.replaying.between_checkpoints import Batches, Checkpoint, Rates, record_between_checkpoints
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replay_sink import OnDifference
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.retraining_without import retraining_of as retraining_of
from dualform.replaying.training import Train as Train
from dualform.store.blobs import Blob
from dualform.store.format import FINAL, FROZEN, MANIFEST, UNCOVERED, rank_folder
from dualform.store.manifest import Manifest
from dualform.store.places import Place, as_blobs
from dualform.store.reader import Run
from dualform.store.run_copy import copy_run as copy_run

REWRITTEN = (FINAL, FROZEN, UNCOVERED)  # a resumed recording writes them again under the same names


EXECUTORS = {
    "local": "dualform.engine.local:LocalExecutor",
    "ray": "dualform.engine.ray_executor:shared_executor",
    "distributed": "dualform.engine.distributed:DistributedExecutor",
}
"""The executors that have a name, and where the functions or classes are that return one."""


def open(
    path: Place,
    *,
    executor: Executor | str | None = None,
    train: Train | None = None,
    trust: bool = False,
    on_difference: OnDifference = "stop",
) -> Memory:
    """Open a recorded run.

    Args:
        path: the run folder; its address in object storage, "s3://bucket/run" (also gs:// and az://, with the package
            extra `cloud`); or the `Blobs` that the run is kept in.
        executor: runs the questions over the patterns: "local", the default, uses threads on this machine, or its GPU;
            "ray" the workers of a Ray cluster, or some here (with the package extra `ray`); "distributed" the processes
            of a training with torch.distributed, which all have to ask. Or an `Executor` of your own.
        train: of a run that keeps steps, its training function, which questions run again; by default the one that the
            run remembers.
        trust: call the training function that the run remembers, wherever it is defined (docs/security.md).
        on_difference: where a replay is not the recorded training to the bit, `"stop"` with the first difference, or
            `"report"`: answer, and warn of the measured drift of the weights.
    """
    run = Run(path)
    runner = make_executor(executor) if isinstance(executor, str) else executor
    if all(entry.store != "steps" for entry in run.description.layers.values()):
        return Memory(run, runner)
    source = ReplayedPatterns(run, train, trust=trust, on_difference=on_difference)
    return Memory(source, ReplayExecutor(runner))


def open_ensemble(runs: Sequence[Place | Memory], **options: Any) -> Ensemble:
    """Open several recordings of one recipe, whose effects are averaged.

        ensemble = dualform.open_ensemble(["runs/a", "runs/b", "runs/c"])
        effects = ensemble.attend(model, inputs, targets=labels).effects(by="label")
        effects.values, effects.spread                      # the mean over recordings, and the standard deviation

    Recordings whose layers, optimizer, number of steps, columns or samples differ are refused: their effects are not
    about the same training.

    Args:
        runs: where the runs are, as `open` takes it, or memories.
        options: as `open` takes them.
    """
    memories = [run if isinstance(run, Memory) else open(run, **options) for run in runs]
    return Ensemble(tuple(memories), tuple(str(memory.location) for memory in memories))


def from_checkpoints(
    make_model: Callable[[], nn.Module],
    checkpoints: Sequence[Checkpoint],
    batches: Batches,
    loss: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]],
    path: Place,
    *,
    rates: Rates | None = None,
    columns: Callable[[Any], Mapping[str, Any]] | None = None,
    layers: Layers = None,
    dtype: Dtype = None,
    batch_axis: int | None = None,
    factory: str | None = None,
    factory_arguments: Mapping[str, Any] | None = None,
) -> Memory:
    """Make a memory of a training of which only checkpoints are left, and print how much of it is explained.

        memory = dualform.from_checkpoints(
            make_model,
            [f"epoch-{number}.pt" for number in range(11)],
            lambda interval: DataLoader(data, 64, shuffle=True),         # batches of (images, labels, ids)
            lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "runs/resnet",
            columns=lambda batch: {"label": batch[1], "sample": batch[2]},
        )

    From each checkpoint the optimizer's steps are taken on the batches of its interval, up to the next checkpoint.
    Their patterns explain a share of the real change of the weights, 1 − ‖rest‖² / ‖change‖², per interval and layer
    (`memory.explanation`); the rest is the share `unexplained`. With the very batches of the training in their order
    the rest is rounding. docs/replay.md has measured shares.

    Args:
        make_model: returns the model, in the mode that it was trained in.
        checkpoints: two or more states of the model in the order of the training: state dicts, paths of files that
            torch.save or safetensors wrote, or functions that return a state dict.
        batches: the batches of each interval between two checkpoints: one iterable for each interval, or a function of
            the number of the interval, from 0.
        loss: returns the loss that was minimised, given the model and a batch.
        make_optimizer: returns the optimizer, or several in a list, given the model, with the settings of the training.
            Momentum and moments begin at zero, and go on from interval to interval.
        path: the run folder to make, an address in object storage, or the `Blobs` to keep the run in.
        rates: the learning rate of each interval, or a function of the number of the step, from 0; by default that of
            the optimizer.
        columns: returns the columns of a batch (sample ids, labels, ...), as `Recorder.annotate` takes them. The column
            `interval` is there in any case.
        layers: the layers to record, as `dualform.record` takes them.
        dtype: what patterns are stored in, as `dualform.record` takes it.
        batch_axis: which leading axis of an input is the batch.
        factory: `"package.module:function"` that makes the model, so that the command line can.
        factory_arguments: its keyword arguments, of JSON types.
    """
    record_between_checkpoints(
        make_model,
        checkpoints,
        batches,
        loss,
        make_optimizer,
        path,
        rates=rates,
        columns=columns,
        layers=layers,
        dtype=dtype,
        batch_axis=batch_axis,
        factory=factory,
        factory_arguments=factory_arguments,
    )
    memory = open(path)
    print(memory.explanation)  # an answer without it would say too much
    return memory


def make_executor(name: str) -> Executor:
    """Return an executor by its name."""
    if name not in EXECUTORS:
        raise QueryError(f"There is no executor {name!r}. There are: {', '.join(EXECUTORS)}.")
    module, _, maker = EXECUTORS[name].partition(":")
    made: Executor = getattr(import_module(module), maker)()
    return made


def published_stamp(path: Place) -> Hashable | None:
    """Return a value that changes whenever more of a run is published, fast to come by; None where there is no run."""
    blobs = as_blobs(path)
    found = [blobs.stamp(MANIFEST)]
    while found[-1] is not None:  # the manifests of several processes, each of which publishes for itself
        found.append(blobs.stamp(f"{rank_folder(len(found))}/{MANIFEST}"))
    return tuple(found[:-1]) or None


def check_end_state(path: Place) -> None:
    """Raise where the model's state at the end is not that of the manifest: an older manifest was put back."""
    blobs = as_blobs(path)
    listed = Manifest.read(blobs).files
    for blob in (Blob(blobs, name) for name in REWRITTEN if name in listed):
        if blob.checksum() != listed[blob.name].xxh3:
            raise CorruptError(
                f"{blob} is not the file that the manifest lists. Restore both from one copy of the run."
            )
