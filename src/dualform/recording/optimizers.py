"""Which known optimizer an optimizer object is: `identity/families` has what is logged of the steps of each.

Looked up by exact type: a subclass may do anything (AdamW is an Adam), unless it evidently changes nothing that a step
uses.
"""

from types import CodeType
from typing import Any

from torch.optim import Optimizer

from dualform.errors import RefusedError
from dualform.identity.families import optimizer_kinds
from dualform.identity.families.optimizer_kind import OptimizerKind


def supported() -> tuple[str, ...]:
    """Return the names of the optimizers whose steps can be recorded exactly."""
    return tuple(sorted(optimizer_type.__name__ for optimizer_type in optimizer_kinds()))


_OF_A_CLASS = frozenset(
    [
        "__module__",
        "__doc__",
        "__qualname__",
        "__dict__",
        "__weakref__",
        "__slots__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__type_params__",
        "__orig_bases__",
        "__parameters__",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
        "_abc_impl",
        "__init__",
        "__repr__",
        "__str__",
    ]
)
"""Names that a subclass may have without changing what a step does: settings are read at every step."""
_READ_BY_STEPS = frozenset(["__getattr__", "_step_supports_amp_scaling", "grad_scale", "found_inf"])
"""Names that a step, or a gradient scaler, looks for though the base class need not have them."""


def base_optimizer(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the known optimizer type that a type is or derives from, whatever it does; AdamW for AdamW."""
    return next((base for base in kind.__mro__ if base in optimizer_kinds()), None)


def changed_names(kind: type[Optimizer], base: type[Optimizer]) -> list[str]:
    """Return what a subclass defines that the base's step may use or be reached through; nothing for the base itself.

    The evidence is by identity: a name that the base has (and so its step may use) must still mean the same object.
    """
    changed = []
    for part in kind.__mro__:
        if part in base.__mro__:
            continue
        for name, value in vars(part).items():
            if name in _OF_A_CLASS or (name not in _READ_BY_STEPS and not hasattr(base, name)):
                continue
            if name != "step" or _unhooked(value) is not _unhooked(base.step):
                changed.append(name)
    return changed


def _unhooked(step: Any) -> Any:
    """Return a step without the wrapper that torch puts around it when an optimizer is made, to call step hooks."""
    while getattr(step, "__code__", None) in _HOOKING:
        step = step.__wrapped__
    return step


_HOOKING = [constant for constant in Optimizer.profile_hook_step.__code__.co_consts if isinstance(constant, CodeType)]


def known_type(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the known type whose step an optimizer's step is: its own, or that of a base it changes nothing of."""
    kind = type(optimizer)
    if kind in optimizer_kinds():
        return kind
    base = base_optimizer(kind)
    return base if base is not None and not changed_names(kind, base) else None


def kind_of(optimizer: Optimizer) -> OptimizerKind[Any] | None:
    """Return the kind of an optimizer whose step is known, or None."""
    known = known_type(optimizer)
    return None if known is None else optimizer_kinds()[known]


def require_kind(optimizer: Optimizer) -> OptimizerKind[Any]:
    """Return the kind of an optimizer whose step is known, or refuse by name."""
    found = kind_of(optimizer)
    if found is None:
        kind = type(optimizer)
        base = base_optimizer(kind)
        changed = "" if base is None else f" (it derives from {base.__name__} and has its own {_listed(kind, base)})"
        raise RefusedError(
            f"{kind.__name__} is not an optimizer whose coefficients are known{changed}; supported: "
            f'{", ".join(supported())}. Record keys only (layers={{"*": "keys"}}) to have attention without '
            "reconstruction."
        )
    return found


def _listed(kind: type[Optimizer], base: type[Optimizer]) -> str:
    return ", ".join(map(repr, changed_names(kind, base)))


def pending_scale(optimizer: Optimizer) -> tuple[float, bool]:
    """Return what a fused step still divides gradients by, and whether a gradient scaler makes it skip."""
    scale = getattr(optimizer, "grad_scale", None)
    found_inf = getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else float(scale)), (found_inf is not None and bool(found_inf))
