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

from dualform.errors import CorruptError, DualformError, FormatError, RunNotFoundError, SharesOnlyError
from dualform.show.grouping import default_by
from dualform.show.job import Cancelled, job_progress
from dualform.show.panels.path_account import REFERENCE_INPUTS, offer_path, usual_units
from dualform.show.png import png
from dualform.show.session import Session
from dualform.show.terminal_tables import plain
from dualform.show.viewer.opened import Opened
from dualform.show.viewer.parameters import BadQuestion, RequestParameters
from dualform.show.viewer.routes import RouteAnswer, questions
from dualform.show.viewer.running_jobs import Jobs

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
IMAGE_CACHING = "private, max-age=86400"  # Cache-Control of images, whose content never changes


def make_app(opened: Opened) -> Starlette:
    """Return the application that answers about one run; `guard` decides who may ask."""
    jobs = Jobs()
    files = static_files()

    def endpoint(answer: RouteAnswer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            parameters = RequestParameters(request.query_params.multi_items())
            return await _answered(
                jobs, request, parameters, lambda: opened.answer(lambda session: rendered(answer(session, parameters)))
            )

        return respond

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
            *(Route(path, endpoint(answer)) for path, answer in questions().items()),
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
    try:
        return await jobs.run(request, "" if parameters is None else parameters.job(), work)
    except Cancelled:
        return rendered({"error": "cancelled"}, 499)
    except RunNotFoundError as error:
        return rendered({"error": str(error), "empty": True}, 404)
    except (CorruptError, FormatError) as error:
        return rendered({"error": str(error)}, 503)  # no question can be answered until the run is repaired
    except SharesOnlyError as error:
        return rendered({"needs_patterns": str(error)})  # no failure: the panel says so in its place
    except DualformError as error:
        return rendered({"error": str(error)}, 400)
    except OSError as error:
        return rendered({"error": f"A file of the run cannot be read: {error}. Restore it from a copy."}, 503)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return rendered({"error": f"{type(error).__name__}: {error}"}, 500)


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
    from dualform.show.report.build import build_report

    test = parameters.number("test", 0, high=max(len(session.tests) - 1, 0))
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
