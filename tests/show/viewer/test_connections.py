"""Connections whose client does not do its part: half a request, no request, a body, an answer that nobody reads."""

import contextlib
import socket
import time

import pytest

from dualform.show.viewer import connections
from helpers.served import Running

STALLED = 1.0  # seconds, instead of the viewer's own


@pytest.fixture
def quick(digits, monkeypatch):
    """A server that gives its clients a second."""
    monkeypatch.setattr(connections, "STALLED_SECONDS", STALLED)
    server = Running(digits.folder)
    yield server
    server.stop()


def connected(server, sent=b"", **options):
    """Return a socket that has sent some bytes."""
    found = socket.socket()
    for option, value in options.items():
        found.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    found.settimeout(20)
    found.connect(server.socket.getsockname())
    found.sendall(sent)
    return found


def head(server, path="/api/run", *more):
    """Return the head of a request that may ask."""
    port = server.socket.getsockname()[1]
    lines = (f"GET {path} HTTP/1.1", "Host: 127.0.0.1", f"Cookie: dualform-{port}={server.token}", *more)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def is_closed_within(found, seconds):
    """Say whether the server closes a connection, whatever it sends before."""
    found.settimeout(seconds)
    try:
        while found.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


HALVES = {
    "nothing": b"",
    "half a request line": b"GET /api/ru",
    "half a head": b"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: dual",
    "half a body": b"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nabc",
    "half a chunk": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
}


def test_connections_without_a_whole_request_are_closed(quick):
    """All at once: each of them waits for as long as a client is given."""
    halves = {**HALVES, "half a second request": head(quick, "/static/main.js") + b"GET /api"}
    with contextlib.ExitStack() as stack:
        found = {name: stack.enter_context(contextlib.closing(connected(quick, sent))) for name, sent in halves.items()}
        open_still = {name for name, one in found.items() if not is_closed_within(one, 4 * STALLED)}
    assert open_still == set()


def send_all(found, parts, pause=0.0):
    """Send parts one after the other; a `ConnectionError` where the server has closed."""
    for part in parts:
        found.sendall(part)
        time.sleep(pause)


def test_bytes_that_drip_do_not_keep_a_connection_open(quick):
    lines = [f"X-{number}: a\r\n".encode() for number in range(30)]
    with contextlib.closing(connected(quick, b"GET / HTTP/1.1\r\n")) as found, pytest.raises(ConnectionError):
        send_all(found, lines, pause=0.2)


def test_a_connection_that_asks_again_and_again_stays(quick):
    with contextlib.closing(connected(quick)) as found:
        began = time.monotonic()
        while time.monotonic() - began < 3 * STALLED:
            found.sendall(head(quick, "/api/progress?job=a"))
            got = b""
            while not got.endswith(b'{"running":false}'):
                got += found.recv(1 << 16)
            time.sleep(0.3)


def test_a_long_question_is_waited_for(quick, monkeypatch):
    opened = quick.server.opened.session

    def slow_session():
        time.sleep(3 * STALLED)
        return opened()

    monkeypatch.setattr(quick.server.opened, "session", slow_session)
    with contextlib.closing(connected(quick, head(quick))) as found:
        assert found.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_reads_is_given_up(quick):
    many = head(quick, "/static/panels.css") * 2000  # more than the system's buffers hold
    with contextlib.closing(connected(quick, SO_RCVBUF=4096)) as found:
        found.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            found.sendall(many)
        deadline = time.monotonic() + 6 * STALLED
        while quick.server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not quick.server.server_state.connections


def test_an_answer_that_is_read_slowly_arrives(quick):
    with contextlib.closing(
        connected(quick, head(quick, "/report.html", "Connection: close"), SO_RCVBUF=4096)
    ) as found:
        got = b""
        began = time.monotonic()
        while part := found.recv(1 << 13):  # about forty parts
            got += part
            time.sleep(0.15)
    assert time.monotonic() - began > 2 * STALLED
    assert got.endswith(b"</html>")


def test_three_hundred_half_open_connections_do_not_keep_others_out(digits):
    server = Running(digits.folder)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(contextlib.closing(connected(server, b"GET /api/ru")))
        with contextlib.closing(connected(server, head(server))) as found:
            assert found.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert len(server.server.server_state.connections) <= connections.MOST_CONNECTIONS
    server.stop()


@pytest.mark.parametrize(
    "more", [("Content-Length: 5",), ("Transfer-Encoding: chunked",), ("Content-Length: 5", "Expect: 100-continue")]
)
def test_a_question_with_a_body_is_413_and_the_connection_ends(running, more):
    with contextlib.closing(connected(running, head(running, "/api/run", *more))) as found:
        assert found.recv(1 << 16).startswith(b"HTTP/1.1 413")
        assert is_closed_within(found, 5)


def test_a_large_body_is_not_taken(running):
    asked = head(running, "/api/run", "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    with contextlib.closing(connected(running, asked)) as found, pytest.raises(ConnectionError):
        send_all(found, [chunk] * 1000)


def test_a_length_of_nothing_is_no_body(running):
    with contextlib.closing(connected(running, head(running, "/api/run", "Content-Length: 0"))) as found:
        assert found.recv(1 << 16).startswith(b"HTTP/1.1 200")
