"""The pool of memory for copies: nothing is used twice at a time, and what nobody refers to is used again."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.recording import buffer_pool
from dualform.recording.buffer_pool import BufferPool, as_rows, lending, new_rows


@pytest.fixture(autouse=True)
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies of any size come from the pool."""
    monkeypatch.setattr(buffer_pool, "MIN_POOLED_BYTES", 1)


def test_a_small_copy_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "MIN_POOLED_BYTES", 64)
    pool = BufferPool()
    small, large = torch.randn(15), torch.randn(16)
    copies = [pool.copy(small), pool.copy(large)]
    assert torch.equal(copies[0], small)
    assert copies[0].data_ptr() != small.data_ptr()
    assert [kind[0] for kind in pool._allocated] == [large.shape]


def test_memory_is_used_again_only_when_no_tensor_refers_to_it() -> None:
    pool = BufferPool()
    rows = torch.randn(4, 5)
    one, two = pool.copy(rows), pool.copy(rows)
    assert torch.equal(one, rows)
    place = one.data_ptr()
    assert len({place, two.data_ptr(), rows.data_ptr()}) == 3
    view = one[1:].T
    del one
    assert pool.copy(rows).data_ptr() != place  # a view of it is alive
    array = view.numpy()
    del view
    assert pool.copy(rows).data_ptr() != place  # and so is an array over that view
    del array
    other = torch.randn(5, 4).T  # of the same shape, not contiguous
    taken = [pool.copy(other) for _ in range(4)]
    assert place in {copy.data_ptr() for copy in taken}
    assert all(copy.is_contiguous() and torch.equal(copy, other) for copy in taken)
    assert len({copy.data_ptr() for copy in taken}) == 4
    assert torch.equal(two, rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_memory_is_used_again_for_the_same_type(dtype: torch.dtype) -> None:
    pool = BufferPool()
    rows = torch.randn(4, 6).mul(3)
    place = pool.copy(rows.to(dtype)).data_ptr()
    plain = pool.copy(rows)
    assert plain.data_ptr() != place
    again = pool.copy(rows.to(dtype))
    assert again.data_ptr() == place
    assert again.dtype == dtype
    assert torch.equal(again, rows.to(dtype))
    assert torch.equal(plain, rows)


def test_copies_that_live_together_share_no_memory() -> None:
    pool = BufferPool()
    copies = [pool.copy(torch.full((3, 5), float(i))) for i in range(40)]
    assert all(torch.equal(copy, torch.full((3, 5), float(i))) for i, copy in enumerate(copies))
    assert pool._free_bytes == sum(memory.nbytes for found in pool._free.values() for memory in found)
    assert pool._free_bytes <= 40 * copies[0].nbytes


def test_an_empty_tensor_is_copied_too() -> None:
    assert BufferPool().copy(torch.empty(0, 3)).shape == (0, 3)


def test_free_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "MAX_FREE_BYTES", 100)
    pool = BufferPool()
    copies = [pool.copy(torch.zeros(20)) for _ in range(2)]
    places = {copy.data_ptr() for copy in copies}
    copies.clear()
    pool.copy(torch.ones(21))
    free = [memory for found in pool._free.values() for memory in found]
    assert len(free) == 1
    assert free[0].data_ptr() in places


def test_rows_are_lent_by_the_pool_of_a_block_on_its_thread_alone() -> None:
    pool, like = BufferPool(), torch.zeros(1, dtype=torch.bfloat16)
    found: list[Tensor] = []
    with lending(pool):
        with lending(BufferPool()):
            new_rows((4, 5), like)
        rows = new_rows((4, 5), like)
        thread = threading.Thread(target=lambda: found.append(new_rows((4, 5), like)))
        thread.start()
        thread.join()
    new_rows((4, 5), like)
    assert (rows.shape, rows.dtype) == ((4, 5), torch.bfloat16)
    assert list(pool._allocated.values()) == [1]


def test_rows_of_a_tensor_are_a_view_of_it_where_they_can_be() -> None:
    whole = torch.randn(2, 3, 4)
    assert as_rows(whole, 4).data_ptr() == whole.data_ptr()
    moved = whole.movedim(1, -1)  # (2, 4, 3)
    assert torch.equal(as_rows(moved, 3), moved.reshape(-1, 3))
    assert as_rows(torch.randn(4), 4).shape == (1, 4)


def test_memory_returns_from_another_thread_and_after_the_pool() -> None:
    pool = BufferPool()
    rows = torch.randn(100)
    copies = [pool.copy(rows)]
    place = copies[0].data_ptr()
    thread = threading.Thread(target=copies.clear)
    thread.start()
    thread.join()
    again = pool.copy(rows)
    assert again.data_ptr() == place
    del pool
    gc.collect()
    assert torch.equal(again, rows)


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
