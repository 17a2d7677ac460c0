"""Who may ask: the right host name, the right token, no body. Wraps the application; knows nothing of runs.

Everything is a GET, but for what begins or ends a replay of the training. That is a POST, and comes with a second token
that only the page itself can read.

The token comes once in the address that the terminal printed, and is swapped for a cookie that scripts cannot read and
other sites cannot send. The host name is checked because a page of another site can make a name of its own point here
(DNS rebinding).
"""

import hmac
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POSTED = ("/api/replay", "/api/replay/cancel")
"""The only paths that are posted to."""
PAGE_HEADER = "x-dualform-page"
LONGEST_QUERY = 32 << 10  # bytes
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_TOKEN = (
    "403: this viewer answers only to the address that `dualform view` printed, with its token. Copy it from there.\n"
)


class Guard:
    """Lets requests through to the application, or refuses them."""

    def __init__(
        self, app: ASGIApp, *, token: str, cookie: str, hosts: Collection[str], page_token: str | None = None
    ) -> None:
        self._app = app
        self._page_token = page_token
        self._token = token
        self._cookie = cookie
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refuse(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (refused or self._app)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._is_known(headers.getlist("host")):
            return PlainTextResponse("400: unknown host name. Open the viewer as 127.0.0.1 or localhost.\n", 400)
        if any(origin.partition("://")[2] != headers["host"] for origin in headers.getlist("origin")):
            return PlainTextResponse("403: a page of another site asks.\n", 403)
        posted = scope["method"] == "POST" and scope["path"] in POSTED
        if scope["method"] not in ("GET", "HEAD") and not posted:
            refusal = {"Allow": "GET, HEAD", "Connection": "close"}  # a body may follow, which nobody reads
            return PlainTextResponse("405: the viewer changes nothing; only GET.\n", 405, refusal)
        if "transfer-encoding" in headers or headers.get("content-length", "0").strip("0"):
            return PlainTextResponse("413: a question has no body.\n", 413, {"Connection": "close"})
        if len(scope["query_string"]) > LONGEST_QUERY:
            return PlainTextResponse(f"414: more than {LONGEST_QUERY} bytes of parameters.\n", 414)
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="replace")
        given = [value for name, value in pairs if name == "token"]
        if given and scope["path"] == "/":
            return self._enter(given[0], [pair for pair in pairs if pair[0] != "token"])
        found = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if not self._is_token(found):
            return PlainTextResponse(NO_TOKEN, 403)
        if posted and not (self._page_token and _equal(headers.get(PAGE_HEADER, ""), self._page_token)):
            return PlainTextResponse("403: only the viewer's own page begins or ends a replay.\n", 403)
        return None

    def _enter(self, token: str, others: list[tuple[str, str]]) -> Response:
        if not self._is_token(token):
            return PlainTextResponse(NO_TOKEN, 403)
        # Not a redirect: a strict cookie is not sent along one that another site began.
        target = "/?" + urlencode(others) if others else "/"
        response = HTMLResponse(
            f'<!doctype html><meta http-equiv="refresh" content="0;url={_escaped(target)}">'
            '<link rel="icon" href="data:,"><title>dualform</title>'
        )
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response

    def _is_token(self, given: str) -> bool:
        return _equal(given, self._token)

    def _is_known(self, hosts: list[str]) -> bool:
        if len(hosts) != 1:
            return False
        name, colon, port = hosts[0].rpartition(":")
        host = name if colon and port.isdigit() else hosts[0]
        return host.lower() in self._hosts


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
