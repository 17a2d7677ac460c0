"""SIGKILL at random moments of recording, resuming, closing, attaching and writing caches: nothing published is lost.

Recordings are killed in chains: each is resumed from a checkpoint, in a process that may be killed again, until it
comes to its end. After every kill the folder is opened and everything in it compared with a training that nobody
recorded; after the last one it must hold all steps, each once, and nothing else.
"""

import dataclasses
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dualform
from dualform.errors import RunNotFoundError
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.format import LOCK
from dualform.store.reader import Run
from torture import children
from torture.children import BEGINS, CLOSING, ENDED, OPENED, WRITING
from torture.outcome import Outcome
from torture.trainings import TRAININGS, Checkpoint, Training, answers, assert_same, examine, kept_shares

FULL, SHORT = 1000, 12  # kills
HANG_SECONDS = 120.0  # after which a process that was not killed counts as hung
LATE_SECONDS = 2.0  # that publishing a slow training's shard may take on a busy machine
CHAIN = 5  # kills of one recording, at most
PARTS = {"recording": 0.70, "attaching": 0.14, "caches": 0.12, "time": 0.04}  # of the kills
CHAINED = [name for name in TRAININGS if name != "published by time"]
CACHED = [name for name in CHAINED if not isinstance(TRAININGS[name].keep, dualform.Shares)]  # shares are sums already
PHASES = {  # mark after which the kill comes -> part of the kills of recordings
    BEGINS: 0.25,
    OPENED: 0.5,
    CLOSING: 0.25,
}
KINDS = {
    dualform.Patterns: "recordings of patterns",
    dualform.Shares: "recordings of shares",
    dualform.Steps: "recordings of steps",
}
FELL = {  # last mark that a killed process sent -> what it was doing
    None: "SIGKILLs before the recording began",
    BEGINS: "SIGKILLs while a recording began or was resumed",
    OPENED: "SIGKILLs while recording",
    CLOSING: "SIGKILLs while a recording was closed",
    ENDED: "SIGKILLs after the end of a recording",
}


def run(folder: Path, *, short: bool, seed: int, count: int | None = None) -> Outcome:
    """Kill so many processes (`count`), and examine what each left."""
    begin = time.monotonic()
    total = count or (SHORT if short else FULL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fork_server("torture.children") as server:
            campaign = _Campaign(folder, server, random.Random(seed), total)
            campaign.run()
    finally:
        torch.set_num_threads(threads)
    campaign.outcome.seconds = time.monotonic() - begin
    return campaign.outcome


@contextmanager
def fork_server(preload: str) -> Iterator[Any]:
    """Give a context whose processes start at once, because what they import is there already."""
    _stop_fork_server()  # one that others started has not imported it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *sys.path])  # the server itself does not take over ours
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    try:
        yield context
    finally:
        _stop_fork_server()


def _stop_fork_server() -> None:
    """Stop this process's fork server, if it runs; Python has no public function for it."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


class _Hung(Exception):
    """A process did not come to its end, or not to its next mark."""


class _Campaign:
    """One run of the campaign: kills, examinations, and what they showed."""

    def __init__(self, folder: Path, server: Any, chance: random.Random, total: int) -> None:
        self.folder = folder
        self.server = server
        self.chance = chance
        self.total = total
        self.outcome = Outcome("kills", counts=dict.fromkeys(FELL.values(), 0))
        self.killed = 0
        self.without_kill = 0  # runs in a row in which no process was killed
        self.runs = 0
        self.checkpoints: dict[str, list[Checkpoint]] = {}
        self.seconds: dict[tuple[str, str], float] = {}  # how long a phase of each training takes, by its first mark

    def run(self) -> None:
        """Do every part."""
        counts = self.outcome.counts
        counts |= {f"of these, of {kind}": 0 for kind in KINDS.values()}
        counts |= {"SIGKILLs while attaching": 0, "SIGKILLs while a cache file was written": 0}
        counts |= {"SIGKILLs of a run that is published by time": 0}
        counts |= {"runs brought to their end": 0, "examinations": 0, "killed before a manifest": 0}
        goals = {part: max(1, round(share * self.total)) for part, share in PARTS.items()}
        for training in (TRAININGS[name] for name in CHAINED):
            self.checkpoints[training.name] = training.checkpoints()
            self._measure(training)
        while self._sum(FELL.values()) < goals["recording"]:
            self._try(self._chain)
        while counts["SIGKILLs while attaching"] < goals["attaching"]:
            self._try(self._attachments)
        while counts["SIGKILLs while a cache file was written"] < goals["caches"]:
            self._try(self._caches)
        while counts["SIGKILLs of a run that is published by time"] < goals["time"]:
            self._try(self._by_time)
        counts["SIGKILLs in all"] = self.killed

    def _sum(self, names: Any) -> int:
        return sum(self.outcome.counts[name] for name in names)

    def _try(self, part: Callable[[Path], None]) -> None:
        """Do one part on a folder of its own; whatever goes wrong is a failure, in words."""
        self.runs += 1
        path = self.folder / f"run{self.runs}"
        before = self.killed
        try:
            part(path)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.outcome.failures.append(
                f"{part.__name__[1:]} of run {self.runs}: {type(error).__name__}: {error} "
                f"({Path(last.filename).name}:{last.lineno})"
            )
            print(f"kills: FAILED: {self.outcome.failures[-1]}", file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self.without_kill = 0 if self.killed > before else self.without_kill + 1
        if self.without_kill > 20:
            raise RuntimeError(f"20 runs in a row without a kill: {self.outcome.failures[-3:]}")
        if self.killed // 100 != before // 100:
            print(f"kills: {self.killed} of {self.total}", file=sys.stderr, flush=True)

    # One process --------------------------------------------------------------------------------------------------

    def _kill(
        self, target: Callable[..., None], arguments: tuple[Any, ...], mark: str | None, delay: float
    ) -> tuple[str | None, bool, float, dict[str, float]]:
        """Start a process and kill it some seconds after a mark; None lets it come to its end.

        Return its last mark, whether it was killed, the time of the kill, and the times of its marks.
        """
        errors = self.folder / f"errors{self.runs}"
        errors.unlink(missing_ok=True)
        ours, theirs = self.server.Pipe(duplex=False)
        process = self.server.Process(target=target, args=(theirs, errors, *arguments))
        process.start()
        theirs.close()
        times: dict[str, float] = {}
        moment = 0.0
        try:
            _wait_for(ours, times, mark)
            if mark is not None:
                time.sleep(delay)
                moment = time.monotonic()
                process.kill()
            process.join(HANG_SECONDS)
            if process.exitcode is None:
                raise _Hung(f"a process did not end within {HANG_SECONDS:.0f} s after {list(times)}")
        finally:
            if process.exitcode is None:
                process.kill()
                process.join()
        _wait_for(ours, times, None)
        ours.close()
        killed = process.exitcode == -9
        if not killed and process.exitcode != 0:
            text = errors.read_text() if errors.exists() else "without a word"
            raise AssertionError(f"a process ended with {process.exitcode}: {text}")
        self.killed += killed
        return (list(times)[-1] if times else None), killed, moment, times

    def _measure(self, training: Training) -> None:
        """Let a recording come to its end, and keep how long its phases took and what it answers."""
        path = self.folder / f"whole {training.name}"
        arguments = (training.name, path, 0, self.checkpoints[training.name][0], None)
        times = self._kill(children.record, arguments, None, 0.0)[3]
        marks = list(times)
        for mark, following in itertools.pairwise(marks):
            self.seconds[training.name, mark] = times[following] - times[mark]
        examine(training, path, self.checkpoints[training.name], ended=True)

    # The parts ----------------------------------------------------------------------------------------------------

    def _chain(self, path: Path) -> None:
        """Record, kill, examine, resume, kill ... and at last let the recording come to its end."""
        training = TRAININGS[self.chance.choice(CHAINED)]
        checkpoints = self.checkpoints[training.name]
        step, at = 0, checkpoints[0]
        for _ in range(self.chance.randint(1, CHAIN)):
            mark = self.chance.choices(list(PHASES), list(PHASES.values()))[0]
            delay = self.chance.random() * 1.1 * self.seconds[training.name, mark]
            arguments = (training.name, path, step, at, None)
            last, killed, _, _ = self._kill(children.record, arguments, mark, delay)
            if killed:
                self.outcome.counts[FELL[last]] += 1
                self.outcome.counts[f"of these, of {KINDS[type(training.keep)]}"] += 1
            step, at = self._checkpoint(training, path, self._examine(training, path))
        self._kill(children.record, (training.name, path, step, at, None), None, 0.0)
        self._examine(training, path, ended=True)
        assert_same(answers(training, path), answers(training, self.folder / f"whole {training.name}"))
        self.outcome.counts["runs brought to their end"] += 1

    def _checkpoint(self, training: Training, path: Path, published: int) -> tuple[int, Checkpoint]:
        """Choose what the user goes on from: a checkpoint of the last published step, or of some step before it."""
        checkpoints = self.checkpoints[training.name]
        if training.keep == dualform.Steps():  # what was published could be asked; the whole is recorded anew
            shutil.rmtree(path, ignore_errors=True)
            return 0, checkpoints[0]
        if isinstance(training.keep, dualform.Shares) and published and self.chance.random() < 0.3:
            kept = kept_shares(dualform.open(path)).state
            if kept is not None:  # a checkpoint without the recorder's state, of the step that the run itself keeps
                return kept, dataclasses.replace(checkpoints[kept], recorder=None)
        step = published if self.chance.random() < 0.5 else self.chance.randint(0, published)
        return step, checkpoints[step]

    def _examine(self, training: Training, path: Path, *, ended: bool = False) -> int:
        """Open and check what a killed process left; return the number of published steps."""
        self.outcome.counts["examinations"] += 1
        begin = time.monotonic()
        try:
            found = examine(training, path, self.checkpoints[training.name], ended=ended)
        except RunNotFoundError:
            if (path / "manifest.json").exists() or ended:
                raise
            self.outcome.counts["killed before a manifest"] += 1
            return 0
        measures = self.outcome.measures
        name = "slowest examination, s"
        measures[name] = max(measures.get(name, 0.0), time.monotonic() - begin)
        if ended and (path / LOCK).exists():
            raise AssertionError("the lock is left after the end")
        with FolderBlobs(path).lease() as mine:
            if not mine:
                raise AssertionError("the lock is still held after the process is gone")
        return found

    def _attachments(self, path: Path) -> None:
        """Kill processes that replace the attachments of one closed run."""
        training = TRAININGS["momentum"]
        shutil.copytree(self.folder / f"whole {training.name}", path)
        for _ in range(min(8, 1 + self.total // 10)):
            delay = self.chance.random() * 0.03
            first = self.chance.randrange(len(children.ATTACHMENTS))
            _, killed, _, _ = self._kill(children.attach, (path, first), WRITING, delay)
            self.outcome.counts["SIGKILLs while attaching"] += killed
            self._examine(training, path)
            memory = dualform.open(path)
            assert isinstance(memory._run, Run)
            if "media/tests.safetensors" in memory._run.manifest.files:
                found = memory.tests()[0]
                if not any("tests" in what and torch.equal(what["tests"], found) for what in children.ATTACHMENTS):
                    raise AssertionError("the tests are none of those that were attached")
            if "media/corpus.safetensors" in memory._run.manifest.files:
                memory.corpus()
        children.put_attachment(path, children.ATTACHMENTS[0])
        self._examine(training, path, ended=True)
        self.outcome.counts["runs brought to their end"] += 1

    def _caches(self, path: Path) -> None:
        """Kill processes that write sums into a run's cache; what is there afterwards gives the same answers."""
        training = TRAININGS[self.chance.choice(CACHED)]
        whole = self.folder / f"whole {training.name}"
        expected = answers(training, whole)
        shutil.copytree(whole, path)
        for _ in range(min(8, 1 + self.total // 10)):
            delay = self.chance.random() * 0.004
            _, killed, _, _ = self._kill(children.ask, (training.name, path), WRITING, delay)
            self.outcome.counts["SIGKILLs while a cache file was written"] += killed
            assert_same(answers(training, path), expected)
            self._examine(training, path)

    def _by_time(self, path: Path) -> None:
        """Kill a slow training whose shards never fill; steps older than `PUBLISH_SECONDS` must be there."""
        training = TRAININGS["published by time"]
        if training.name not in self.checkpoints:
            self.checkpoints[training.name] = training.checkpoints()
        log = self.folder / f"log{self.runs}"
        arguments = (training.name, path, 0, self.checkpoints[training.name][0], log)
        delay = self.chance.uniform(0.5, 1.0) * (LATE_SECONDS + children.PUBLISH_SECONDS)
        _, killed, moment, _ = self._kill(children.record, arguments, OPENED, delay + 0.5)
        published = self._examine(training, path)
        ends = [float(line) for line in log.read_text().splitlines()]
        old = sum(end < moment - LATE_SECONDS - children.PUBLISH_SECONDS for end in ends)
        lost = self.outcome.measures.get("most steps lost of a run that is published by time", 0.0)
        self.outcome.measures["most steps lost of a run that is published by time"] = max(lost, len(ends) - published)
        if killed and published < old:
            raise AssertionError(f"{published} steps are published, but {old} were old enough")
        self.outcome.counts["SIGKILLs of a run that is published by time"] += killed


def _wait_for(connection: Connection, times: dict[str, float], mark: str | None) -> None:
    """Take marks until one comes, or (None) until there are no more; note when each came first."""
    end = time.monotonic() + HANG_SECONDS
    while mark is None or mark not in times:
        if not connection.poll(max(0.0, end - time.monotonic())):
            raise _Hung(f"no mark {mark!r} within {HANG_SECONDS:.0f} s after {list(times)}")
        try:
            times.setdefault(connection.recv(), time.monotonic())
        except EOFError:
            if mark is None:
                return
            raise AssertionError(f"a process ended before the mark {mark!r}, after {list(times)}") from None
