"""The viewer as `dualform view` runs it, in a child process that can be watched, halted and ended."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

START = "{prelude}\nfrom dualform.show.cli import main\nmain()"


class ViewerChild:
    """A running `dualform view RUN`.

    Attributes:
        port: the port that it listens on, at 127.0.0.1.
        token: the token of its address.
        prelude: Python text that the process runs before the command.
    """

    def __init__(self, run: Path, *, log: Path, prelude: str = "") -> None:
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(prelude=prelude), "view", str(run), "--memory-mb", "64"],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None, "a pipe"
        line = self.process.stdout.readline().decode()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)\s*", line)
        if found is None:
            self.kill()
            raise RuntimeError(f"The viewer did not start: it printed {line!r}, and {self.errors()[-2000:]!r}")
        self.port, self.token = int(found[1]), found[2]

    def errors(self) -> str:
        """Return everything that it has written to stderr."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    def halt(self, seconds: float) -> None:
        """Stop the process for a while, as a suspended machine or a debugger does."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self.process.send_signal(signal.SIGCONT)

    def memory(self) -> float:
        """Return its resident memory in MB."""
        return self._status("VmRSS") / 1024

    def threads(self) -> int:
        """Return its number of threads."""
        return self._status("Threads")

    def files(self) -> int:
        """Return its number of open files, sockets included."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 (names alone)
        return 0

    def interrupt(self, patience: float = 20.0) -> int | None:
        """End the process by SIGINT, as Ctrl-C does; return its exit status, or nothing where it had to be killed."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process whatever it does."""
        if self.alive:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _status(self, name: str) -> int:
        with contextlib.suppress(OSError):  # the process may have died
            text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
            if found := re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE):
                return int(found[1])
        return 0
