"""KeyboardInterrupt at random moments of a program's whole life: nothing hangs, and nothing of ours is left.

The lives are in `torture.lives`, in a process of their own. This process sends a part of the interrupts, as SIGINT, and
watches: where nothing is heard for a while, the stacks of all threads are the failure.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torture.kills import fork_server
from torture.lives import FEW, NAMES, READING, RECORDING, live
from torture.outcome import Outcome

FULL, SHORT = 1000, 16  # interrupts
HANG_SECONDS = 120.0  # without a word, after which the process counts as hung
TORCHS_OWN = "grad mode left off by torch's own code"
TURNED = "turned into another exception by safetensors"
BATCH = 125  # interrupts of one process


def run(folder: Path, *, short: bool, seed: int, count: int | None = None) -> Outcome:
    """Interrupt so many times (`count`), and check everything after each."""
    begin = time.monotonic()
    total = count or (SHORT if short else FULL)
    outcome = Outcome("interrupts")
    stages = {stage: f"interrupts in {stage}" for stage in (*RECORDING, *READING)}
    outcome.counts = dict.fromkeys(stages.values(), 0)
    kinds = {"by timer": "by timer", "by SIGINT": "by SIGINT of another process", "twice": "two, the second in closing"}
    outcome.counts |= dict.fromkeys(kinds.values(), 0)
    outcome.counts |= {TORCHS_OWN: 0, TURNED: 0}
    done = hangs = 0
    with fork_server("torture.lives") as server:
        while done < total and hangs < 3:
            cores = 1 + done // BATCH % 2  # questions are answered by one thread, or by several
            names = FEW if short else NAMES
            watch = _Watch(server, folder / f"batch{done}", names, seed + done, min(BATCH, total - done), cores)
            for stage, kind, failures in watch.interrupts():
                done += 1
                plain, _, others = kind.partition(", ")
                outcome.counts[stages[stage]] += 1
                outcome.counts[kinds[plain]] += 1
                outcome.counts[TORCHS_OWN] += "grad mode" in others
                outcome.counts[TURNED] += "turned" in others
                outcome.failures.extend(failures)
                for failure in failures:
                    print(f"interrupts: FAILED: {failure}", file=sys.stderr, flush=True)
                if done % 100 == 0:
                    print(f"interrupts: {done} of {total}", file=sys.stderr, flush=True)
            hangs += watch.failure is not None
            if watch.failure is not None:
                outcome.failures.append(watch.failure)
    outcome.counts["interrupts in all"] = done
    outcome.counts["hangs"] = hangs
    outcome.seconds = time.monotonic() - begin
    return outcome


class _Watch:
    """One process that is interrupted, and the one that shoots and watches."""

    def __init__(self, server: Any, folder: Path, names: Sequence[str], seed: int, count: int, cores: int) -> None:
        folder.mkdir(parents=True)
        self.stacks = folder / "stacks"
        self.failure: str | None = None
        self.chance = random.Random(seed)
        self.ours, theirs = server.Pipe()
        self.process = server.Process(target=live, args=(theirs, folder, names, seed, count, self.stacks, cores))
        self.process.start()
        theirs.close()

    def interrupts(self) -> Any:
        """Yield (stage, kind, failures) of each interrupt; a hang or an early end becomes `failure`."""
        connection: Connection = self.ours
        try:
            while True:
                if not connection.poll(HANG_SECONDS):
                    self.failure = f"hung for {HANG_SECONDS:.0f} s:\n{self._dump()}"
                    return
                match connection.recv():
                    case ("shoot", delay):
                        time.sleep(delay)
                        self._send(signal.SIGINT)
                    case ("interrupted", stage, kind, failures):
                        yield stage, kind, failures
                    case ("end",):
                        return
        except EOFError:
            self.process.join(5)
            self.failure = f"the process ended early with {self.process.exitcode}"
        finally:
            self.process.join(0 if self.failure else 20)
            if self.process.exitcode is None:
                self.process.kill()
                self.process.join()
            connection.close()

    def _send(self, number: int) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def _dump(self) -> str:
        """Return the stacks of all threads of the process."""
        self._send(signal.SIGUSR1)
        time.sleep(1.0)
        return self.stacks.read_text()
