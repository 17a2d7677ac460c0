"""Fixtures that every test may use; the machine is shared, so one thread."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# No example has a deadline: the machine may be busy. On CI they are the same every time: a rare new one is found at the
# desk, not in somebody's submission.
settings.register_profile("suite", deadline=None)
settings.register_profile("ci", settings.get_profile("suite"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")

# Files whose subject is how a run is published. In every other file os.fsync does nothing: no test cuts the power.
PUBLISHING = {"test_faults.py", "test_folder.py", "test_format.py", "test_kill.py", "test_writer.py"}


# Files that take longest, five seconds of a processor and more, roughly in that order. They come first: a file is run
# by one process, and the others would wait for one that begins last. (Without --no-loadscope-reorder xdist begins with
# the most tests.)
LONG = (
    *("test_exactness_matrix.py", "test_notebooks.py", "test_shares_matrix.py", "test_browser.py"),
    *("test_transformers.py", "test_onesided.py", "test_elementwise.py", "test_joint_preparation.py"),
    *("test_clients.py", "test_cli.py", "test_text_session.py", "test_ray_executor.py", "test_images.py"),
    *("test_connections.py", "test_rows.py", "test_blobs.py", "test_doubts.py", "test_tricks.py"),
    *("test_interrupts.py", "test_path_trainings.py", "test_forgeries.py", "test_distinct.py"),
    *("test_optimizers.py", "test_site.py", "test_kills.py", "test_recurrent.py", "test_pages.py"),
    *("test_replay_executor.py", "test_hooks.py", "test_toys.py", "test_object_blobs.py", "test_memory.py"),
    *("test_divided.py", "test_path_samples.py", "test_exactness.py", "test_joint_replay.py"),
    *("test_imports.py", "test_spotlight.py", "test_conv.py", "test_golden_studies.py"),
)


@pytest.hookimpl(tryfirst=True)  # before pytest itself deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the `LONG` files first; mark as slow campaigns, browser tests, and cases of a `mostly_slow` test.

    All cases of a `mostly_slow` test are slow but the `fast` ones.

    The cases are cut into `fast` blocks of equal length, and one case in each stays fast: the first of the first block,
    the second of the second. Of a table of layers by optimizers that is a diagonal.
    """
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("browser") or item.get_closest_marker("campaign"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("mostly_slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("mostly_slow")
        assert marker is not None
        length = max(1, len(found) // marker.kwargs["fast"])
        for place, item in enumerate(found):
            block, offset = divmod(place, length)
            if offset != block % length:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take what is there before the first test out of Python's search for cycles, which would go through it each time.

    Modules and collected tests are about a million objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_fsync(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make `os.fsync` do nothing in a test file, unless publishing is the file's subject."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in PUBLISHING:
            patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    """Forget after each test, passed or failed, every function that `torch.compile` has compiled (30 µs)."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a process: a second one of playwright cannot be started beside it."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("needs Chromium: on Debian `apt-get install chromium`; scripts/test does it when it runs as root")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()
