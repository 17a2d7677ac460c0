"""What runs in the processes that `torture.kills` kills. Imported once by the fork server, so that each starts at once.

A process sends a mark through its connection when it comes to a new phase; the kill is timed from a mark.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dualform
import dualform.store.tensors
import dualform.store.writer
from dualform.lazy import compute, parquet
from dualform.store.folder import own_files
from torture.trainings import TRAININGS, Checkpoint, Training, answers

with contextlib.suppress(ImportError):
    import pandas  # noqa: F401 (pyarrow imports it with its first table)

BEGINS, OPENED, CLOSING, ENDED, WRITING = "begins", "opened", "closing", "ended", "writing"
PUBLISH_SECONDS = 0.1  # instead of 30, for the training that is published by time
STEP_SECONDS = 0.025  # of each of its steps

torch.set_num_threads(1)
TRAININGS["momentum"].checkpoints()  # making the first optimizer imports most of torch
PRELOADED = (dualform.record, dualform.open, dualform.Corpus, parquet.write_table, compute.field)
"""Names whose modules are imported when they are first asked for: here once, and not in each process."""


@contextlib.contextmanager
def told(connection: Connection, errors: Path) -> Iterator[Callable[[str], None]]:
    """Give the function that sends a mark; an exception is written to a file, as nobody else would see it."""
    try:
        yield connection.send
    except BaseException:
        errors.write_text(traceback.format_exc())
        raise


def record(
    connection: Connection, errors: Path, name: str, path: Path, first: int, at: Checkpoint, log: Path | None
) -> None:
    """Record a training from a checkpoint to its end, beginning or resuming a run.

    Args:
        connection: takes the marks.
        errors: where an exception is written.
        name: of the training.
        path: the run folder.
        first: the step that the checkpoint stands at.
        at: the checkpoint.
        log: where to write the time at which each step ended, where the training is slow.
    """
    with told(connection, errors) as tell:
        training: Training = TRAININGS[name]
        model, optimizers = training.at(at)
        if log is not None:
            dualform.store.writer.PUBLISH_SECONDS = PUBLISH_SECONDS
        tell(BEGINS)
        resume = training.keep != dualform.Steps()  # a run of steps is recorded in one go
        recorder = dualform.record(model, optimizers, path, resume=resume, **training.options)
        if at.recorder is not None:
            recorder.load_state_dict(at.recorder)
        with recorder:
            tell(OPENED)
            assert recorder.step == first, f"resumed at step {recorder.step}, not {first}"
            for _ in training.record(recorder, model, optimizers, first):
                if log is not None:
                    with log.open("a") as file:
                        file.write(f"{time.monotonic()}\n")
                    time.sleep(STEP_SECONDS)
            tell(CLOSING)
        tell(ENDED)


ATTACHMENTS: Sequence[dict[str, Any]] = (
    {"tests": torch.arange(12.0).reshape(4, 3)},
    {"tests": torch.arange(6000.0).reshape(2000, 3)},
    {"labels": ["a", "b", "c"]},
    {"labels": ["drei", "vier", "fünf", "sechs"]},
    {"tokens": torch.arange(40) % 4, "vocabulary": list("abcd"), "unit": "chars"},
    {"tokens": torch.arange(9000) % 3, "vocabulary": list("xyz"), "unit": "chars"},
    {"corpus": torch.arange(70) % 5},
    {"corpus": torch.arange(7000) % 5},
)
"""What is attached in turn; each kind twice with another content and size, so that every attachment replaces one."""


def put_attachment(path: Path, what: dict[str, Any]) -> None:
    """Attach one of `ATTACHMENTS` to a run."""
    memory = dualform.open(path)
    if "tests" in what:
        memory.add_tests(what["tests"])
    elif "corpus" in what:
        memory.add_corpus(dualform.Corpus.from_tokens(what["corpus"], vocabulary=list("abcde"), unit="chars"))
    else:
        memory.add_media(**what)


def attach(connection: Connection, errors: Path, path: Path, first: int) -> None:
    """Replace the attachments of a run, again and again, beginning with the `first` of them."""
    with told(connection, errors) as tell:
        tell(BEGINS)
        for turn in range(first, first + 10 * len(ATTACHMENTS)):
            tell(WRITING)
            put_attachment(path, ATTACHMENTS[turn % len(ATTACHMENTS)])


def ask(connection: Connection, errors: Path, name: str, path: Path) -> None:
    """Ask what is cached on the disk, again and again from an empty cache; a mark comes as each file is written."""

    def telling(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_and_tell(*args: Any, **kwargs: Any) -> Any:
            connection.send(WRITING)
            return write(*args, **kwargs)

        return write_and_tell

    with told(connection, errors) as tell:
        dualform.store.tensors.write_tensors = telling(dualform.store.tensors.write_tensors)
        tell(BEGINS)
        for _ in range(50):
            for file in own_files(path, ["cache"]):
                file.unlink()
            answers(TRAININGS[name], path)
