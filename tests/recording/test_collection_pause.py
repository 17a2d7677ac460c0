"""Python searches for cycles again after a step, also after one that failed, and never where the user forbids it."""

import gc

import pytest

from dualform.recording.collection_pause import pausing_collection


def test_the_search_is_paused_and_goes_on() -> None:
    seen = []

    @pausing_collection
    def work(fail: bool) -> None:
        seen.append(gc.isenabled())
        if fail:
            raise ValueError("no")

    work(False)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        work(True)
    assert gc.isenabled()
    gc.disable()
    try:
        work(False)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False] * 3


def test_an_interrupt_just_after_the_search_was_paused_lets_it_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pausing_collection(gc.isenabled)()
    assert gc.isenabled()
