"""What folding shares by group adds to a training loop, and what it takes, beside storing the patterns of the run."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from benchmarks.bench import Bench
from benchmarks.families.blocks import BLOCKS, WIDTH, blocks
from benchmarks.rows import Measured, at_most, row
from benchmarks.stores import MNIST, batches, classifier, images, train
from benchmarks.timing import timed_pairs, wait

GROUPS = 8
VOCABULARY = 16_384
TOKENS = (8, 1024)


@row(
    "shares-mnist",
    what="keeping shares by 10 classes, MNIST network 784-800-800-10, SGD with momentum, batch 128",
    against="the same loop without recording",
    cpu=at_most(2.0),
    why={
        "cpu": "momentum: every pattern enters two products, that of the shares and that of their averages, which "
        "together are 0.8 of a plain step's arithmetic. Sorting, scaling and copying rows, and the hooks, take the "
        "rest; the first steps also make the shares and find the rows.",
    },
)
def shares_mnist(bench: Bench) -> Measured:
    inputs, labels, source = images(bench)
    order = batches(len(inputs), bench.size(200, 3))
    stored: list[int] = []

    def plain() -> float:
        return train(*classifier(MNIST, bench.device), inputs, labels, order)

    def kept() -> float:
        model, optimizer = classifier(MNIST, bench.device)
        with bench.scratch() as folder:
            with dualform.record(model, optimizer, folder, keep=dualform.Shares(by="label")) as recorder:
                loop = train(model, optimizer, inputs, labels, order, recorder=recorder)
            stored.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        return loop

    pairs = timed_pairs(kept, plain, 0, 1, 1, 0) if bench.quick else timed_pairs(kept, plain, 60, 3, 9, 1)
    model, _ = classifier(MNIST, bench.device)
    patterns = dualform.estimate(model, inputs[order[0]], steps=len(order)).total
    return Measured(
        pairs.ratio,
        pairs.spread,
        {
            "inputs": source,
            **pairs.detail("with shares", "plain"),
            "run folder, MB": stored[-1] / 1e6,
            "patterns of the same run, MB": patterns / 1e6,
        },
    )


class _LanguageModel(nn.Module):
    """Blocks as GPT-2's, and an output layer: 98 million parameters at full size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = blocks(count)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take (B, L, d)."""
        found: Tensor = self.head(self.blocks(x))
        return found


@row(
    "shares-gpt",
    what="keeping shares of a GPT-2-small-sized model by 8 groups, AdamW, 8 × 1,024 tokens, float32",
    against="the same loop without recording",
    cuda=at_most(1.45),
    why={
        "cuda": "the second weight gradient alone takes 28 % of a step (37 ms of 132), at the rate of the first. "
        "Moving 8 shares of every parameter takes 3.3 ms, copies of keys and values 3.",
    },
    coarse=False,
)
@row(
    "shares-gpt-bfloat16",
    what="keeping shares of a GPT-2-small-sized model by 8 groups, AdamW, 8 × 1,024 tokens, bfloat16 autocast",
    against="the same loop without recording",
    cuda=at_most(1.6),
    why={
        "cuda": "Python: the GPU works for 40 ms of a step that takes 126, and for 21 of a plain one's 31. Of the 95 "
        "ms that recording adds, the hooks of the backward take 32, and the fold with its preparation 63; about 25 of "
        "these went into matrices of groups that were built on the CPU, as they no longer are.",
    },
    coarse=True,
)
def shares_gpt(bench: Bench, *, coarse: bool) -> Measured:
    rows, length = (TOKENS[0], 4) if bench.quick else TOKENS
    steps = bench.size(10, 1)
    torch.manual_seed(0)
    stream = torch.randn(rows, length, WIDTH, device=bench.device)
    targets = torch.randint(VOCABULARY, (rows, length), device=bench.device)
    groups = [f"source {number}" for number in range(GROUPS)]
    cuda = bench.device.type == "cuda"
    peaks: dict[str, int] = {}
    stored: list[int] = []

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _LanguageModel(bench.size(BLOCKS, 1)).to(bench.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, what: str, recorder: dualform.Recorder | None = None
    ) -> float:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = 0.0
        for step in range(steps + 2):
            if step == 2:  # the first two make the optimizer's state, and the shares
                wait(bench.device)
                begin = time.perf_counter()
            if recorder is not None:
                recorder.annotate(source=_shuffled(groups, step))
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=coarse):
                loss = functional.cross_entropy(model(stream).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wait(bench.device)
        if cuda:
            peaks[what] = torch.cuda.max_memory_allocated()
        return time.perf_counter() - begin

    def plain() -> float:
        return loop(*made(), "plain")

    def kept() -> float:
        model, optimizer = made()
        with bench.scratch() as folder:
            shares = dualform.Shares(by="source", groups=GROUPS)
            with dualform.record(model, optimizer, folder, keep=shares, check_rows=False) as recorder:
                taken = loop(model, optimizer, "shares", recorder)
            stored.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        return taken

    pairs = timed_pairs(kept, plain, 0, 1, 1, 0) if bench.quick else timed_pairs(kept, plain, 40, 2, 3, 1)
    return Measured(
        pairs.ratio,
        pairs.spread,
        {
            **pairs.detail("with shares", "plain"),
            "run folder, GB": stored[-1] / 1e9,
            "patterns of one step, GB": dualform.estimate(made()[0], stream, steps=1).total / 1e9,
            **{f"peak device memory, {what}, GB": peak / 1e9 for what, peak in peaks.items()},
        },
    )


def _shuffled(groups: Sequence[str], step: int) -> list[str]:
    """Return the groups in another order in every step."""
    return [*groups[step % len(groups) :], *groups[: step % len(groups)]]
