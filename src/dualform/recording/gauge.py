"""Gauge: probes of a model's gradients, and what recorded calls predict for them. Holds the random columns."""

import torch
from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.hooks import Arrival
from dualform.recording.probes import COARSE, Prediction, Probe, Size, Watching, predict, probe, projection
from dualform.threads import one_thread


class Gauge:
    """Measures gradients through a few fixed random columns per parameter."""

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}

    def probe(self, name: str, parameter: nn.Parameter, *, size: Size = "about") -> Probe | None:
        """Take a probe of a parameter's gradient, if there is one."""
        if parameter.grad is None:
            return None
        gradient = parameter.grad if parameter.dim() == 1 else parameter.grad.flatten(1)
        with one_thread(bytes_read=gradient.nbytes, device=gradient.device):
            return probe(gradient, self._projection(name, parameter), size=size)

    def predictions(self, arrival: Arrival) -> dict[ParameterUse, Prediction]:
        """Return what a call's patterns predict for its parameters, computed once for all of them."""
        if arrival.predictions is None:
            arrival.predictions = {}
            if arrival.values is not None and arrival.keys is not None:
                layer = arrival.call.layer
                watching = {
                    use: Watching(self._projection(name, parameter), parameter.shape)
                    for use, (name, parameter) in layer.parameters.items()
                }
                dtype = next(iter(layer.parameters.values()))[1].dtype
                values = arrival.values.to(dtype)
                # Autograd rounds the whole gradient to what autocast computed in.
                coarse = 1.0 if arrival.call.coarse is None else COARSE / torch.finfo(dtype).eps
                rounding = layer.kind.rounding * coarse
                with one_thread(bytes_read=values.nbytes + arrival.keys.nbytes, device=values.device):
                    arrival.predictions = predict(watching, values, arrival.keys, rounding=rounding)
        return arrival.predictions

    def _projection(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        if parameter.dim() == 1:
            return None
        columns = self._columns.get(name)
        if columns is None or columns.device != parameter.device:
            rows, width = len(parameter), parameter[0].numel()
            columns = projection(rows, width, dtype=parameter.dtype, device=parameter.device)
            self._columns[name] = columns
        return columns
