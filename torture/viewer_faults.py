"""What happens to a run folder, and to the viewer's process, while clients ask.

A timeline says at every moment which states of the run an answer may be about, and which statuses may be given instead
of an answer. Each state is a folder that was kept before: `first`, `grown`, `other tests`, and `open at N` while a
resumed recording goes on.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dualform
from torture.viewer_child import ViewerChild
from torture.viewer_questions import UNREADABLE
from torture.viewer_run import GROWN, OTHER_TESTS, STEPS, TESTS, test_examples

FIRST, GROWN_RUN, OTHER = "first", "grown", "other tests"
OPEN = tuple(f"open at {step}" for step in range(STEPS, STEPS + GROWN + 1))
STATES = (FIRST, GROWN_RUN, OTHER, *OPEN)
NO_RUN = 404  # status of a viewer whose run is gone
MANIFEST = "manifest.json"


@dataclass
class Phase:
    """A stretch of time: the states that answers may be about, and the statuses that may be given instead."""

    begin: float
    states: frozenset[str]
    statuses: frozenset[int]
    end: float = float("inf")


class Timeline:
    """The phases of a storm, the latest last."""

    def __init__(self, state: str) -> None:
        self._phases = [Phase(time.monotonic(), frozenset({state}), frozenset())]
        self._lock = threading.Lock()

    def turn(self, *states: str, statuses: tuple[int, ...] = ()) -> None:
        """Begin a phase."""
        now = time.monotonic()
        with self._lock:
            self._phases[-1].end = now
            self._phases.append(Phase(now, frozenset(states), frozenset(statuses)))

    def during(self, begin: float, end: float) -> tuple[frozenset[str], frozenset[int]]:
        """Return the states and statuses that are right for a request that began and ended at these times."""
        with self._lock:
            found = [phase for phase in self._phases if phase.begin <= end and phase.end >= begin]
        states: frozenset[str] = frozenset().union(*(phase.states for phase in found))
        return states, frozenset().union(*(phase.statuses for phase in found))


class Faults:
    """Does harm to a run folder, one fault after the other, and undoes it.

    Attributes:
        counts: how often each fault was done.
    """

    def __init__(self, folder: Path, kept: Path, checkpoint: Path, viewer: ViewerChild, *, seed: int) -> None:
        self._folder = folder
        self._kept = kept  # state -> a copy of the run folder
        self._checkpoint = checkpoint
        self._viewer = viewer
        self._rng = random.Random(seed)
        self.state = FIRST
        self.timeline = Timeline(FIRST)
        self._each: dict[str, Callable[[], None]] = {
            "files missing for a moment": self._lose_file,
            "manifests missing for a moment": self._lose_manifest,
            "manifests half written for a moment": self._cut_manifest,
            "older manifests put back for a moment": self._older_manifest,
            "attachments replaced": self._replace_tests,
            "recordings resumed": self._grow,
            "run folders exchanged": self._exchange,
            "caches deleted": self._delete_cache,
            "viewers stopped and continued": self._halt,
        }
        self.counts = dict.fromkeys(self._each, 0)

    def go_on(self, until: float) -> None:
        """Do one fault after the other, each of them in turn, until a time."""
        order: list[str] = []
        while time.monotonic() < until:
            if not order:
                order = list(self._each)
                self._rng.shuffle(order)
            name = order.pop()
            self._each[name]()
            self.counts[name] += 1
            time.sleep(self._rng.uniform(0.0, 0.5))

    @contextmanager
    def _moment(self, *states: str, statuses: tuple[int, ...] = ()) -> Iterator[None]:
        """Let a fault last a moment; afterwards the run is what it was."""
        self.timeline.turn(*(states or (self.state,)), statuses=statuses)
        try:
            yield
        finally:
            self.timeline.turn(self.state)

    def _pause(self) -> None:
        time.sleep(self._rng.uniform(0.1, 1.0))

    def _lose_file(self) -> None:
        listed = json.loads((self._folder / MANIFEST).read_bytes())
        names = [entry.get("at") or name for name, entry in listed["files"].items()]
        names += [name for shard in listed["shards"] for name in shard["files"]]
        path = self._folder / self._rng.choice(names)
        with self._moment(statuses=(UNREADABLE,)):
            path.rename(path.with_name("away"))
            self._pause()
            path.with_name("away").rename(path)

    def _lose_manifest(self) -> None:
        path = self._folder / MANIFEST
        with self._moment(statuses=(NO_RUN, UNREADABLE)):
            path.rename(path.with_name("away"))
            self._pause()
            path.with_name("away").rename(path)

    def _cut_manifest(self) -> None:
        whole = (self._folder / MANIFEST).read_bytes()
        self._with_manifest(whole[: self._rng.randrange(len(whole))])

    def _older_manifest(self) -> None:
        """Put manifests back whose files are no longer the same, or no longer all there."""
        for state in (GROWN_RUN, OTHER):
            self._restore(state)
            self._with_manifest((self._kept / FIRST / MANIFEST).read_bytes())

    def _with_manifest(self, content: bytes) -> None:
        path = self._folder / MANIFEST
        with self._moment(statuses=(NO_RUN, UNREADABLE)):
            path.rename(path.with_name("away"))
            path.write_bytes(content)
            self._pause()
            path.with_name("away").rename(path)

    def _replace_tests(self) -> None:
        """Replace the test examples by others, and these by the first ones: both while clients ask."""
        self._restore(FIRST)
        for state, first, count in ((OTHER, 50, OTHER_TESTS), (FIRST, 0, TESTS)):
            inputs, targets, images = test_examples(first, count)
            self.timeline.turn(self.state, state)
            dualform.open(self._folder).add_tests(inputs, targets, images=images)
            self._become(state)
            self._pause()

    def _grow(self) -> None:
        self._restore(FIRST)
        self.timeline.turn(FIRST, GROWN_RUN, *OPEN)
        command = [sys.executable, "-m", "torture.viewer_run", str(self._folder), str(self._checkpoint)]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(f"The resumed recording failed: {done.stderr[-2000:]}")
        self._become(GROWN_RUN)

    def _exchange(self) -> None:
        self._restore(self._rng.choice((FIRST, GROWN_RUN, OTHER, *OPEN)), always=True)

    def _restore(self, state: str, *, always: bool = False) -> None:
        """Put another folder in the run's place, with nothing there for a moment."""
        if state == self.state and not always:
            return
        fresh, old = self._folder.with_name("fresh"), self._folder.with_name("old")
        shutil.copytree(self._kept / state, fresh)
        (fresh / MANIFEST).touch()  # a copy of a copy has the same time
        self.timeline.turn(self.state, state, statuses=(NO_RUN, UNREADABLE))
        self._folder.rename(old)
        fresh.rename(self._folder)
        self._become(state)
        shutil.rmtree(old)

    def _become(self, state: str) -> None:
        self.state = state
        self.timeline.turn(state)

    def _delete_cache(self) -> None:
        shutil.rmtree(self._folder / "cache", ignore_errors=True)

    def _halt(self) -> None:
        self._viewer.halt(self._rng.uniform(0.2, 2.0))
