"""Identical keys are stored once: the same answers, fewer bytes, also after a resume, a cut, and in float16."""

from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform.store import pool as pool_module
from dualform.store import taken_steps
from dualform.store.pool import Pool
from dualform.store.reader import Run
from dualform.store.stored_rows import MemoryRows, PooledRows
from helpers.loops import assert_exact, loss_of, sgd

SAMPLES = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 3))


def rows_of(step: int) -> Tensor:
    """Return the samples of a step: all of them in every epoch of four steps, in another order each time."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(step // 4))
    return order[6 * (step % 4) : 6 * (step % 4) + 6]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: dualform.Recorder,
    steps: range,
    *,
    noise: bool = False,
) -> None:
    for step in steps:
        rows = rows_of(step)
        recorder.annotate(sample=rows)
        optimizer.zero_grad()
        inputs = SAMPLES[rows] + (1e-6 * step if noise else 0)
        loss_of(model(inputs)).backward()
        optimizer.step()


def fit(path: Path, steps: int = 20, *, noise: bool = False, **options: object) -> tuple[nn.Module, dualform.Memory]:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, shard_bytes=9000, **options) as recorder:  # type: ignore[arg-type]
        train(model, optimizer, recorder, range(steps), noise=noise)
    return model, dualform.open(path)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_the_same_answers_from_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None) -> None:
    model, memory = fit(tmp_path / "pooled", dtype=dtype)
    monkeypatch.setattr(taken_steps, "MIN_POOLED_WIDTH", 10**9)
    _, plain = fit(tmp_path / "plain", dtype=dtype)
    pooled, every = Run(tmp_path / "pooled"), Run(tmp_path / "plain")
    assert len(pooled.shards) > 3
    assert sum(shard.entry.pools["0"][1] for shard in pooled.shards) == 24  # each sample once
    assert not any(shard.entry.pools for shard in every.shards)
    assert all("2" not in shard.entry.pools for shard in pooled.shards)  # its keys owe to the parameters
    assert memory.info().layers["0"]["bytes"] < plain.info().layers["0"]["bytes"]
    queries = {"0": torch.randn(3, 40)}
    for ours, theirs in zip(
        (memory, memory.where("step >= 7"), memory.at(step=9), memory.where(sample=5)),
        (plain, plain.where("step >= 7"), plain.at(step=9), plain.where(sample=5)),
        strict=True,
    ):
        one, other = ours.attend(queries=queries)["0"], theirs.attend(queries=queries)["0"]
        # Where rows begin in a file decides how a product is rounded.
        close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(one.attention(), other.attention(), **close)
        torch.testing.assert_close(one.contributions(), other.contributions(), **close)
        torch.testing.assert_close(one.totals(by="sample").values, other.totals(by="sample").values, **close)
        # Equal keys tie, and rounding decides their order.
        torch.testing.assert_close(one.top(4).values, other.top(4).values, **close)
        assert torch.equal(ours.weights()["0.weight"], theirs.weights()["0.weight"])
    assert memory.verify(model).passed


def test_pooled_keys_of_an_int8_layer_are_float16(tmp_path: Path) -> None:
    """A key that is stored once and used in every epoch has one rounding, which no sum over epochs averages out."""
    model, memory = fit(tmp_path / "run", dtype="int8")
    run = Run(tmp_path / "run")
    shard = run.shards[0]
    assert "0" in shard.entry.pools
    assert shard.rows("0", "keys").dtype == torch.float16
    assert shard.rows("0", "values").dtype == shard.rows("2", "keys").dtype == torch.int8
    assert memory.verify(model).passed


def test_adam_replays_over_a_pool(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with dualform.record(model, optimizer, tmp_path / "run", shard_bytes=9000) as recorder:
        train(model, optimizer, recorder, range(20))
    assert_exact(dualform.open(tmp_path / "run"), model)


@pytest.mark.parametrize("cut", [8, 10])
def test_a_resumed_run_knows_its_keys(tmp_path: Path, cut: int) -> None:
    """Cut between two shards or within one, the pool goes on where it was."""
    model, optimizer = network(), None
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", shard_bytes=9000) as recorder:
        train(model, optimizer, recorder, range(cut))
        checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        buffers = {p: optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()}
        train(model, optimizer, recorder, range(cut, 14))
    model.load_state_dict(checkpoint)
    for parameter, buffer in buffers.items():
        optimizer.state[parameter]["momentum_buffer"] = buffer
    with dualform.record(model, optimizer, tmp_path / "run", shard_bytes=9000, resume=True) as recorder:
        train(model, optimizer, recorder, range(cut, 20))
    run = Run(tmp_path / "run")
    assert sum(shard.entry.pools["0"][1] for shard in run.shards) == 24
    assert_exact(dualform.open(tmp_path / "run"), model)


def test_keys_that_never_come_again_cost_a_reference_each(tmp_path: Path) -> None:
    model, memory = fit(tmp_path / "run", noise=True)
    assert sum(shard.entry.pools["0"][1] for shard in Run(tmp_path / "run").shards) == 120
    assert memory.verify(model).passed


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_rows_come_back_as_they_went_in(numbers: list[int], cuts: list[int]) -> None:
    alphabet = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3)
    rows = alphabet[torch.tensor(numbers)]
    pool, bases, sources, references, start = Pool(), [], [], [], 0
    for size in [*cuts, len(rows)]:
        part = rows[start : start + size]
        if not len(part):
            break
        bases.append(pool.size)
        found, new, digests = pool.place(part)
        assert digests.shape == (len(new), 2)
        sources.append(MemoryRows(part[new], None))
        references.append(found)
        start += size
    pooled = PooledRows(torch.cat(references), bases, sources)
    assert torch.equal(pooled.take(slice(None))[0], rows)
    some = torch.randperm(len(rows))[: len(rows) // 2]
    assert torch.equal(pooled.take(some)[0], rows[some])
    again = Pool()
    for base, source in zip(bases, sources, strict=True):
        again.remember(base, Pool().place(source.stored)[2])
    assert again.place(rows)[1].numel() == 0


def placed_plainly(known: dict[bytes, int], size: int, rows: Tensor) -> tuple[list[int], list[int], list[bytes]]:
    """Look keys up one after the other; return their key ids, which rows are new, and the digests of new keys."""
    key_ids: list[int] = []
    new: list[int] = []
    digests: list[bytes] = []
    for i, row in enumerate(rows):
        digest = xxhash.xxh3_128_digest(row.numpy().tobytes())
        if digest in known:
            key_ids.append(known[digest])
            continue
        key_ids.append(size + len(new))
        if len(known) < pool_module.MAX_REMEMBERED_KEYS:
            known[digest] = key_ids[-1]
        new.append(i)
        digests.append(digest)
    return key_ids, new, digests


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=6), st.integers(0, 40))
def test_keys_are_placed_as_one_by_one(batches: list[list[int]], most: int) -> None:
    """Batches of new keys, of known ones, of both, with repeated keys, and with more than are remembered."""
    alphabet = torch.arange(31 * 3, dtype=torch.float32).reshape(31, 3)
    known: dict[bytes, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "MAX_REMEMBERED_KEYS", most)
        pool = Pool()
        for numbers in batches:
            rows = alphabet[torch.tensor(numbers, dtype=torch.int64)]
            expected = placed_plainly(known, pool.size, rows)
            size = pool.size
            key_ids, new, digests = pool.place(rows)
            assert key_ids.dtype == torch.int32
            assert key_ids.tolist() == expected[0]
            assert new.tolist() == expected[1]
            assert digests.numpy().tobytes() == b"".join(expected[2])
            assert pool.size == size + len(expected[1])


def test_keys_that_are_looked_at_part_by_part_are_found_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))[torch.arange(50) % 30]
    whole = Pool().place(keys)
    monkeypatch.setattr(pool_module, "PART_BYTES", 7 * 40 * 4)
    seen: list[Tensor] = []
    for one, other in zip(Pool().place(keys, seen.append), whole, strict=True):
        assert torch.equal(one, other)
    assert [len(part) for part in seen] == [7] * 7 + [1]
    assert torch.equal(torch.cat(seen), keys)
    assert [len(found) for found in Pool().place(keys[:0], seen.append)] == [0, 0, 0]
