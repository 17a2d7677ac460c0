"""A recording's beginning and end outside a with statement, and the end of one that nobody closed."""

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import RunExistsError, StoreError
from dualform.recording import step_recorder
from dualform.recording.changes import Changes
from dualform.recording.ending import remove_handles
from dualform.recording.step_in_progress import StepInProgress
from dualform.store import shard_writing, writer
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.format import LOCK
from dualform.store.queue import ByteQueue
from dualform.store.tables import steps_table
from helpers.loops import assert_exact, batches, counts, leftovers, mlp, sgd, train
from helpers.programs import run_program

DROPPED = "was never closed, and its recording ends here"


def writers() -> list[threading.Thread]:
    """Return the threads of dualform that write or publish."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("dualform-")]


# Flat scripts -------------------------------------------------------------------------------------------------------


def test_start_and_close_do_what_a_with_statement_does(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(3))
    recorder.close()
    assert leftovers(model, optimizer) == []
    assert not writers()
    memory = dualform.open(run)
    assert memory.info().closed
    assert memory.step == recorder.step == 3
    assert_exact(memory, model)


def test_a_recorder_may_be_closed_twice_and_inside_a_with_statement(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run)
    recorder.close()  # has not begun, and still may
    with recorder:
        train(model, optimizer, batches(2))
        recorder.close()
        train(model, optimizer, batches(1))
        recorder.close()
    recorder.close()
    assert dualform.open(run).step == 2
    with pytest.raises(RuntimeError, match="used already"):
        recorder.start()


# A beginning that fails halfway -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["parameters", "hooks", "thread"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_neither_hooks_nor_thread_nor_lock(
    run: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    model = mlp()
    optimizer = sgd(model)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        if where == "parameters":
            patch.setattr(step_recorder, "UnclaimedParameters", fail)
        elif where == "hooks":
            patch.setattr(optimizer, "register_step_post_hook", fail)
        else:
            patch.setattr(writer, "start_alone", fail)
        with pytest.raises(error):
            dualform.record(model, optimizer, run).start()
    assert leftovers(model, optimizer) == []
    assert not writers()
    assert not (run / LOCK).exists()
    with dualform.record(model, optimizer, run, resume=True):
        train(model, optimizer, batches(2))
    assert_exact(dualform.open(run), model)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_end_that_fails_leaves_neither_thread_nor_lock(
    run: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(2))
    with monkeypatch.context() as patch:
        patch.setattr(writer.DiskWriter, "close", fail)
        with pytest.raises(error):
            recorder.close()
    assert leftovers(model, optimizer) == []
    assert not writers()
    assert dualform.open(run).step == 2
    with dualform.record(model, optimizer, run, resume=True):
        pass


def test_a_second_recording_says_that_this_process_still_records(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    first = dualform.record(model, optimizer, run).start()
    for path in (run, run.parent / "." / run.name, Path(os.path.relpath(run))):
        with pytest.raises(RunExistsError, match=r"still being recorded to by this process.*close\(\)"):
            dualform.record(model, optimizer, path, resume=True).start()
    train(model, optimizer, batches(2))
    first.close()
    with dualform.record(model, optimizer, run, resume=True) as again:
        assert again.step == 2


OTHER = """
import sys, torch, dualform
model = torch.nn.Linear(2, 2)
try:
    dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), sys.argv[1]).start()
except dualform.DualformError as error:
    print(error)
"""


@pytest.mark.slow
def test_another_process_is_told_so(run: Path) -> None:
    model = mlp()
    with dualform.record(model, sgd(model), run):
        done = run_program(OTHER, run)
    assert "is being recorded to by another process" in done.stdout, done.stderr


# Nobody closes ------------------------------------------------------------------------------------------------------


class Callback:
    """A trainer's callback; its end does not come when the training raises."""

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
        self.recorder = dualform.record(model, optimizer, path)
        self.recorder.start()

    def end(self) -> None:
        self.recorder.close()


def test_a_recorder_that_is_dropped_ends_its_recording(run: Path) -> None:
    """The model lives on, as in a notebook where the training is started again."""
    model = mlp()
    optimizer = sgd(model)
    callback = Callback()
    callback.begin(model, optimizer, run)
    train(model, optimizer, batches(3))
    recorder = weakref.ref(callback.recorder)
    with pytest.warns(UserWarning, match=DROPPED) as caught:
        del callback
    assert str(run) in str(caught[0].message)
    assert recorder() is None
    assert leftovers(model, optimizer) == []
    assert not writers()
    memory = dualform.open(run)
    assert not memory.info().closed
    assert memory.step == 3
    assert counts(memory) == {"0": 12, "2": 12}
    assert memory.verify(model).passed
    with dualform.record(model, optimizer, run, resume=True) as again:
        assert again.step == 3


def test_recorder_and_model_that_are_dropped_together_are_collected(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(3))
    kept = weakref.ref(model), weakref.ref(recorder)
    with pytest.warns(UserWarning, match=DROPPED):
        del recorder
    del model, optimizer
    gc.collect()
    assert [found() for found in kept] == [None, None]
    assert not writers()
    assert dualform.open(run).step == 3


def test_a_recorder_that_is_dropped_between_forward_and_backward(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(1))
    loss = model(batches(1)[0]).square().sum()
    with pytest.warns(UserWarning, match=DROPPED):
        del recorder
    loss.backward()
    optimizer.step()
    assert dualform.open(run).step == 1


def test_a_recorder_that_is_kept_by_a_with_statement_alone_goes_on(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        gc.collect()
        train(model, optimizer, batches(2))
        gc.collect()
    assert dualform.open(run).step == 2


def test_a_closed_recorder_is_dropped_silently(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run).start()
    recorder.close()
    del recorder
    gc.collect()


def test_garbage_collected_on_the_writers_own_thread_waits_for_nobody(run: Path, monkeypatch: Any) -> None:
    model = mlp()
    optimizer = sgd(model)
    holder = [dualform.record(model, optimizer, run, shard_bytes=0).start()]
    recorder = weakref.ref(holder[0])
    dropped = threading.Event()

    def drop(records: Any) -> Any:
        holder.clear()
        gc.collect()
        dropped.set()
        return steps_table(records)

    monkeypatch.setattr(shard_writing, "steps_table", drop)
    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)  # on that thread nobody would catch it
    train(model, optimizer, batches(1))
    assert dropped.wait(60)
    for thread in writers():
        thread.join(60)
    assert recorder() is None
    assert not writers()
    assert not (run / LOCK).exists()
    assert dualform.open(run).step == 1


UNCLOSED = """
import os, sys, torch, dualform
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = dualform.record(model, optimizer, sys.argv[1]).start()
if sys.argv[2] == "cycle":
    recorder.me = recorder
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit()  # a child that ends as a program does
if sys.argv[2] == "fork":
    os.wait()
    assert os.path.exists(os.path.join(sys.argv[1], ".lock"))
if sys.argv[2] == "raise":
    raise SystemError("in mid-training")
"""


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("how", ["plain", "cycle", "raise", "fork"])
def test_a_program_that_ends_without_closing_publishes_what_was_taken(run: Path, how: str) -> None:
    done = run_program(UNCLOSED, run, how)
    assert done.returncode == (1 if how == "raise" else 0), done.stderr
    assert done.stderr.count(DROPPED) == 1, done.stderr
    assert done.stdout == ""
    assert not (run / LOCK).exists()
    memory = dualform.open(run)
    assert memory.step == 3
    assert not memory.info().closed


# Interrupts -----------------------------------------------------------------------------------------------------------


def test_a_second_interrupt_while_closing_keeps_the_lock_until_the_writer_has_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    optimizer = sgd(model)
    go_on, waiting = threading.Event(), threading.Event()

    def slowly(records: Any) -> Any:
        waiting.set()
        assert go_on.wait(60)
        return steps_table(records)

    def interrupted(self: Any) -> None:
        assert waiting.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_writing, "steps_table", slowly)
    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(3))
    with monkeypatch.context() as patch:
        patch.setattr(ByteQueue, "join", interrupted)  # the closing waits here when Ctrl-C comes
        with pytest.raises(KeyboardInterrupt):
            recorder.close()
    assert leftovers(model, optimizer) == []
    assert writers(), "the writer has something left to publish"
    with FolderBlobs(run).lease() as mine:
        assert not mine, "nobody else may write while it does"
    go_on.set()
    with dualform.record(model, optimizer, run, resume=True) as again:  # waits for it
        assert again.step == 3
    assert not writers()
    assert_exact(dualform.open(run), model)


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("where", ["note", "keep"])
def test_a_step_whose_recording_is_interrupted_is_left_out_and_none_comes_after_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, where: str, swallowed: bool
) -> None:
    """The optimizer has stepped by then, and the recording knows the new weights but has not handed the step on."""
    owner = Changes if where == "note" else StepInProgress
    real = getattr(owner, where)
    model = mlp()
    optimizer = sgd(model)

    def interrupted(self: Any, *args: Any) -> Any:
        real(self, *args)
        raise KeyboardInterrupt

    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(2))
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            train(model, optimizer, batches(1))
    if swallowed:
        with pytest.raises(StoreError, match=r"earlier step was not recorded \(it was interrupted\)"):
            train(model, optimizer, batches(1))
        with pytest.raises(StoreError, match="earlier step was not recorded"):
            recorder.close()
    else:
        recorder.__exit__(KeyboardInterrupt, caught.value, None)
    memory = dualform.open(run)
    assert memory.step == 2
    assert not memory.info().closed
    assert memory.verify(kept).passed
    model.load_state_dict(kept)
    with dualform.record(model, sgd(model), run, resume=True) as again:
        assert again.step == 2


def test_a_beginning_that_is_interrupted_before_the_manifest_leaves_a_folder_to_begin_in(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model = mlp()
    optimizer = sgd(model)
    with monkeypatch.context() as patch:
        patch.setattr(shard_writing.ShardWriter, "publish_manifest", fail)
        with pytest.raises(KeyboardInterrupt):
            dualform.record(model, optimizer, run).start()
    assert list(run.iterdir()) == []
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(2))
    assert_exact(dualform.open(run), model)


def test_an_interrupt_just_after_the_sink_was_opened_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writer.DiskWriter.open

    def opened(self: Any, start: Any) -> int:
        real(self, start)
        raise KeyboardInterrupt

    model = mlp()
    optimizer = sgd(model)
    with monkeypatch.context() as patch:
        patch.setattr(writer.DiskWriter, "open", opened)
        with pytest.raises(KeyboardInterrupt):
            dualform.record(model, optimizer, run).start()
    assert leftovers(model, optimizer) == []
    assert not writers()
    assert not (run / LOCK).exists()


def test_an_interrupt_while_hooks_are_taken_off_ends_the_recording_all_the_same(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = [KeyboardInterrupt()]

    def once(handles: Any, *, running: bool) -> None:
        if interrupts:
            raise interrupts.pop()
        remove_handles(handles, running=running)

    model = mlp()
    optimizer = sgd(model)
    recorder = dualform.record(model, optimizer, run).start()
    train(model, optimizer, batches(2))
    monkeypatch.setattr(step_recorder, "remove_handles", once)
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    assert leftovers(model, optimizer) == []
    assert not writers()
    assert not (run / LOCK).exists()
    assert dualform.open(run).step == 2


CLOSED_AT_EXIT = """
import atexit, sys, torch, dualform
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
recorder = dualform.record(model, optimizer, sys.argv[1])
recorder.__enter__()
atexit.register(recorder.__exit__, None, None, None)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_recording_may_be_closed_when_the_interpreter_ends(tmp_path: Path) -> None:
    assert run_program(CLOSED_AT_EXIT, tmp_path / "run").returncode == 0
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 3
    assert memory.verify().passed
