"""The application: its routes, and how an answer or a failure becomes a response."""

import importlib.resources
import json
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dualform.engine.consent import asking_before_replays
from dualform.errors import (
    CorruptError,
    DualformError,
    FormatError,
    ReplayError,
    ReplayNeededError,
    RunNotFoundError,
    SharesOnlyError,
)
from dualform.show.grouping import default_by
from dualform.show.job import Cancelled, job_progress
from dualform.show.panels.path_account import REFERENCE_INPUTS, offer_path, usual_units
from dualform.show.png import png
from dualform.show.session import Session
from dualform.show.terminal_tables import plain
from dualform.show.viewer.opened import Opened
from dualform.show.viewer.parameters import BadQuestion, RequestParameters
from dualform.show.viewer.replays import ReplayQuestion
from dualform.show.viewer.routes import RouteAnswer, question_name, questions, read_questions
from dualform.show.viewer.running_jobs import Jobs

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
IMAGE_CACHING = "private, max-age=86400"  # Cache-Control of images, whose content never changes


def make_app(opened: Opened, *, page_token: str) -> Starlette:
    """Return the application that answers about one run; `guard` decides who may ask.

    Args:
        opened: the run.
        page_token: what the page has to send with what it posts; it is told to whoever may ask.
    """
    jobs = Jobs()
    files = static_files()

    def endpoint(path: str, answer: RouteAnswer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            pairs = request.query_params.multi_items()
            parameters = RequestParameters(pairs)
            asked = ReplayQuestion(question_name(path, pairs), lambda session: answer(session, parameters))
            return await _answered(
                jobs, request, parameters, lambda: opened.answer(lambda session: rendered(_now_or_kept(session, asked)))
            )

        return respond

    async def page(request: Request) -> Response:
        return rendered({"token": page_token})

    async def replay(request: Request) -> Response:
        if request.method != "POST":
            return rendered(opened.replays.state())
        if request.url.path.endswith("/cancel"):
            return rendered(opened.replays.cancel())
        texts = request.query_params.getlist("q")
        return await _answered(
            jobs, request, None, lambda: rendered(opened.replays.start(opened.session(), read_questions(texts)))
        )

    async def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return PlainTextResponse("404: there is no such file.\n", 404)
        kind, content = files[name]
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    async def progress(request: Request) -> Response:
        try:
            job = jobs.progress(RequestParameters(request.query_params.multi_items()).job())
            return rendered({"running": False} if job is None else job_progress(job))
        except BadQuestion as error:
            return rendered({"error": str(error)}, 400)

    async def image(request: Request) -> Response:
        what, number = request.path_params["what"], request.path_params["number"]
        if not re.fullmatch(r"[0-9]{1,15}", number):
            return PlainTextResponse("404: an image is named by a number.\n", 404)
        return await _answered(jobs, request, None, lambda: opened.answer(lambda run: _image(run, what, int(number))))

    async def report(request: Request) -> Response:
        parameters = RequestParameters(request.query_params.multi_items())
        return await _answered(
            jobs, request, parameters, lambda: opened.answer(lambda session: _report(session, parameters))
        )

    return Starlette(
        routes=[
            Route("/", static),
            Route("/static/{name:path}", static),
            Route("/media/{what}/{number}.png", image),
            Route("/api/progress", progress),
            Route("/report.html", report),
            Route("/api/page", page),
            Route("/api/replay", replay, methods=["GET", "POST"]),
            Route("/api/replay/cancel", replay, methods=["POST"]),
            *(Route(path, endpoint(path, answer)) for path, answer in questions().items()),
        ]
    )


def rendered(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    body = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return Response(body, status, media_type="application/json")


async def _answered(
    jobs: Jobs, request: Request, parameters: RequestParameters | None, work: Callable[[], Response]
) -> Response:
    """Run a question in a thread; every failure is an answer that says what failed."""

    def asking_first() -> Response:
        with asking_before_replays():
            return work()

    try:
        return await jobs.run(request, "" if parameters is None else parameters.job(), asking_first)
    except Cancelled:
        return rendered({"error": "cancelled"}, 499)
    except RunNotFoundError as error:
        return rendered({"error": str(error), "empty": True}, 404)
    except (CorruptError, FormatError) as error:
        return rendered({"error": str(error)}, 503)  # no question can be answered until the run is repaired
    except ReplayNeededError as error:
        return rendered({"needs_replay": str(error), "seconds": error.seconds})  # no failure: the panel offers it
    except ReplayError as error:
        return rendered({"needs_patterns": str(error)})  # the training may not be called, or differs
    except SharesOnlyError as error:
        return rendered({"needs_patterns": str(error)})  # no failure: the panel says so in its place
    except DualformError as error:
        return rendered({"error": str(error)}, 400)
    except OSError as error:
        return rendered({"error": f"A file of the run cannot be read: {error}. Restore it from a copy."}, 503)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return rendered({"error": f"{type(error).__name__}: {error}"}, 500)


def _now_or_kept(session: Session, question: ReplayQuestion) -> Any:
    """Return the answer to a question, or where it needs a replay the one that a replay has brought."""
    try:
        return question.answer(session)
    except ReplayNeededError:
        if question.name not in session.replayed:
            raise
        kept = session.replayed[question.name]
        if isinstance(kept, DualformError):
            raise kept from None
        return kept


def _image(session: Session, what: str, number: int) -> Response:
    if what == "sample":
        pixels = session.media.image(number)
    elif what == "test" and session.test_images is not None and number < len(session.test_images):
        pixels = session.test_images[number]
    else:
        pixels = None
    if pixels is None:
        return PlainTextResponse("404: there is no such image.\n", 404)
    return Response(png(pixels.numpy()), media_type="image/png", headers={"Cache-Control": IMAGE_CACHING})


def _report(session: Session, parameters: RequestParameters) -> Response:
    test = parameters.number("test", 0, high=max(len(session.tests) - 1, 0))
    try:
        return _report_of(session, test)
    except ReplayNeededError as error:
        return PlainTextResponse(f"409: {error} `dualform report RUN` does it, with --trust or --train.\n", 409)


def _report_of(session: Session, test: int) -> Response:
    from dualform.show.report.build import build_report

    by = default_by(session.memory)
    subject = session.test(test)
    units = usual_units(session.outputs(subject), subject.target)
    offered = offer_path(session, subject, by, units, references=REFERENCE_INPUTS, start=False)
    paths = {} if offered.account is None else {test: offered.account}  # a page's answer does not wait for a path
    page = build_report(session, tests=[test], by=by, media=True, paths=paths)
    name = f"attachment; filename=dualform-report-{test}.html"
    return Response(page, media_type="text/html", headers={"Content-Disposition": name})


def static_files() -> dict[str, tuple[str, bytes]]:
    """Return the page's own files by name, with their types: the only files that are ever served."""
    found: dict[str, tuple[str, bytes]] = {}

    def walk(folder: Any, prefix: PurePosixPath) -> None:
        for entry in folder.iterdir():
            name = prefix / entry.name
            if entry.is_dir():
                walk(entry, name)
            elif name.suffix in MEDIA_TYPES:
                found[str(name)] = (MEDIA_TYPES[name.suffix], entry.read_bytes())

    walk(importlib.resources.files("dualform.show.viewer") / "static", PurePosixPath())
    return found
