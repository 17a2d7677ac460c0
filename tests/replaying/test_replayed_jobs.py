"""Every job gives the plain answer while a training goes by its patterns: the executors' suite on twins of its runs.

The twin is the same training, recorded with its steps alone, in shards of the same steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from conformance.executors import ExecutorConformance, executed_run, folded_run
from dualform.engine.jobs import Executor, Job
from dualform.engine.source import PatternSource
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Recording, Train, record_training
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run

__all__ = ["executed_run", "folded_run"]  # fixtures


def executed_training(run: Run) -> Train:
    """Return the training of the fixture `executed_run`."""

    def train(recording: Recording) -> nn.Module:
        torch.manual_seed(0)
        inputs = torch.randn(36, 40)
        model = nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with recording(model, optimizer, check_rows=False) as recorder:
            for step in range(9):
                rows = torch.arange(12) + 12 * (step % 3)
                recorder.annotate(sample=rows, label=rows % 4)
                optimizer.zero_grad()
                model(inputs[rows]).square().mean().backward()
                optimizer.step()
                if any(shard.stop == step + 1 for shard in run.shards):
                    recorder.flush()
        return model

    return train


def folded_training(run: Run) -> Train:
    """Return the training of the fixture `folded_run`."""

    def train(recording: Recording) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        first, last = model[0].parameters(), [model.get_parameter("2.bias")]
        optimizers = [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(last, lr=0.1, momentum=0.9)]
        with recording(model, optimizers, check_rows=False) as recorder:
            for step in range(9):
                recorder.annotate(label=torch.arange(12) % 4)
                model.zero_grad()
                generator = torch.Generator().manual_seed(step)
                model(torch.randn(12, 6, generator=generator)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                if any(shard.stop == step + 1 for shard in run.shards):
                    recorder.flush()
        return model

    return train


def twin(run: Run, train: Train) -> ReplayedPatterns:
    """Record the steps of a run's training; return them as a source that holds nothing."""
    blobs = MemoryBlobs()
    record_training(train, blobs)
    steps = Run(blobs)
    assert [(s.start, s.stop) for s in steps.shards] == [(s.start, s.stop) for s in run.shards]
    assert run.final is not None
    assert steps.final is not None
    assert all(torch.equal(tensor, run.final[name]) for name, tensor in steps.final.items())
    return ReplayedPatterns(steps, train, held_bytes=0)


class TwinExecutor:
    """Runs jobs over the twin of the source that they are meant for."""

    def __init__(self, twins: dict[int, ReplayedPatterns]) -> None:
        self._twins = twins

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        replayed = self._twins[id(source)]
        for name in replayed.run.blobs.list("cache/"):
            replayed.run.blobs.remove(name)
        fresh = ReplayedPatterns(replayed.run, replayed.require_train(), held_bytes=0)
        return ReplayExecutor().run(fresh, jobs)


@pytest.fixture(scope="module")
def twins(executed_run: Run, folded_run: Run) -> dict[int, ReplayedPatterns]:
    found = {
        executed_run: twin(executed_run, executed_training(executed_run)),
        folded_run: twin(folded_run, folded_training(folded_run)),
    }
    return {id(run): replayed for run, replayed in found.items()}


class TestReplayExecutor(ExecutorConformance):
    @pytest.fixture
    def make(self, twins: dict[int, ReplayedPatterns]) -> Callable[[], Executor]:
        return lambda: TwinExecutor(twins)
