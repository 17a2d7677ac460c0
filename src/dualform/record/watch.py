"""Which layers of a model are watched, and which of its parameters that leaves uncovered.

Reads the model only; hooks are attached elsewhere.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dualform.errors import CoverageError, RefusedError, UnknownLayerError
from dualform.record.layers import Composite, LayerKind, Role, composites, find_composite, find_kind, kinds

What = Literal["keys+values", "keys"]
Layers = str | Sequence[str] | Mapping[str, What] | None
Dtype = Literal["float16"] | Mapping[str, Literal["float16"] | None] | None

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A layer that is recorded."""

    name: str
    module: nn.Module
    kind: LayerKind
    keys_only: bool
    parameters: Mapping[Role, tuple[str, nn.Parameter]]  # role -> (name in the model, parameter)
    d_in: int
    d_out: int
    composite: Composite | None = None  # where the module computes several layers in one call
    part: str = ""  # which of them this is


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A layer that could be recorded."""

    module: nn.Module
    kind: LayerKind
    composite: Composite | None = None
    part: str = ""


def find_candidates(model: nn.Module) -> dict[str, Candidate]:
    """Return every layer of a model that could be recorded, by name: modules, and parts of composite modules."""
    found: dict[str, Candidate] = {}
    inside: set[int] = set()  # modules of a composite, which it never calls
    for path, module in model.named_modules():
        name = plain_name(path)
        composite = find_composite(module)
        if composite is not None:
            inside.update(id(child) for child in module.modules())
            own = dict(module.named_parameters())
            for part, kind in composite.parts(module).items():
                roles = kind.roles(module)
                if roles and all(attribute in own for attribute in roles):  # a parametrized weight is no parameter
                    found[".".join(filter(None, (name, part)))] = Candidate(module, kind, composite, part)
        elif id(module) not in inside and (simple := find_kind(module)) is not None:
            found[name] = Candidate(module, simple)
    return found


def watch(model: nn.Module, layers: Layers) -> tuple[Watched, ...]:
    """Choose the layers to record.

    Args:
        model: the model to look through.
        layers: nothing for every supported layer; a name or pattern (`"encoder.*"`) or several; or a mapping from names
            or patterns to `"keys+values"` or `"keys"`, of which the first that matches decides.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS:
            raise RefusedError(
                f"{type(module).__name__}{f' ({name!r})' if name else ''} is not supported: several processes or "
                "replicas would each see a part of the patterns. Record the plain module on one process."
            )
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    candidates = find_candidates(model)
    if not candidates:
        raise UnknownLayerError(
            f"{type(model).__name__} holds no layer that can be recorded; supported kinds: {_supported()}."
        )
    chosen = _choose(candidates, layers)
    watched = []
    for name, what in chosen.items():
        candidate = candidates[name]
        module, kind = candidate.module, candidate.kind
        own = dict(module.named_parameters())
        parameters = _by_role(
            name, [(role, names[id(own[attribute])], own[attribute]) for attribute, role in kind.roles(module).items()]
        )
        if any(is_lazy(parameter) for _, parameter in parameters.values()):
            raise RefusedError(f"Layer {name!r} is not initialised yet. Run the model once before recording it.")
        low = [entry for entry, parameter in parameters.values() if parameter.dtype not in _EXACT]
        if low and what != "keys":
            dtype = next(iter(parameters.values()))[1].dtype
            raise RefusedError(
                f"Layer {name!r} has parameters of dtype {dtype}, whose own rounding is larger than their updates; "
                f"exact are float32 and float64. Train master weights in float32, or record this layer's keys only "
                f'(layers={{{name!r}: "keys"}}).'
            )
        d_in, d_out = kind.widths(module)
        watched.append(
            Watched(name, module, kind, what == "keys", parameters, d_in, d_out, candidate.composite, candidate.part)
        )
    _check_shared(watched)
    return tuple(watched)


def _by_role(layer: str, entries: Iterable[tuple[Role, str, nn.Parameter]]) -> dict[Role, tuple[str, nn.Parameter]]:
    """Return a layer's parameters by role, refusing a role that two of them have: one would stand for both."""
    found: dict[Role, tuple[str, nn.Parameter]] = {}
    for role, name, parameter in entries:
        if role in found:
            raise RefusedError(
                f"Layer {layer!r} uses its parameters {found[role][0]!r} and {name!r} in the same way ({role!r}), so "
                "that they could not be told apart. Its layer kind has to give each parameter a role of its own."
            )
        found[role] = name, parameter
    return found


def stored_dtype(dtype: Dtype, layer: str) -> str | None:
    """Return the dtype that a layer's patterns are stored in; nothing for the one that is trained.

    >>> stored_dtype({"lstm*": "float16"}, "lstm.l0"), stored_dtype({"lstm*": "float16"}, "softmax")
    ('float16', None)
    """
    if not isinstance(dtype, Mapping):
        return dtype
    return next((found for pattern, found in dtype.items() if fnmatchcase(layer, pattern)), None)


def _check_shared(watched: Sequence[Watched]) -> None:
    """Refuse a parameter whose patterns are kept in one layer and not in another: its sum would be incomplete."""
    exact: dict[str, Watched] = {}
    keys_only: dict[str, Watched] = {}
    for layer in watched:
        for name, _ in layer.parameters.values():
            (keys_only if layer.keys_only else exact)[name] = layer
    for name in exact.keys() & keys_only.keys():
        raise RefusedError(
            f"Layers {exact[name].name!r} and {keys_only[name].name!r} share parameter {name!r}, but the second is to "
            'store its keys only. Record both "keys+values", or both "keys".'
        )


_EXACT = (torch.float32, torch.float64)


def _choose(candidates: Iterable[str], layers: Layers) -> dict[str, What]:
    everything: dict[str, What] = {"*": "keys+values"}
    if layers is None:
        wanted: Mapping[str, What] = everything
    elif isinstance(layers, str):
        wanted = {layers: "keys+values"}
    elif isinstance(layers, Mapping):
        wanted = layers
    else:
        wanted = dict.fromkeys(layers, "keys+values")
    if not wanted:
        raise UnknownLayerError("layers names no layer. Leave it out to record every layer that can be.")
    names = list(candidates)
    for pattern, what in wanted.items():
        if what not in get_args(What):
            raise UnknownLayerError(f"Layer {pattern!r} is to store {what!r}; expected one of {get_args(What)}.")
        if not any(pattern == name or fnmatchcase(name, pattern) for name in names):
            raise UnknownLayerError(
                f"{pattern!r} matches no layer that can be recorded. There are: {', '.join(map(repr, names))} "
                f"(supported kinds: {_supported()})."
            )
    chosen: dict[str, What] = {}
    for name in names:
        for pattern, what in wanted.items():
            if pattern == name or fnmatchcase(name, pattern):
                chosen[name] = what
                break
    return chosen


def covered(watched: Iterable[Watched]) -> dict[str, nn.Parameter]:
    """Return the parameters that the watched layers cover, by name, each once."""
    return {name: parameter for layer in watched for name, parameter in layer.parameters.values()}


def uncovered(model: nn.Module, optimizers: Iterable[Optimizer], watched: Iterable[Watched]) -> dict[str, Tensor]:
    """Return the trained parameters that no watched layer covers, by name."""
    seen = {id(parameter) for parameter in covered(watched).values()}
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    missing: dict[str, Tensor] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                if id(parameter) not in seen and parameter.requires_grad:
                    missing[names.get(id(parameter), f"<optimizer {i}, group {j}, parameter {k}>")] = parameter
    return missing


def report_uncovered(missing: Mapping[str, int], recorded: Mapping[str, Tensor], *, strict: bool) -> None:
    """Warn of trained parameters that no layer covers (name -> elements), or with `strict` raise."""
    names = list(missing)
    shown = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    total = sum(missing.values())
    whole = total + sum(parameter.numel() for parameter in recorded.values())
    text = f"{len(names)} trained parameters ({total / whole:.1%} of the elements) are not recorded: {shown}."
    if strict:
        raise CoverageError(f"{text} Record their layers, freeze them, or leave out strict=True.")
    warnings.warn(f"{text} What they learn stays in the model but is no part of the memory.", stacklevel=5)


def _supported() -> str:
    return ", ".join(sorted([*kinds(), *composites()]))


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without what torch.compile puts in front."""
    return name.replace("_orig_mod.", "")
