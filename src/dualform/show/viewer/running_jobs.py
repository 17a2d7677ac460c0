"""Run a blocking question in a thread, report its progress, and stop it when the client has gone."""

import functools
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from dualform.progress import watching
from dualform.show.job import ReportedJob

R = TypeVar("R")
MAX_RUNNING_JOBS = 8  # questions that are worked on at the same time
MAX_NAMED_JOBS = 64  # jobs whose progress can be asked for


class Jobs:
    """The questions that are being worked on."""

    def __init__(self) -> None:
        self._limiter: anyio.CapacityLimiter | None = None
        self._named: dict[str, ReportedJob] = {}

    def progress(self, name: str) -> ReportedJob | None:
        """Return a job by the name that the page gave it."""
        return self._named.get(name)

    async def run(self, request: Request, name: str, work: Callable[[], R]) -> R:
        """Run `work` in a thread; raise `Cancelled` if the client goes away before it is done."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(MAX_RUNNING_JOBS)
        job = ReportedJob()
        if name:
            while len(self._named) >= MAX_NAMED_JOBS:
                self._named.pop(next(iter(self._named)))
            self._named[name] = job
        outcome: list[R] = []
        failure: list[BaseException] = []

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            job.cancelled = True

        def thread() -> None:
            try:
                with watching(job.report):
                    outcome.append(work())
            except BaseException as error:  # raised again below, outside of the task group
                failure.append(error)

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                await anyio.to_thread.run_sync(functools.partial(thread), limiter=self._limiter)
                group.cancel_scope.cancel()
        finally:
            self._named.pop(name, None)
        if failure:
            raise failure[0]
        return outcome[0]
