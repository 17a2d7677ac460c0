"""A GPT-2-small-sized stack of blocks: what a token costs, all of it and with chosen layers keys-only."""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from benchmarks.bench import Bench
from benchmarks.rows import REPORTED, Measured, row
from benchmarks.timing import timed_pairs, wait

WIDTH, HEADS, BLOCKS = 768, 12, 12


class Block(nn.Module):
    """A pre-norm transformer block, as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d) -> (B, L, d)
        """Return the stream after this block."""
        parts = self.mix(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (3, B, H, L, d/H)
        query, key, value = parts
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        grown: Tensor = self.shrink(functional.gelu(self.grow(self.norm_2(x))))
        return x + grown


def blocks(count: int) -> nn.Sequential:
    """Return a stack of blocks, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


@row(
    "blocks-estimate",
    what="`estimate` per token: 12 blocks of width 768, keys and values of every linear layer, float16",
    against="(what chosen layers cost keys-only is in the details)",
    unit="kB",
    cpu=REPORTED,
)
def blocks_estimate(bench: Bench) -> Measured:
    model = blocks(bench.size(BLOCKS, 1))
    token = torch.randn(1, 1, WIDTH)
    linear = [f"*.{name}" for name in ("mix", "project", "grow", "shrink")]
    whole = dualform.estimate(model, token, steps=1, layers=linear, dtype="float16")
    keys = dualform.estimate(model, token, steps=1, layers={"*.shrink": "keys"}, dtype="float16")
    one = dualform.estimate(model, token, steps=1, layers={f"{len(model) - 1}.shrink": "keys"}, dtype="float16")
    per_layer = {f"{name}, B": size for name, size in whole.layers.items() if name.startswith("0.")}
    return Measured(
        whole.total / 1e3,
        None,
        {"3072-wide keys alone, kB": keys.total / 1e3, "of the last block alone, kB": one.total / 1e3, **per_layer},
    )


@row(
    "blocks",
    what="recording overhead, GPT-2-small-sized blocks, the last 3072-wide layer keys-only, float16, to disk",
    against="the same loop without recording",
    unit="percent",
    cpu=REPORTED,
    cuda=REPORTED,
)
def blocks_overhead(bench: Bench) -> Measured:
    count = BLOCKS if bench.device.type == "cuda" else 1
    rows, length = (8, 1024) if bench.device.type == "cuda" else (4, 128)
    steps = bench.size(20, 1)
    stream = torch.randn(rows, length if not bench.quick else 8, WIDTH, device=bench.device)
    tokens = steps * stream.shape[0] * stream.shape[1]
    model = blocks(count).to(bench.device)
    stored: list[int] = []

    def loop(optimizer: torch.optim.Optimizer) -> float:
        wait(bench.device)
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(stream).square().mean().backward()
            optimizer.step()
        wait(bench.device)
        return time.perf_counter() - start

    def plain() -> float:
        return loop(torch.optim.SGD(model.parameters(), lr=1e-5))

    def recorded() -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        with bench.scratch() as folder:
            with dualform.record(model, optimizer, folder, layers={f"{count - 1}.shrink": "keys"}, dtype="float16"):
                taken = loop(optimizer)
            stored.append(sum(path.stat().st_size for path in folder.glob("shards/*")))
        return taken

    least = 1 if bench.quick else 3
    pairs = timed_pairs(recorded, plain, 30, least, 1 if bench.quick else 9, 0 if bench.quick else 1)
    low, high = pairs.spread
    return Measured(
        pairs.ratio - 1,
        (low - 1, high - 1),
        {
            "blocks": count,
            "tokens per step": tokens // steps,
            "plain, µs per token": 1e6 * min(pairs.theirs) / tokens,
            "recording adds, µs per token": 1e6 * (min(pairs.ours) - min(pairs.theirs)) / tokens,
            "stored, kB per token": stored[-1] / tokens / 1e3,
        },
    )
