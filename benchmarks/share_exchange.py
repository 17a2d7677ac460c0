"""Two ways to fold shares where processes have rows of the weights, measured against each other on one linear layer.

    torchrun --nproc_per_node 2 benchmarks/share_exchange.py
    torchrun --nproc_per_node 4 benchmarks/share_exchange.py

*Sums*: each process multiplies its own patterns to the whole gradient of each group, and the processes exchange rows of
these, which is a reduce-scatter. *Patterns*: each process gets the keys of all processes and the columns of their
values that make its own rows, and multiplies these. Both end with the same numbers, which is checked: the gradient of
each group's patterns in all processes, of this process's rows. Printed are the bytes that a process sends and the least
time of a step's exchange with its products; then what the ways of a reduce-scatter take that torch.distributed has.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

REPEATS = 7
CASES = (  # rows of each process, width of keys, width of values, groups
    (64, 784, 512, 10),
    (64, 784, 512, 2),
    (1024, 512, 2048, 8),
    (4096, 256, 1024, 2),
    (4096, 256, 1024, 8),
    (4096, 256, 1024, 64),
)


def least_ms(work: Callable[[], object]) -> float:
    """Return the least time of some work that all processes do together, the slowest process's, in milliseconds."""
    found = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    slowest = torch.tensor(found)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 1e3 * float(slowest.min())


def scatter_sums(whole: Tensor) -> Tensor:
    """Return the sum over processes of this process's part of tensors, (parts, ...) -> (...)."""
    found = torch.empty_like(whole)
    dist.all_to_all_single(found, whole)
    return found.sum(0)


def by_sums(keys: Tensor, values: Tensor, groups: int) -> Tensor:
    """Return each group's gradient of this process's rows, from sums of every process."""
    size = dist.get_world_size()
    parts = [value.t() @ key for value, key in zip(values.chunk(groups), keys.chunk(groups), strict=True)]
    return torch.stack([scatter_sums(part.view(size, -1, keys.shape[1])) for part in parts])


def by_patterns(keys: Tensor, values: Tensor, groups: int) -> Tensor:
    """Return the same from the patterns of every process, whose values are cut to this process's rows."""
    size, rows = dist.get_world_size(), values.shape[1] // dist.get_world_size()
    all_keys = [torch.empty_like(keys) for _ in range(size)]
    dist.all_gather(all_keys, keys)
    cut = values.view(len(values), size, rows).transpose(0, 1).contiguous()
    all_values = torch.empty_like(cut)
    dist.all_to_all_single(all_values, cut)
    by_group = [torch.cat([one.chunk(groups)[group] for one in all_keys]) for group in range(groups)]
    mine = [torch.cat([one.chunk(groups)[group] for one in all_values]) for group in range(groups)]
    return torch.stack([value.t() @ key for value, key in zip(mine, by_group, strict=True)])


def main() -> None:
    """Measure, and print a line for each case."""
    warnings.simplefilter("ignore", FutureWarning)  # of names that later versions of torch have others for
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()

    def tell(text: str) -> None:
        if not rank:
            print(text, flush=True)

    tell(f"{size} processes\n  rows  keys values groups |     sums: MB     ms | patterns: MB     ms")
    for rows, d_in, d_out, groups in CASES:
        generator = torch.Generator().manual_seed(rank)
        keys, values = (torch.randn(rows, width, generator=generator) for width in (d_in, d_out))
        rows -= rows % groups
        keys, values = keys[:rows], values[:rows]
        torch.testing.assert_close(
            by_sums(keys, values, groups), by_patterns(keys, values, groups), rtol=1e-4, atol=1e-3
        )
        sums = 4e-6 * groups * d_in * d_out * (size - 1) / size
        patterns = 4e-6 * rows * (size - 1) * (d_in + d_out / size)
        times = [least_ms(partial(way, keys, values, groups)) for way in (by_sums, by_patterns)]
        tell(
            f"{rows:6} {d_in:5} {d_out:6} {groups:6} | {sums:12.2f} {times[0]:6.1f} | {patterns:12.2f} {times[1]:6.1f}"
        )
    whole, part = torch.randn(size << 20), torch.empty(1 << 20)
    for name, way in (
        ("all_to_all_single and a sum", lambda: scatter_sums(whole.view(size, -1))),
        ("all_reduce, of which a part is used", lambda: dist.all_reduce(whole)),
        ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(part, whole)),
    ):
        tell(f"{4 * size:3} MB by {name}: {least_ms(way):.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
