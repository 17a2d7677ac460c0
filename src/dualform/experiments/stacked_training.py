"""Many small networks of one shape trained at once, each on samples of its own, and one that is recorded.

A stack of networks has a leading axis of models on every parameter; their losses are summed, so that each gets its own
gradient, and an elementwise optimizer moves each as if it were alone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

import dualform
from dualform.effects.output_gradients import measure_quantity
from dualform.experiments.retraining_config import RetrainingConfig
from dualform.experiments.retraining_networks import CharacterLSTM
from dualform.progress import bar

StackedState = dict[str, Tensor]
SECOND_MOMENT = "second_moment."
"""What a checkpoint's names of AdamW's second moments begin with."""


def make_optimizer(config: RetrainingConfig, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration."""
    if config.optimizer == "SGD":
        return torch.optim.SGD(
            parameters, lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
    return torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def initial(config: RetrainingConfig, seed: int) -> nn.Module:
    """Make the network of a seed."""
    torch.manual_seed(seed)
    return config.make_model()


def order(count: int, config: RetrainingConfig, seed: int) -> Tensor:
    """Return the rows of every step, (S, batch): whole epochs, each in a new order, without a last short batch."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(config.batch, count)
    epochs = [torch.randperm(count, generator=generator) for _ in range(config.epochs)]
    return torch.cat([epoch[: count - count % batch].reshape(-1, batch) for epoch in epochs])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all targets."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train_stack(
    config: RetrainingConfig,
    inputs: Tensor,
    targets: Tensor,
    rows: Tensor,
    seeds: Sequence[int],
    *,
    keep: Sequence[int] = (),
    device: str = "cpu",
) -> tuple[StackedState, list[StackedState]]:
    """Train a network for each set of rows.

    Args:
        config: how to train.
        inputs: (N, ...) of all samples.
        targets: (N, ...)
        rows: (K, n) the samples of each network.
        seeds: (K,) of each network and its order of training.
        keep: the steps after which to keep a checkpoint, of AdamW with its second moments.
        device: where to train.

    Returns:
        the stacked parameters, name -> (K, ...), and the checkpoints.
    """
    models = [initial(config, seed) for seed in seeds]
    names = [name for name, _ in models[0].named_parameters()]
    stacked = {
        name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).to(device)
        for name in names
    }
    for tensor in stacked.values():
        tensor.requires_grad_(True)
    optimizer = make_optimizer(config, list(stacked.values()))
    orders = torch.stack([order(rows.shape[1], config, seed) for seed in seeds])  # (K, S, batch)
    inputs, targets, rows, orders = (part.to(device) for part in (inputs, targets, rows, orders))
    skeleton = _mappable(models[0]).to(device)

    def loss(parameters: Mapping[str, Tensor], batch: Tensor, wanted: Tensor) -> Tensor:
        return loss_of(functional_call(skeleton, dict(parameters), (batch,)), wanted)

    losses: Callable[..., Tensor] = vmap(loss)
    checkpoints: list[StackedState] = []
    with bar("retraining", total=orders.shape[1]) as advance:
        for step in range(orders.shape[1]):
            chosen = rows.gather(1, orders[:, step])  # (K, batch)
            optimizer.zero_grad()
            losses(stacked, inputs[chosen], targets[chosen]).sum().backward()
            optimizer.step()
            if step + 1 in keep:
                checkpoints.append(_checkpoint(stacked, optimizer))
            advance(1)
    return {name: tensor.detach() for name, tensor in stacked.items()}, checkpoints


def _checkpoint(stacked: StackedState, optimizer: torch.optim.Optimizer) -> StackedState:
    """Return copies of the parameters and of their second moments, whose bias towards 0 is taken out."""
    found = {name: tensor.detach().cpu().clone() for name, tensor in stacked.items()}
    for name, tensor in stacked.items():
        state = optimizer.state[tensor]
        if "exp_avg_sq" in state:
            remembered = optimizer.param_groups[0]["betas"][1] ** float(state["step"])
            found[SECOND_MOMENT + name] = (state["exp_avg_sq"] / (1 - remembered)).cpu()
    return found


def _mappable(model: nn.Module) -> nn.Module:
    """Let a model compute in a way that `vmap` knows: it knows no LSTM."""
    if isinstance(model, CharacterLSTM):
        model.written_out = True
    return model


@torch.no_grad()
def measure_stack(config: RetrainingConfig, stacked: StackedState, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the margin of every test input under every network, (K, M)."""
    device = next(iter(stacked.values())).device
    skeleton = _mappable(initial(config, 0)).to(device).eval()

    def margins(parameters: Mapping[str, Tensor], batch: Tensor, wanted: Tensor) -> Tensor:
        return measure_quantity(functional_call(skeleton, dict(parameters), (batch,)), wanted, "margin")

    found: Tensor = vmap(margins, in_dims=(0, None, None))(stacked, inputs.to(device), targets.to(device))
    return found.cpu()


def train_recorded(config: RetrainingConfig, inputs: Tensor, targets: Tensor, folder: Path, seed: int) -> nn.Module:
    """Train one network on all samples, as `train_stack` does, and record it."""
    model = initial(config, seed)
    optimizer = make_optimizer(config, model.parameters())
    with dualform.record(model, optimizer, folder) as recorder:
        _train_alone(config, model, optimizer, inputs, targets, seed, lambda rows: recorder.annotate(sample=rows))
    return model


def train_plain(config: RetrainingConfig, inputs: Tensor, targets: Tensor, seed: int) -> nn.Module:
    """Train one network on all samples, as `train_recorded` does, without a recording."""
    model = initial(config, seed)
    _train_alone(config, model, make_optimizer(config, model.parameters()), inputs, targets, seed, lambda rows: None)
    return model


def _train_alone(
    config: RetrainingConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    seed: int,
    annotate: Callable[[Tensor], None],
) -> None:
    steps = order(len(inputs), config, seed)
    with bar("training one network", total=len(steps)) as advance:
        for rows in steps:
            annotate(rows)
            optimizer.zero_grad()
            loss_of(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            advance(1)
