"""A small run of digits and a server on it, shared by the tests of the viewer."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import dualform
from dualform.experiments.datasets import load
from dualform.experiments.image_training import ClassifierRecipe, Phase, make_tasks, train_classifier
from helpers.served import Running
from helpers.small_models import record_letters


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
