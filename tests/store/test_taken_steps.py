"""Steps as the disk writer takes them: rows that are encoded where they are trained make the same files."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import dualform
from dualform.store import taken_steps
from dualform.store.reader import Run


def recorded_files(path: Path, dtype: str | None) -> tuple[dict[str, bytes], dict[str, object]]:
    """Train a small network with a pooled layer, an embedding and a plain one; return its shard files and ranges."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 5), "pixels": nn.Linear(40, 5), "head": nn.Linear(5, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, pixels = torch.randint(9, (6,)), torch.randn(6, 40)
    with dualform.record(model, optimizer, path, dtype=dtype) as recorder:  # type: ignore[arg-type]
        for step in range(3):
            recorder.annotate(turn=step)
            hidden = model["tokens"](tokens) + model["pixels"](pixels)
            (1e-8 * model["head"](hidden).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                recorder.flush()
    shards = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.glob("shards/*"))}
    return shards, {str(shard.entry.index): shard.entry.key_range for shard in Run(path).shards}


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_rows_encoded_on_their_device_make_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """The CPU stands for a GPU: its tensors are said to be elsewhere, so that they are encoded before they are queued.

    Tensors are sorted by name and size in a file, so files are equal to the byte.
    """
    expected = recorded_files(tmp_path / "late", dtype)
    taken: list[bool] = []

    def elsewhere(rows: torch.Tensor) -> bool:
        taken.append(True)
        return True

    monkeypatch.setattr(taken_steps, "is_elsewhere", elsewhere)
    assert recorded_files(tmp_path / "early", dtype) == expected
    assert taken


def many_small_calls(path: Path, dtype: str | None) -> tuple[dict[str, bytes], list[tuple[object, ...]]]:
    """Train a network that is called five times in each step; return the shard files, and the columns of patterns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, path, dtype=dtype) as recorder:  # type: ignore[arg-type]
        for step in range(3):
            losses = []
            for moment in range(5):
                if moment == 3:
                    recorder.annotate(moment=moment, name=["a", "bc"])
                elif moment:
                    recorder.annotate(moment=moment, share=moment / 4)
                else:
                    recorder.annotate(moment=moment)
                losses.append(model(torch.randn(2, 3)).square().sum())
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
            if step == 1:
                recorder.flush()
    files = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.glob("shards/*"))}
    table = dualform.open(path).patterns("0")
    names = ("step", "call", "row", "moment", "name", "share")
    return files, list(zip(*(table[name].to_pylist() for name in names), strict=True))


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_small_calls_that_are_joined_make_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    files, columns = many_small_calls(tmp_path / "joined", dtype)
    expected = [
        (
            step,
            call,
            row,
            call,
            ["a", "bc"][row] if call == 3 else None,
            call / 4 if call in (1, 2, 4) else None,
        )
        for step in range(3)
        for call in range(5)
        for row in range(2)
    ]
    assert columns == expected
    monkeypatch.setattr(taken_steps, "MAX_JOINED_BYTES", -1)
    assert many_small_calls(tmp_path / "apart", dtype) == (files, columns)


def test_waiting_steps_hold_few_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of ten calls of two layers waits as two pairs of tensors."""
    kept: list[int] = []
    compact = taken_steps.TakenStep.compact

    def counted(step: taken_steps.TakenStep) -> None:
        compact(step)
        kept.append(len(step.calls))
        assert not step.places
        assert step.copy is None

    monkeypatch.setattr(taken_steps.TakenStep, "compact", counted)
    many_small_calls(tmp_path / "run", None)
    assert kept == [2, 2, 2]


def recorded_calls(path: Path) -> dict[str, bytes]:
    """Record a layer whose calls are small beside one whose calls are large, two calls each; return the shard files."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"small": nn.Linear(4, 3), "large": nn.Linear(400, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small, large = torch.randn(2, 5, 4), torch.randn(2, 64, 400)
    with dualform.record(model, optimizer, path) as recorder:
        for step in range(3):
            recorder.annotate(turn=step)
            ends = [model["small"](rows).square().sum() for rows in small]
            ends += [model["large"](rows).square().sum() for rows in large]
            (1e-4 * torch.stack(ends).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert dualform.open(path).verify(model).passed
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.glob("shards/*"))}


def test_small_calls_are_joined_beside_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[str, int, int]] = []
    join = taken_steps._joined

    def joining(calls: Sequence[taken_steps.TakenCall]) -> Sequence[taken_steps.TakenCall]:
        found = join(calls)
        joined.append((calls[0].layer, len(calls), len(found)))
        return found

    monkeypatch.setattr(taken_steps, "_joined", joining)
    files = recorded_calls(tmp_path / "joined")
    assert set(joined) == {("small", 2, 1), ("large", 2, 2)}
    monkeypatch.setattr(taken_steps, "MAX_JOINED_BYTES", -1)
    assert recorded_calls(tmp_path / "apart") == files
    assert joined[-1][1:] == (2, 2)
