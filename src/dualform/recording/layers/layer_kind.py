"""What a layer kind has to say about a module, and the registry of kinds.

Does not hook anything: it only knows shapes and where the key of a call is found.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch  # noqa: F401 (for the example)
from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding
from dualform.recording.sharded_modules import original_type


class LayerKind(ABC):
    """A kind of layer whose parameters are sums over (key, value) patterns."""

    name: str
    key_text = "what `keys` returns"  # a key in words, for the page of what is supported
    own_order = False  # whether torch sums the gradients in an order of its own, so that ours differ in the last bits
    rounding = 1.0  # how many times more rounding the values carry than errors that autograd hands over
    optional = False  # whether a run leaves a layer of this kind out of its list if the layer was never called
    batch_axis: int | None = None  # the axis of the keys that counts the batch's rows; None for the model's own

    @abstractmethod
    def uses(self, module: nn.Module) -> tuple[ParameterUse, ...]:
        """Return how the layer uses each of the module's own parameters, named as the module names them."""

    @abstractmethod
    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (d_in, d_out), the widths of a key and of a value."""

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input of a call, from the call's arguments."""
        return cast("Tensor", args[0] if args else kwargs["input"])

    def for_module(self, module: nn.Module) -> "LayerKind":
        """Return this kind as it serves one module: itself, or a copy that knows the module.

        Only a kind whose `inputs` depend on the module's options needs a copy.
        """
        return self

    def unsupported(self, module: nn.Module) -> str:
        """Name the module's options that the identity does not cover, as in `sparse=True`; empty if it covers all."""
        return ""

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the keys of a call, (..., d_in): here the input itself."""
        return inputs

    def leading(self, module: nn.Module, inputs: Any) -> tuple[int, ...]:
        """Return the shape of a call's patterns, all axes of `keys` but the last; overridden where keys are costly."""
        return tuple(self.keys(module, inputs).shape[:-1])

    def unfolding(self, module: nn.Module) -> Unfolding | None:
        """Return how keys repeat elements of `repeated_inputs`, which may be kept in their place; None if they do not.

        The keys are then to the bit `unfolding.patches(repeated_inputs)`.
        """
        return None

    def repeated_inputs(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the inputs, (B, channels, ...), whose patches are the keys, where there is an `unfolding`."""
        raise NotImplementedError(f"{self.name} has no unfolding")

    def values(self, module: nn.Module, inputs: Tensor, error: Tensor) -> Tensor:
        """Return the values of a call, (..., d_out), from the error at its output: here the error itself."""
        return error

    def errors(self, module: nn.Module, inputs: Any, errors: Sequence[Tensor | None]) -> Tensor:
        """Return the values of a call from the errors at all its outputs, of which some may not have come."""
        (error,) = errors
        assert error is not None, "a call's only output brought the error"
        return self.values(module, inputs, error)

    def release(self, inputs: Any) -> None:  # noqa: B027 (most kinds hold nothing)
        """Let go of what a call's inputs hold for `errors` alone, where only keys are recorded: here nothing."""


K = TypeVar("K", bound=LayerKind)
_KINDS: dict[type[nn.Module], LayerKind] = {}
_ELSEWHERE: dict[tuple[str, str], LayerKind] = {}  # (package, class) -> kind
Recogniser = Callable[[nn.Module], LayerKind | None]
"""Takes a module of no registered type, and returns its kind or None."""

_RECOGNISERS: list[Recogniser] = []
_RECOGNISED: dict[str, type[LayerKind]] = {}  # the kinds that recognisers return, by name


def records(module_type: type[nn.Module]) -> Callable[[type[K]], type[K]]:
    """Register a layer kind for a module type."""

    def register(kind: type[K]) -> type[K]:
        _KINDS[module_type] = kind()
        return kind

    return register


def register_layer(module_type: type[nn.Module], kind: type[LayerKind]) -> None:
    """Let `dualform.record` record a module type of your own.

    The layer's output must be linear in each of its parameters, for a key that the module's input determines: a
    parameter map says how (`dualform.identity.parameter_maps`).

    >>> class Scaled(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.ones(width))
    ...     def forward(self, x):
    ...         return self.factor * x.tanh()
    >>> class ScaledKind(LayerKind):
    ...     name = "Scaled"
    ...     own_order = True                          # torch sums an elementwise gradient in an order of its own
    ...     def uses(self, module):
    ...         return (ParameterUse("factor", "factor", "scale"),)
    ...     def widths(self, module):
    ...         return module.factor.numel(), module.factor.numel()
    ...     def inputs(self, args, kwargs):
    ...         return args[0]
    ...     def keys(self, module, inputs):
    ...         return inputs.tanh()                  # what the factor multiplies
    >>> register_layer(Scaled, ScaledKind)  # doctest: +SKIP

    Args:
        module_type: the class of the module; subclasses with the same `forward` count too.
        kind: a subclass of `dualform.recording.layers.LayerKind`.
    """
    records(module_type)(kind)


def records_elsewhere(package: str, name: str) -> Callable[[type[K]], type[K]]:
    """Register a layer kind for a class of another package, which need not be installed."""

    def register(kind: type[K]) -> type[K]:
        _ELSEWHERE[package, name] = kind()
        return kind

    return register


def recognises(*kinds: type[LayerKind]) -> Callable[[Recogniser], Recogniser]:
    """Register a function that recognises modules by what they compute, and the kinds that it returns."""

    def register(recogniser: Recogniser) -> Recogniser:
        _RECOGNISERS.append(recogniser)
        _RECOGNISED.update((kind.name, kind) for kind in kinds)
        return recogniser

    return register


def kinds() -> tuple[str, ...]:
    """Return the names of the supported module types."""
    own = (module_type.__name__ for module_type in _KINDS)
    return tuple(sorted([*own, *(f"{package}.{name}" for package, name in _ELSEWHERE)]))


def registered() -> dict[str, type[LayerKind]]:
    """Return every kind by the name of its module type, and those that are recognised by their own name."""
    own = {module_type.__name__: type(kind) for module_type, kind in _KINDS.items()}
    elsewhere = {f"{package}.{name}": type(kind) for (package, name), kind in _ELSEWHERE.items()}
    return _RECOGNISED | elsewhere | own


def module_types() -> tuple[type[nn.Module], ...]:
    """Return the supported module types of torch."""
    return tuple(_KINDS)


def find_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a module, or None if the module cannot be recorded.

    A subclass counts only when it computes what its base computes, that is, has the same `forward`.
    """
    kind = kind_by_type(module)
    if kind is None:
        kind = next((found for recognise in _RECOGNISERS if (found := recognise(module)) is not None), None)
    if kind is None or kind.unsupported(module):
        return None
    # A parametrized or otherwise computed weight is no parameter of the module itself.
    own = dict(module.named_parameters(recurse=False))
    uses = kind.uses(module)
    return kind.for_module(module) if uses and all(use.parameter in own for use in uses) else None


def kind_by_type(module: nn.Module) -> LayerKind | None:
    """Return the kind that is registered for a module's type, whatever the module's options; or None."""
    own_type = original_type(module)
    kind = _ELSEWHERE.get((own_type.__module__.partition(".")[0], own_type.__name__))
    if kind is None:
        for module_type, candidate in _KINDS.items():
            same = isinstance(module, module_type) and own_type.forward is module_type.forward
            if same or own_type is module_type:
                kind = candidate
    return kind


def present(module: nn.Module, *uses: ParameterUse) -> tuple[ParameterUse, ...]:
    """Return the uses whose parameter the module has; a layer without bias has None in its place."""
    return tuple(use for use in uses if _attribute(module, use.parameter) is not None)


def _attribute(module: nn.Module, name: str) -> Any:
    """Return a module's attribute by its name, which may lead through children: "out_proj.bias"."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward method of a module's class; None where the class has none to look at (TorchScript)."""
    try:
        found: Callable[..., Any] = type(module).forward
    except AttributeError:
        return None
    return found


def takes_one_input(module: nn.Module) -> bool:
    """Say whether the forward of a module's class takes one input, and nothing else."""
    forward = forward_of(module)
    if forward is None:
        return False
    try:
        return len(inspect.signature(forward).parameters) == 2  # self and the input
    except (TypeError, ValueError):  # a function that is not written in Python has no signature
        return False
