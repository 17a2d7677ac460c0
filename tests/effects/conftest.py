"""One recorded run and its dense reference, for all tests of effects."""

import pytest

from helpers.paired import Pair, train_horizons


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The run of eleven steps, float64."""
    return train_horizons(tmp_path_factory.mktemp("effects"))
