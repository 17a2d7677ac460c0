"""Continuity: are the model's layers, and the optimizers' state, still those that the last recorded step left?

Both are compared by identity, which reads no tensor.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.watch import Watched


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a recorded module or parameter is kept in the model."""

    holder: Mapping[str, object]  # a module's `_modules` or `_parameters`
    key: str
    held: object
    layer: str
    text: str  # what is kept here, for a message


class Places:
    """Where the recorded layers and their parameters stand in the model, to find what was exchanged."""

    def __init__(self, model: nn.Module, layers: Iterable[Watched]) -> None:
        paths = {id(module): path for path, module in model.named_modules()}
        found: dict[tuple[int, str], _Place] = {}
        for layer in layers:
            holder = model
            path = paths.get(id(layer.module), "")
            for key in path.split(".") if path else ():
                held = holder._modules[key]
                assert held is not None, "a module is on the path to another one"
                text = f"the module of type {type(held).__name__}"
                found.setdefault((id(holder._modules), key), _Place(holder._modules, key, held, layer.name, text))
                holder = held
            mine = {id(parameter): name for name, parameter in layer.parameters.values()}
            for part in layer.module.modules():
                for key, parameter in part._parameters.items():
                    if id(parameter) in mine:
                        place = _Place(
                            part._parameters, key, parameter, layer.name, f"parameter {mine[id(parameter)]!r}"
                        )
                        found.setdefault((id(part._parameters), key), place)
        self._places = tuple(found.values())
        self._holders = [place.holder for place in self._places]
        self._keys = [place.key for place in self._places]
        self._held = [place.held for place in self._places]

    def exchanged(self) -> str | None:
        """Return a sentence that names the first recorded layer of which something is no longer in the model."""
        if all(map(is_, map(dict.get, self._holders, self._keys), self._held)):  # type: ignore[arg-type]
            return None
        for place in self._places:
            if place.holder.get(place.key) is not place.held:
                what = "was taken out of the model" if place.key not in place.holder else "was exchanged for another"
                return f"Layer {place.layer!r} is not the recorded one any more: {place.text} {what}"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The optimizer's state of one parameter: its tensors, and how often each was written to."""

    size: int  # number of entries, those included that are no tensors
    tensors: Mapping[str, tuple[Tensor, int]]

    def is_same(self, state: Mapping[str, Any]) -> bool:
        """Say whether a state consists of the very same tensors, none of which was written to."""
        if len(state) != self.size:
            return False
        for entry, (tensor, writes) in self.tensors.items():
            if state.get(entry) is not tensor or tensor._version != writes:
                return False
        return True


class _States:
    """The whole state of an optimizer as it was noted: every object in it, and how often each tensor was written to.

    Comparing all of it at once takes a few calls. What single parameters had is put together where something differs.
    """

    def __init__(self, states: Mapping[Tensor, Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Note a state, and which parameters the optimizer trains."""
        self._followed = parameters
        self._parameters = list(states)
        self._states = list(states.values())
        self._sizes = list(map(len, self._states))
        self._entries = list(chain.from_iterable(self._states))
        self._values = [value for state in self._states for value in state.values()]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._writes = [tensor._version for tensor in self._tensors]

    def note_writes(self, states: Mapping[Tensor, Any], parameters: Mapping[str, nn.Parameter]) -> bool:
        """Note a state that may have been written to since; False, and nothing is noted, where it has other objects."""
        if parameters is not self._followed or not self._has_same_objects(states):
            return False
        self._writes = [tensor._version for tensor in self._tensors]
        return True

    def is_same(self, states: Mapping[Tensor, Any]) -> bool:
        """Say whether a state consists of the very same objects, and no tensor was written to."""
        return self._has_same_objects(states) and [tensor._version for tensor in self._tensors] == self._writes

    def _has_same_objects(self, states: Mapping[Tensor, Any]) -> bool:
        return (
            len(states) == len(self._states)
            and all(map(is_, states, self._parameters))
            and all(map(is_, states.values(), self._states))
            and list(map(len, self._states)) == self._sizes
            and list(chain.from_iterable(self._states)) == self._entries
            and all(map(is_, chain.from_iterable(map(dict.values, self._states)), self._values))
        )

    def by_name(self, exact: Collection[str]) -> dict[str, _State]:
        """Return the states that the parameters of exactly recorded layers had, by name."""
        writes, found, start = iter(self._writes), {}, 0
        for parameter, size in zip(self._parameters, self._sizes, strict=True):
            both = zip(self._entries[start : start + size], self._values[start : start + size], strict=True)
            tensors = {entry: (value, next(writes)) for entry, value in both if isinstance(value, Tensor)}
            found[id(parameter)] = _State(size, tensors)
            start += size
        empty = _State(0, {})
        return {name: found.get(id(one), empty) for name, one in self._followed.items() if name in exact}


class Continuity:
    """The optimizers' state as the last step left it.

    A replay goes on from the state that it has come to. So a state that was cleared, loaded or edited between two steps
    ends an exact recording, unless the tensors that were put there are equal to those that the last step left.
    """

    def __init__(self, exact: Collection[str], *, updates: Mapping[str, int] | None = None) -> None:
        """Take the names of exactly recorded parameters and, in a resumed run, the updates that each has had."""
        self._exact = exact
        self._updates = updates  # where there are some, the optimizer's checkpoint may be loaded until its first step
        self._known: dict[int, _States] = {}  # id of an optimizer -> its state
        self._stepped: set[int] = set()

    def note(self, owned: RecordedOptimizer, parameters: Mapping[str, nn.Parameter], *, stepped: bool = True) -> None:
        """Keep the state of an optimizer as it is now: when the recording begins, and after every step."""
        states, known = owned.optimizer.state, self._known.get(id(owned.optimizer))
        if known is None or not known.note_writes(states, parameters):
            mine = {one: state for one, state in states.items() if isinstance(state, dict)}
            self._known[id(owned.optimizer)] = _States(mine, parameters)
        if stepped:
            self._stepped.add(id(owned.optimizer))

    def broken(self, owned: RecordedOptimizer, parameters: Mapping[str, nn.Parameter]) -> str | None:
        """Return a sentence on the first parameter whose state is not the one that its last step left."""
        states, noted = owned.optimizer.state, self._known.get(id(owned.optimizer))
        first = self._updates is not None and id(owned.optimizer) not in self._stepped
        if noted is None or (not first and noted.is_same(states)):
            return None
        for name, known in noted.by_name(self._exact).items():
            if first and name in parameters and (what := self._wrong_start(owned, name, states.get(parameters[name]))):
                return f"The state of {owned.class_name} for parameter {name!r} {what}"
            if name not in parameters or known.is_same(state := states.get(parameters[name], {})):
                continue
            if what := self._difference(owned, known, state):
                return f"The state of {owned.class_name} for parameter {name!r} {what}"
        return None

    def _wrong_start(self, owned: RecordedOptimizer, name: str, state: Mapping[str, Any] | None) -> str | None:
        """Say what is wrong with the state at the first step of a resumed run, judging by its count of updates."""
        updates = 0 if self._updates is None else self._updates.get(name, 0)
        if not updates or owned.kind is None or owned.kind.logs_restart:
            return None
        if not state:
            return f"is empty, though the run holds {updates} updates of it: its checkpoint was not loaded"
        if (count := state.get("step")) is not None and int(count) != updates:
            return f"counts {int(count)} updates, though the run holds {updates}: it is another checkpoint's"
        return None

    def _difference(self, owned: RecordedOptimizer, known: _State, state: Mapping[str, Any]) -> str | None:
        for entry, (tensor, writes) in known.tensors.items():
            now = state.get(entry)
            if now is None:
                if owned.kind is not None and not owned.kind.logs_restart:
                    return f"was cleared ({entry!r} is gone)"
            elif now is tensor:
                if tensor._version != writes:
                    return f"was edited in place ({entry!r})"
            elif tensor._version != writes or not isinstance(now, Tensor) or not _is_equal(tensor, now):
                return f"was replaced or loaded from elsewhere ({entry!r})"
        if self._updates is not None and id(owned.optimizer) not in self._stepped:
            return None
        new = [entry for entry, now in state.items() if isinstance(now, Tensor) and entry not in known.tensors]
        return f"was loaded ({new[0]!r} was not there)" if new else None


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other.to(tensor.device))
