"""The dense, obvious implementation that everything is compared with: float64, loops over patterns, no hooks, no files.

It trains its own copy of a small network by plain autograd, and takes SGD apart *forwards*: the start and every pattern
own a share of each parameter and of its momentum buffer, and every step pushes every share through the optimizer's
update. The weight is the sum of all shares. (The package derives coefficients backwards, and only when asked.)
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor], Tensor]


@dataclass
class Share:
    """What one thing adds to a parameter, and to its momentum buffer."""

    parameter: Tensor
    buffer: Tensor


@dataclass
class Pattern:
    """One (key, value) row of a layer, with its address and its shares by parameter name."""

    layer: str
    step: int
    micro: int
    call: int
    row: int
    position: int
    key: Tensor
    value: Tensor
    columns: dict[str, Any]
    shares: dict[str, Share] = field(default_factory=dict)


@dataclass
class Batch:
    """One backward: inputs (B, d) or (B, L, d), a loss of the network's output, and constant or (B,) columns."""

    inputs: Tensor
    loss: Loss
    columns: Mapping[str, Any] = field(default_factory=dict)


class Reference:
    """A sequential network of linear layers and anything without parameters between them, trained by SGD."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = copy.deepcopy(model).double()
        self.layers = {name: m for name, m in self.model.named_children() if isinstance(m, nn.Linear)}
        self.starts = {
            name: Share(p.detach().clone(), torch.zeros_like(p)) for name, p in self.model.named_parameters()
        }
        self.warm: set[str] = set()  # parameters that have a momentum buffer
        self.patterns: list[Pattern] = []
        self.steps = 0
        self.history = [self.weights()]  # after every step

    # Training -----------------------------------------------------------------------------------------------------

    def step(
        self,
        batches: Sequence[Batch],
        settings: Mapping[str, Any] | Callable[[str], Mapping[str, Any]],
        *,
        max_norm: float | None = None,
        without_gradient: Iterable[str] = (),
    ) -> None:
        """Accumulate the batches, clip by norm, and step with SGD's settings (of each parameter, where they differ)."""
        new = [pattern for micro, batch in enumerate(batches) for pattern in self._patterns(micro, batch)]
        gradients = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        for pattern in new:
            for name, gradient in self._gradients(pattern).items():
                gradients[name] += gradient
        for name in without_gradient:
            del gradients[name]
        factor = 1.0
        if max_norm is not None:
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            factor = min(1.0, float(max_norm / (norm + 1e-6)))
        self.patterns += new
        for name in gradients:
            chosen = settings(name) if callable(settings) else settings
            terms: list[tuple[Pattern | None, Share]] = [(None, self.starts[name])]
            terms += [(pattern, pattern.shares[name]) for pattern in self.patterns if name in pattern.shares]
            for term, share in terms:
                gradient = torch.zeros_like(share.parameter)
                if term is not None and term.step == self.steps:
                    gradient = factor * self._gradients(term)[name]
                _sgd(share, gradient, first=name not in self.warm, **chosen)
            if chosen.get("momentum", 0.0) != 0.0:
                self.warm.add(name)
        self.steps += 1
        with torch.no_grad():
            for name, weight in self.weights().items():
                self.model.get_parameter(name).copy_(weight)
        self.history.append(self.weights())

    def _patterns(self, micro: int, batch: Batch) -> list[Pattern]:
        x = batch.inputs.double()
        calls = []
        for name, module in self.model.named_children():
            if name in self.layers:
                layer = self.layers[name]
                z = x @ layer.weight.T
                if layer.bias is not None:
                    z = z + layer.bias
                z.retain_grad()
                calls.append((name, x, z))
                x = z
            else:
                x = module(x)
        self.model.zero_grad()
        batch.loss(x).backward()
        found = []
        for name, key, z in calls:
            keys, values = key.detach(), z.grad
            assert values is not None
            for row in range(len(keys)):
                columns = {
                    column: entry if isinstance(entry, str | int | float) else entry[row]
                    for column, entry in batch.columns.items()
                }
                for position in range(keys[row].numel() // keys.shape[-1]):
                    k = keys[row].reshape(-1, keys.shape[-1])[position]
                    v = values[row].reshape(-1, values.shape[-1])[position]
                    pattern = Pattern(name, self.steps, micro, 0, row, position, k, v, columns)
                    pattern.shares = {
                        p: Share(torch.zeros_like(g), torch.zeros_like(g)) for p, g in self._gradients(pattern).items()
                    }
                    found.append(pattern)
        return found

    def _gradients(self, pattern: Pattern) -> dict[str, Tensor]:
        gradients = {f"{pattern.layer}.weight": torch.outer(pattern.value, pattern.key)}
        if self.layers[pattern.layer].bias is not None:
            gradients[f"{pattern.layer}.bias"] = pattern.value
        return gradients

    # Answers ------------------------------------------------------------------------------------------------------

    def of(self, layer: str, keep: Callable[[Pattern], bool] = lambda pattern: True) -> list[Pattern]:
        """Return a layer's kept patterns in the order they are stored."""
        return [pattern for pattern in self.patterns if pattern.layer == layer and keep(pattern)]

    def shares(self, keep: Callable[[Pattern], bool] = lambda pattern: True) -> dict[str, Tensor]:
        """Return the kept patterns' share of every parameter."""
        total = {name: torch.zeros_like(start.parameter) for name, start in self.starts.items()}
        for pattern in self.patterns:
            if keep(pattern):
                for name, share in pattern.shares.items():
                    total[name] = total[name] + share.parameter
        return total

    def weights(self, keep: Callable[[Pattern], bool] = lambda pattern: True) -> dict[str, Tensor]:
        """Return what is left of the start, plus the kept patterns' shares."""
        return {name: self.starts[name].parameter + share for name, share in self.shares(keep).items()}

    def attention(self, layer: str, queries: Tensor, keep: Callable[[Pattern], bool] = lambda pattern: True) -> Tensor:
        """Return key · query, (Q, T)."""
        patterns = self.of(layer, keep)
        return torch.tensor([[float(p.key @ q) for p in patterns] for q in queries.double()], dtype=torch.float64)

    def contributions(
        self, layer: str, queries: Tensor, keep: Callable[[Pattern], bool] = lambda pattern: True
    ) -> Tensor:
        """Return what each pattern adds to the output, (Q, T, d_out): its share of the layer, applied to the query."""
        rows = []
        for query in queries.double():
            row = []
            for pattern in self.of(layer, keep):
                added = pattern.shares[f"{layer}.weight"].parameter @ query
                if f"{layer}.bias" in pattern.shares:
                    added = added + pattern.shares[f"{layer}.bias"].parameter
                row.append(added)
            rows.append(torch.stack(row))
        return torch.stack(rows)

    def totals(
        self,
        layer: str,
        queries: Tensor,
        by: Callable[[Pattern], Any],
        of: str = "attention",
        keep: Callable[[Pattern], bool] = lambda pattern: True,
    ) -> dict[Any, Tensor]:
        """Return the sum over each group's patterns, by group label: (Q,) or (Q, d_out)."""
        if of == "contribution":
            each = self.contributions(layer, queries, keep)
        else:
            each = self.attention(layer, queries, keep)
            each = each.abs() if of == "magnitude" else each
        groups: dict[Any, Tensor] = {}
        for t, pattern in enumerate(self.of(layer, keep)):
            label = by(pattern)
            groups[label] = groups.get(label, torch.zeros_like(each[:, t])) + each[:, t]
        return groups

    def top(
        self,
        layer: str,
        queries: Tensor,
        k: int,
        *,
        largest: bool = True,
        keep: Callable[[Pattern], bool] = lambda pattern: True,
    ) -> list[list[tuple[float, Pattern]]]:
        """Return, per query, the k patterns with the largest (or smallest) attention, best first."""
        patterns = self.of(layer, keep)
        ranked = []
        for row in self.attention(layer, queries, keep).tolist():
            order = sorted(range(len(patterns)), key=lambda t: row[t], reverse=largest)[:k]
            ranked.append([(row[t], patterns[t]) for t in order])
        return ranked

    def output(self, layer: str, queries: Tensor) -> Tensor:
        """Return the layer's output, (Q, d_out), as the trained layer itself computes it."""
        outputs: Tensor = self.layers[layer](queries.double())
        return outputs.detach()


def _sgd(
    share: Share,
    gradient: Tensor,
    *,
    first: bool,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Apply one step of torch.optim.SGD, word for word as its documentation has it, to one share."""
    gradient = -gradient if maximize else gradient
    gradient = gradient + weight_decay * share.parameter
    if momentum != 0.0:
        share.buffer = gradient if first else momentum * share.buffer + (1.0 - dampening) * gradient
        gradient = gradient + momentum * share.buffer if nesterov else share.buffer
    share.parameter = share.parameter - lr * gradient
