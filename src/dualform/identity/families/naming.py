"""Names of optimizer types, as a run keeps them: `module:qualname`, so that two types called `AdamW` are two names.

torch's own are named by their public package, `torch.optim:AdamW`, wherever torch defines them. Runs of earlier
versions have the bare class name, which means torch's optimizer of that name.
"""

import torch
from torch.optim import Optimizer

TORCH = "torch.optim"


def optimizer_name(optimizer: type[Optimizer]) -> str:
    """Return the name of an optimizer type.

    >>> optimizer_name(torch.optim.SGD)
    'torch.optim:SGD'
    """
    is_torchs = getattr(torch.optim, optimizer.__qualname__, None) is optimizer
    return f"{TORCH if is_torchs else optimizer.__module__}:{optimizer.__qualname__}"


def class_name(name: str) -> str:
    """Return the class in the name of an optimizer type, for people.

    >>> class_name("torch.optim:SGD"), class_name("SGD")
    ('SGD', 'SGD')
    """
    return name.rpartition(":")[2]


def full_name(name: str) -> str:
    """Return the name of an optimizer type with its module, given also without one, as earlier versions wrote it.

    >>> full_name("SGD"), full_name("mine:SGD")
    ('torch.optim:SGD', 'mine:SGD')
    """
    return name if ":" in name else f"{TORCH}:{name}"


def same_optimizer(one: str, other: str) -> bool:
    """Say whether two names may be of one optimizer type: equal, or equal classes where one has no lasting module.

    A program that is run is the module `__main__`, and has its own name where it is imported.

    >>> same_optimizer("SGD", "torch.optim:SGD"), same_optimizer("mine:SGD", "torch.optim:SGD")
    (True, False)
    >>> same_optimizer("__main__:Mine", "train:Mine")
    True
    """
    modules = {name.rpartition(":")[0] for name in (one, other)}
    return one == other or (class_name(one) == class_name(other) and bool(modules & {"", "__main__"}))
