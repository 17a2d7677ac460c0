"""A small run of digits, a server on it, and a browser, shared by the tests of the viewer."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import dualform
from dualform.experiments.datasets import load
from dualform.experiments.image_training import ClassifierRecipe, Phase, make_tasks, train_classifier
from helpers.served import Running
from helpers.small_models import record_letters

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
NO_CHROMIUM = "needs Chromium: on Debian `apt-get install chromium`; scripts/test does it when it runs as root"


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A recorded run of digits with its model and its task."""
    folder = tmp_path_factory.mktemp("viewer") / "run"
    tasks = make_tasks([load("digits")])
    recipe = ClassifierRecipe(hidden=(24, 16), learning_rate=0.05, batch=64)
    model = train_classifier(tasks, [Phase(("digits",), 80)], recipe, folder, seed=0)
    return SimpleNamespace(folder=folder, model=model, task=tasks[0])


@pytest.fixture(scope="session")
def running(digits: SimpleNamespace) -> Iterator[Running]:
    server = Running(digits.folder)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[httpx.Client]:
    with running.client() as found:
        yield found


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which scripts/test fetches by npm."""
    folders = [os.environ.get("DUALFORM_AXE", ""), str(Path(__file__).parents[3] / ".venv" / "axe")]
    for folder in folders:
        path = Path(folder) / "node_modules" / "axe-core" / "axe.min.js"
        if folder and path.is_file():
            return path.read_text(encoding="utf-8")
    pytest.skip("needs axe-core: npm install --prefix .venv/axe axe-core; scripts/test does it where there is npm")


@pytest.fixture
def memory(digits: SimpleNamespace) -> dualform.Memory:
    return dualform.open(digits.folder)


@pytest.fixture(scope="session")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server on a run of letters."""
    folder = tmp_path_factory.mktemp("letters") / "run"
    record_letters(folder)
    server = Running(folder)
    yield server
    server.stop()
