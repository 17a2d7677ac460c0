"""Fixtures that every test may use; the machine is shared, so one thread."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"
