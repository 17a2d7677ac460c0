"""One client of a viewer: asks, compares, breaks off, stalls. Every request's outcome goes into one shared tally."""

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torture.viewer_faults import Timeline
from torture.viewer_questions import FORBIDDEN, UNREADABLE, Question, differs, essence, fuzzed

PATIENCE = 60.0  # seconds after which a request that is not answered counts as hung
MOST_STALLED = 3  # connections that each client leaves open without doing its part
UNREAD = "answers unread"
MOST_FAILURES = 200  # that are kept in words

COUNTED = (
    *("ordinary questions answered as before the storm", "answers that a file is missing, during such a fault"),
    *("fuzzed questions", "forbidden requests refused", "requests broken off", "answers read slowly"),
    *("large bodies refused", "connections left half open or unread", "half-open connections closed by the viewer"),
    *("answers 2xx", "answers 4xx", "answers 5xx", "answers 500", "wrong answers", "requests that hung"),
    *("connections that failed", "forbidden requests answered", "tracebacks of the viewer"),
)
"""What is counted even where it never happened, in the order of the page."""

References = Mapping[str, Mapping[Question, Any]]  # state -> question -> the essence of its answer


@dataclass
class Tally:
    """What all clients saw, filled from many threads."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    latencies: list[float] = field(default_factory=list)  # of ordinary questions, in seconds
    failures: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *names: str) -> None:
        """Add one to each of these."""
        with self._lock:
            self.counts.update(names)

    def took(self, seconds: float) -> None:
        """Take note of how long an ordinary question took."""
        with self._lock:
            self.latencies.append(seconds)

    def fail(self, kind: str, words: str) -> None:
        """Count a failure, and keep its words unless there are too many."""
        with self._lock:
            self.counts[kind] += 1
            if len(self.failures) < MOST_FAILURES:
                self.failures.append(f"{kind}: {words}")


@dataclass
class Stalled:
    """A connection that a client leaves open without doing its part.

    Attributes:
        kind: the part that is missing, in words.
        moved: when bytes last moved in it. A viewer that still answers earlier requests is not stalled yet.
        queues: the bytes that waited in the viewer's socket at the last look.
    """

    kind: str
    connection: socket.socket
    moved: float
    queues: str = ""


class Client:
    """A client with a connection of its own, and a random sequence of its own."""

    def __init__(
        self,
        port: int,
        token: str,
        *,
        questions: Sequence[Question],
        references: References,
        timeline: Timeline,
        tally: Tally,
        seed: int,
        stalled_seconds: float,
    ) -> None:
        self._port = port
        self._token = token
        self._questions = list(questions)
        self._references = references
        self._timeline = timeline
        self._tally = tally
        self._rng = random.Random(seed)
        self._stalled_seconds = stalled_seconds  # after which the viewer must have closed a stalled connection
        self._connection: socket.socket | None = None
        self._stalled: list[Stalled] = []

    def go_on(self, until: float) -> None:
        """Ask until a time."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (60, self._ask_ordinary),
            (20, self._ask_fuzzed),
            (8, self._ask_forbidden),
            (4, self._break_off),
            (4, self._stall),
            (2, self._read_slowly),
            (2, self._send_body),
        ]
        chosen = [act for weight, act in acts for _ in range(weight)]
        while time.monotonic() < until:
            try:
                self._rng.choice(chosen)()
            except OSError as error:
                self._drop()
                self._tally.fail("connections that failed", f"{type(error).__name__}: {error}")
            self._look_at_stalled()

    def close(self) -> None:
        """Close all connections."""
        self._drop()
        for stalled in self._stalled:
            stalled.connection.close()
        self._stalled.clear()

    # Whole requests -----------------------------------------------------------------------------------------------

    def _ask_ordinary(self) -> None:
        question = self._rng.choice(self._questions)
        begin = time.monotonic()
        answer = self.answer(question)
        if answer is None:
            return
        end = time.monotonic()
        self._tally.took(end - begin)
        states, statuses = self._timeline.during(begin, end)
        status, kind, body = answer
        if question.path == "/api/badge" and b'"state":"failed"' in body:
            status = UNREADABLE  # the badge's way to say that a file is missing
        if status in statuses and kind == "application/json" and b'"error"' in body:
            self._tally.count("answers that a file is missing, during such a fault")
            return
        found = essence(question, status, kind, body)
        reasons = {state: differs(found, self._references[state][question]) for state in states}
        if all(reasons.values()):
            self._tally.fail("wrong answers", f"{question.address[:200]} in {reasons}: {status} {body[:300]!r}")
        else:
            self._tally.count("ordinary questions answered as before the storm")

    def _ask_fuzzed(self) -> None:
        question = fuzzed(self._rng, self._questions)
        begin = time.monotonic()
        answer = self.answer(question)
        if answer is None:
            return
        status, _, body = answer
        _, statuses = self._timeline.during(begin, time.monotonic())
        if status >= 500 and status not in statuses:
            self._tally.fail("fuzzed questions answered 5xx", f"{question.address[:300]}: {status} {body[:300]!r}")
        else:
            self._tally.count("fuzzed questions")

    def _ask_forbidden(self) -> None:
        question = self._rng.choice(FORBIDDEN)
        answer = self.answer(question)
        if answer is None:
            return
        if 400 <= answer[0] < 500:
            self._tally.count("forbidden requests refused")
        else:
            self._tally.fail("forbidden requests answered", f"{question}: {answer[0]} {answer[2][:200]!r}")

    def answer(self, question: Question) -> tuple[int, str, bytes] | None:
        """Return the status, media type and body of an answer; nothing where none came, which is a failure."""
        fresh = self._connection is None
        try:
            found = self._exchange(question)
        except (http.client.HTTPException, ConnectionError) as error:
            self._drop()
            if fresh:
                self._tally.fail(
                    "connections that failed", f"{question.address[:200]}: {type(error).__name__}: {error}"
                )
                return None
            return self.answer(question)  # an idle connection may be closed at any time, and browsers ask again too
        except TimeoutError:
            self._drop()
            self._tally.fail("requests that hung", f"{question.address[:200]}: no answer within {PATIENCE:g} s")
            return None
        self._tally.count(f"answers {found[0] // 100}xx")
        if found[0] == 500:
            self._tally.count("answers 500")
        return found

    def _exchange(self, question: Question) -> tuple[int, str, bytes]:
        if self._connection is None:
            self._connection = self._connected()
        self._connection.sendall(self._head(question))
        with http.client.HTTPResponse(self._connection, method=question.method) as response:
            response.begin()
            body = response.read()
            kind = (response.getheader("content-type") or "").partition(";")[0]
            if response.getheader("connection", "").lower() == "close":
                self._drop()
            return response.status, kind, body

    def _head(self, question: Question, *more: str) -> bytes:
        token = self._token if question.token is None else question.token
        lines = [
            f"{question.method} {question.address} HTTP/1.1",
            f"Host: {'127.0.0.1' if question.host is None else question.host}",
            *([f"Origin: {question.origin}"] if question.origin is not None else ()),
            f"Cookie: dualform-{self._port}={token}",
            *more,
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _connected(self, *, receive_bytes: int | None = None) -> socket.socket:
        found = socket.socket()
        try:
            if receive_bytes is not None:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            found.settimeout(PATIENCE)
            found.connect(("127.0.0.1", self._port))
        except BaseException:
            found.close()
            raise
        return found

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Requests that are no whole ones ------------------------------------------------------------------------------

    def _break_off(self) -> None:
        """Ask, and go away before the answer: politely, or with a reset."""
        connection = self._connected()
        with contextlib.closing(connection):
            connection.sendall(self._head(self._rng.choice(self._questions)))
            time.sleep(self._rng.choice((0.0, 0.0, 0.05, 0.3)))
            if self._rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._tally.count("requests broken off")

    def _stall(self) -> None:
        """Leave a connection open that sent nothing, half a request, or half a body."""
        whole = self._head(self._rng.choice(self._questions))
        body = self._head(Question("/api/run"), f"Content-Length: {self._rng.randrange(1, 10_000)}") + b"abc"
        parts = {
            "nothing sent": b"",
            "half a head": whole[: self._rng.randrange(1, len(whole) - 1)],
            "half a body": body,
        }
        kind = self._rng.choice(list(parts))
        self._keep(kind, self._connected(), parts[kind])

    def _read_slowly(self) -> None:
        """Ask for large answers; read one slowly, or leave them unread and the connection open."""
        connection = self._connected(receive_bytes=4096)
        head = self._head(Question("/report.html", (("test", "1"),)), "Connection: close")
        if self._rng.random() < 0.5:
            self._keep(UNREAD, connection, self._head(Question("/static/panels.css")) * 1500)
            return
        with contextlib.closing(connection):
            connection.sendall(head)
            until = time.monotonic() + 3.0
            with contextlib.suppress(TimeoutError):
                while time.monotonic() < until and connection.recv(1 << 12):
                    time.sleep(0.02)
        self._tally.count("answers read slowly")

    def _send_body(self) -> None:
        """Send a large body in chunks; the viewer must refuse it, and may close the connection at any point."""
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        sent = 0
        with contextlib.closing(self._connected()) as connection:
            connection.sendall(self._head(Question("/api/run"), "Transfer-Encoding: chunked"))
            with contextlib.suppress(ConnectionError):
                for _ in range(320):
                    connection.sendall(chunk)
                    sent += len(chunk)
                connection.sendall(b"0\r\n\r\n")
        if sent > 16 << 20:
            self._tally.fail("large bodies taken", f"{sent} bytes")
        else:
            self._tally.count("large bodies refused")

    def _keep(self, kind: str, connection: socket.socket, sent: bytes) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            while sent:
                sent = sent[connection.send(sent) :]
        self._stalled.append(Stalled(kind, connection, time.monotonic()))
        self._tally.count("connections left half open or unread")
        while len(self._stalled) > MOST_STALLED:
            self._stalled.pop(0).connection.close()

    def _look_at_stalled(self) -> None:
        """See whether the viewer has closed the stalled connections that it should have closed by now."""
        for one in list(self._stalled):
            if is_reset(one.connection):
                self._tally.count("half-open connections closed by the viewer")
            else:
                if one.kind == UNREAD and (queues := queues_of(self._port, one.connection)) != one.queues:
                    one.queues, one.moved = queues, time.monotonic()
                if time.monotonic() - one.moved <= self._stalled_seconds:
                    continue
                words = f"{one.kind}: {time.monotonic() - one.moved:.0f} s; the viewer's queues are {one.queues!r}"
                self._tally.fail("half-open connections that stayed", words)
            one.connection.close()
            self._stalled.remove(one)


def queues_of(port: int, connection: socket.socket) -> str:
    """Return how many bytes wait in the viewer's own socket of a connection, to be sent and to be read."""
    mine = connection.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if (int(fields[1][-4:], 16), int(fields[2][-4:], 16)) == (port, mine):
            return fields[4]
    return ""


def is_reset(connection: socket.socket) -> bool:
    """Say whether the other side has closed a connection, whose unread bytes stay unread."""
    try:
        found = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    if not found:
        return True
    # Bytes are there to be read: a reset shows in the socket's state, which does not need them.
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1  # 1: established
