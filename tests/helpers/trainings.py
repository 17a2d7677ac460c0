"""Small trainings as functions that can be run again: four networks, three optimizers, and ways to break them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualform.replaying.training import Recording, Train

STEPS = 7
ROWS = 4
LENGTH = 5
LETTERS = 6


class Mlp(nn.Sequential):
    """Two linear layers on images of 16 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))


class Cnn(nn.Module):
    """A convolution and a linear layer on images of 4 × 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, 4, 4) -> (B, 3)
        logits: Tensor = self.head(functional.relu(self.conv(x)).flatten(1))
        return logits


class Lstm(nn.Module):
    """Letters, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, LETTERS)

    def forward(self, x: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        logits: Tensor = self.head(self.lstm(self.table(x))[0])
        return logits


class Transformer(nn.Module):
    """Letters, one block of attention, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, LETTERS)

    def forward(self, x: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        logits: Tensor = self.head(self.block(self.table(x)))
        return logits


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "lstm": Lstm, "transformer": Transformer}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01)],
    "Muon": lambda model: [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
        torch.optim.SGD([p for p in model.parameters() if p.dim() != 2], lr=1e-2),
    ],
}


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a step and their labels (B,), or the next letters (B, L)."""
    generator = torch.Generator().manual_seed(100 + step)
    if kind in ("mlp", "cnn"):
        inputs = torch.randn(ROWS, 1, 4, 4, generator=generator)
        return inputs, inputs.flatten(1)[:, :3].argmax(dim=1)
    letters = torch.randint(LETTERS, (ROWS, LENGTH + 1), generator=generator)
    return letters[:, :-1], letters[:, 1:]


def make_training(
    kind: str = "mlp",
    optimizer: str = "SGD",
    *,
    seed: int = 0,
    steps: int = STEPS,
    swapped: int | None = None,
    noise: float = 0.0,
    lr: float | None = None,
    shifted_sample: int | None = None,
    annotate: bool = True,
) -> Train:
    """Return a training function.

    Args:
        kind: which network.
        optimizer: which optimizer.
        seed: of the network's start.
        steps: how many steps.
        swapped: the step of whose batch one input is another.
        noise: added to the loss's scale in every step, from the global generator, which nobody seeds again.
        lr: the learning rate from the fourth step on.
        shifted_sample: the step of which one annotation is another.
        annotate: whether there are annotations.
    """

    def train(recording: Recording) -> nn.Module:
        if not noise:
            torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        model = MODELS[kind]()
        if noise:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        optimizers = OPTIMIZERS[optimizer](model)
        with recording(model, optimizers, check_rows=False) as recorder:
            for step in range(steps):
                inputs, labels = batch(kind, step)
                if step == swapped:
                    inputs = torch.cat([batch(kind, 99)[0][:1], inputs[1:]])
                if lr is not None and step >= 3:
                    for group in optimizers[0].param_groups:
                        group["lr"] = lr
                if annotate:
                    sample = (torch.arange(ROWS) + 3 * step) % 10
                    sample = sample + (step == shifted_sample)
                    columns = {"label": labels} if labels.dim() == 1 else {"letter": labels}
                    recorder.annotate(sample=sample, epoch=step // 3, **columns)
                scale = 1.0 + noise * float(torch.rand(()))
                loss = scale * functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
                for one in optimizers:
                    one.zero_grad()
                loss.backward()
                for one in optimizers:
                    one.step()
                if step == 3:
                    recorder.flush()  # two shards
        return model

    return train


def train_mlp(recording: Recording) -> nn.Module:
    """Train the small network: a function that a run can remember by its name."""
    found: nn.Module = make_training()(recording)
    return found
