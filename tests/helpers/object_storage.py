"""An S3 server in this process (moto's), whose answers a test can spoil: it drops, delays or refuses some requests."""

import contextlib
import importlib.util
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn

import dualform

BUCKET = "runs"
SECRET = "secret-of-the-tests"
Action = Literal["drop", "lose", "refuse", "fail", "slow"]
"""Drop a request unread; do what it says and lose the answer; answer 403, or 503; answer after a while."""


@dataclass(slots=True)
class Fault:
    """What happens to the next requests of a method whose path has some text in it."""

    method: str
    part: str
    action: Action
    times: int = 1
    seconds: float = 0.0


@dataclass(slots=True)
class ObjectStorage:
    """A running server with one bucket."""

    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    before: Callable[[str, str], None] | None = None  # is told of every request before it is answered

    def address(self) -> str:
        """Return an address that nobody has used yet."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def spoil(self, method: str, part: str, action: Action, *, times: int = 1, seconds: float = 0.0) -> None:
        """Spoil the next requests of a method whose path has some text in it."""
        self.faults.append(Fault(method, part, action, times, seconds))

    def fault(self, method: str, path: str) -> Fault | None:
        """Return what is to happen to a request, if anything, and count it."""
        for found in self.faults:
            if found.method == method and found.part in path and found.times > 0:
                found.times -= 1
                return found
        return None


class SpoiledApplication:
    """The server's application, with the faults of a test in front of it."""

    def __init__(self, application: Callable[..., Iterable[bytes]], storage: ObjectStorage) -> None:
        self._application = application
        self._storage = storage
        self._putting = threading.Lock()  # moto looks at a condition and puts later; the services do both at once

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self._storage.requests.append((method, path))
        if self._storage.before is not None:
            self._storage.before(method, path)
        fault = self._storage.fault(method, path)
        action = None if fault is None else fault.action
        if fault is not None and action == "slow":
            time.sleep(fault.seconds)
        if action in ("refuse", "fail"):
            start_response("403 Forbidden" if action == "refuse" else "503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if action == "lose":
            b"".join(self._answer(environ, lambda *_: lambda _: None))
        if action in ("drop", "lose"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("500 Lost", [])
            return [b""]
        return self._answer(environ, start_response)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "PUT":
            return self._application(environ, start_response)
        with self._putting:
            return list(self._application(environ, start_response))


def can_serve() -> bool:
    """Say whether the packages are installed that an S3 server and its client need."""
    return all(importlib.util.find_spec(name) is not None for name in ("obstore", "moto", "flask_cors"))


@contextlib.contextmanager
def serving() -> Iterator[ObjectStorage]:
    """Run the server for as long as the context lasts, with an environment by which obstore and boto3 find it."""
    if not can_serve():
        pytest.skip("object storage is tested with obstore and moto: pip install 'dualform[cloud]' 'moto[server]'")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    silent = dict.fromkeys(("log", "connection_dropped"), lambda *_: None)
    quiet = type("Quiet", (WSGIRequestHandler,), {"protocol_version": "HTTP/1.1", **silent})
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    storage = ObjectStorage()
    application = SpoiledApplication(DomainDispatcherApplication(create_backend_app), storage)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=quiet)
    server.daemon_threads = True
    storage.port = server.port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{storage.port}"
    settings = {
        "AWS_ACCESS_KEY_ID": "key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import httpx

        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        yield storage
    server.shutdown()
    thread.join(5)
    server.server_close()


class Task:
    """A linear layer that is trained on new samples at every step."""

    def __init__(self, width: int = 24) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, recorder: dualform.Recorder, steps: range, *, batch: int = 16) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(batch, self.model.in_features, generator=generator)
            labels = torch.randint(4, (batch,), generator=generator)
            recorder.annotate(label=labels)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            self.optimizer.step()
