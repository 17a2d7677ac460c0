"""SOURCE, written from its published formula, for networks of linear layers and convolutions.

    Bae et al. 2024, "Training Data Attribution via Approximate Unrolled Differentiation"

Training is cut into segments l = 1 .. L of K_l steps with the learning rate η. Each has an EK-FAC curvature
H_l = (U_G ⊗ U_A) diag(λ) (U_G ⊗ U_A)ᵀ, from the checkpoints in it together, and the mean ḡ_l of a sample's gradients at
them. With the gradient q of what is asked, at the last checkpoint,

    score = -(1/N) Σ_l ⟨F_l S_{l+1} ... S_L q, ḡ_l⟩      S_l = exp(-η K_l H_l)      F_l = (1 - exp(-η K_l H_l)) H_l⁻¹

Momentum μ multiplies η by 1 / (1 - μ). Under Adam, with P the mean of 1 / (root of second moments + ε), the paper's
appendix takes S_l = exp(-η K_l P h) with the diagonal h of H_l alone, and F_l = H_l⁻¹ (1 - S_l) with a damped EK-FAC
inverse; without a damping here the diagonal takes the place of the inverse too.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.effects.filter import remaining

BATCH = 250  # samples whose gradients are taken at once

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Of each layer the inputs, (B, T, d_in), with a 1 for the bias, and the gradients at the outputs, (B, T, d_out)."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A network on its way.

    Attributes:
        model: the network.
        steps: how many steps led to it from the checkpoint before, or from the start.
        second_moments: of Adam, by parameter, without their bias; empty under SGD.
    """

    model: nn.Module
    steps: int
    second_moments: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What is asked of a checkpoint's network, once for all numbers of segments.

    Attributes:
        checkpoint: the checkpoint.
        own: the pairs of all samples with their own targets.
        drawn: the same with targets drawn from what the network says.
    """

    checkpoint: Checkpoint
    own: Pairs
    drawn: Pairs


@dataclass(frozen=True, slots=True, eq=False)
class Curvature:
    """A layer's curvature in one segment, U diag(λ) Uᵀ with U = U_G ⊗ U_A.

    Attributes:
        values: U_G, (d_out, d_out).
        keys: U_A, (d_in, d_in).
        eigenvalues: λ, (d_out, d_in).
    """

    values: Tensor
    keys: Tensor
    eigenvalues: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        """Return what it is made of."""
        return self.values, self.keys, self.eigenvalues

    def scale(self, matrices: Tensor, factors: Tensor) -> Tensor:
        """Multiply matrices (M, d_out, d_in) by factors (d_out, d_in), in the eigenvectors' coordinates."""
        return self.values @ (factors * (self.values.T @ matrices @ self.keys)) @ self.keys.T

    def diagonal(self) -> Tensor:
        """Return the curvature of each entry of the weight for itself, (d_out, d_in)."""
        return self.values.square() @ self.eigenvalues @ self.keys.square().T


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What is trained and what is asked.

    Attributes:
        losses: of a model's outputs and targets, the loss of each sample, (B,).
        quantity: of a model's outputs and targets, what is asked of each test input, (B,).
        samples: inputs and targets of the training samples.
        tests: inputs and targets of the test inputs.
        rate: the learning rate, over 1 - momentum.
        seed: of the targets that curvatures are sampled with.
    """

    losses: Callable[[Tensor, Tensor], Tensor]
    quantity: Callable[[Tensor, Tensor], Tensor]
    samples: tuple[Tensor, Tensor]
    tests: tuple[Tensor, Tensor]
    rate: float
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """SOURCE's scores.

    Attributes:
        scores: variant -> (M, N), how much each sample is said to raise what is asked of each test input.
        seconds: variant -> seconds of a processor, had it been asked alone.
        factor_bytes: bytes of the curvatures, in float32.
    """

    scores: dict[str, Tensor]
    seconds: dict[str, float]
    factor_bytes: int


def gather(task: Task, checkpoint: Checkpoint) -> Gathered:
    """Return the pairs of all samples at a checkpoint."""
    own = find_pairs(checkpoint.model, task.losses, task.samples)
    return Gathered(checkpoint, own, find_pairs(checkpoint.model, task.losses, task.samples, seed=task.seed))


def score_samples(
    task: Task, gathered: Sequence[Gathered], *, segments: int, dampings: Sequence[float | None] = ()
) -> Scored:
    """Return the scores of all samples, by the plain form and by those for Adam.

    Args:
        task: what is trained and asked.
        gathered: of the checkpoints in their order; the last is the trained network.
        segments: how many segments the checkpoints are cut into.
        dampings: of the form for Adam, each a share of the mean eigenvalue, or None for the diagonal alone; needs
            second moments.
    """
    spent, began = dict.fromkeys(("", *map(_label, dampings)), 0.0), process_time()
    queries = find_queries(task, gathered[-1].checkpoint.model)
    cut = torch.arange(len(gathered)).tensor_split(segments)
    parts = [[gathered[i] for i in part.tolist()] for part in cut]
    curvatures = [find_curvatures(task, part) for part in parts]
    times = [task.rate * sum(each.checkpoint.steps for each in part) for part in parts]
    preconditioners = [find_preconditioners([each.checkpoint for each in part]) for part in parts] if dampings else []
    turned: dict[str, dict[str, list[Tensor]]] = {label: {} for label in spent}
    for name, query in queries.items():
        with _timed(spent, ""):
            turned[""][name] = pull_back([each[name] for each in curvatures], times, query)
        for damping in dampings:
            with _timed(spent, _label(damping)):
                scales = [each[name] for each in preconditioners]
                pulled = pull_back_adam([each[name] for each in curvatures], times, scales, query, damping)
                turned[_label(damping)][name] = pulled
    scores = {label: torch.zeros(len(task.tests[0]), len(task.samples[0])) for label in turned}
    for at, part in enumerate(parts):
        for name in queries:
            asked = {label: layers[name][at].flatten(1).float() for label, layers in turned.items()}
            for each in part:
                inputs, errors = each.own[name]
                for rows in torch.arange(len(inputs)).split(BATCH):
                    gradients = torch.einsum("bto,bti->boi", errors[rows], inputs[rows]).flatten(1).float()
                    for label, query in asked.items():
                        with _timed(spent, label):
                            scores[label][:, rows] -= query @ gradients.T / len(part)
    shared = process_time() - began - sum(spent.values())
    sizes = [4 * part.numel() for each in curvatures for one in each.values() for part in one.parts()]
    return Scored(scores, {label: shared + seconds for label, seconds in spent.items()}, sum(sizes))


def _label(damping: float | None) -> str:
    return "diagonal" if damping is None else f"damping {damping:g}"


@contextlib.contextmanager
def _timed(spent: dict[str, float], label: str) -> Iterator[None]:
    """Add the seconds of a processor that pass meanwhile."""
    start = process_time()
    yield
    spent[label] += process_time() - start


def pull_back(curvatures: Sequence[Curvature], times: Sequence[float], queries: Tensor) -> list[Tensor]:
    """Return F_l S_{l+1} ... S_L q of a layer for each segment, (M, d_out, d_in), in float64.

    Args:
        curvatures: of each segment.
        times: η K of each.
        queries: q, (M, d_out, d_in).
    """
    found, left = [], queries.double()
    for curvature, time in zip(reversed(curvatures), reversed(times), strict=True):
        exponent = time * curvature.eigenvalues
        found.append(curvature.scale(left, time * remaining(exponent)))
        left = curvature.scale(left, (-exponent).exp())
    return found[::-1]


def pull_back_adam(
    curvatures: Sequence[Curvature],
    times: Sequence[float],
    preconditioners: Sequence[Tensor],
    queries: Tensor,
    damping: float | None,
) -> list[Tensor]:
    """Return the same in the form for Adam.

    Args:
        curvatures: of each segment.
        times: η K of each.
        preconditioners: P of each, (d_out, d_in).
        queries: q, (M, d_out, d_in).
        damping: what is added to the eigenvalues, as a share of their mean; None for the diagonal alone.
    """
    found, left = [], queries.double()
    for curvature, time, each in zip(reversed(curvatures), reversed(times), reversed(preconditioners), strict=True):
        exponent = time * each.double() * curvature.diagonal()
        if damping is None:
            found.append(time * each.double() * remaining(exponent) * left)
        else:
            eigenvalues = curvature.eigenvalues
            inverse = 1 / (eigenvalues + damping * eigenvalues.mean()).clamp(min=1e-30)
            found.append(curvature.scale(-torch.expm1(-exponent) * left, inverse))
        left = left * (-exponent).exp()
    return found[::-1]


def find_queries(task: Task, model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of what is asked of each test input, by layer, (M, d_out, d_in)."""
    pairs = find_pairs(model, task.quantity, task.tests)
    return {name: torch.einsum("bto,bti->boi", errors, inputs) for name, (inputs, errors) in pairs.items()}


def find_curvatures(task: Task, gathered: Sequence[Gathered]) -> dict[str, Curvature]:
    """Return each layer's EK-FAC curvature of the mean loss, over some checkpoints together.

    Targets are drawn from what the model says. A sample's loss is a mean over its terms, whose gradients are then
    independent; so the curvature is the number of terms times the second moment of a sample's gradient.
    """
    found = {}
    for name in gathered[0].drawn:
        pairs = [each.drawn[name] for each in gathered]
        keys, values = (torch.linalg.eigh(sum(_moment(pair[i]) for pair in pairs))[1] for i in (0, 1))
        each = [_sum_of_squares(errors.double() @ values, inputs.double() @ keys) for inputs, errors in pairs]
        terms, count = task.samples[1][0].numel(), len(task.samples[0]) * len(gathered)
        found[name] = Curvature(values, keys, torch.stack(each).sum(dim=0) * (terms / count))
    return found


def _moment(rows: Tensor) -> Tensor:
    """Return the sum of the outer products of rows (B, T, d), (d, d)."""
    flat = rows.flatten(0, 1).double()
    return flat.T @ flat


def _sum_of_squares(errors: Tensor, inputs: Tensor) -> Tensor:
    """Return the sum over samples of the squared entries of their gradients, (d_out, d_in)."""
    if errors.shape[1] == 1:
        return errors[:, 0].square().T @ inputs[:, 0].square()
    whole = errors.new_zeros(errors.shape[2], inputs.shape[2])
    for rows in torch.arange(len(errors)).split(BATCH):
        whole += torch.einsum("bto,bti->boi", errors[rows], inputs[rows]).square().sum(dim=0)
    return whole


def find_preconditioners(checkpoints: Sequence[Checkpoint], *, eps: float = 1e-8) -> dict[str, Tensor]:
    """Return Adam's preconditioner of each layer from the mean of the second moments, (d_out, d_in)."""
    found = {}
    for name, module in _layers(checkpoints[-1].model):
        parts = []
        for parameter in ("weight", "bias"):
            if getattr(module, parameter) is not None:
                each = [checkpoint.second_moments[f"{name}.{parameter}"] for checkpoint in checkpoints]
                parts.append(torch.stack(each).mean(dim=0).reshape(len(each[0]), -1))
        found[name] = 1 / (torch.cat(parts, dim=1).sqrt() + eps)
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield name, module


def find_pairs(
    model: nn.Module,
    measure: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    *,
    seed: int | None = None,
) -> Pairs:
    """Return the layers' inputs and the gradients of what is measured of each input of the data.

    With a seed, the targets are drawn from what the model says.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for rows in torch.arange(len(data[0])).split(BATCH):
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        handles = [module.register_forward_hook(_catch(calls, name)) for name, module in _layers(model)]
        try:
            outputs, targets = model(data[0][rows]), data[1][rows]
            if generator is not None:
                said = outputs.detach().flatten(0, -2).softmax(dim=-1)
                targets = torch.multinomial(said, 1, generator=generator).reshape(targets.shape)
            measure(outputs, targets).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
            model.zero_grad()
        for name, each in calls.items():
            found.setdefault(name, []).append(_joined(each, axis=1))
    return {name: _joined(each, axis=0) for name, each in found.items()}


def _catch(calls: dict[str, list[tuple[Tensor, Tensor]]], name: str) -> Callable[..., None]:
    """Return a hook that keeps a layer's inputs, as rows, with the gradients at its outputs, call by call."""

    def forward(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        inputs = _input_rows(module, given[0].detach())

        def backward(gradient: Tensor) -> None:
            errors = gradient.flatten(2).transpose(1, 2) if isinstance(module, nn.Conv2d) else gradient
            calls.setdefault(name, []).append((inputs, errors.reshape(len(errors), -1, errors.shape[-1])))

        output.register_hook(backward)

    return forward


def _input_rows(module: nn.Module, given: Tensor) -> Tensor:
    """Return a layer's inputs as rows, (B, T, d_in), with a 1 where it has a bias."""
    if isinstance(module, nn.Conv2d):
        assert not isinstance(module.padding, str), "padding is a number in the networks that are compared"
        shape = module.kernel_size, module.dilation, module.padding, module.stride
        given = functional.unfold(given, *shape).transpose(1, 2)
    rows = given.reshape(len(given), -1, given.shape[-1])
    return rows if module.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)


def _joined(pairs: Sequence[tuple[Tensor, Tensor]], *, axis: int) -> tuple[Tensor, Tensor]:
    inputs, errors = zip(*pairs, strict=True)
    return torch.cat(inputs, dim=axis), torch.cat(errors, dim=axis)
