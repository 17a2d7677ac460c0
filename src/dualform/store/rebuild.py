"""The weights that a stored run implies: what is left of the start, plus the kept patterns' shares.

`weight = start + share` (and `+ rounding`, where the optimizer rounds coarsely), each parameter summed over all layers
that use it, in float64 over float32 products. Parameters whose optimizer has coefficients are summed in any order; the
others are replayed step by step.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualform.coefficients.family import Of
from dualform.identity.parameter_maps import ParameterMap
from dualform.progress import bar
from dualform.record.sinks import RESIDUAL
from dualform.store.reader import Run
from dualform.store.replay import Rounding, kept, replay, replayed_parameters
from dualform.store.stream import Keep, everything, stream


@dataclass(frozen=True, slots=True)
class Parts:
    """A parameter in two parts, float64, or three where its optimizer rounds more coarsely than its dtype."""

    start: Tensor  # what decay and momentum left of the start
    share: Tensor  # what the kept patterns added
    rounding: Rounding | None = None
    noise: float = 0.0  # the size of what coarsely rounded gradients did beyond their patterns, at random

    @property
    def whole(self) -> Tensor:
        """The parameter: all parts together. Rounding is no pattern's, so that every view keeps it, like the start."""
        total = self.start + self.share
        return total if self.rounding is None else total + self.rounding.term


def parts(
    run: Run, *, horizon: int, keep: Keep = everything, layers: Collection[str] | None = None
) -> dict[str, Parts]:
    """Return start and share of each parameter of these layers after `horizon` steps.

    Args:
        run: the run to read.
        horizon: the number of steps after which the parameters are wanted.
        keep: which patterns to keep.
        layers: the layers whose parameters are wanted; by default every one with values.
    """
    if layers is None:
        layers = [name for name, entry in run.layers.items() if entry.store != "keys"]
    scalar = shares(run, horizon=horizon, keep=keep, layers=layers)
    found = {
        name: Parts(start(run, name, horizon=horizon), share, noise=_noise(run, name, horizon))
        for name, share in scalar.items()
    }
    if replayed_parameters(run, layers):
        for name, outcome in replay(run, layers, horizon=horizon, groups=1, codes=kept(keep)).items():
            found[name] = Parts(outcome.start, outcome.shares[0], outcome.rounding, outcome.noise)
    return found


def _noise(run: Run, parameter: str, horizon: int) -> float:
    """Return the root of the sum of squares of what each step's residual did to a parameter with coefficients."""
    facts, _ = run.facts(parameter)
    if RESIDUAL not in facts.settings:
        return 0.0
    residual = np.nan_to_num(np.asarray(facts.settings[RESIDUAL], dtype=np.float64))
    within = facts.step < horizon
    coefficients = run.coefficients(parameter, horizon)[0].step[facts.step[within]]
    return float(np.linalg.norm(coefficients * residual[within]))


def start(run: Run, parameter: str, *, horizon: int, of: Of = "parameter") -> Tensor:
    """Return what `horizon` steps left of the start of a parameter that has coefficients, in float64."""
    found, _ = run.coefficients(parameter, horizon, of)
    left = found.start * run.initial[parameter].double()
    buffer = run.initial_states.get(parameter, {}).get("momentum_buffer")
    return left if buffer is None else left + found.buffer * buffer.double()


def shares(
    run: Run, *, horizon: int, keep: Keep = everything, layers: Collection[str], of: Of = "parameter"
) -> dict[str, Tensor]:
    """Return the kept patterns' share of each parameter that has coefficients (or of its buffer), in float64."""
    total: dict[str, Tensor] = {}
    for layer in layers:
        entry = run.require_values(layer)
        scalar = [name for name in entry.parameters.values() if not run.is_replayed(name)]
        for parameter in scalar:
            shape = run.manifest.parameters[parameter].shape
            total.setdefault(parameter, torch.zeros(shape, dtype=torch.float64))
        if not scalar:
            continue
        with bar(f"rebuilding {layer}", total=run.count(layer)) as advance:
            for chunk in stream(run, layer, horizon=horizon, keep=keep, values=True, of=of, reuse=True):
                assert chunk.values is not None, "values were asked for"
                for use, coefficients in chunk.coefficients.items():
                    share, parameter_map = total[use.parameter], use.parameter_map
                    values = scaled(chunk.values, coefficients, parameter_map)
                    share += parameter_map.gradient(values, chunk.keys, share.shape)
                advance(len(chunk.patterns))
    return total


def scaled(values: Tensor, coefficients: Tensor, parameter_map: ParameterMap) -> Tensor:
    """Return values (T, d_out) times coefficients (T,); a bias's in float64, since they nearly cancel in its sum."""
    if parameter_map.is_bias:
        values, coefficients = values.double(), coefficients.double()
    return values * coefficients[:, None]


def states(run: Run, *, horizon: int) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state that the run implies after `horizon` steps: parameter -> entry -> tensor."""
    layers = [name for name, entry in run.layers.items() if entry.store != "keys"]
    buffers = shares(run, horizon=horizon, layers=layers, of="buffer")
    found = {
        name: {"momentum_buffer": start(run, name, horizon=horizon, of="buffer") + share}
        for name, share in buffers.items()
    }
    for name in found:  # what no step touched is as it was, whatever the optimizer
        if not len(run.facts(name)[0].step):
            found[name] = {entry: tensor.double() for entry, tensor in run.initial_states.get(name, {}).items()}
    if replayed_parameters(run, layers):
        for name, outcome in replay(run, layers, horizon=horizon, groups=0, codes=kept(everything)).items():
            found[name] = {e: t.double() for e, t in outcome.state.items() if isinstance(t, Tensor)}
    return found
