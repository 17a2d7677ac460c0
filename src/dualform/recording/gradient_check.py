"""Do the recorded patterns explain the gradient of a step? The check that reads the whole gradient.

The gradient G of a weight is seen through P = G R with a few fixed random columns R (a bias through itself), and
compared with what the patterns of all its backwards predict, each times its factor: sum_m f_m E_mᵀ (X_m R).

Differences are compared with the rounding of what P was computed from, ‖G‖ and sum |e| ‖x‖, never with P itself: a
projection that happens to cancel is small, and its rounding is not. sum |e| ‖x‖ costs a pass over keys and values, so
it is found only where ‖G‖ does not explain a difference already.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualform.identity.parameter_use import ParameterUse
from dualform.recording.divided import whole_shape
from dualform.recording.gradient_history import NOT_FINITE, Factors
from dualform.recording.gradient_samples import (
    GradientSample,
    Look,
    SamplePlan,
    plan_sample,
    sample_elements,
    take_sample,
)
from dualform.recording.hooks import Arrival
from dualform.recording.pattern_copies import find_late_values
from dualform.recording.probes import (
    COARSE_ROUNDING,
    Float64Array,
    Patches,
    Prediction,
    ProbeSpec,
    as_float64,
    is_at_hand,
    length,
    norm_of,
    predict,
    projection,
)
from dualform.threads import one_thread

MAX_JOINED_BYTES = 1 << 16
"""Bytes of a call's keys up to which its patterns are compared together with those of the layer's other calls."""
UNSEEN = (
    "no recorded pattern explains its gradient: its layer was not seen in the forward pass, which was a functional "
    "call, began before the recording, or was compiled before it (call torch._dynamo.reset())"
)


class ExplainedGradient(NamedTuple):
    """What a check found.

    Attributes:
        objection: how the gradient differs from its patterns' sum, in words; None if only by rounding.
        residual: ‖gradient − its patterns' sum‖, where autocast rounded the gradient; else None.
        factor: what the patterns' sum was multiplied with, where that was to be found.
    """

    objection: str | None
    residual: float | None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class PredictedPart:
    """What the patterns of one call predict for the probe of a gradient.

    Attributes:
        micro: which backward accumulated them.
        columns: the prediction.
        size: finds what the prediction's rounding is relative to.
        patterns: their number.
        coarse: whether autocast rounded what they add to the gradient.
        prediction: where the numbers come from.
    """

    micro: int
    columns: Tensor
    size: Callable[[], float]
    patterns: int
    coarse: bool
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class GradientView:
    """A gradient seen through its random columns, beside what its patterns predict for them.

    Attributes:
        seen: G R; of a gradient with one axis G itself.
        parts: the predictions.
        norm: finds ‖G‖.
        width: d_in; 1 for a bias.
        dtype: of the gradient.
    """

    seen: Tensor
    parts: Sequence[PredictedPart]
    norm: Callable[[], float]
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PredictedSum:
    """What all patterns of a step predict for the probe of a gradient.

    Attributes:
        columns: the prediction, each backward's times its factor.
        size: finds what the prediction's rounding is relative to.
        patterns: their number.
        coarse: whether autocast rounded what any of them adds to the gradient.
    """

    columns: Float64Array
    size: Callable[[], float]
    patterns: int
    coarse: bool


class Resolution(NamedTuple):
    """What is known of a parameter's gradient at the step.

    Attributes:
        factors: micro -> what its gradient was multiplied with; 0 where it was cleared, NaN where no one factor is.
        objection: what the identity does not cover, in words; None if nothing was found.
        residual: ‖gradient − its patterns' sum‖, where autocast rounded the gradient.
    """

    factors: Mapping[int, float]
    objection: str | None
    residual: float | None = None


class GradientCheck:
    """Compares gradients with what recorded patterns predict, through a few fixed random columns per parameter."""

    def __init__(self, *, by_elements: Collection[str] = (), projected: bool = False) -> None:
        """Compare the gradients of one recording.

        Args:
            by_elements: names of dense gradients whose patterns need not explain them, so that some of their elements
                show enough on a GPU too.
            projected: whether every sample is taken through random columns, so that samples of several processes have
                the same form whatever their gradients are.
        """
        self._by_elements = by_elements
        self._projected = projected
        self._columns: dict[str, Tensor] = {}
        self._sparse: set[str] = set()  # parameters whose gradients are mostly zero
        self._plans: dict[str, SamplePlan | None] = {}

    def sample(
        self,
        name: str,
        parameter: nn.Parameter,
        gradient: Tensor | None,
        *,
        projected: bool | None = None,
        look: Look = "later",
    ) -> GradientSample | None:
        """Take a sample of a parameter's gradient, if there is one; with options as `take_sample` has them."""
        if gradient is None:
            return None
        if gradient.is_cuda and name not in self._by_elements:
            return self._sample_on_gpu(name, parameter, gradient, look)
        projected = self._projected or projected
        if not projected and look == "later" and name not in self._sparse:
            plan = self._plans[name] if name in self._plans else self.plan(name, parameter)
            view = None if plan is None else plan.view(gradient)
            if plan is not None and view is not None:
                elements = view.clone()
                if not plan.least or elements.numpy().nonzero()[0].size >= plan.least:
                    return GradientSample(elements)
        if not is_at_hand(parameter):
            if name in self._by_elements:
                return sample_elements(gradient, look=look)
            return take_sample(gradient, self.columns(name, parameter), look=look)
        if projected is None and name in self._sparse:
            projected = True
        with one_thread(bytes_read=gradient.nbytes, device=parameter.device):
            return take_sample(gradient, self.columns(name, parameter), projected=projected, look=look)

    def _sample_on_gpu(self, name: str, parameter: nn.Parameter, gradient: Tensor, look: Look) -> GradientSample:
        """Return the sample that `take_sample` takes of a gradient on a GPU, with fewer calls."""
        columns = self._columns.get(name)
        plain = look != "now" and gradient.layout is torch.strided and not gradient.requires_grad
        if plain and columns is not None and gradient.dim() == 2 and columns.device == gradient.device:
            elements = torch.mm(gradient, columns).view(-1)
            return GradientSample(elements, True, None, gradient if look == "at the step" else None)
        return take_sample(gradient, self.columns(name, parameter), look=look)

    def views(self, parameters: Mapping[str, nn.Parameter]) -> list[Tensor | None]:
        """Return each gradient's sample as it is in the gradient's memory; None where it has to be taken."""
        found = []
        for name, parameter in parameters.items():
            gradient = parameter.grad
            plan = self._plans[name] if name in self._plans else self.plan(name, parameter)
            found.append(None if gradient is None or plan is None else plan.view(gradient))
        return found

    def plan(self, name: str, parameter: nn.Parameter) -> SamplePlan | None:
        """Return where the sample of a parameter's gradient lies, or None; see `plan_sample`."""
        if name not in self._plans:
            self._plans[name] = plan_sample(parameter)
        return self._plans[name]

    def columns(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Return the fixed random columns R of a parameter, (d_in, C); None where it has a single axis."""
        columns = self._columns.get(name)
        if columns is not None and columns.device == parameter.device:
            return columns
        shape = whole_shape(parameter)
        if len(shape) == 1:
            return None
        rows, width = shape[0], shape[1:].numel()
        columns = projection(rows, width, dtype=parameter.dtype, device=parameter.device)
        self._columns[name] = columns
        return columns

    def resolve(
        self,
        name: str,
        parameter: nn.Parameter,
        arrivals: Sequence[tuple[int, Arrival]],
        factors: Factors,
        *,
        full: bool,
        sample: GradientSample | None = None,
    ) -> Resolution:
        """Return what is known of a gradient at the step, compared with its patterns where that is to be done.

        That is in a `full` check; where autocast rounded the gradient, whose distance from its patterns is a fact of
        the step; and where the samples showed nothing: then the factor is found that fits best.

        Args:
            name: the parameter's name.
            parameter: the parameter, its gradient as the step sees it.
            arrivals: the calls that were accumulated since the last step, each with its micro.
            factors: what the gradient's samples show.
            full: whether the step is checked in full.
            sample: a sample of the gradient as the step sees it, if one was taken; it may spare another reading.
        """
        wanted = full or factors.blind or any(arrival.call.coarse is not None for _, arrival in arrivals)
        refused = factors.objection is not None and not factors.blind
        if refused or not wanted or parameter.grad is None:
            return Resolution(factors.of, factors.objection)
        gradient = parameter.grad.detach() if parameter.dim() == 1 else parameter.grad.detach().flatten(1)
        columns = self.columns(name, parameter)
        if columns is None:
            seen = gradient
        elif sample is not None and sample.projected and is_at_hand(gradient):
            seen = sample.elements.view(len(gradient), -1)
        else:
            with one_thread(bytes_read=gradient.nbytes, device=gradient.device):
                seen = gradient @ columns
        view = self.view(name, parameter, arrivals, seen, lambda: float(norm_of(gradient)))
        explained = explain(view, factors.of, find_factor=factors.blind)
        if not factors.blind:
            return Resolution(factors.of, explained.objection, explained.residual)
        if explained.objection is not None:
            return Resolution(factors.of, explained.objection, explained.residual)
        self._sparse.add(name)  # its samples said too little
        return Resolution(dict.fromkeys(factors.of, explained.factor), None, explained.residual)

    def view(
        self,
        name: str,
        parameter: nn.Parameter,
        arrivals: Sequence[tuple[int, Arrival]],
        seen: Tensor,
        norm: Callable[[], float],
    ) -> GradientView:
        """Return a parameter's gradient beside what its patterns predict; no number of them is read.

        Args:
            name: the parameter's name.
            parameter: the parameter.
            arrivals: the calls that were accumulated since the last step, each with its micro.
            seen: its gradient as the step sees it, through the parameter's random columns.
            norm: finds the norm of the gradient.
        """
        parts = [
            PredictedPart(
                micro,
                prediction.columns,
                prediction.size,
                0 if calls[0].values is None else len(prediction.values),
                calls[0].call.coarse is not None,
                prediction,
            )
            for micro, calls in _by_layer(arrivals)
            for use, prediction in self._predictions(calls).items()
            if use.parameter == name
        ]
        return GradientView(seen, parts, norm, parameter.shape[1:].numel(), parameter.dtype)

    def _predictions(self, calls: Sequence[Arrival]) -> dict[ParameterUse, Prediction]:
        """Return what the patterns of a layer's calls predict for its parameters, computed once for all of them.

        The first of the calls keeps it, for as long as no other call joins them.
        """
        first = calls[0]
        if first.predictions is None or first.predicted_calls != len(calls):
            first.predictions, first.predicted_calls = {}, len(calls)
            for call in calls:
                if call.values is None and call.keys is not None:
                    call.values = find_late_values(call)
            if first.values is not None and first.keys is not None:
                layer = first.call.layer
                watching = {
                    use: ProbeSpec(self.columns(name, parameter), parameter.shape)
                    for use, (name, parameter) in layer.parameters.items()
                }
                dtype = next(iter(layer.parameters.values()))[1].dtype
                values = _joined([call.values for call in calls]).to(dtype)
                keys = _joined_keys(calls, dtype)
                # Autograd rounds the whole gradient to what autocast computed in.
                coarse = 1.0 if first.call.coarse is None else COARSE_ROUNDING / torch.finfo(dtype).eps
                factor = layer.kind.rounding * coarse
                read = values.nbytes + (keys.inputs if isinstance(keys, Patches) else keys).nbytes
                with one_thread(bytes_read=read, device=values.device):
                    first.predictions = predict(watching, values, keys, rounding=factor)
        return first.predictions


def _by_layer(arrivals: Sequence[tuple[int, Arrival]]) -> list[tuple[int, list[Arrival]]]:
    """Return calls together that one backward brought to one layer, where they are small; each list with its micro."""
    together: dict[tuple[int, int, torch.dtype | None], list[Arrival]] = {}
    found = []
    for micro, arrival in arrivals:
        small = arrival.keys is not None and arrival.keys.nbytes <= MAX_JOINED_BYTES
        key = micro, id(arrival.call.layer), arrival.call.coarse
        if not small or key not in together:
            found.append((micro, [arrival]))
            if small:
                together[key] = found[-1][1]
        else:
            together[key].append(arrival)
    return found


def _joined_keys(calls: Sequence[Arrival], dtype: torch.dtype) -> Tensor | Patches:
    """Return the keys of several calls as one tensor, (T, d_in); or those of a single call as `Patches` of its inputs.

    `Patches` are for a call in the CPU's memory whose inputs are kept in place of its keys.
    """
    first = calls[0]
    if len(calls) == 1 and first.keys is not None and first.unfolding is not None and first.keys.is_cpu:
        return Patches(first.keys.to(dtype), first.unfolding)
    keys = _joined([_keys_of(call) for call in calls])
    return keys.to(dtype) if keys.is_floating_point() else keys


def _keys_of(arrival: Arrival) -> Tensor | None:
    """Return the keys of a call, (T, d_in), made of its inputs where these are kept in their place."""
    if arrival.keys is None or arrival.unfolding is None:
        return arrival.keys
    return arrival.unfolding.rows(arrival.keys)


def _joined(rows: Sequence[Tensor | None]) -> Tensor:
    """Return the rows of several calls as one tensor."""
    given = [one for one in rows if one is not None]
    return given[0] if len(given) == 1 else torch.cat(given)


def explain(view: GradientView, factors: Mapping[int, float], *, find_factor: bool) -> ExplainedGradient:
    """Compare a parameter's gradient with the sum of its patterns.

    Args:
        view: the gradient as the step sees it, and its patterns' predictions.
        factors: micro -> what its gradient was multiplied with.
        find_factor: whether to find one factor for all backwards together, instead of taking `factors`.
    """
    total: Tensor | None = None
    parts: list[tuple[float, PredictedPart]] = []
    for part in view.parts:
        factor = 1.0 if find_factor and part.micro in factors else factors.get(part.micro, 0.0)
        if factor == 0.0:
            continue
        columns = part.columns if factor == 1.0 else factor * part.columns
        total = columns if total is None else total + columns
        parts.append((factor, part))
    predicted = as_float64(view.seen.new_zeros(()).expand(view.seen.shape) if total is None else total)
    found = 1.0
    if find_factor:
        now = as_float64(view.seen)
        power = float(predicted @ predicted)
        found = float(predicted @ now) / power if power else 1.0
        predicted = found * predicted
    summed = PredictedSum(
        predicted,
        lambda: sum(abs(factor * found) * part.size() for factor, part in parts),
        sum(part.patterns for _, part in parts),
        any(part.coarse for _, part in parts),
    )
    return compare_sum(view, summed)._replace(factor=found)


def compare_sum(view: GradientView, predicted: PredictedSum) -> ExplainedGradient:
    """Compare a parameter's gradient with the sum of what all of its patterns predict."""
    now = as_float64(view.seen)
    difference = length(now - predicted.columns)
    residual = difference if predicted.coarse else None
    if not math.isfinite(difference):
        return ExplainedGradient(NOT_FINITE, residual)
    # ‖G‖ is never more than the patterns' sum |e| ‖x‖
    if difference <= rounding(length(now), view.width, view.dtype):
        return ExplainedGradient(None, residual)
    size = predicted.size()
    if difference <= rounding(max(size, view.norm()), view.width, view.dtype, terms=predicted.patterns):
        return ExplainedGradient(None, residual)
    if not size:
        return ExplainedGradient(UNSEEN, residual)
    text = (
        f"the recorded patterns do not explain its gradient (residual {difference / size:.1e}): it is also used "
        "where it is not seen, such as a regulariser in the loss or a functional call; or a hook or an edit by "
        "hand changes gradients; or the GPU computed it in TF32 (set torch.backends.cudnn.allow_tf32 and "
        "torch.backends.cuda.matmul.allow_tf32 to False)"
    )
    return ExplainedGradient(text, residual)


def rounding(size: float, width: int, dtype: torch.dtype, *, terms: int = 0) -> float:
    """Return how large a difference rounding explains.

    The rounding of a product grows with the square root of its width; the bound is 4 times the worst of 10,000 random
    gradients (tests/recording/test_probes.py). That of a sum over patterns, which autograd may add up one by one, grows
    with the root of their number (`terms`), and more where all have the same sign. Below the last term products of
    gradients underflow.
    """
    limits = torch.finfo(dtype)
    relative = 16 + 2 * math.sqrt(width) + 4 * math.sqrt(terms)
    return relative * limits.eps * size + limits.smallest_normal / limits.eps
