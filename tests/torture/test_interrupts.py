"""The campaign of interrupts, in its short form; and that it can fail."""

import multiprocessing
import random
import threading
from pathlib import Path

import pytest
from torture.trainings import TRAININGS

from dualform.recording.hooks import Hooks
from torture import interrupts, lives


def test_interrupts(tmp_path: Path) -> None:
    outcome = interrupts.run(tmp_path, short=True, seed=2022)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.counts["interrupts in all"] == interrupts.SHORT
    assert outcome.counts["by timer"] > 0
    assert outcome.counts["hangs"] == 0


def test_a_thread_counts_once_it_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt within `Thread.start` leaves one in Python's list that never was."""
    wait = threading.Event()
    never, begun = (threading.Thread(target=wait.wait, name=name) for name in ("dualform-never", "dualform-begun"))
    monkeypatch.setitem(threading._limbo, never, never)  # type: ignore[attr-defined]
    begun.start()
    try:
        assert "dualform-never" in [thread.name for thread in threading.enumerate()]
        assert "dualform-begun" in lives.threads()
        assert "dualform-never" not in lives.threads()
    finally:
        wait.set()
        begun.join()


def broken(folder: Path) -> None:
    """Interrupt recordings with a library whose hooks stay on; end with 3 if the campaign says so."""
    Hooks.detach = lambda self: None  # type: ignore[method-assign]
    ours, _ = multiprocessing.Pipe()
    life = lives._Life(folder, ["momentum"], random.Random(1), ours)
    found = [life.interrupt_at(stage) for stage in ("annotate", "forward", "backward")]
    texts = [text for one in found if one is not None for text in one[2]]
    raise SystemExit(3 if any("hooks are left" in text for text in texts) else 0)


def test_hooks_that_stay_are_found(tmp_path: Path) -> None:
    """In a process of its own: signals belong to the main thread, and what is broken stays broken there."""
    process = multiprocessing.get_context("fork").Process(target=broken, args=(tmp_path,))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 3


@pytest.mark.parametrize("name", lives.NAMES)
def test_a_life_that_nobody_interrupts_comes_to_its_end(tmp_path: Path, name: str) -> None:
    training = TRAININGS[name]
    model, optimizers = training.at(training.checkpoints()[0])
    trigger = lives.Trigger()
    lives.record(training, model, optimizers, tmp_path / "run", trigger, None)
    lives.read(training, model, tmp_path / "run", trigger, None)
    assert set(trigger.seconds) >= set(lives.RECORDING)
    assert not lives.leftovers(model, optimizers)
    assert not lives.threads()
