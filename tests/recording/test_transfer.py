"""Copies of patterns: their memory is never used twice at a time, and what is packed comes out again."""

import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.recording.packing import pack, unpack
from dualform.recording.probes import Probe
from dualform.recording.trails import Accumulation, Trail, fetched

DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8))
def test_what_is_packed_comes_out_again(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randn(shape).mul(50).abs().to(dtype) for dtype, shape in shapes]
    tensors[0] = tensors[0].T if tensors[0].dim() == 2 else tensors[0]
    for one, other in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_probes_are_fetched_as_they_are() -> None:
    """What a GPU's probes go through; here nothing has to move."""

    def probe(norm: bool) -> Probe:
        return Probe(torch.randn(3, 2), torch.randn(()) if norm else None)

    first = Accumulation(0, None, probe(True), torch.randn(3, 2), [lambda: 1.0])
    second = Accumulation(1, probe(False), probe(True), torch.randn(3, 2), [], coarse=True)
    seen = [(Trail(4, [first, second]), probe(True)), (Trail(1), None)]
    assert fetched(seen) is seen


def test_a_step_inside_a_backward_does_not_give_back_what_the_next_one_needs(tmp_path: Path) -> None:
    """An optimizer per parameter, each stepping as soon as its gradient is there; weight and bias share patterns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    with dualform.record(model, list(optimizers.values()), tmp_path / "run", shard_bytes=1) as recorder:
        handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
        for _ in range(10):
            model(torch.randn(8, 8)).square().mean().backward()
            recorder.flush()
        for handle in handles:
            handle.remove()
    assert dualform.open(tmp_path / "run").verify(model).passed


class TwoHeads(nn.Module):
    """A recurrent layer whose keys are as many numbers as the heads' values."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16)
        self.a, self.b = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        found = self.lstm(inputs)[0]
        return self.a(found), self.b(found)


def test_two_backwards_over_one_graph_share_no_memory_that_is_used_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run", shard_bytes=1 << 30) as recorder:
        for step in range(30):
            optimizer.zero_grad()
            a, b = model(torch.randn(5, 8, 16))
            a.square().mean().backward(retain_graph=True)
            b.pow(4).mean().backward()
            optimizer.step()
            if step % 3 == 2:
                recorder.flush()
    assert dualform.open(tmp_path / "run").verify(model).passed


SCRIPT = """
import atexit, sys, torch, dualform
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
recorder = dualform.record(model, optimizer, sys.argv[1])
recorder.__enter__()
atexit.register(recorder.__exit__, None, None, None)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_recording_may_be_closed_when_the_interpreter_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "run")], check=True)
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 3
    assert memory.verify().passed
