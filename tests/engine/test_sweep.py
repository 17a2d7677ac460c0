"""A sweep that goes forwards twice has the answer of one that goes backwards, in every layer and optimizer family."""

import pytest
import torch

from dualform.engine.fold import run_folds
from dualform.engine.jobs import Sweep, WholeView
from dualform.engine.measures import PatternMeasure
from dualform.engine.reducers import Everything
from dualform.engine.shares import replayed_parameters
from dualform.engine.sweep import ForwardSweep, run_sweep
from dualform.recording.keep import Patterns
from dualform.replaying.training import record_training
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.trainings import MODELS, make_training

QUERIES = 3


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
@pytest.mark.parametrize("kind", MODELS)
def test_two_ways_forward_find_what_the_way_back_finds(kind: str, optimizer: str) -> None:
    blobs = MemoryBlobs()
    record_training(make_training(kind, optimizer, steps=5), blobs, keep=Patterns())
    run = Run(blobs)
    generator = torch.Generator().manual_seed(0)
    asked, like = 0, torch.empty(0, dtype=torch.float64)
    for name, entry in run.layers.items():
        if not replayed_parameters(run, [name]):
            continue
        ids = any(use.parameter_map.takes_ids for use in entry.uses)
        queries = torch.randn(QUERIES, entry.d_in, generator=generator, dtype=torch.float64)
        queries = torch.arange(QUERIES)[:, None] if ids else queries
        units = torch.tensor([0, entry.d_out - 1, 0])
        shapes = {use: run.description.parameters[use.parameter].shape for use in entry.uses}
        measure = PatternMeasure("contribution", units, shapes)
        for horizon in (3, run.steps):
            job = Sweep(name, WholeView(run, horizon), Everything(), like, queries=queries, measure=measure)
            sweep = ForwardSweep(run, job)
            sweep.begin(run_folds(run, sweep.folds()))
            for step in range(run.steps):
                sweep.take(step)
            expected = run_sweep(run, job)
            assert expected.abs().max() > 0, name
            torch.testing.assert_close(sweep.result(), expected, rtol=1e-9, atol=1e-12)
            asked += 1
    assert asked


def test_what_is_kept_of_a_step_is_what_acts_on_the_asked_units() -> None:
    blobs = MemoryBlobs()
    record_training(make_training("mlp", "AdamW", steps=2), blobs, keep=Patterns())
    run = Run(blobs)
    measure = PatternMeasure("contribution", torch.tensor([2, 2]), {})
    job = Sweep("1", WholeView(run, 2), Everything(), torch.empty(0), queries=torch.randn(2, 16), measure=measure)
    assert ForwardSweep(run, job).kept_bytes == 2 * 8 * 2 * (16 + 1)  # steps · float64 · (P, Q) · one row and one bias
