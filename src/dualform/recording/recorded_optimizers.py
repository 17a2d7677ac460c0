"""The recorded optimizers: which covered parameters each one trains, the state it starts from, and its closure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dualform.errors import RefusedError
from dualform.identity.families.naming import class_name, optimizer_name
from dualform.identity.families.optimizer_kind import OptimizerKind
from dualform.recording.optimizers import kind_of, known_type, require_kind
from dualform.recording.sharded_modules import own_part


class RecordedOptimizer:
    """One optimizer of a run: which covered parameters it trains, and how its facts are read.

    Attributes:
        optimizer: the optimizer.
        names: id of every covered parameter -> name.
        kind: how its facts are read; None where only keys are recorded and the optimizer is not known.
        name: the name of the optimizer's type, or of the known one whose step it has, as a run keeps it.
    """

    __slots__ = ("_by_group", "_held", "_parameters", "_sizes", "kind", "name", "names", "optimizer")

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], kind: OptimizerKind[Any] | None) -> None:
        self.optimizer = optimizer
        self.names = names
        self.kind = kind
        self.name = optimizer_name(known_type(optimizer) or type(optimizer))
        self._held: list[nn.Parameter] = []  # all that the groups held when they were last looked at
        self._sizes: list[int] = []  # how many each group held
        self._parameters: dict[str, nn.Parameter] = {}
        self._by_group: list[list[str]] = []

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The covered parameters that it trains by now; groups may be added at any time.

        While the groups hold the same parameters it is the same object, so that others may know by it that they do.
        """
        groups = [group["params"] for group in self.optimizer.param_groups]
        now = list(chain.from_iterable(groups))
        if list(map(len, groups)) != self._sizes or not all(map(is_, now, self._held)):
            names = self.names
            self._parameters = {names[id(parameter)]: parameter for parameter in now if id(parameter) in names}
            self._by_group = [[names[id(one)] for one in group if id(one) in names] for group in groups]
            self._held, self._sizes = now, [len(group) for group in groups]
        return self._parameters

    @property
    def names_by_group(self) -> Sequence[Sequence[str]]:
        """The names of the covered parameters of each group, as `parameters` last found them."""
        return self._by_group

    @property
    def class_name(self) -> str:
        """The name of that type's class, for people."""
        return class_name(self.name)


def divide_parameters(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter], *, keys_only: bool
) -> tuple[RecordedOptimizer, ...]:
    """Divide the covered parameters among the optimizers, refusing what is not known or not clear."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    taken: dict[str, Optimizer] = {}
    owned = []
    for optimizer in optimizers:
        kind = kind_of(optimizer) if keys_only else require_kind(optimizer)
        owned.append(RecordedOptimizer(optimizer, names, kind))
        for name in owned[-1].parameters:
            if name in taken:
                raise RefusedError(
                    f"Parameter {name!r} is trained by {type(taken[name]).__name__} and by "
                    f"{type(optimizer).__name__}. Give every parameter to one optimizer."
                )
            taken[name] = optimizer
    return tuple(owned)


def warm_states(optimizers: Sequence[RecordedOptimizer]) -> dict[str, dict[str, Tensor]]:
    """Return copies of the optimizers' state that is warm already: parameter -> entry -> tensor."""
    states = {}
    for owned in optimizers:
        for name, parameter in owned.parameters.items():
            found = owned.kind.warm_state(owned.optimizer.state.get(parameter, {})) if owned.kind else {}
            if found:
                states[name] = {entry: own_part(tensor).detach().cpu().clone() for entry, tensor in found.items()}
    return states


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], prepare: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Prepare a step now, or after its closure where it has one: the gradients exist only then.

    Takes and returns what an optimizer's step hook does; None where the arguments stay as they are.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        prepare()
        return None

    def measured_closure() -> Any:
        result = closure()
        prepare()
        return result

    if len(args) > 1:
        return (args[0], measured_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": measured_closure}
