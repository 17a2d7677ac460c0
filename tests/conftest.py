"""Fixtures that every test may use; the machine is shared, so one thread."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# On CI the same examples every time: a rare new one is found at the desk, not in somebody's submission.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"
