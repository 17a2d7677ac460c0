"""Reading patterns back: addresses by arithmetic, rows by layer, ranges, coefficients of what never moved."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import dualform
from dualform.engine.addresses import addresses
from dualform.engine.reading import read_blocks
from dualform.errors import UnknownLayerError
from dualform.store.reader import Run
from helpers.small import ROWS, batch, network, recorded, sgd, train

# Addresses --------------------------------------------------------------------------------------------------------

leading = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@given(shapes=st.lists(leading, max_size=4), axis=st.integers(0, 1), fine=st.booleans(), data=st.data())
def test_addresses_are_what_a_loop_over_the_input_gives(
    shapes: list[list[int]], axis: int, fine: bool, data: st.DataObject
) -> None:
    """Every call has its own leading shape; its annotation has one row per batch row, or one per row and position."""
    names = ("step", "micro", "call", "rows", "positions", "inner", "annotation_offset", "annotation_rows")
    calls: dict[str, list[int]] = {name: [] for name in (*names, "annotation_positions", "batch_axis")}
    expected = []
    taken = 0
    for number, shape in enumerate(shapes):
        at = min(axis, len(shape) - 1)
        rows, positions = shape[at], int(np.prod(shape[:at] + shape[at + 1 :], dtype=int))
        annotated = data.draw(st.booleans()) and rows * positions > 0
        per_position = fine and annotated
        entry = {
            "step": number // 2,
            "micro": number % 2,
            "call": number,
            "rows": rows,
            "positions": positions,
            "inner": int(np.prod(shape[at + 1 :], dtype=int)),
            "annotation_offset": taken if annotated else -1,
            "annotation_rows": rows if annotated else -1,
            "annotation_positions": (positions if per_position else 0) if annotated else -1,
            "batch_axis": axis,
        }
        for name, value in entry.items():
            calls[name].append(value)
        for index in np.ndindex(*shape):
            row, others = index[at], index[:at] + index[at + 1 :]
            position = int(np.ravel_multi_index(others, shape[:at] + shape[at + 1 :])) if others else 0
            note = -1 if not annotated else taken + (row * positions + position if per_position else row)
            expected.append((number // 2, number % 2, number, row, position, note))
        taken += (rows * (positions if per_position else 1)) if annotated else 0
    found = addresses({name: np.array(column, dtype=np.int64) for name, column in calls.items()})
    order = ("step", "micro", "call", "row", "position", "annotation")
    assert list(zip(*(found[name].tolist() for name in order), strict=True)) == expected


class Twice(nn.Module):
    """Tokens through one layer, twice; then one layer over the flattened batch."""

    def __init__(self, *, batch_axis: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.batch_axis = batch_axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.mix(torch.relu(self.mix(x)))
        return self.out(z.reshape(-1, 4))


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_annotations_of_tokens_reach_every_call_and_the_flattened_batch(run: Path, batch_axis: int) -> None:
    rows, positions = 3, 2
    model = Twice(batch_axis=batch_axis)
    optimizer = sgd(model)
    shape = (rows, positions) if batch_axis == 0 else (positions, rows)
    torch.manual_seed(1)
    with dualform.record(model, optimizer, run, batch_axis=batch_axis, shard_bytes=0) as recorder:
        for step in range(2):
            tokens = torch.arange(rows * positions).reshape(rows, positions) + 10 * step
            recorder.annotate(token=tokens, sample=torch.arange(rows), task="t")
            inputs = torch.randn(*shape, 4)
            # Every input says which token it is, so that keys and annotations can be compared.
            inputs[..., 0] = (tokens if batch_axis == 0 else tokens.T).float()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    table = memory.patterns("mix").to_pylist()
    keys = torch.cat([chunk.keys for chunk in read_blocks(memory._run, "mix", horizon=2)])
    assert len(table) == 2 * 2 * rows * positions
    for row, key in zip(table, keys, strict=True):
        assert row["token"] == 10 * row["step"] + row["row"] * positions + row["position"]
        assert row["sample"] == row["row"]
        if row["call"] == 0:
            assert float(key[0]) == row["token"]
    assert sorted({(row["call"], row["micro"]) for row in table}) == [(0, 0), (1, 0)]
    flat = memory.patterns("out").to_pylist()
    in_order = [row["token"] for row in table if row["call"] == 0]
    assert [row["token"] for row in flat] == in_order, "the flattened batch is the same tokens in the same order"
    assert [row["sample"] for row in flat] == [row["sample"] for row in table if row["call"] == 0]


# Rows -------------------------------------------------------------------------------------------------------------


def test_a_stream_gives_the_keys_that_the_layer_saw_in_order(run: Path) -> None:
    recorded(run, 7)
    source = Run(run)
    chunks = list(read_blocks(source, "0", horizon=7, size=4))
    assert [len(chunk.keys) for chunk in chunks] == [4, 4, 4, 4, 2] * 2 + [4, 2], "chunks end with their shard"
    torch.testing.assert_close(
        torch.cat([chunk.keys for chunk in chunks]), torch.cat([batch(step)[0] for step in range(7)]), rtol=0, atol=0
    )
    assert np.concatenate([chunk.patterns for chunk in chunks]).tolist() == list(range(7 * ROWS))


@pytest.mark.parametrize("horizon", range(8))
def test_a_horizon_ends_the_stream_inside_a_shard(run: Path, horizon: int) -> None:
    recorded(run, 7)
    chunks = list(read_blocks(Run(run), "2", horizon=horizon, values=True))
    assert sum(len(chunk.keys) for chunk in chunks) == horizon * ROWS


def test_the_key_range_is_that_of_all_shards(run: Path) -> None:
    recorded(run, 7)
    source = Run(run)
    keys = torch.cat([batch(step)[0] for step in range(7)])
    assert source.key_range("0") == pytest.approx((float(keys.min()), float(keys.max())), rel=1e-7)
    assert source.key_range("2")[0] == 0.0


def test_an_unknown_layer_is_answered_with_the_known_ones(run: Path) -> None:
    recorded(run, 2)
    memory = dualform.open(run)
    with pytest.raises(UnknownLayerError, match=r"'nope' was not recorded.*'0', '2'"):
        memory.patterns("nope")


def test_without_any_update_a_parameter_is_its_start_whatever_the_optimizer(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    optimizer.zero_grad()
    model(batch(0)[0]).sum().backward()
    optimizer.step()  # warm momentum buffers, before the recording
    optimizer.zero_grad()
    with dualform.record(model, optimizer, run) as recorder:
        optimizer.step()
        train(model, optimizer, range(2), recorder)
    source = Run(run)
    found, _ = source.coefficients("0.weight", 1)
    assert (found.start, found.buffer) == (1.0, 0.0)
    found, _ = source.coefficients("0.weight", 1, "buffer")
    assert (found.start, found.buffer) == (0.0, 1.0)
    assert dualform.open(run).verify(model).passed
