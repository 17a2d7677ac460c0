"""Fifty clients of a viewer, with faults from all sides: wrong questions, stalled connections, a run that changes.

The viewer runs in a child process. The answers to the ordinary questions are taken before the storm, for every state
that the run folder will be in; during the storm every answer must be that of a state which the folder was in.
"""

import shutil
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dualform
from torture.outcome import Outcome
from torture.viewer_child import ViewerChild
from torture.viewer_client import Client, References, Tally
from torture.viewer_faults import FIRST, GROWN_RUN, OTHER, STATES, Faults, Timeline
from torture.viewer_questions import PREPARING, Question, differs, essence, ordinary
from torture.viewer_run import OTHER_TESTS, grow, record_base, test_examples

CLIENTS = 50
SECONDS, SHORT_SECONDS = 600.0, 10.0
MOST_GROWTH, SHORT_GROWTH = (
    150.0,
    400.0,
)  # MB that the viewer may grow by after a third of the storm; it fills caches first
MOST_THREADS = 40  # the event loop, eight questions at once, preparations, and the libraries' own
MOST_FILES = 120  # of a run that keeps at most 100 files open
PRELUDE = ""  # Python text that the viewer's process runs first; tests break the viewer by it
STALLED = "import dualform.show.viewer.connections as c; c.STALLED_SECONDS = {seconds}"


def run(folder: Path, *, short: bool, seed: int, count: int | None = None) -> Outcome:
    """Let clients ask a viewer for ten minutes, or for seconds in the short form.

    Args:
        folder: where runs and logs are written.
        short: whether to take the short form.
        seed: of all random choices.
        count: the number of seconds, instead of the form's own.
    """
    began = time.monotonic()
    seconds = float(count) if count is not None else SHORT_SECONDS if short else SECONDS
    stalled = min(20.0, max(1.0, seconds / 8))  # what the viewer allows a client; its own in the full form
    kept, live, checkpoint = folder / "kept", folder / "live" / "run", folder / "checkpoint.pt"
    live.parent.mkdir(parents=True)
    _say("recording the states of the run")
    _make_states(kept, checkpoint)
    questions = ordinary((5,) if short else (0, 5, 11))
    tally = Tally()
    prelude = STALLED.format(seconds=stalled) + "\n" + PRELUDE
    outcome = Outcome("clients", counts={"clients": CLIENTS}, failures=tally.failures)
    _say("taking the answers of every state")
    references = _references(kept, questions, folder, prelude)
    shutil.copytree(kept / FIRST, live)
    viewer = ViewerChild(live, log=folder / "viewer.log", prelude=prelude)
    try:
        faults = Faults(live, kept, checkpoint, viewer, seed=seed)
        clients = [
            Client(
                viewer.port,
                viewer.token,
                questions=questions,
                references=references,
                timeline=faults.timeline,
                tally=tally,
                seed=seed * 1000 + number,
                stalled_seconds=2 * stalled + 5,
            )
            for number in range(CLIENTS)
        ]
        samples = _storm(viewer, clients, faults, tally, seconds)
        for client in clients:
            client.close()
        most_growth = SHORT_GROWTH if short else MOST_GROWTH
        _judge(viewer, faults, references, questions, samples, tally, outcome, most_growth=most_growth)
    finally:
        viewer.kill()
    outcome.counts |= {**tally.counts, **faults.counts}
    outcome.measures |= _latencies(tally.latencies)
    outcome.seconds = time.monotonic() - began
    return outcome


def _make_states(kept: Path, checkpoint: Path) -> None:
    """Record the run, and keep a copy of its folder in every state that it will be in."""
    kept.mkdir()
    record_base(kept / FIRST, checkpoint)
    shutil.copytree(kept / FIRST, kept / OTHER)
    inputs, targets, images = test_examples(50, OTHER_TESTS)
    dualform.open(kept / OTHER).add_tests(inputs, targets, images=images)
    shutil.copytree(kept / FIRST, kept / GROWN_RUN)
    grow(kept / GROWN_RUN, checkpoint, copies=kept)


def _references(kept: Path, questions: Sequence[Question], folder: Path, prelude: str) -> References:
    """Return the answers to the ordinary questions in every state, each asked of a viewer that nobody disturbs."""
    live = folder / "calm" / "run"
    live.parent.mkdir()
    found: dict[str, dict[Question, Any]] = {}
    shutil.copytree(kept / FIRST, live)
    viewer = ViewerChild(live, log=folder / "calm.log", prelude=prelude)
    try:
        for state in STATES:
            shutil.rmtree(live)
            shutil.copytree(kept / state, live)
            found[state] = _answers(viewer, questions)
    finally:
        viewer.kill()
    return found


def _answers(viewer: ViewerChild, questions: Sequence[Question]) -> dict[Question, Any]:
    client = Client(
        viewer.port,
        viewer.token,
        questions=questions,
        references={},
        timeline=Timeline(FIRST),
        tally=Tally(),
        seed=0,
        stalled_seconds=0,
    )
    try:
        return {one: _settled(client, one) for one in questions}
    finally:
        client.close()


def _settled(client: Client, question: Question) -> Any:
    """Return the essence of an answer; that of a badge once nothing is being prepared for it any more."""
    end = time.monotonic() + 60
    found = _essence_of_answer(client, question)
    while question.path == "/api/badge" and found[1].get("state") == PREPARING and time.monotonic() < end:
        time.sleep(0.05)
        found = _essence_of_answer(client, question)
    return found


def _essence_of_answer(client: Client, question: Question) -> Any:
    answer = client.answer(question)
    if answer is None:
        raise AssertionError(f"A viewer that nobody disturbs did not answer {question.address}")
    return essence(question, *answer)


def _storm(
    viewer: ViewerChild, clients: Sequence[Client], faults: Faults, tally: Tally, seconds: float
) -> list[tuple[float, int, int]]:
    """Let clients and faults go on for a time; return the viewer's memory, threads and files about once a second."""
    until = time.monotonic() + seconds
    actions = [*(client.go_on for client in clients), faults.go_on]
    threads = [threading.Thread(target=_guarded, args=(action, until, tally), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    samples = []
    while time.monotonic() < until and viewer.alive:
        samples.append((viewer.memory(), viewer.threads(), viewer.files()))
        left = until - time.monotonic()
        if len(samples) % 30 == 0:
            _say(f"{left:.0f} s left, {sum(tally.counts.values())} events, {len(tally.failures)} failures")
        time.sleep(max(0.0, min(1.0, left)))
    for thread in threads:
        thread.join(180)
        if thread.is_alive():
            tally.fail("clients that hung", "a client did not come to its end within 180 s")
    return samples


def _guarded(work: Callable[[float], None], until: float, tally: Tally) -> None:
    try:
        work(until)
    except Exception:
        tally.fail("errors of the campaign itself", traceback.format_exc(limit=-4))


def _judge(
    viewer: ViewerChild,
    faults: Faults,
    references: References,
    questions: Sequence[Question],
    samples: Sequence[tuple[float, int, int]],
    tally: Tally,
    outcome: Outcome,
    *,
    most_growth: float,
) -> None:
    """Look at the viewer when all is quiet again, and end it."""
    if not viewer.alive:
        tally.fail("viewers that died", f"exit status {viewer.process.returncode}: {viewer.errors()[-2000:]}")
        return
    for question, found in _answers(viewer, questions).items():
        if why := differs(found, references[faults.state][question]):
            tally.fail("wrong answers after the storm", f"{question.address[:200]} in {faults.state}: {why}")
    time.sleep(6.0)  # idle connections are closed after five seconds
    memory = [sample[0] for sample in samples]
    third = max(1, len(memory) // 3)
    growth = max(memory[-third:]) - max(memory[:third])
    outcome.measures = {
        "memory after a third of the storm, MB": max(memory[:third]),
        "memory at its end, MB": max(memory[-third:]),
        "most threads": max(sample[1] for sample in samples),
        "threads when quiet": viewer.threads(),
        "most open files": max(sample[2] for sample in samples),
        "open files when quiet": viewer.files(),
    }
    for name, found, most in (
        ("MB of growth", growth, most_growth),
        ("threads when quiet", viewer.threads(), MOST_THREADS),
        ("open files when quiet", viewer.files(), MOST_FILES),
    ):
        if found > most:
            tally.fail("resources that grew", f"{found:g} {name}; at most {most:g}")
    status = viewer.interrupt()
    if status is None:
        tally.fail("viewers that did not end", "Ctrl-C did not end the viewer within 20 s")
    tracebacks = viewer.errors().count("Traceback")
    if tracebacks:
        text = viewer.errors()
        tally.fail("tracebacks of the viewer", f"{tracebacks}; the first: {text[text.index('Traceback') :][:1500]}")


def _latencies(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=20)
    return {
        "median answer, ms": 1000 * statistics.median(seconds),
        "95 of 100 answers within, ms": 1000 * cuts[18],
        "slowest answer, ms": 1000 * max(seconds),
    }


def _say(text: str) -> None:
    sys.stderr.write(f"clients: {text}\n")
    sys.stderr.flush()
