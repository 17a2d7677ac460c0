"""The campaign of kills, in its short form; and that it can fail."""

import os
from pathlib import Path

import pyarrow as pa
import pytest
from torture.trainings import TRAININGS, examine

from dualform.errors import CorruptError
from dualform.store import shard_writing
from dualform.store.tables import steps_table
from torture import kills


def test_kills(tmp_path: Path) -> None:
    outcome = kills.run(tmp_path, short=True, seed=2022)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.counts["SIGKILLs in all"] >= kills.SHORT
    for name in ("attaching", "a cache file was written"):
        assert outcome.counts[f"SIGKILLs while {name}"] > 0
    assert outcome.counts["SIGKILLs of a run that is published by time"] > 0
    assert outcome.counts["runs brought to their end"] > 0
    assert outcome.counts["examinations"] > outcome.counts["runs brought to their end"]


def killed_recording(path: Path, step: int) -> None:
    """Leave a run as a process leaves it that ends without a word after some steps."""
    training = TRAININGS["momentum"]
    if (child := os.fork()) == 0:
        import dualform

        model, optimizers = training.at(training.checkpoints()[0])
        recorder = dualform.record(model, optimizers, path, **training.options).start()
        for number in range(step):
            recorder.annotate(**training.columns(number))
            training.take(model, optimizers, number)
        os._exit(0)
    os.waitpid(child, 0)


def test_an_examination_finds_a_step_that_is_there_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that writes the facts of a step twice is found out."""
    training = TRAININGS["momentum"]
    checkpoints = training.checkpoints()
    killed_recording(tmp_path / "whole", 12)
    assert 0 <= examine(training, tmp_path / "whole", checkpoints) <= 12
    monkeypatch.setattr(shard_writing, "steps_table", lambda records: pa.concat_tables([steps_table(records)] * 2))
    recorded(tmp_path / "twice")
    with pytest.raises((AssertionError, CorruptError), match=r"verify failed|not each there once|do not ascend"):
        examine(training, tmp_path / "twice", checkpoints, ended=True)


def test_an_examination_finds_files_that_nobody_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = TRAININGS["momentum"]
    checkpoints = training.checkpoints()
    recorded(tmp_path / "run")
    examine(training, tmp_path / "run", checkpoints, ended=True)
    (tmp_path / "run" / "shards" / "009999.safetensors").write_bytes(b"half")
    with pytest.raises(AssertionError, match="does not list"):
        examine(training, tmp_path / "run", checkpoints, ended=True)


def recorded(path: Path) -> None:
    """Record a training to its end."""
    import dualform

    training = TRAININGS["momentum"]
    model, optimizers = training.at(training.checkpoints()[0])
    with dualform.record(model, optimizers, path, **training.options) as recorder:
        for number in range(training.steps):
            recorder.annotate(**training.columns(number))
            training.take(model, optimizers, number)
