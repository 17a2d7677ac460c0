"""Who writes to a run in object storage, where no lock ends with the process that holds it.

The lease is a blob that its holder renews. It is over when the holder removes it, when it was not renewed in time, or
when the holder's process is gone, which another process of the same machine can see. Times are those of the storage.
A lease keeps honest writers apart; what keeps the run whole is that a manifest is replaced only by who knows it.
"""

import contextlib
import datetime
import json
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from typing import Protocol

from dualform.errors import RemoteError

LEASE_SECONDS = 60.0  # after its last renewal a lease is over
RENEWALS = 4  # in that time


class LeaseStorage(Protocol):
    """What a lease needs of the place that it lies in."""

    def lease_content(self) -> tuple[bytes, str, datetime.datetime] | None:
        """Return the lease as it is: its content, its tag, and when it was put; None where there is none."""

    def put_lease(self, content: bytes, was: str | None) -> str | None:
        """Put the lease if it is still the one of a tag (None: none); return its new tag, None if it is not."""

    def remove_lease(self) -> None:
        """Remove the lease."""

    def storage_time(self) -> datetime.datetime:
        """Return the time by the storage's clock."""


class Lease:
    """One attempt to be the only one who writes."""

    def __init__(self, storage: LeaseStorage) -> None:
        self._storage = storage
        self._content = json.dumps(
            {"holder": uuid.uuid4().hex, "machine": _machine(), "pid": os.getpid(), "process": _process(os.getpid())}
        ).encode()
        self._tag: str | None = None
        self._process_id = os.getpid()
        self._renewed = 0.0
        self._over = threading.Event()
        self.lost = False  # whether somebody else may write by now

    def acquire(self) -> bool:
        """Take the lease, if nobody has it or its holder is gone; say whether it could be had."""
        self._tag = self._storage.put_lease(self._content, None)
        if self._tag is None:
            held = self._storage.lease_content()
            if held is not None and not self._is_over(held[0], held[2]):
                return False
            self._tag = self._storage.put_lease(self._content, None if held is None else held[1])
        if self._tag is None:
            return False
        self._renewed = time.monotonic()
        threading.Thread(target=self._keep, name="dualform-lease", daemon=True).start()
        return True

    def release(self) -> None:
        """Give the lease back; a forked process leaves it alone."""
        self._over.set()
        if os.getpid() != self._process_id or self.lost:
            return
        with contextlib.suppress(OSError):
            held = self._storage.lease_content()
            if held is not None and held[0] == self._content:
                self._storage.remove_lease()

    def _is_over(self, content: bytes, since: datetime.datetime) -> bool:
        """Say whether the lease of another holder is over."""
        try:
            holder = json.loads(content)
            if holder["machine"] == _machine():
                return _process(int(holder["pid"])) != str(holder["process"])
        except (ValueError, KeyError, TypeError):
            pass  # a lease of another version, which ends by its age
        return (self._storage.storage_time() - since).total_seconds() > LEASE_SECONDS

    def _keep(self) -> None:
        """Renew the lease until it is given back, or lost."""
        while not self._over.wait(LEASE_SECONDS / RENEWALS):
            try:
                tag = self._storage.put_lease(self._content, self._tag)
            except RemoteError:
                self.lost = time.monotonic() - self._renewed > LEASE_SECONDS
            else:
                self.lost = tag is None and not self._over.is_set()
                self._tag, self._renewed = tag, time.monotonic()
            if self.lost:
                return


def _machine() -> str:
    """Return a name of this machine since its last start."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}".strip()


def _process(number: int) -> str:
    """Return when a process began, in the system's words; "" where there is no such process."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        if Path("/proc/self").exists():
            return ""
    try:  # a system without /proc: a number that is in use
        os.kill(number, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"
