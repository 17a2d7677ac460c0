"""Steps as the disk writer takes them: rows that are encoded where they are trained make the same files."""

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
