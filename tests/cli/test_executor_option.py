"""`--executor` of the commands that ask: the named executor runs their jobs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dualform import cli, opening
from dualform.engine.jobs import Job
from dualform.engine.plain import PlainExecutor
from dualform.engine.source import PatternSource
from dualform.errors import QueryError
from dualform.show.viewer.serve import make_server
from helpers.served import Running
from helpers.small_models import record_pictures


class CountingExecutor:
    """The plain executor, which counts the jobs of all of its kind."""

    jobs = 0

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        CountingExecutor.jobs += len(jobs)
        return PlainExecutor().run(source, jobs)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[CountingExecutor]:
    monkeypatch.setitem(opening.EXECUTORS, "counting", f"{__name__}:CountingExecutor")
    monkeypatch.setattr(CountingExecutor, "jobs", 0)
    return CountingExecutor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("executor") / "run"
    record_pictures(found)
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify"],
        ["attend", "--by", "label", "--trust"],
        ["attend", "--of", "path", "--by", "label", "--trust", "--test", "0"],
        ["mask", "--without", "label = 1", "--trust"],
        ["report", "--tests", "1", "--trust"],
    ],
)
def test_a_command_uses_the_executor_that_is_named(
    folder: Path, tmp_path: Path, counting: type[CountingExecutor], arguments: list[str]
) -> None:
    command, *options = arguments
    more = ["-o", str(tmp_path / "report.html")] if command == "report" else []
    found = CliRunner().invoke(cli.app, [command, str(folder), *options, *more, "--executor", "counting"])
    assert found.exit_code == 0, found.output + str(found.exception)
    assert counting.jobs > 0


def test_the_viewer_uses_the_executor_that_is_named(folder: Path, counting: type[CountingExecutor]) -> None:
    server = Running(folder, executor="counting")
    with server.client() as client:
        assert client.get("/api/curves", params={"test": 2, "by": "label"}).status_code == 200
    server.stop()
    assert counting.jobs > 0


def test_a_name_that_is_no_executor_is_refused(folder: Path) -> None:
    with pytest.raises(QueryError, match="no executor 'abacus'"):
        make_server(folder, executor="abacus")
