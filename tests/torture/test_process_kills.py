"""The campaign of kills of several processes, in its short form; and that it can fail."""

import random
import time
from pathlib import Path

import pytest

from torture import process_kills


@pytest.mark.slow
def test_process_kills(tmp_path: Path) -> None:
    outcome = process_kills.run(tmp_path, short=True, seed=2022)
    assert not outcome.failures
    assert outcome.counts["SIGKILLs of one of two processes"] == outcome.counts["SIGKILLs of both processes"] == 1


def test_lost_steps_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = process_kills._Campaign(tmp_path, random.Random(1), 1)
    found = iter([3, 9, 7])  # published before the recording, at the kill, and after it
    monkeypatch.setattr(process_kills, "_published", lambda path: next(found))
    monkeypatch.setattr(campaign, "_wait_for_a_moment", lambda *args: next(found))
    monkeypatch.setattr(process_kills, "take_steps", lambda *args: time.sleep(10))
    with pytest.raises(AssertionError, match="9 steps were published before the kill, and 7 after it"):
        campaign._kill(process_kills.TRAININGS[0], tmp_path / "run", 3, [], "all")
