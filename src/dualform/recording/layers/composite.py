"""Modules that compute several layers in one call: which parts they have, and how their calls are seen.

A recurrent layer or an attention module hands its weights to one function of torch, so that no hook on a module sees
its parts. While such a module runs, a `Tracer` intercepts that function, computes what it computes, and reports each
part's input and outputs. Nothing is put on the module, and nothing is recorded here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dualform.recording.layers.layer_kind import LayerKind, kind_by_type, module_types, registered

Report = Callable[[str, Callable[[], Any], Sequence[Tensor]], None]
"""Takes a part's name, a function that makes its input as the part's kind takes it, and its outputs, whose errors the
kind will need. The function is called before the report returns, or never."""


class Composite(ABC):
    """A kind of module that has several layers."""

    key_text: str  # as `LayerKind.key_text`
    own_order = False  # as `LayerKind.own_order`

    @abstractmethod
    def parts(self, module: nn.Module) -> Mapping[str, LayerKind]:
        """Return the kind of each part, by its name below the module; nothing where its options are not covered."""

    @abstractmethod
    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], report: Report
    ) -> TorchFunctionMode:
        """Return what reports the parts of one call of the module while it is entered."""


class Tracer(TorchFunctionMode):
    """Calls every function of torch as it is, except for those that a stand-in is given for."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions  # the name of a function of torch -> its stand-in, which takes the function first

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, or its stand-in."""
        stand_in = self._functions.get(getattr(func, "__name__", ""))
        if stand_in is None:
            return func(*args, **(kwargs or {}))
        return stand_in(func, *args, **(kwargs or {}))


C = TypeVar("C", bound=Composite)
_COMPOSITES: dict[type[nn.Module], Composite] = {}


def composes(*module_types: type[nn.Module]) -> Callable[[type[C]], type[C]]:
    """Register a composite for module types."""

    def register(composite: type[C]) -> type[C]:
        for module_type in module_types:
            _COMPOSITES[module_type] = composite()
        return composite

    return register


def composites() -> dict[str, Composite]:
    """Return every composite by the name of its module type."""
    return {module_type.__name__: composite for module_type, composite in _COMPOSITES.items()}


def sums_in_own_order(kind: str) -> bool:
    """Say whether torch sums the gradients of a kind of layer in an order of its own, by the kind's name."""
    found = registered().get(kind) or composites().get(kind)
    return found is not None and found.own_order


def base_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the supported type of torch that a module is of or derives from, whatever the module computes."""
    return next((found for found in (*module_types(), *_COMPOSITES) if isinstance(module, found)), None)


def find_composite(module: nn.Module) -> Composite | None:
    """Return the composite of a module; a subclass counts only when it has the same `forward`."""
    for module_type, composite in _COMPOSITES.items():
        if isinstance(module, module_type) and type(module).forward is module_type.forward:
            return composite
    return None


def computed_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of tensors that a layer of a supported type uses as parameters, but that are none.

    Such a tensor is computed from other parameters in every forward: by a parametrization, or by a hook that runs
    before the forward (the older weight and spectral norms, pruning).
    """
    composite, kind = find_composite(module), kind_by_type(module)
    kinds = [] if kind is None else [kind]
    if composite is not None:
        kinds = list(composite.parts(module).values())
    own = dict(module.named_parameters(remove_duplicate=False))
    return tuple(dict.fromkeys(use.parameter for one in kinds for use in one.uses(module) if use.parameter not in own))
