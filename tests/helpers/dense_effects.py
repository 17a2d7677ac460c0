"""Effects as their formula is written: plain autograd, float64, a loop over patterns and over test inputs.

Shares nothing with the package: it trains its own copy of a network of linear layers and ReLUs, derives rates from the
optimizer's own definition, and never factorises anything.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Step:
    """The patterns of one step of one layer: keys with a 1 appended, values, the rate, and what decay takes."""

    keys: Tensor
    values: Tensor
    rate: float
    decay: float


def train_densely(
    model: nn.Sequential, batches: Sequence[tuple[Tensor, Tensor]], *, adam: bool, lr: float, **settings: float
) -> tuple[nn.Sequential, dict[str, list[Step]]]:
    """Train a copy; return it and every layer's steps."""
    model = copy.deepcopy(model)
    layers = {name: module for name, module in model.named_children() if isinstance(module, nn.Linear)}
    steps: dict[str, list[Step]] = {name: [] for name in layers}
    first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number, (inputs, labels) in enumerate(batches, start=1):
        x, seen = inputs, {}
        for name, module in model.named_children():
            z = module(x)
            if name in layers:
                z.retain_grad()
                seen[name] = (x, z)
            x = z
        model.zero_grad()
        functional.cross_entropy(x, labels).backward()
        with torch.no_grad():
            rates = {}
            for name, p in model.named_parameters():
                g = p.grad
                assert g is not None
                if adam:
                    first[name] = 0.9 * first[name] + 0.1 * g
                    second[name] = 0.999 * second[name] + 0.001 * g**2
                    d = 1 / ((second[name] / (1 - 0.999**number)).sqrt() + 1e-8)
                    rates[name] = (lr * (d * g**2).sum(), (g**2).sum())
                    p.mul_(1 - lr * settings["weight_decay"])
                    p.sub_(lr * d * first[name] / (1 - 0.9**number))
                else:
                    d = g + settings["weight_decay"] * p
                    first[name] = d if number == 1 else settings["momentum"] * first[name] + d
                    p.sub_(lr * first[name])
            for name, (key, z) in seen.items():
                if adam:
                    above, below = (sum(rates[f"{name}.{part}"][i] for part in ("weight", "bias")) for i in (0, 1))
                    rate, decay = (
                        float(above / below),
                        -math.log(1 - lr * settings["weight_decay"]),
                    )
                else:
                    rate = lr / (1 - settings["momentum"])
                    decay = rate * settings["weight_decay"]
                keys = torch.cat([key.detach(), torch.ones(len(key), 1, dtype=key.dtype)], dim=1)
                steps[name].append(Step(keys, z.grad.clone(), rate, decay))
    return model, steps


def softmax_weights(step: Step) -> Tensor:
    """Return w of each pattern, from the last layer's values."""
    found = []
    for e in step.values:
        scaled = len(step.values) * e
        p = scaled.clone()
        p[scaled.argmin()] += 1
        found.append(((1 - p @ p) / (scaled @ scaled)).clamp(0, 1e4))
    return torch.stack(found)


def dense_moments(steps: Sequence[Step], last: Sequence[Step] | None) -> tuple[float, Tensor, Tensor]:
    """Return T, A and G of a layer; `last` is the last layer's steps, for w, or nothing for w = 1."""
    time = sum(step.rate for step in steps)
    d_in, d_out = steps[0].keys.shape[1], steps[0].values.shape[1]
    a, g = torch.zeros(d_in, d_in, dtype=torch.float64), torch.zeros(d_out, d_out, dtype=torch.float64)
    for number, step in enumerate(steps):
        n = len(step.keys)
        weights = torch.ones(n) if last is None else softmax_weights(last[number])
        for x, e, w in zip(step.keys, step.values, weights, strict=True):
            a += step.rate / n * torch.outer(x, x) / time
            g += step.rate * n * w * torch.outer(e, e) / time
    return time, a, g


def kernel_size(steps: Sequence[Step], last: Sequence[Step] | None) -> float:
    """Return t = T tr(A) tr(G) of a layer."""
    time, a, g = dense_moments(steps, last)
    return float(time * a.trace() * g.trace())


def dense_effects(
    steps: Sequence[Step],
    last: Sequence[Step] | None,
    asked: Sequence[tuple[Tensor, Tensor]],
    *,
    kappa: float = 1.0,
) -> Tensor:
    """Return the effect of every pattern on every test input, (M, T).

    Args:
        steps: a layer's.
        last: the last layer's, for w; nothing for w = 1.
        asked: of each test input, its query at the layer and the gradient at the layer's output.
        kappa: how much faster than by this layer alone an absence is repaired.
    """
    time, a, g = dense_moments(steps, last)
    a_values, u_a = torch.linalg.eigh(a)
    g_values, u_g = torch.linalg.eigh(g)
    decay = sum(step.decay for step in steps)
    exponent = kappa * time * torch.outer(g_values.clamp(min=0), a_values.clamp(min=0)) + decay
    left = torch.where(exponent > 1e-9, (1 - torch.exp(-exponent)) / exponent, torch.ones_like(exponent))
    effects = []
    for query, gradient in asked:
        q = torch.cat([query, torch.ones(1, dtype=query.dtype)])
        matrix = u_g @ (left * torch.outer(u_g.T @ gradient, u_a.T @ q)) @ u_a.T
        effects.append(
            torch.stack(
                [-step.rate * (e @ matrix @ x) for step in steps for x, e in zip(step.keys, step.values, strict=True)]
            )
        )
    return torch.stack(effects)


def asked_of(
    model: nn.Sequential, inputs: Tensor, labels: Tensor, quantity: str
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return each test input's query and gradient at every layer, one input at a time."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for row, label in zip(inputs, labels.tolist(), strict=True):
        x, seen = row, {}
        for name, module in model.named_children():
            z = module(x)
            if isinstance(module, nn.Linear):
                z.retain_grad()
                seen[name] = (x, z)
            x = z
        others = torch.cat([x[:label], x[label + 1 :]])
        asked = x[label] - others.logsumexp(0) if quantity == "margin" else x.logsumexp(0) - x[label]
        model.zero_grad()
        asked.backward()
        for name, (x, z) in seen.items():
            found.setdefault(name, []).append((x.detach(), z.grad.clone()))
    return found
