"""Fixtures that every test may use; the machine is shared, so one thread."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# On CI the same examples every time: a rare new one is found at the desk, not in somebody's submission.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# Files whose subject is how a run is published. In every other file os.fsync does nothing: no test cuts the power.
PUBLISHING = {"test_faults.py", "test_folder.py", "test_format.py", "test_kill.py", "test_writer.py"}


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
