"""A viewer's server in a thread of the test's own process."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from dualform.show.viewer.serve import make_server

BUDGET = 4_000_000


class Running:
    """A server in a thread of this process."""

    def __init__(self, folder: Path | str, **options: Any) -> None:
        options.setdefault("budget", BUDGET)
        options.setdefault("trust", True)  # our own runs
        self.server, self.socket, self.address = make_server(folder, **options)
        self.base, self.token = self.address.split("/?token=")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A client that has swapped its token for the cookie."""
        with httpx.Client(base_url=self.base, timeout=60) as client:
            assert client.get("/", params={"token": self.token}).status_code == 200
            yield client

    def stop(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(10)
        self.server.opened.close()
