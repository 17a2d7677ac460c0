"""What a layer kind has to say about a module, and the registry of kinds.

Does not hook anything: it only knows shapes and where the key of a call is found.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

Role = Literal["weight", "bias"]
"""How a parameter takes its patterns: `weight` sums value ⊗ key, `bias` sums values (its key is the constant 1)."""


class LayerKind(ABC):
    """A kind of layer whose parameters are sums over (key, value) patterns."""

    name: str
    batch_axis: int | None = None  # where a layer of this kind always has it, whatever the model's other layers do

    @abstractmethod
    def roles(self, module: nn.Module) -> Mapping[str, Role]:
        """Return the role of each of the module's own parameters, by attribute name."""

    @abstractmethod
    def widths(self, module: nn.Module) -> tuple[int, int]:
        """Return (d_in, d_out), the widths of a key and of a value."""

    @abstractmethod
    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the input of a call, from the call's arguments."""

    def accepts(self, module: nn.Module) -> bool:
        """Say whether the identity covers this module's options."""
        return True

    def keys(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Return the keys of a call, (..., d_in): here the input itself."""
        return inputs

    def values(self, module: nn.Module, error: Tensor) -> Tensor:
        """Return the values of a call, (..., d_out), from the error at its output: here the error itself."""
        return error


K = TypeVar("K", bound=LayerKind)
_KINDS: dict[type[nn.Module], LayerKind] = {}


def records(module_type: type[nn.Module]) -> Callable[[type[K]], type[K]]:
    """Register a layer kind for a module type."""

    def register(kind: type[K]) -> type[K]:
        _KINDS[module_type] = kind()
        return kind

    return register


def kinds() -> tuple[str, ...]:
    """Return the names of the supported module types."""
    return tuple(sorted(module_type.__name__ for module_type in _KINDS))


def find_kind(module: nn.Module) -> LayerKind | None:
    """Return the kind of a module, or nothing where it cannot be recorded.

    A subclass counts only when it computes what its base computes, that is, has the same `forward`.
    """
    for module_type, kind in _KINDS.items():
        if type(module) is module_type or (
            isinstance(module, module_type) and type(module).forward is module_type.forward
        ):
            # A parametrized or otherwise computed weight is no parameter of the module itself.
            own = dict(module.named_parameters(recurse=False))
            if kind.accepts(module) and all(name in own for name in kind.roles(module)):
                return kind
    return None
