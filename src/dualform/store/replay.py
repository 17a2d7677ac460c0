"""Replay the optimizers that have no coefficients: one forward pass over the steps, from the recorded gradients.

Used for the elementwise family. A step's gradient is summed again call by call, in the order in which autograd summed
it, torch's own optimizer takes the step, and each share (the start's, and each group's) follows the linear map of that
step. Only as many matrices are held as there are shares.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualform.coefficients.elementwise import Backward, Linear, Replay, Share, family
from dualform.forms import form
from dualform.progress import bar
from dualform.store.encoding import decode
from dualform.store.format import LayerEntry
from dualform.store.reader import Columns, Rows, Run, Shard
from dualform.store.stream import Keep, everything

Codes = Callable[[Shard, str], npt.NDArray[np.int64] | None]
"""The group of each pattern of a shard and layer, -1 for none; nothing where all are in group 0."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One parameter after its replay.

    Attributes:
        start: what is left of the start, float64.
        shares: (G, ...) each group's share, float64.
        parameter: the parameter itself, as torch's own steps on the rebuilt gradients left it.
        state: the optimizer's state.
    """

    start: Tensor
    shares: Tensor
    parameter: Tensor
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Call:
    """The patterns of one call, decoded."""

    entry: LayerEntry
    micro: int
    keys: Tensor  # (n, d_in)
    values: Tensor  # (n, d_out)
    codes: Tensor | None  # (n,)
    layout: str | None

    def gradient(self, role: str, shape: Sequence[int]) -> Tensor:
        """Return its gradient of a parameter, summed as autograd summed it.

        A bias sums errors in the order in which they lie in memory. Where its true gradient is zero, as that of a key
        projection's bias, rounding is all there is of it, and Adam makes much of that.
        """
        if role.startswith("bias") and self.layout is not None:
            lying = _laid_out(self.values, self.layout)
            return form(role).gradient(lying.sum(dim=tuple(range(lying.dim() - 1)))[None], self.keys[:1], shape)
        return form(role).gradient(self.values, self.keys, shape)


def replayed_parameters(run: Run, layers: Collection[str]) -> tuple[str, ...]:
    """Return the parameters of these layers whose optimizer has to be replayed."""
    names = dict.fromkeys(p for layer in layers for p in run.layer(layer).parameters.values())
    return tuple(name for name in names if run.is_replayed(name))


def kept(keep: Keep) -> Codes:
    """Return the grouping whose only group is what a mask keeps."""

    def codes(shard: Shard, layer: str) -> npt.NDArray[np.int64] | None:
        mask = keep(shard, layer)
        return None if mask is None else np.where(mask, 0, -1)

    return codes


def replay(
    run: Run,
    layers: Collection[str],
    *,
    horizon: int,
    groups: int,
    codes: Codes,
    contributing: Collection[str] | None = None,
) -> dict[str, Replayed]:
    """Replay the parameters of these layers over the first `horizon` steps.

    Args:
        run: the run to read.
        layers: the layers whose parameters are wanted. All layers that share one of them are read.
        horizon: how many steps.
        groups: how many groups of patterns to follow; 0 for the start alone.
        codes: which group each pattern is in.
        contributing: the layers whose patterns the groups are made of; by default all.
    """
    names = replayed_parameters(run, layers)
    parameters = {name: _Parameter(run, name, groups) for name in names}
    reader = _Reader(run, names, codes, contributing)
    with bar("replaying", total=min(horizon, run.steps)) as advance:
        for step in range(min(horizon, run.steps)):
            calls = reader.calls(step)
            for parameter in parameters.values():
                parameter.step(step, calls)
            advance(1)
    return {name: parameter.result() for name, parameter in parameters.items()}


def multipliers(run: Run, layer: str, *, horizon: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield, for each step from the last to the first, what multiplies its gradients in each of a layer's parameters.

    A pattern of step s adds `A_s ⊙ (e xᵀ)` to the weight. A_s depends on all later steps, so it is found backward, from
    segments of about sqrt(S) steps that are replayed once more; that many matrices are held, never S.
    """
    names = replayed_parameters(run, [layer])
    reader = _Reader(run, names, kept(everything), None)
    steps = min(horizon, run.steps)
    length = max(1, math.isqrt(steps))
    replays = {name: _Parameter(run, name, 0) for name in names}
    saved: list[dict[str, Replay]] = []
    for step in range(steps):
        if step % length == 0:
            saved.append({name: parameter.replay.copy() for name, parameter in replays.items()})
        calls = reader.calls(step)
        for parameter in replays.values():
            parameter.step(step, calls)
    backward = {name: Backward(run.initial[name].shape) for name in names}
    roles = {name: role for role, name in run.layer(layer).parameters.items()}
    for segment in reversed(range(len(saved))):
        maps: list[dict[str, Linear]] = []
        for name, parameter in replays.items():
            parameter.replay = saved[segment][name]
        for step in range(segment * length, min((segment + 1) * length, steps)):
            calls = reader.calls(step)
            found = {name: parameter.step(step, calls) for name, parameter in replays.items()}
            maps.append({name: linear for name, linear in found.items() if linear is not None})
        for step in reversed(range(segment * length, segment * length + len(maps))):
            linears = maps.pop()
            yield step, {roles[name]: backward[name].step(linear) for name, linear in linears.items()}


class _Parameter:
    """One parameter on its way through the steps."""

    def __init__(self, run: Run, name: str, groups: int) -> None:
        facts, self._factors = run.facts(name)
        kind = family()[facts.optimizer]
        initial = run.initial[name]
        state = run.initial_states.get(name, {})
        self._name = name
        self.replay = Replay(kind, initial, state)
        average = state.get(kind.average) if kind.average else None
        self._start = Share(initial.double(), None if average is None else average.double())
        self._shares = [Share(torch.zeros(initial.shape, dtype=torch.float64)) for _ in range(groups)]
        self._at = {int(step): i for i, step in enumerate(facts.step)}
        self._settings = facts.settings

    def step(self, step: int, calls: list[_Call]) -> Linear | None:
        """Take a step, if this parameter was updated in it, and return its linear map."""
        if step not in self._at:
            return None
        gradient = torch.zeros_like(self.replay.parameter)
        parts: list[Tensor | None] = [None for _ in self._shares]
        first = True
        for micro in sorted({call.micro for call in calls}):
            factor = float(self._factors[step, micro])
            if factor == 0.0:
                continue
            whole: Tensor | None = None
            # Autograd reaches the last call first, and sums in the order in which it reaches them.
            for call in [c for c in reversed(calls) if c.micro == micro]:
                for role, name in call.entry.parameters.items():
                    if name == self._name:
                        one = call.gradient(role, gradient.shape)
                        whole = one if whole is None else whole + one
                        self._part(parts, role, call, one, factor)
            if whole is not None:
                scaled = whole if factor == 1.0 else whole * factor
                gradient, first = (scaled if first else gradient + scaled), False
        linear = self.replay.step(self._settings_of(step), gradient.reshape(self.replay.parameter.shape))
        self._start.step(linear, None)
        for share, part in zip(self._shares, parts, strict=True):
            share.step(linear, None if part is None else part.reshape(share.weight.shape))
        return linear

    def _part(self, parts: list[Tensor | None], role: str, call: _Call, whole: Tensor, factor: float) -> None:
        """Add a call's gradient to its groups'."""
        if not parts:
            return
        if call.codes is None:
            members: list[tuple[int, Tensor]] = [(0, whole)]
        else:
            present = [code for code in call.codes.unique().tolist() if code >= 0]
            if len(present) == 1 and bool((call.codes >= 0).all()):
                members = [(present[0], whole)]
            else:
                members = []
                for code in present:
                    rows = call.codes == code
                    part = form(role).gradient(call.values[rows], call.keys[rows], whole.shape)
                    members.append((code, part))
        for code, gradient in members:
            scaled = gradient.double() * factor
            before = parts[code]
            parts[code] = scaled if before is None else before + scaled

    def _settings_of(self, step: int) -> dict[str, Any]:
        i = self._at[step]
        found: dict[str, Any] = {
            name: column[i].item()
            for name, column in self._settings.items()
            if name not in ("updated", "beta1", "beta2") and column[i] is not None and column[i] == column[i]
        }
        if "beta1" in self._settings:
            found["betas"] = (float(self._settings["beta1"][i]), float(self._settings["beta2"][i]))
        return found

    def result(self) -> Replayed:
        """Return where the parameter and its shares have come to."""
        shape = self._start.weight.shape
        shares = [share.weight for share in self._shares]
        return Replayed(
            start=self._start.weight,
            shares=torch.stack(shares) if shares else torch.zeros(0, *shape, dtype=torch.float64),
            parameter=self.replay.parameter.detach(),
            state=self.replay.state,
        )


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """Return values with the shape and strides that they had, as SHAPE:STRIDES."""
    shape, strides = ([int(number) for number in part.split(",")] for part in layout.split(":"))
    values = values.reshape(shape)
    for axis, stride in enumerate(strides):
        if stride == 0:  # expanded: all the same along this axis
            values = values.narrow(axis, 0, 1)
    lying = torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)
    return lying.expand(shape)


class _Reader:
    """The calls of any step that reach some parameters, a shard at a time."""

    def __init__(self, run: Run, names: Collection[str], codes: Codes, contributing: Collection[str] | None) -> None:
        self._run = run
        self._codes = codes
        self._contributing = contributing
        self._layers = [n for n, entry in run.layers.items() if set(entry.parameters.values()) & set(names)]
        for layer in self._layers:
            run.require_values(layer)
        self._shard: Shard | None = None
        self._sources: dict[str, tuple[Columns, Rows, Rows, npt.NDArray[np.int64] | None]] = {}

    def calls(self, step: int) -> list[_Call]:
        """Return a step's calls, in the order of layers and forward calls."""
        if self._shard is None or not self._shard.entry.start <= step < self._shard.entry.stop:
            self._open(next(s for s in self._run.shards if s.entry.start <= step < s.entry.stop))
        return [call for layer in self._sources for call in self._of(layer, step)]

    def _open(self, shard: Shard) -> None:
        self._shard = shard
        self._sources = {}
        for layer in self._layers:
            if count := shard.count(layer):
                counted = self._contributing is None or layer in self._contributing
                groups = self._codes(shard, layer) if counted else np.full(count, -1)
                rows = (shard.rows(layer, "keys"), shard.rows(layer, "values"))
                self._sources[layer] = (shard.calls(layer), *rows, groups)

    def _of(self, layer: str, step: int) -> Iterator[_Call]:
        table, keys, values, groups = self._sources[layer]
        entry = self._run.layer(layer)
        dtype: torch.dtype = getattr(torch, self._run.manifest.parameters[next(iter(entry.parameters.values()))].dtype)
        for i in range(*np.searchsorted(table["step"], [step, step + 1]).tolist()):
            at = slice(int(table["offset"][i]), int(table["offset"][i] + table["rows"][i] * table["positions"][i]))
            yield _Call(
                entry=entry,
                micro=int(table["micro"][i]),
                keys=decode(keys.stored[at], None if keys.scales is None else keys.scales[at], dtype),
                values=decode(values.stored[at], None if values.scales is None else values.scales[at], dtype),
                codes=None if groups is None else torch.from_numpy(np.ascontiguousarray(groups[at])),
                layout=table["layout"][i],
            )
