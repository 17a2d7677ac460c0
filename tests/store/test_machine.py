"""Append, flush, close, crash, reopen, resume in any order: the folder always says what a list in memory says."""

import contextlib
import copy
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

import dualform
from dualform.errors import StoreError
from helpers.small import files, listed


@dataclass
class Step:
    """What one step recorded, and where it left model and optimizer."""

    keys: Tensor
    notes: list[Any]
    after: tuple[dict[str, Any], dict[str, Any]]


class RunFolder(RuleBasedStateMachine):
    """The model is `steps`, of which the first `published` are on disk."""

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "run"
        torch.manual_seed(0)
        self.net = nn.Linear(2, 2).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        self.first = self.state()
        self.steps: list[Step] = []
        self.published = 0
        self.recorder: dualform.Recorder | None = None

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))

    def after(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy(self.steps[step - 1].after if step else self.first)

    @precondition(lambda self: self.recorder is None)
    @rule(back=st.integers(0, 5), given=st.booleans())
    def open(self, back: int, given: bool) -> None:
        """Start, or continue from a checkpoint some steps before the last published one."""
        at = max(0, self.published - back)
        model, optimizer = self.after(at)
        self.net.load_state_dict(model)
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(optimizer)
        resume = at if given and self.path.exists() else True
        self.recorder = dualform.record(self.net, self.optimizer, self.path, resume=resume).__enter__()
        assert self.recorder.step == at
        self.steps = self.steps[:at]
        self.published = at

    @precondition(lambda self: self.recorder is not None)
    @rule(rows=st.integers(0, 3), note=st.none() | st.booleans(), seed=st.integers(0, 99))
    def step(self, rows: int, note: bool | None, seed: int) -> None:
        """Take a step with a batch of some rows, annotated per row, by a constant, or not."""
        assert self.recorder is not None
        keys = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        notes: list[Any] = [None] * rows
        if note is not None:
            notes = [seed + i for i in range(rows)] if note else [seed] * rows
            self.recorder.annotate(note=notes if note else seed)
        self.optimizer.zero_grad()
        self.net(keys).square().sum().backward()
        self.optimizer.step()
        self.steps.append(Step(keys, notes, self.state()))

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def flush(self) -> None:
        """Publish what there is."""
        assert self.recorder is not None
        self.recorder.flush()
        self.published = len(self.steps)

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def close(self) -> None:
        """End the recording in order."""
        assert self.recorder is not None
        self.recorder.__exit__(None, None, None)
        self.recorder = None
        self.published = len(self.steps)
        assert dualform.open(self.path).verify().passed
        assert files(self.path) == listed(self.path)

    @precondition(lambda self: self.recorder is not None)
    @rule(litter=st.booleans())
    def crash(self, litter: bool) -> None:
        """End the recording as a kill does: what was not published is gone."""
        assert self.recorder is not None
        writer: Any = self.recorder._sink
        self.recorder._steps._detach()
        self.recorder._steps._finalizer()
        writer._queue.fail(RuntimeError("killed"))
        with contextlib.suppress(StoreError):
            writer.abandon()
        self.recorder = None
        if litter:
            (self.path / "shards").mkdir(exist_ok=True)
            for name in ("shards/.partial-0-000000.safetensors", "shards/009999.safetensors", ".lock"):
                (self.path / name).write_bytes(b"half")

    @invariant()
    def agrees(self) -> None:
        """What the folder gives is what was published."""
        if not hasattr(self, "path") or not self.path.exists():
            return
        memory = dualform.open(self.path)
        assert memory.step == self.published
        kept = self.steps[: self.published]
        table = memory.patterns("")
        assert table["step"].to_pylist() == [s for s, step in enumerate(kept) for _ in step.keys]
        assert table["row"].to_pylist() == [row for step in kept for row in range(len(step.keys))]
        if "note" in table.column_names:
            assert table["note"].to_pylist() == [note for step in kept for note in step.notes]
        if table.num_rows:
            queries = torch.eye(2, dtype=torch.float64)
            torch.testing.assert_close(
                memory.attend(queries={"": queries})[""].attention(),
                torch.cat([step.keys for step in kept]).T,
                rtol=0,
                atol=0,
            )
        for horizon in {0, self.published // 2, self.published}:
            assert memory.at(step=horizon).verify(self.after(horizon)[0]).passed

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            if self.recorder is not None:
                self.recorder.__exit__(None, None, None)
            shutil.rmtree(self.folder)


TestRunFolder = pytest.mark.slow(RunFolder.TestCase)
TestRunFolder.settings = settings(
    max_examples=40, stateful_step_count=16, suppress_health_check=list(HealthCheck), database=None
)
