"""Why parameters of a model cannot be recorded, in words: whose they are, which of the usual reasons it is, what to do.

Five reasons are usual: a subclass of a supported layer with a forward of its own; an option of a supported layer that
the identity does not cover; a weight that is computed from other parameters (weight norm, spectral norm, pruning);
modules kept in a plain list, which torch does not see as parts of the model; and bare parameters that code of the
user's own computes with.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from dualform.recording.layers import base_type, computed_parameters, kind_by_type
from dualform.recording.sharded_modules import original_type


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


def describe_unrecordable(model: nn.Module, parameters: Collection[int] | None = None) -> str:
    """Say in a list whose parameters these are (by id; all of the model's and of hidden modules by default).

    >>> describe_unrecordable(nn.Sequential(nn.PReLU(), nn.PReLU(), nn.Embedding(3, 2, sparse=True)))
    '2 PReLU, 1 Embedding (with sparse=True)'
    """
    counts: dict[str, int] = {}
    bare: dict[str, list[str]] = {}
    known: set[int] = set()
    inside = _parametrizing(model)
    for module in model.modules():
        mine = _own(module, parameters)
        known.update(id(parameter) for parameter in module.parameters(recurse=False))
        if not mine or module in inside:
            continue
        kind, base = original_type(module).__name__, base_type(module)
        if base is not None or _is_of_torch(module):
            reason = _reason(module, base)
            kind += f" ({reason})" if reason else ""
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
    inside = _parametrizing(model)
    for module in model.modules():
        if not _own(module, parameters) or module in inside:
            continue
        kind, base = original_type(module).__name__, base_type(module)
        if computed := computed_parameters(module):
            advice.append(
                f"The {' and '.join(computed)} of {kind} {'is' if len(computed) == 1 else 'are'} computed from other "
                "parameters in every forward; only parameters that a layer applies as they are can be recorded: train "
                "the layer without its parametrization, normalisation or pruning "
                "(torch.nn.utils.parametrize.remove_parametrizations; remove_weight_norm, remove_spectral_norm or "
                "prune.remove for the older ones)."
            )
        elif base is not None and _has_own_forward(module, base):
            advice.append(
                f"{kind} is a subclass of {base.__name__} with a forward of its own, and nobody can know what that "
                f"computes: let it hold an nn.{base.__name__} instead of being one."
            )
        elif base is None and not _is_of_torch(module):
            advice.append(
                f"{kind} computes with bare Parameters in code of its own: use a supported layer such as nn.Linear "
                "for them (nn.Embedding(1, width) for a class token), or a small module that only adds one to its "
                "input or multiplies it by one."
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
    return original_type(module).__module__.startswith("torch.")


def _reason(module: nn.Module, base: type[nn.Module] | None) -> str:
    """Say why a module of a supported type is not recorded, as words to put in brackets; empty for other modules."""
    if base is not None and _has_own_forward(module, base):
        return f"a {base.__name__} with a forward of its own"
    if computed := computed_parameters(module):
        return f"its {' and '.join(computed)} {'is' if len(computed) == 1 else 'are'} computed from other parameters"
    kind = kind_by_type(module)
    options = "" if kind is None else kind.unsupported(module)
    return f"with {options}" if options else ""


def _parametrizing(model: nn.Module) -> set[nn.Module]:
    """Return the modules that hold the original parameters of parametrized layers, which the layers stand for."""
    layers = [module for module in model.modules() if is_parametrized(module)]
    return {part for layer in layers for part in cast("nn.ModuleDict", layer.parametrizations).modules()}


def _own(module: nn.Module, parameters: Collection[int] | None) -> list[str]:
    """Return the names of a module's own parameters that are asked about, those of its parametrizations included."""
    own = list(module.named_parameters(recurse=False))
    if is_parametrized(module):
        own += cast("nn.ModuleDict", module.parametrizations).named_parameters(prefix="parametrizations")
    return [name for name, parameter in own if parameters is None or id(parameter) in parameters]


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
