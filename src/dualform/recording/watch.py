"""Which layers of a model are watched, and which of its parameters that leaves uncovered.

Reads the model only; hooks are attached elsewhere.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dualform.errors import CoverageError, RefusedError, UnknownLayerError
from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding
from dualform.recording.layers import Composite, LayerKind, composites, find_composite, find_kind, kinds
from dualform.recording.unrecordable import advise, describe_unrecordable
from dualform.recording.user_warnings import warn_user

What = Literal["keys+values", "keys"]
Layers = str | Sequence[str] | Mapping[str, What] | None
TRAINED = "trained"
"""The choice of layers that is the default: those of which an optimizer holds a parameter."""
StoredDtype = Literal["float16", "int8"]
Dtype = StoredDtype | Mapping[str, StoredDtype | None] | None


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A layer that is recorded."""

    name: str
    module: nn.Module
    kind: LayerKind
    keys_only: bool
    parameters: Mapping[ParameterUse, tuple[str, nn.Parameter]]  # use -> (name in the model, parameter)
    d_in: int
    d_out: int
    composite: Composite | None = None  # where the module computes several layers in one call
    part: str = ""  # which of them this is
    shares_only: bool = False  # whether its patterns are not kept, but only sums over groups of them


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
                uses = kind.uses(module)
                if uses and all(use.parameter in own for use in uses):  # a parametrized weight is no parameter
                    found[".".join(filter(None, (name, part)))] = Candidate(module, kind, composite, part)
        elif id(module) not in inside and (simple := find_kind(module)) is not None:
            found[name] = Candidate(module, simple)
    return found


def watch(
    model: nn.Module,
    layers: Layers,
    optimizers: Sequence[Optimizer] | None = None,
    *,
    patterns: Layers | Literal[False] = None,
) -> tuple[Watched, ...]:
    """Choose the layers to record.

    Args:
        model: the model to look through.
        layers: nothing or `"trained"` for every supported layer that is trained; a name or pattern (`"encoder.*"`) or
            several; or a mapping from names or patterns to `"keys+values"` or `"keys"`, of which the first that matches
            decides.
        optimizers: what trains the model; without any, a layer is trained where it requires a gradient.
        patterns: the layers whose patterns are kept, nothing for all, False for none; of the others only sums are.
    """
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    candidates = find_candidates(model)
    if not candidates:
        raise UnknownLayerError(
            f"{type(model).__name__} holds no layer that can be recorded{_found(model)}; supported kinds: "
            f"{_supported()}. {advise(model)}".rstrip()
        )
    found = {name: _parameters(name, candidate, names) for name, candidate in candidates.items()}
    if layers is None or layers == TRAINED:
        chosen: dict[str, What] = dict.fromkeys(_trained(model, found, optimizers), "keys+values")
        named: set[str] = set()
    else:
        chosen = _choose(candidates, layers)
        named = set(chosen) & set([layers] if isinstance(layers, str) else layers)
    kept = set(chosen) if patterns is None else set(_choose(chosen, patterns)) if patterns else set()
    watched = []
    for name, what in chosen.items():
        shares_only = name not in kept and what != "keys"
        candidate, parameters = candidates[name], found[name]
        module, kind = candidate.module, candidate.kind
        if any(is_lazy(parameter) for _, parameter in parameters.values()):
            raise RefusedError(f"Layer {name!r} is not initialised yet. Run the model once before recording it.")
        low = [parameter for _, parameter in parameters.values() if parameter.dtype not in _EXACT]
        if low and what != "keys" and not shares_only:
            if name not in named and not any(parameter.requires_grad for parameter in low):
                continue  # frozen, and nobody asked for it
            raise RefusedError(
                f"Layer {name!r} has parameters of dtype {low[0].dtype}, whose own rounding is larger than their "
                "updates; exact are float32 and float64. Train master weights in float32, or record this layer's keys "
                f'only (layers={{{name!r}: "keys"}}).'
            )
        d_in, d_out = kind.widths(module)
        watched.append(
            Watched(
                name,
                module,
                kind,
                what == "keys",
                parameters,
                d_in,
                d_out,
                candidate.composite,
                candidate.part,
                shares_only,
            )
        )
    if not watched:
        raise UnknownLayerError(_nothing_trained(model, optimizers))
    _check_shared(watched)
    return tuple(watched)


def _parameters(
    layer: str, candidate: Candidate, names: Mapping[int, str]
) -> dict[ParameterUse, tuple[str, nn.Parameter]]:
    """Return a layer's parameters by use, each with its name in the model.

    Two uses of one name are refused: answers are kept by name, and one would stand for both. Two uses of one parameter
    are refused too: what the patterns of one use add to the parameter would be missing from the other.
    """
    own = dict(candidate.module.named_parameters())
    found: dict[ParameterUse, tuple[str, nn.Parameter]] = {}
    for use in candidate.kind.uses(candidate.module):
        name = names[id(own[use.parameter])]
        same = next((other for other in found if other.name == use.name), None)
        if same is not None:
            raise RefusedError(
                f"Layer {layer!r} calls its uses of {same.parameter!r} and {name!r} by the same name, {use.name!r}, so "
                "that they could not be told apart. Its layer kind has to give each use a name of its own."
            )
        if any(parameter is own[use.parameter] for _, parameter in found.values()):
            raise RefusedError(
                f"Layer {layer!r} uses its parameter {name!r} twice in one call; a layer kind can describe one use. "
                "Split the module, so that each part uses the parameter once: uses in several layers are added up."
            )
        found[dataclasses.replace(use, parameter=name)] = name, own[use.parameter]
    return found


def _trained(
    model: nn.Module,
    found: Mapping[str, Mapping[ParameterUse, tuple[str, nn.Parameter]]],
    optimizers: Sequence[Optimizer] | None,
) -> list[str]:
    """Return the layers of which an optimizer holds a parameter; it may be frozen now, and trained later."""
    if optimizers is None:
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        trained = trained or {id(parameter) for parameter in model.parameters()}
    else:
        trained = held(optimizers)
    return [name for name, uses in found.items() if any(id(parameter) in trained for _, parameter in uses.values())]


def held(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that optimizers hold."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _nothing_trained(model: nn.Module, optimizers: Sequence[Optimizer] | None) -> str:
    """Say that nothing that is trained can be recorded, and why."""
    mine = None if optimizers is None else held(optimizers)
    whose = "" if optimizers is None else " that " + " and ".join(type(one).__name__ for one in optimizers) + " holds"
    own = {id(parameter) for parameter in model.parameters()}
    if mine is not None and not mine & own and not describe_unrecordable(model, mine):
        return (
            f"None of the {len(mine)} parameters{whose} belongs to this {type(model).__name__}. Make the optimizer "
            "from this model's parameters."
        )
    return (
        f"Nothing{whose or ' that is trained'} can be recorded{_found(model, mine)}; supported kinds: {_supported()}. "
        f"{advise(model, mine)}".rstrip()
    )


def _found(model: nn.Module, parameters: Collection[int] | None = None) -> str:
    """Say whose parameters were found, as part of a sentence."""
    found = describe_unrecordable(model, parameters)
    return f": there are {found}" if found else ""


def stored_dtype(dtype: Dtype, layer: str) -> StoredDtype | None:
    """Return the dtype that a layer's patterns are stored in; nothing for the one that is trained.

    >>> stored_dtype({"lstm*": "int8"}, "lstm.l0"), stored_dtype({"lstm*": "int8"}, "softmax")
    ('int8', None)
    """
    if not isinstance(dtype, Mapping):
        return dtype
    return next((found for pattern, found in dtype.items() if fnmatchcase(layer, pattern)), None)


def stores_inputs(unfolding: Unfolding, stored: StoredDtype | None, trained: torch.dtype) -> bool:
    """Say whether inputs of a convolution take less than its keys, whose rows would be stored in a dtype.

    Inputs are stored in the dtype that is trained, so that they give the keys to the bit: the scale of a row of float16
    or int8 is that of its largest element, which is another one in a key than in the whole input.

    >>> unfolding = Unfolding((3,), (1,), (1,))
    >>> stores_inputs(unfolding, "float16", torch.float32), stores_inputs(unfolding, "int8", torch.float32)
    (True, False)
    """
    itemsize = trained.itemsize if stored is None else getattr(torch, stored).itemsize
    return math.prod(unfolding.kernel) * itemsize > math.prod(unfolding.stride) * trained.itemsize


def _check_shared(watched: Sequence[Watched]) -> None:
    """Refuse a parameter whose patterns are kept in one layer and not in another: its sum would be incomplete."""
    exact: dict[str, Watched] = {}
    keys_only: dict[str, Watched] = {}
    shares_only: dict[str, Watched] = {}
    for layer in watched:
        for name, _ in layer.parameters.values():
            (keys_only if layer.keys_only else shares_only if layer.shares_only else exact)[name] = layer
    for name in exact.keys() & shares_only.keys():
        raise RefusedError(
            f"Layers {exact[name].name!r} and {shares_only[name].name!r} share parameter {name!r}, but patterns are to "
            "be kept of the first alone. Name both in Patterns(layers=...), or neither."
        )
    exact |= shares_only
    for name in exact.keys() & keys_only.keys():
        raise RefusedError(
            f"Layers {exact[name].name!r} and {keys_only[name].name!r} share parameter {name!r}, but the second is to "
            'store its keys only. Record both "keys+values", or both "keys".'
        )


_EXACT = (torch.float32, torch.float64)


def _choose(candidates: Iterable[str], layers: str | Sequence[str] | Mapping[str, What]) -> dict[str, What]:
    if isinstance(layers, str):
        wanted: Mapping[str, What] = {layers: "keys+values"}
    elif isinstance(layers, Mapping):
        wanted = layers
    else:
        wanted = dict.fromkeys(layers, "keys+values")
    if not wanted:
        raise UnknownLayerError("layers names no layer. Leave it out to record every layer that is trained.")
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


def report_uncovered(
    model: nn.Module, missing: Mapping[str, Tensor], recorded: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Warn of trained parameters that no layer covers, by name and whose they are; or with `strict` raise."""
    names = list(missing)
    shown = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    total = sum(parameter.numel() for parameter in missing.values())
    whole = total + sum(parameter.numel() for parameter in recorded.values())
    asked = {id(parameter) for parameter in missing.values()}
    whose, advice = describe_unrecordable(model, asked), advise(model, asked)
    text = f"{len(names)} trained parameters ({total / whole:.1%} of the elements) are not recorded: {shown}"
    text += f" ({whose})." if whose else "."
    if strict:
        raise CoverageError(f"{text} Record their layers, freeze them, or leave out strict=True. {advice}".rstrip())
    warn_user(f"{text} What they learn stays in the model but is no part of the memory. {advice}".rstrip())


def report_joined(model: nn.Module, optimizer: Optimizer, joined: Mapping[str, Tensor], *, strict: bool) -> None:
    """Warn of parameters that joined an optimizer in mid-recording and that no layer covers; or with `strict` raise."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in joined)
    candidates = find_candidates(model)
    layers = [name for name in owners if name in candidates]
    text = (
        f"{', '.join(map(repr, joined))} joined {type(optimizer).__name__} after the recording began and "
        f"{'is' if len(joined) == 1 else 'are'} not recorded. "
    )
    if layers:
        text += f"Name the {'layer' if len(layers) == 1 else 'layers'} when the recording begins: layers=[..., "
        text += f"{', '.join(map(repr, layers))}]."
    else:
        text += f"No supported layer has {'it' if len(joined) == 1 else 'them'}."
    if strict:
        raise CoverageError(f"{text} Or leave out strict=True.")
    warn_user(text)


def _supported() -> str:
    return ", ".join(sorted([*kinds(), *composites()]))


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without what torch.compile puts in front."""
    return name.replace("_orig_mod.", "")
