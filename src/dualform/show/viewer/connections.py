"""Bounds on connections: how many there are, and how long one may wait for its client.

uvicorn closes a connection that is idle between two requests. One that sends half a request, or does not read its
answer, would stay open for as long as the client likes. Here every connection is looked at now and then, and ended
where the server waits for the client and nothing has moved. What the requests ask for is not looked at.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

STALLED_SECONDS = 20.0
"""Seconds that a client has to send a whole request, or to read something of an answer; up to one look more."""
LOOKS = 4  # looks at a connection in that time
MOST_CONNECTIONS = 128  # well below the 256 open files that some systems allow


class BoundedProtocol(H11Protocol):
    """One connection, which is ended when its client stalls, or when there are too many."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._next_look: asyncio.TimerHandle | None = None
        self._seen: object = None  # what the connection waited for at the last look
        self._looks = 0  # how often in a row it was the same
        self._began = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look at the connection; where there are too many, end the one that stalls most."""
        super().connection_made(transport)
        self._look_later()
        if len(self.connections) > MOST_CONNECTIONS:
            mine = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
            stalled = [one for one in mine if one._waits_for() is not None]
            most = max(stalled, key=lambda one: (one._looks, -one._began), default=self)
            self.connections.discard(most)  # it is told that it is lost only later
            most.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._next_look = self.loop.call_later(STALLED_SECONDS / LOOKS, self._look)

    def _look(self) -> None:
        seen = self._waits_for()
        self._looks = self._looks + 1 if seen is not None and seen == self._seen else 0
        self._seen = seen
        if self._looks >= LOOKS:
            self.transport.abort()
        else:
            self._look_later()

    def _waits_for(self) -> object:
        """Return what the client is to do next, which changes when it does; nothing where the server is at work."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            return "read", unread
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            return "send", self.cycle  # the request before: bytes that drip do not count
        return None
