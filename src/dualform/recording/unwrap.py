"""The optimizers that `record` was given: unwrapped, or one clear sentence of why they are none.

Training frameworks hand out wrappers (accelerate's `AcceleratedOptimizer`, Lightning's `LightningAdamW`) which have no
step hooks of their own, but call the step of the optimizer in their attribute `optimizer`. That optimizer is recorded.
What a wrapper does to parameters beside that step is none of the optimizer's.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dualform.errors import OptimizerError
from dualform.recording.optimizers import kind_of

_EXPECTED = "expected the optimizer that trains the model, or several in a list"


def unwrap_all(given: Any) -> list[Optimizer]:
    """Return the optimizers that were given: one, or several in a list, each wrapped or not."""
    if given is None:
        raise OptimizerError(
            f"record() got None as optimizer; {_EXPECTED}. Make it before recording (a Trainer of transformers has it "
            "after trainer.create_optimizer())."
        )
    several = isinstance(given, Iterable) and not isinstance(given, Tensor | nn.Module | str | dict)
    found = list(given) if several and _inner(given) is None and not isinstance(given, Optimizer) else [given]
    if not found:
        raise ValueError("record() needs at least one optimizer.")
    return [unwrap(one) for one in found]


def unwrap(given: Any) -> Optimizer:
    """Return the optimizer itself, from inside any number of wrappers."""
    seen: set[int] = set()
    while not (isinstance(given, Optimizer) and kind_of(given) is not None):
        inner = _inner(given)
        if inner is None or id(inner) in seen:
            break
        seen.add(id(given))
        given = inner
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, Tensor) or (isinstance(given, tuple) and any(isinstance(part, Tensor) for part in given)):
        what = "the model's parameters"
    elif isinstance(given, dict):
        what = "groups of parameters"
    else:
        what = f"{'the model' if isinstance(given, nn.Module) else 'an object'} of type {type(given).__name__}"
    raise OptimizerError(
        f"record() got {what} as optimizer, which is no optimizer of torch; {_EXPECTED}: "
        "dualform.record(model, optimizer, path) with optimizer = torch.optim.SGD(model.parameters(), lr=0.1), say."
    )


def _inner(wrapper: Any) -> Optimizer | None:
    """Return the optimizer that a wrapper calls; a scheduler has one too, but does not step it."""
    if isinstance(wrapper, LRScheduler | nn.Module) or not callable(getattr(wrapper, "step", None)):
        return None
    inner = getattr(wrapper, "optimizer", None)
    return inner if isinstance(inner, Optimizer) and inner is not wrapper else None
