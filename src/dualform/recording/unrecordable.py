"""Why parameters of a model cannot be recorded, in words: whose they are, which of the usual reasons it is, what to do.

Three reasons are usual: a subclass of a supported layer with a forward of its own, modules kept in a plain list (torch
does not see those as parts of the model), and bare parameters that code of the user's own computes with.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from dualform.recording.layers import base_type


@dataclass(frozen=True, slots=True)
class Hidden:
    """A module in a plain container, where torch does not find it."""

    owner: nn.Module
    attribute: str
    container: type
    module: nn.Module


def hidden_modules(model: nn.Module) -> Iterator[Hidden]:
    """Find the modules that a model keeps in plain lists, tuples, sets or dictionaries."""
    for owner in model.modules():
        for attribute, value in vars(owner).items():
            if attribute in ("_modules", "_parameters", "_buffers") or not isinstance(value, list | tuple | set | dict):
                continue
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, nn.Module):
                    yield Hidden(owner, attribute, type(value), item)


def describe(model: nn.Module, parameters: Collection[int] | None = None) -> str:
    """Say in a list whose parameters these are (by id; all of the model's and of hidden modules by default).

    >>> describe(nn.Sequential(nn.ConvTranspose2d(1, 1, 2), nn.ConvTranspose2d(1, 1, 2)))
    '2 ConvTranspose2d'
    """
    counts: dict[str, int] = {}
    bare: dict[str, list[str]] = {}
    known: set[int] = set()
    for module in model.modules():
        mine = _own(module, parameters)
        known.update(id(parameter) for parameter in module.parameters(recurse=False))
        if not mine:
            continue
        kind, base = type(module).__name__, base_type(module)
        if base is not None or _is_of_torch(module):
            kind += f" (a {base.__name__} with a forward of its own)" if base and _has_own_forward(module, base) else ""
            counts[kind] = counts.get(kind, 0) + 1
        else:
            bare.setdefault(kind, []).extend(mine)
    parts = [f"{count} {kind}" for kind, count in counts.items()]
    parts += [
        f"{len(names)} {'Parameter' if len(names) == 1 else 'Parameters'} of {kind} ({_listed(names)})"
        for kind, names in bare.items()
    ]
    hidden: dict[str, int] = {}
    for found in hidden_modules(model):
        for module in found.module.modules():
            own = {id(parameter) for parameter in module.parameters(recurse=False)}
            if _own(module, parameters) and not own <= known:
                known |= own
                what = f"{type(module).__name__} in the plain {found.container.__name__} {found.attribute!r}"
                what += f" of {type(found.owner).__name__}"
                hidden[what] = hidden.get(what, 0) + 1
    return ", ".join([*parts, *(f"{count} {what}" for what, count in hidden.items())])


def advise(model: nn.Module, parameters: Collection[int] | None = None) -> str:
    """Say what to do about parameters that cannot be recorded (by id; all by default): sentences, or nothing."""
    advice: list[str] = []
    for module in model.modules():
        if not _own(module, parameters):
            continue
        kind, base = type(module).__name__, base_type(module)
        if base is not None and _has_own_forward(module, base):
            advice.append(
                f"{kind} is a subclass of {base.__name__} with a forward of its own, and nobody can know what that "
                f"computes: let it hold an nn.{base.__name__} instead of being one."
            )
        elif base is None and not _is_of_torch(module):
            advice.append(
                f"{kind} computes with bare Parameters in code of its own: use a supported layer such as nn.Linear "
                "for them."
            )
    registered = {id(module) for module in model.modules()}
    for found in hidden_modules(model):
        if id(found.module) not in registered and any(_own(module, parameters) for module in found.module.modules()):
            better = "nn.ModuleDict" if issubclass(found.container, dict) else "nn.ModuleList"
            advice.append(
                f"{type(found.owner).__name__} keeps modules in the plain {found.container.__name__} "
                f"{found.attribute!r}, where torch does not see them as its parts: use {better}."
            )
    return " ".join(dict.fromkeys(advice))


def _has_own_forward(module: nn.Module, base: type[nn.Module]) -> bool:
    return type(module).forward is not base.forward


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _own(module: nn.Module, parameters: Collection[int] | None) -> list[str]:
    """Return the names of a module's own parameters that are asked about."""
    own = module.named_parameters(recurse=False)
    return [name for name, parameter in own if parameters is None or id(parameter) in parameters]


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
