"""Who may ask, and what may be asked for: hosts, tokens, methods, names of things, parameters."""

import contextlib
import http.client

import httpx
import pytest


def status(running, path="/api/run", *, host=None, cookie=True, method="GET", origin=None):
    """Ask with headers of our own choosing; return (status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", running.socket.getsockname()[1], timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name in [host] if isinstance(host, str) else host or ["127.0.0.1"]:
        connection.putheader("Host", name)
    if origin is not None:
        connection.putheader("Origin", origin)
    if cookie:
        port = running.socket.getsockname()[1]
        connection.putheader("Cookie", f"dualform-{port}={running.token if cookie is True else cookie}")
    connection.endheaders()
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, response.headers, response.read()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "127.0.0.1:8000"])
def test_the_right_hosts_are_answered(running, host):
    assert status(running, host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::1]x"])
def test_other_hosts_are_400_even_with_the_token(running, host):
    code, _, body = status(running, host=host)
    assert code == 400
    assert b"steps" not in body


@pytest.mark.parametrize("path", ["/", "/api/run", "/static/main.js", "/media/test/0.png", "/report.html", "/nothing"])
@pytest.mark.parametrize("cookie", [False, "wrong", "", "ä"])
def test_no_token_or_a_wrong_one_is_403(running, path, cookie):
    cookie = cookie.encode("utf-8").decode("latin-1") if cookie else cookie
    assert status(running, path, cookie=cookie)[0] == 403


def test_a_wrong_token_in_the_address_is_403_and_sets_no_cookie(running):
    code, headers, _ = status(running, "/?token=wrong", cookie=False)
    assert code == 403
    assert "set-cookie" not in headers


def test_the_token_is_swapped_for_a_cookie_that_scripts_and_other_sites_cannot_use(running):
    code, headers, body = status(running, f"/?token={running.token}&test=3", cookie=False)
    assert code == 200
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "domain" not in cookie
    assert running.token.encode() not in body
    assert b"url=/?test=3" in body


def test_the_way_in_does_not_carry_markup(running):
    _, _, body = status(running, f"/?token={running.token}&test=%22%3E%3Cscript%3Ealert(1)%3C/script%3E", cookie=False)
    assert b"<script" not in body


@pytest.mark.parametrize("path", ["/", "/api/run", "/media/test/0.png", "/static/main.js", "/nothing", "/api/top?k=x"])
def test_every_answer_has_the_headers_of_a_careful_server(running, path):
    _, headers, _ = status(running, path)
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_get_only(running, method):
    code, headers, _ = status(running, method=method)
    assert code == 405
    assert headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        "/media/sample/..%2f..%2fmanifest.png",
        "/media/sample/../../manifest.json",
        "/media/../manifest.json",
        "/media/sample/-1.png",
        "/media/sample/1e3.png",
        "/media/sample/999999999.png",
        "/media/sample/" + "9" * 5000 + ".png",
        "/media/passwd/0.png",
        "/media/test/999999.png",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/guard.py",
        "/static//etc/passwd",
        "/static/",
        "/manifest.json",
    ],
)
def test_path_tricks_find_nothing(running, path):
    code, _, body = status(running, path)
    assert code == 404
    assert len(body) < 200


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/prediction?test=-1", "test"),
        ("/api/prediction?test=abc", "test"),
        ("/api/prediction?test=999999", "no test 999999"),
        ("/api/prediction?test=" + "9" * 400, "characters"),
        ("/api/prediction?test=%00", "test"),
        ("/api/prediction?test=%D9%A3", "whole number"),
        ("/api/layers?by=colour", "no column 'colour'"),
        ("/api/layers?by=step:wide", "column:width"),
        ("/api/layers?by=step:-5", "column:width"),
        ("/api/layers", "by is missing"),
        ("/api/layers?by=label&of=influence", "influence"),
        ("/api/top?by=label&layer=layers.9", "no layer 'layers.9'"),
        ("/api/top?by=label&k=100000", "from 1 to 60"),
        ("/api/top?by=label&steps=5", "0-600"),
        ("/api/top?by=label&steps=9-3", "0-600"),
        ("/api/prediction?by=label&g=%5B%5B1%5D%5D", "expected a number"),
        ("/api/prediction?by=label&g={", "JSON"),
        ("/api/prediction?by=label&g=[1,2]", "number of values"),
        ("/api/prediction?g=1", "without the column"),
        ("/api/mask?by=task,label&g=1", "number of values"),
        ("/api/mask?by=task,label&g=null", "number of values"),
        ("/api/mask?by=step:10&g=%22x%22", "bins"),
        ("/api/mask?by=step:10&g=true", "bins"),
        ("/api/mask?by=label&g=" + "9" * 300, "64 bits"),
        ("/api/mask?by=label&p=%22%5Cud800%22", "cannot be encoded"),
        ("/api/prediction?by=label&" + "&".join(["g=1"] * 300), "at most 256"),
        ("/api/prediction?drawn=!!!", "not base64"),
        ("/api/prediction?drawn=AAAA", "an input has 64"),
        ("/api/prediction?prompt=hello", "no vocabulary"),
        ("/api/prediction?start=maybe", "kept, dropped"),
        ("/api/passage?place=1", "no text"),
        ("/api/search?text=", "nothing to search"),
        ("/api/sample?test=0&sample=1000000", "no training sample"),
        ("/api/progress?job=../x", "letters"),
        ("/api/mask?by=label&g=3&only=2", "only"),
    ],
)
def test_malformed_parameters_are_400_with_a_reason(running, path, words):
    code, headers, body = status(running, path)
    assert code == 400, body
    assert headers["content-type"] == "application/json"
    assert words in body.decode()
    assert "Traceback" not in body.decode()


def test_a_group_of_one_column_may_come_as_a_list(running):
    assert status(running, "/api/mask?by=step:10&g=[10]")[2] == status(running, "/api/mask?by=step:10&g=10")[2]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://127.0.0.1:1"])
def test_a_page_of_another_site_is_403_even_with_the_cookie(running, origin):
    code, _, body = status(running, origin=origin)
    assert code == 403
    assert b"steps" not in body


def test_the_viewers_own_page_may_say_where_it_is_from(running):
    assert status(running, origin="http://127.0.0.1")[0] == 200


def test_an_oversized_question_is_refused(running):
    # The server closes the connection without reading all of the question, so that its system may reset it, and ours
    # may then drop an answer that has come already: ask again.
    for attempt in range(5):
        try:
            found = status(running, "/api/prediction?prompt=" + "x" * 40_000)[0]
            break
        except ConnectionError:
            assert attempt < 4, "no answer came through"
    assert found == 414
    assert status(running, "/api/prediction?prompt=" + "x" * 5000)[0] == 400


def test_an_unknown_question_is_404(client: httpx.Client):
    assert client.get("/api/everything").status_code == 404
