"""Whether a recording in a framework goes on with an earlier one."""

from pathlib import Path

import dualform
from dualform.integrations.resuming import decide_resume
from helpers.loops import mlp, sgd


def test_a_run_goes_on_where_there_is_one_and_a_checkpoint_was_loaded(run: Path) -> None:
    assert decide_resume("auto", run, step=3) is False
    model = mlp()
    with dualform.record(model, sgd(model), run):
        pass
    assert decide_resume("auto", run, step=3) is True
    assert decide_resume("auto", run, step=0) is False
    assert decide_resume(2, run, step=0) == 2
    assert decide_resume(False, run, step=3) is False
