"""The end of a recording that nobody closed: its recorder was dropped, or the program ended.

A callback's end may never come, and a flat script may stop at an exception. The hooks refer to their recorder only
weakly, so it is collected when its owner is. Then the hooks come off, what was taken is published, and the folder is
free for another recording.
"""

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from dualform.recording.hooks import Hooks
from dualform.recording.module_hooks import HookHandle
from dualform.recording.sinks import Sink

WAIT_SECONDS = 60
"""How long collecting a recorder waits for its sink: a lock held around the collection may be one the sink needs."""


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a bound method without keeping its object alive, and does nothing without it."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        found = reference()
        return None if found is None else found(*args)

    return hook


def remove_handles(handles: list[HookHandle], *, running: bool) -> None:
    """Remove an optimizer's hooks; while they are running only those that nothing comes after.

    An optimizer goes through its dictionary of hooks, which then must not change under it. The others stay listed.
    """
    left = []
    for handle in handles:
        if running and not handle.is_last:
            left.append(handle)
        else:
            handle.remove()
    handles[:] = left


class Forkable(Protocol):
    """What is told in a forked process that it is the parent's."""

    def leave_to_parent(self) -> None:
        """Do nothing any more."""


_recording: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def leave_in_forks(recorder: Forkable) -> None:
    """Let a recorder do nothing in every process that is forked from this one, such as a loader's workers."""
    _recording.add(recorder)


def _after_fork() -> None:
    for recorder in list(_recording):
        recorder.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def end_when_dropped(
    recorder: object, hooks: Hooks, handles: list[HookHandle], sink: Sink, hand_on: Callable[[], object]
) -> Callable[[], object]:
    """End a recording when its recorder is collected, or the program ends; return what calls that off.

    Args:
        recorder: whose end is waited for.
        hooks: are taken off.
        handles: of the optimizers' hooks, which are taken off too.
        sink: is abandoned.
        hand_on: gives the sink a step that was made and that it does not have yet, before it is abandoned.
    """
    return weakref.finalize(recorder, _end, hooks, handles, sink, hand_on, os.getpid()).detach


def _end(hooks: Hooks, handles: list[HookHandle], sink: Sink, hand_on: Callable[[], object], process: int) -> None:
    if os.getpid() != process:  # a forked worker: hooks, thread and lock are its parent's
        return
    hooks.detach()
    remove_handles(handles, running=False)

    def abandon() -> None:
        try:
            with contextlib.suppress(Exception):  # a step that is refused is no step of the run, and nobody can be told
                hand_on()
        finally:
            sink.abandon()

    ending = threading.Thread(target=abandon, name="dualform-ending", daemon=True)
    try:
        ending.start()
    except RuntimeError:  # the interpreter is ending
        abandon()
    else:
        # Garbage may be collected on any thread, also on one that the sink waits for.
        ending.join(0 if threading.current_thread().name.startswith("dualform") else WAIT_SECONDS)
    path = getattr(sink, "path", None)
    warnings.warn(
        f"A recorder{'' if path is None else f' ({path})'} was never closed, and its recording ends here: the program "
        "ended or nobody refers to the recorder any more. The steps taken so far are published. Use it in a with "
        "statement, or keep it and call its close().",
        stacklevel=2,
    )
