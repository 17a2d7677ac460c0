"""One recorded run and its dense reference, for all tests of attend."""

import pytest

from helpers.paired import STEPS, Pair, train_both


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The run of eleven steps, float64; `references[s]` is that of the first s steps."""
    folder = tmp_path_factory.mktemp("attend")
    pairs = [train_both(folder / str(steps), steps) for steps in (0, 3, 6, STEPS)]
    whole = pairs[-1]
    by_step = {p.memory.step: p.reference for p in pairs}
    whole.references = [by_step.get(step, whole.reference) for step in range(STEPS + 1)]
    return whole
