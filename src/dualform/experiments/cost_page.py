"""The table of costs in docs/keep.md: what each way of keeping takes for networks of four sizes. Nothing is trained."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualform.experiments.models.mlp import mlp
from dualform.experiments.models.residual import residual
from dualform.experiments.models.transformer import transformer
from dualform.recording.estimate import size_text
from dualform.show.costs import keeping_costs


@dataclass(frozen=True, slots=True)
class CostExample:
    """A training whose costs the table shows: how to make its model and one of its batches, and how many steps."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    steps: int
    groups: int = 10


EXAMPLES = (
    CostExample(
        "MLP 784-800-800-10, batches of 128", lambda: mlp([784, 800, 800, 10]), lambda: torch.zeros(128, 784), 3000
    ),
    CostExample(
        "residual network 32-64-128, 28 × 28 images, batches of 128",
        lambda: residual([32, 64, 128], 10),
        lambda: torch.zeros(128, 1, 28, 28),
        3000,
    ),
    CostExample(
        "Transformer of GPT-2 small's size, batches of 8 × 1,024 tokens",
        lambda: transformer(tokens=50257, width=768, blocks=12, heads=12, context=1024),
        lambda: torch.zeros(8, 1024, dtype=torch.int64),
        10000,
    ),
)


def cost_page() -> str:
    """Return the table as Markdown."""
    columns = []
    for example in EXAMPLES:
        with torch.device("meta"):  # sizes alone: no memory is taken and nothing is computed
            columns.append(keeping_costs(example.model(), example.batch(), steps=example.steps, groups=example.groups))
    head = ["`keep=`", "can be asked", *(f"{example.name}, {example.steps:,} steps" for example in EXAMPLES)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * 2}{'---:|' * len(EXAMPLES)}"]
    for same in zip(*columns, strict=True):
        sizes = (size_text(cost.bytes) for cost in same)
        lines.append(f"| `{same[0].keep}` | {same[0].answers} | {' | '.join(sizes)} |")
    return "\n".join(lines) + "\n"
