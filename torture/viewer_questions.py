"""What clients ask a viewer: ordinary questions over all routes, fuzzed ones, and ones that must be refused."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from torture.viewer_run import SIDE, STEPS

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Question:
    """A request: its path, its parameters, and what is unusual about it.

    Attributes:
        path: the path, as it is sent.
        pairs: names and values of the parameters, before they are quoted.
        method: the HTTP method.
        host: the Host header, where it is not 127.0.0.1.
        origin: the Origin header, if there is one.
        token: the token, where it is not the right one.
        raw: whether the values are quoted already.
    """

    path: str
    pairs: Pairs = ()
    method: str = "GET"
    host: str | None = None
    origin: str | None = None
    token: str | None = None
    raw: bool = field(default=False, compare=False)

    @property
    def address(self) -> str:
        """The path with the quoted parameters."""
        if not self.pairs:
            return self.path
        return (
            self.path + "?" + "&".join(f"{name}={value if self.raw else _quoted(value)}" for name, value in self.pairs)
        )


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


def ask(path: str, **values: Any) -> Question:
    """Return an ordinary question; a list stands for a parameter that is given several times."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        pairs += [(name, str(one)) for one in (value if isinstance(value, list) else [value])]
    return Question(path, tuple(pairs))


UNREADABLE = 503  # status of a viewer whose run lacks a file
PREPARING = "preparing"  # state of a badge that is not known yet
DRAWING = "gIAA" * (SIDE * SIDE // 3)  # base64 of one byte per pixel


def ordinary(tests: Sequence[int] = (0, 5, 11)) -> list[Question]:
    """Return questions over all routes, some of them about each of these tests; answers depend on the run alone."""
    found = [
        ask("/"),
        ask("/static/main.js"),
        ask("/static/nothing.js"),
        ask("/report.html", test=1),
        ask("/media/sample/3.png"),
        ask("/media/test/2.png"),
        ask("/media/test/999.png"),
        ask("/api/progress", job="nobody"),
        ask("/api/run"),
        ask("/api/tests"),
        ask("/api/snippets", first=2, count=5),
        ask("/api/search", text="zero"),
        ask("/api/passage", place=40, context=6),
        ask("/api/passage", place=100_000),
        ask("/api/badge", by="label"),
        ask("/api/groups", by="label"),
        ask("/api/path", test=1, by="label", references=0),
        ask("/api/badge", by="task,label"),
        ask("/api/sample", test=1, sample=7),
        ask("/api/sample", test=1, sample=100_000),
        ask("/api/prediction", drawn=DRAWING),
        ask("/api/prediction", test=4, prompt="one two"),
        ask("/api/mask", by="label", g=2),
        ask("/api/mask", by="label", g=[0, 3], only=1),
        ask("/api/mask", by="label", s="0-13"),
        ask("/api/mask", by="task,label", g='["even",1]', start="dropped"),
        ask("/api/mask", by="step:10", g=[10, 30], s="0-3"),
        ask("/api/mask", by="label", p=[3, 9], r=100_000, seed=5),
    ]
    for test in tests:
        found += [
            ask("/api/prediction", test=test),
            ask("/api/prediction", test=test, by="label", g=1),
            ask("/api/prediction", test=test, s="5-20", **{"in": "active"}),
            ask("/api/curves", test=test, by="label", k=20),
            ask("/api/time", test=test, by="label"),
            ask("/api/top", test=test, by="label", per="sample", k=6),
            ask("/api/top", test=test, by="label", tab="group", of="magnitude"),
            ask("/api/top", test=test, by="label", tab="negative", steps=f"3-{STEPS // 2}"),
            *(ask("/api/layers", test=test, by=by, of=of) for by in ("label", "step:10") for of in MEASURES),
        ]
    return found


MEASURES = ("attention", "magnitude", "contribution", "effect")

VALUES = (
    *("", "0", "-1", "-0", "007", "1e3", "1.5", "nan", "inf", "9223372036854775807", "9223372036854775808"),
    *(
        "-9223372036854775809",
        "1" + "0" * 19,
        "1" + "0" * 400,
        "4294967296",
        "999999999999999999",
        "\0",
        "a\0b",
        "\ud800",
    ),
    *("é", "١٢", " 1", "1 ", "\n", "\u202e", "' OR 1=1 --", '"', "\\", "null", "true", "[]", "[1]", "[1,2]", "[[1]]"),
    *("{}", '{"a":1}', "[null]", '"x"', '"\\ud800"', '"a\\u0000b"', "NaN", "Infinity", "-Infinity", "[NaN]", "1e400"),
    *("-1e400", "1e-400", "[1e400,1]", "1.5e300", "../../manifest.json", "%2e%2e", "x" * 250, "x" * 5000, "[" * 900),
    *(
        "label",
        "sample",
        "pattern",
        "step",
        "task",
        "score",
        "token",
        "row",
        "label,label",
        "label,",
        ",",
        ":",
        "label:",
    ),
    *("step:0", "step:-1", "step:nan", "step:inf", "step:1e-300", "step:1e300", "step:0.1", "step:1e18", "score:0.25"),
    *("score:1e-18", "task:3", "sample:7", "task,label,sample,step", "pattern,step,micro,call,row,position", "colour"),
    *("0-1", "0-600", "5-5", "9-3", "0-999999999999", "0-9999999999999", "-1-5", "all", "none", "effect", "magnitude"),
    *("group", "kept", "dropped", "active", "layers.0", "layers.9", "AAAA", DRAWING, DRAWING + "AAAA", "zero one"),
)
"""Hostile values, any of which may stand for any parameter."""

NAMES = (
    *(
        "test",
        "by",
        "of",
        "layer",
        "row",
        "k",
        "first",
        "count",
        "tab",
        "per",
        "steps",
        "g",
        "s",
        "p",
        "r",
        "seed",
        "only",
    ),
    *("start", "in", "drawn", "prompt", "text", "place", "context", "sample", "job", "token", "", "x" * 300, "é", "\0"),
)


def fuzzed(rng: random.Random, base: list[Question]) -> Question:
    """Return an ordinary question with some parameters changed, repeated, dropped or added."""
    question = rng.choice([one for one in base if one.path.startswith(("/api/", "/report", "/media"))])
    pairs = list(question.pairs)
    for _ in range(rng.randint(1, 4)):
        change = rng.random()
        if pairs and change < 0.45:
            at = rng.randrange(len(pairs))
            pairs[at] = (pairs[at][0], rng.choice(VALUES))
        elif pairs and change < 0.55:
            pairs.pop(rng.randrange(len(pairs)))
        elif pairs and change < 0.65:
            pairs += [rng.choice(pairs)] * rng.choice((1, 2, 300))
        else:
            pairs.append((rng.choice(NAMES), rng.choice(VALUES)))
    if rng.random() < 0.1:  # bytes that are no UTF-8, and signs that stand for themselves
        wild = tuple((_quoted(name), "".join(f"%{rng.randrange(256):02X}" for _ in range(6))) for name, _ in pairs)
        return Question(question.path, wild, raw=True)
    return Question(question.path, tuple((_quoted(name), value) for name, value in pairs))


FORBIDDEN = (
    Question("/api/run", token="wrong"),
    Question("/api/run", token=""),
    Question("/", (("token", "wrong"),), token=""),
    Question("/report.html", token="x" * 3000),
    Question("/static/main.js", token=""),
    Question("/api/tests", host="evil.example"),
    Question("/api/tests", host="127.0.0.1.evil.example"),
    Question("/api/tests", host=""),
    Question("/api/tests", origin="http://evil.example"),
    Question("/api/tests", origin="null"),
    Question("/api/tests", origin="http://127.0.0.1:1"),
    *(Question("/api/tests", method=method) for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE")),
    *(
        Question(path)
        for path in (
            "/static/../app.py",
            "/static/..%2fapp.py",
            "/static/%2e%2e/guard.py",
            "/static//etc/passwd",
            "/media/sample/..%2f..%2fmanifest.png",
            "/media/../manifest.json",
            "/media/sample/-1.png",
            "/media/sample/1e3.png",
            "/manifest.json",
            "/api/everything",
            "/.lock",
        )
    ),
    Question("/api/prediction", (("prompt", "x" * 40_000),)),
)
"""Requests that must be answered with 400 to 499, whatever happens to the run."""


def differs(found: Any, wanted: Any, *, at: str = "") -> str | None:
    """Say where two answers differ by more than rounding; nothing where they agree."""
    if isinstance(wanted, float) and isinstance(found, float | int) and not isinstance(found, bool):
        return None if math.isclose(found, wanted, rel_tol=1e-3, abs_tol=1e-5) else f"{at}: {found} for {wanted}"
    if isinstance(wanted, dict) and isinstance(found, dict):
        if found.keys() != wanted.keys():
            return f"{at}: other entries"
        return next((why for name in wanted if (why := differs(found[name], wanted[name], at=f"{at}/{name}"))), None)
    if isinstance(wanted, list) and isinstance(found, list):
        if len(found) != len(wanted):
            return f"{at}: {len(found)} entries for {len(wanted)}"
        pairs = enumerate(zip(found, wanted, strict=True))
        return next((why for i, (one, other) in pairs if (why := differs(one, other, at=f"{at}/{i}"))), None)
    if at.endswith("/state") and found == PREPARING:
        return None  # it becomes what is wanted
    return None if found == wanted else f"{at}: {str(found)[:80]!r} for {str(wanted)[:80]!r}"


def essence(question: Question, status: int, kind: str, body: bytes) -> Any:
    """Return what of an answer must be the same each time: all but where the run lies and what is still prepared."""
    if question.path == "/report.html":
        return [status, kind, body.endswith(b"</html>")]
    if kind != "application/json":
        return [status, kind, body.hex()]
    found = json.loads(body)
    if question.path == "/api/badge" and status == 200:
        found = {name: found[name] for name in ("state", "uncovered", "not_recorded")}
    if question.path == "/api/run" and status == 200:
        found = {name: value for name, value in found.items() if name not in ("name", "path")}
    if isinstance(found, dict) and "error" in found:
        found = {"error": True}  # its words may name the number of tests, or the run's folder
    return [status, found]
