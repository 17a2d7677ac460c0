"""Corrupted and forged run folders: 10,000 of them, each asked everything, by processes that may die of it.

A run that was tampered with must answer as before, refuse by an error of dualform's own, or fail `verify`: never raise
anything else, take more than two seconds of processor time or a gigabyte of memory for a question, or kill the reader.
What `verify` cannot know, because nothing else in the run depends on it, is listed in `UNKNOWABLE` with the reason.
"""

import contextlib
import gc
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from dualform.errors import DualformError
from torture.forging import Case, corruptions, fields, forgeries
from torture.good_runs import GoodRun, make_good_runs
from torture.outcome import Outcome
from torture.questions import QUESTIONS, REFUSED, answers, comparable, open_run, same

FULL, SHORT = 10_000, 100
SECONDS = 2.0  # of processor time that a question may take
BYTES = 1 << 30  # that a question may take beyond what the process has
HANGING = 60.0  # seconds after which a case counts as hung
ROUNDING = {"": 3e-5, "float16": 2e-3}
"""How far a number may be from the good run's, relative to the largest of its answer; by run, "" for any other.

What is stored as float16 is exact to 2e-3 of the change, which is verify's bound too.
"""
OFTEN = {"where": 3, "report": 6, "kept": 2}  # questions that are asked in every n-th case only: they take longest

UNKNOWABLE: dict[str, tuple[str, str]] = {
    r".*: annotations/.*": ("annotations", "labels and samples are the user's word; nothing else depends on them"),
    r".*: media/.*": ("attachments", "texts, images and tests are the user's word"),
    r".*: calls/.* (step|micro|call|rows|positions|inner|annotation_\w+)\b.*": (
        "addresses",
        "which step, row or annotation a pattern is called by, where the sum of all patterns is the same",
    ),
    r".*: steps/.* fingerprint\b.*": ("marks", "by which a step is recognised in resuming"),
    r".*: shards/\d+/(parameters|state_after|stale)\b.*": ("marks", "for resuming, and of state that no layer covers"),
    r".*: (uncovered|(files/)?frozen|no_final).*": (
        "uncovered state",
        "state that no layer covers is in no sum of patterns",
    ),
    r".*: (created|versions|factory|factory_arguments|optimizers)\b.*": ("descriptions", "words of the run on itself"),
    r".*: layers/[^/]*/(kind|optional)\b.*": ("descriptions", "the name of a layer's kind; whether it may be unused"),
    r"(shares|groupings): layers/[^/]*/dtype\b.*": ("descriptions", "the dtype in which a layer's sums are given"),
    r".*: layers/[^/]* twice": ("descriptions", "a layer that was never used adds nothing"),
    r".*: (rows|batch_axis)\b.*": ("addresses", "how rows were matched with annotations"),
    r".*: columns\b.*": ("annotations", "a column that no shard has reads as null, as one that came later does"),
    r".*: shares/groupings/.*": ("annotations", "what a group of shares is called by"),
    r".*: shares/\d+\.safetensors (keys|counts|lowest)\b.*": ("keys without value", "sums of keys are in no weight"),
    r".*: shards/\d+\.safetensors .*/keys\b.*": ("keys without value", "the key of a value of zero is in no sum"),
    r".*: shards/\d+\.safetensors flipped .*": ("keys without value", "the same, or a bit below verify's bound"),
    r"keys: (shards|initial|final|steps).*": ("keys only", "nothing is rebuilt from keys alone, and verify says so"),
}
"""The changes that may give another answer although `verify` passes: run and change, as a pattern -> what, and why."""


@dataclass
class Verdict:
    """What became of one case."""

    outcome: str  # a key of the counts
    failure: str = ""
    slowest: float = 0.0  # seconds of processor time of its slowest question
    largest: int = 0  # bytes that it took at most beyond what the process had
    refused: list[str] = field(default_factory=list)  # questions that ended in an error of our own


# In a child -------------------------------------------------------------------------------------------------------


def _ask(folder: Path, run: GoodRun, good: Mapping[str, Any], case: Case, skip: frozenset[str]) -> Verdict:
    """Ask a forged run every question, and judge the answers by those of the good run."""
    verdict = Verdict("")
    found: dict[str, Any] = {}
    before = _memory(reset=True)
    for name in ("open", *QUESTIONS):
        if name in skip:
            continue
        began = time.process_time()
        try:
            if name == "open":
                memory = open_run(folder, run)
            else:
                found[name] = comparable(QUESTIONS[name](memory, run))
        except DualformError as error:
            if name == "open" or good[name] != REFUSED:
                verdict.refused.append(name)
            if problem := _message_problem(str(error)):
                verdict.failure = verdict.failure or f"{name}: {problem}"
        except BaseException as error:  # whatever it is, it is not an error of our own
            where = _place(error)
            verdict.outcome = "raw exception"
            verdict.failure = verdict.failure or f"{name}: {type(error).__name__}: {str(error)[:200]} ({where})"
        took = time.process_time() - began
        verdict.slowest = max(verdict.slowest, took)
        if took > SECONDS:
            verdict.failure = verdict.failure or f"{name}: took {took:.1f} s"
        if name == "open" and verdict.refused:
            break
    verdict.largest = _memory(reset=False) - before
    if verdict.largest > BYTES:
        verdict.failure = verdict.failure or f"took {verdict.largest >> 20} MB"
    return _judged(verdict, found, good, case, run.name)


def _judged(verdict: Verdict, found: Mapping[str, Any], good: Mapping[str, Any], case: Case, run: str) -> Verdict:
    if verdict.failure:
        verdict.outcome = verdict.outcome or "too slow, too large or unclear"
        return verdict
    rounding = ROUNDING.get(run, ROUNDING[""])
    wrong = [n for n, answer in found.items() if n != "verify" and not same(answer, good[n], rounding)]
    if not wrong:
        verdict.outcome = "refused by our own error" if verdict.refused else "answers as before"
        if found.get("verify", "True") != "True":
            verdict.outcome = "answers as before, verify fails"
    elif "verify" in verdict.refused or found.get("verify") == "False":
        verdict.outcome = "another answer, and verify fails"
    elif subject := _unknowable(f"{run}: {case.what}"):
        verdict.outcome = f"another answer that verify cannot know of: {subject}"
    else:
        verdict.outcome = "another answer, and verify passes"
        verdict.failure = f"{', '.join(wrong)}: another answer, and verify passes"
    return verdict


def _unknowable(change: str) -> str:
    """Return what a change is of, where `verify` cannot know of it; else nothing."""
    change = re.sub(r"\branks/\d+/", "", change)  # another process's files and manifest are as the first one's
    found = (subject for pattern, (subject, _) in UNKNOWABLE.items() if re.fullmatch(pattern, change, re.DOTALL))
    return next(found, "")


def _message_problem(text: str) -> str:
    """Say why a message is not fit to be shown; empty where it is."""
    if "\n" in text.strip() or len(text) > 2000:
        return f"the message is {len(text)} characters long, or has several lines: {text[:80]!r}"
    return ""


def _place(error: BaseException) -> str:
    """Return the innermost of our own lines that an exception went through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "dualform" in path:
            found = f"{Path(path).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _memory(*, reset: bool) -> int:
    """Return the largest memory of this process in bytes, since it was last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) << 10 if found else 0


def _copy(source: Path, folder: Path) -> None:
    """Copy a run by hard links; a case gives a file that it changes a copy of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in source.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)


def _serve(orders: int, results: int, folder: Path, runs: list[GoodRun], cases: list[Case], seed: int) -> None:
    """Take the numbers of cases from a pipe until it ends, and answer each with a verdict."""
    torch.set_num_threads(1)
    limit = _address_space() + 2 * BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    good: list[dict[str, Any]] = []
    for run in runs:
        _copy(run.path, folder)
        good.append(answers(open_run(folder, run), run))
    for number in iter(lambda: os.read(orders, 4), b""):
        i = struct.unpack("<I", number)[0]
        case = cases[i]
        _copy(runs[case.run].path, folder)
        chance = random.Random(f"{seed} {case.run} {case.what}")
        case.apply(folder, chance)
        skip = frozenset(name for name, often in OFTEN.items() if i % often)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = _ask(folder, runs[case.run], good[case.run], case, skip)
        gc.collect(0)
        answer = pickle.dumps(verdict)
        os.write(results, struct.pack("<I", len(answer)) + answer)


def _address_space() -> int:
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 1 << 40


# In the parent ----------------------------------------------------------------------------------------------------


class _Child:
    """A forked process that judges cases; another one takes its place when it dies or hangs."""

    def __init__(self, folder: Path, runs: list[GoodRun], cases: list[Case], seed: int) -> None:
        self._arguments = (folder, runs, cases, seed)
        self._pid = 0

    def judge(self, number: int) -> Verdict:
        """Return the verdict on a case."""
        if not self._pid:
            self._start()
        try:
            os.write(self._orders, struct.pack("<I", number))
            size = struct.unpack("<I", self._read(4))[0]
            found: Verdict = pickle.loads(self._read(size))
        except (OSError, EOFError) as error:
            status = self.end()
            hung = isinstance(error, TimeoutError)
            return Verdict("hung" if hung else "died", f"the process {'hung' if hung else f'died ({status})'}")
        return found

    def end(self) -> int:
        """End the process; return its exit status, negative for a signal."""
        if not self._pid:
            return 0
        os.close(self._orders)
        os.close(self._results)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _start(self) -> None:
        orders, self._orders = os.pipe()
        self._results, results = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._orders)
            os.close(self._results)
            status = 1
            try:
                _serve(orders, results, *self._arguments)
                status = 0
            finally:
                os._exit(status)
        os.close(orders)
        os.close(results)

    def _read(self, size: int) -> bytes:
        import select

        content = b""
        until = time.monotonic() + HANGING
        while len(content) < size:
            ready, _, _ = select.select([self._results], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(self._results, size - len(content))
            if not part:
                raise EOFError
            content += part
        return content


def choose(runs: list[GoodRun], *, count: int, seed: int) -> list[Case]:
    """Return cases of all kinds, as many as asked for where there are so many, the same for the same seed."""
    every: dict[str, list[Case]] = {"corrupted": [], "field": [], "forged": []}
    for number in range(len(runs)):
        for make in (corruptions, fields, forgeries):
            for case in make(runs, number):
                every[case.kind].append(case)
    chance = random.Random(seed)
    share = {"corrupted": min(count // 5, len(every["corrupted"])), "field": 2 * count // 5}
    share["forged"] = count - sum(share.values())
    chosen = [case for kind, cases in every.items() for case in chance.sample(cases, min(share[kind], len(cases)))]
    chance.shuffle(chosen)
    return chosen


def run(folder: Path, *, short: bool, seed: int, count: int | None = None) -> Outcome:
    """Forge runs and ask them.

    Args:
        folder: an empty folder to work in.
        short: whether some seconds have to do.
        seed: what chooses the cases.
        count: how many cases; by default as many as the form has.
    """
    began = time.monotonic()
    outcome = Outcome("forgeries")
    threads, arrow = torch.get_num_threads(), pa.cpu_count()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = make_good_runs(folder / "good", few=short)
        cases = choose(runs, count=count or (SHORT if short else FULL), seed=seed)
        verdicts = _judge_all(folder / "forged", runs, cases, seed)
    finally:
        torch.set_num_threads(threads)
        pa.set_cpu_count(arrow)
    kinds = {"corrupted": "files corrupted", "field": "manifest fields forged", "forged": "files forged"}
    for kind, words in kinds.items():
        outcome.counts[words] = sum(case.kind == kind for case in cases)
    outcome.counts |= dict(Counter(verdict.outcome for verdict in verdicts).most_common())
    outcome.measures["slowest question, s of processor time"] = max((v.slowest for v in verdicts), default=0.0)
    outcome.measures["most memory, MB"] = max((v.largest for v in verdicts), default=0) / (1 << 20)
    outcome.failures = [
        f"{runs[case.run].name}: {case.kind}: {case.what[:120]}: {verdict.failure}"
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.failure
    ]
    outcome.seconds = time.monotonic() - began
    return outcome


def _judge_all(folder: Path, runs: list[GoodRun], cases: list[Case], seed: int) -> list[Verdict]:
    child = _Child(folder, runs, cases, seed)
    verdicts = []
    try:
        for i in range(len(cases)):
            verdicts.append(child.judge(i))
            if verdicts[-1].failure:
                sys.stderr.write(
                    f"forgeries: {runs[cases[i].run].name}: {cases[i].what[:120]}: {verdicts[-1].failure}\n"
                )
            if i % 500 == 499:
                failures = sum(bool(verdict.failure) for verdict in verdicts)
                sys.stderr.write(f"forgeries: {i + 1} of {len(cases)}, {failures} failures\n")
    finally:
        child.end()
        shutil.rmtree(folder, ignore_errors=True)
    return verdicts
