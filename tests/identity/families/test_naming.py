"""Names of optimizer types: two of one class name are two, and a name without a module is torch's."""

import numpy as np
import pytest
import torch

from dualform.errors import FormatError
from dualform.identity.families import Facts, derive, find_optimizer_kind, optimizer_kinds
from dualform.identity.families.naming import class_name, full_name, optimizer_name, same_optimizer


class AdamW(torch.optim.AdamW):
    """An optimizer of somebody else, called like torch's."""


def test_two_optimizers_of_one_class_name_do_not_collide() -> None:
    assert optimizer_name(torch.optim.AdamW) == "torch.optim:AdamW"
    assert optimizer_name(AdamW) == f"{__name__}:AdamW"
    assert class_name(optimizer_name(AdamW)) == "AdamW"
    assert find_optimizer_kind(optimizer_name(AdamW)) is None
    assert not same_optimizer(optimizer_name(AdamW), optimizer_name(torch.optim.AdamW))


@pytest.mark.parametrize("optimizer", optimizer_kinds(), ids=lambda optimizer: optimizer.__name__)
def test_a_bare_class_name_reads_as_torchs_optimizer(optimizer: type[torch.optim.Optimizer]) -> None:
    assert full_name(optimizer.__name__) == optimizer_name(optimizer)
    assert find_optimizer_kind(optimizer.__name__) is find_optimizer_kind(optimizer_name(optimizer))
    assert find_optimizer_kind(optimizer.__name__) is optimizer_kinds()[optimizer]


def test_somebody_elses_optimizer_has_no_coefficients() -> None:
    facts = Facts("mine:SGD", "float32", np.zeros(0, dtype=np.int64), {})
    with pytest.raises(FormatError, match=r"trained by 'SGD'; coefficients are known for SGD"):
        derive(facts, horizon=0)
