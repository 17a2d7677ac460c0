"""A run whose patterns come back with a replay is a source like any other while they are held."""

import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualform
from conformance.sources import SourceConformance
from dualform.attend.memory import Memory
from dualform.errors import RefusedError, ReplayError
from dualform.recording import alignment
from dualform.recording.keep import Patterns, Steps
from dualform.replaying import replay_executor
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Recording, record_training
from dualform.store.blobs import Blobs
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from helpers.together import run_together
from helpers.trainings import STEPS, batch, make_training


@pytest.fixture(scope="module")
def recorded() -> Blobs:
    blobs = MemoryBlobs()
    record_training(make_training("mlp", "AdamW"), blobs)
    return blobs


@pytest.fixture
def source(recorded: Blobs) -> ReplayedPatterns:
    return ReplayedPatterns(Run(recorded), make_training("mlp", "AdamW"), held_bytes=0)


class TestHeldPatterns(SourceConformance):
    @pytest.fixture
    def source(self, source: ReplayedPatterns) -> ReplayedPatterns:
        source.hold(source.layers)
        return source


def going_by(source: ReplayedPatterns) -> Memory:
    return Memory(source, ReplayExecutor())


def test_several_questions_take_one_replay(source: ReplayedPatterns) -> None:
    spotlight = going_by(source).attend(queries={"1": torch.randn(2, 16), "3": torch.rand(2, 6)})
    spotlight.compute(dualform.Totals(by="label", of="magnitude"), dualform.Top(3), dualform.Top(2, largest=False))
    assert source.replays == 1


def test_one_of_several_processes_replays_alone(recorded: Blobs, tmp_path: Path) -> None:
    def work(rank: int) -> list[float]:
        if rank:
            return []
        source = ReplayedPatterns(Run(recorded), make_training("mlp", "AdamW"), held_bytes=0)
        spotlight = going_by(source).attend(queries={"3": torch.ones(1, 6)})
        found: list[float] = spotlight.compute(dualform.Totals(by="label", of="magnitude"))[0]["3"].values[0].tolist()
        return found

    assert run_together(tmp_path, work)[0] == work(0)


def test_a_replay_ends_behind_the_last_step_that_is_asked_for(recorded: Blobs) -> None:
    seen = []

    def train(recording: Recording) -> nn.Module:
        def opened(model: nn.Module, optimizer: Any, **options: Any) -> Any:
            optimizer[0].register_step_pre_hook(lambda *_: seen.append(1))
            return recording(model, optimizer, **options)

        found: nn.Module = make_training("mlp", "AdamW")(opened)
        return found

    source = ReplayedPatterns(Run(recorded), train, held_bytes=0)
    going_by(source).at(step=3).weights()
    assert len(seen) == 3 < STEPS
    del seen[:]
    going_by(source).at(step=0).weights()
    assert len(seen) == 0


def test_global_generators_are_left_alone(source: ReplayedPatterns) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    going_by(source).weights()
    assert source.replays == 1
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]


def test_a_question_in_any_mode_replays_in_the_modes_of_a_program(source: ReplayedPatterns) -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert going_by(source).weights()
    assert torch.is_grad_enabled()


def test_layers_that_are_stored_need_no_replay() -> None:
    blobs, train = MemoryBlobs(), make_training("mlp", "AdamW")
    record_training(train, blobs, keep=[Steps(), Patterns(layers="3")])
    source = ReplayedPatterns(Run(blobs), train, held_bytes=0)
    assert {name: entry.store for name, entry in source.layers.items()} == {"1": "steps", "3": "keys+values"}
    memory = going_by(source)
    inputs = batch("mlp", 50)[0]
    model = record_training(train, MemoryBlobs())
    memory.attend(model, inputs)["3"].top(3, of="contribution")
    assert source.replays == 0
    assert memory.verify(model).passed
    assert source.replays == 1


def test_contributions_of_single_patterns_in_all_layers_take_two_replays_or_are_refused_by_name(
    source: ReplayedPatterns, monkeypatch: pytest.MonkeyPatch
) -> None:
    spotlight = going_by(source).attend(queries={"1": torch.randn(2, 16), "3": torch.rand(2, 6)})
    spotlight.compute(dualform.Top(2, of="contribution", unit=1))
    assert source.replays == 2
    layer = spotlight["3"]
    monkeypatch.setattr(replay_executor, "SWEPT_BYTES", 0)
    with pytest.raises(ReplayError, match=r"layer '3' go backwards.*keep=Patterns"):
        layer.top(3, of="contribution", unit=1)


def test_patterns_that_are_not_there_are_refused_by_name(source: ReplayedPatterns, recorded: Blobs) -> None:
    with pytest.raises(ReplayError, match="come back when the training is replayed"):
        source.parts()[0].rows("1", "keys").take(slice(0, 2))
    with pytest.raises(ReplayError, match="come back when the training is replayed"):
        Memory(Run(recorded)).weights()
    part = source.parts()[0]
    part.windows["1"] = (4, torch.zeros(4, 16), None)
    rows = part.rows("1", "keys")
    assert rows.take(slice(4, 8))[0].shape == rows.take(torch.tensor([7, 4, 5, 6]))[0].shape == (4, 16)
    for outside in (slice(0, 5), slice(7, 9), torch.tensor([3]), torch.tensor([8])):
        with pytest.raises(ReplayError, match="only goes forwards"):
            rows.take(outside)


def test_a_failing_question_is_not_taken_for_a_failing_training(source: ReplayedPatterns) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of the question")

    with pytest.raises(ZeroDivisionError, match="of the question"):
        source.replay({"1": "keys"}, fail, steps=source.steps)


def test_a_training_that_catches_every_error_does_not_hide_a_difference(recorded: Blobs) -> None:
    def train(recording: Recording) -> None:
        with contextlib.suppress(Exception):
            make_training("mlp", "AdamW", swapped=2)(recording)

    with pytest.raises(ReplayError, match="in step 2, the network's inputs"):
        going_by(ReplayedPatterns(Run(recorded), train)).weights()


def test_a_plan_says_what_a_question_takes(source: ReplayedPatterns, recorded: Blobs) -> None:
    memory = going_by(source)
    size = STEPS * 4 * 4 * ((16 + 6) + (6 + 3))
    assert memory.plan(dualform.Top(3)).replays == 1
    assert memory.plan(dualform.Top(3)).bytes == size
    assert memory.plan(dualform.Top(3)).seconds == source.recorded_seconds > 0
    assert str(memory.plan(dualform.Top(3), layers="3")).startswith("1 replay, about ")
    spotlight = memory.attend(queries={"1": torch.randn(2, 16), "3": torch.rand(2, 6)})
    for question in (
        dualform.Totals(by="label"),
        dualform.Totals(by="label", of="contribution"),
        dualform.Top(2, of="contribution"),
        dualform.Top(2, of="contribution", unit=1),
    ):
        before, planned = source.replays, memory.plan(question).replays
        spotlight.compute(question)
        assert source.replays - before <= planned
    held = Memory(ReplayedPatterns(Run(recorded), make_training("mlp", "AdamW")), ReplayExecutor())
    assert held.plan(dualform.Top(3, of="contribution")).replays == 1
    held.weights()
    assert held.plan(dualform.Top(3, of="contribution")).replays == 0


def test_answers_are_kept_beside_the_run_by_question(recorded: Blobs) -> None:
    queries = {"1": torch.randn(2, 16, generator=torch.Generator().manual_seed(1))}

    def ask(k: int, view: str | None = None, **options: Any) -> tuple[torch.Tensor, int]:
        source = ReplayedPatterns(Run(recorded), make_training("mlp", "AdamW"), held_bytes=0, **options)
        memory = going_by(source) if view is None else going_by(source).where(view)
        return memory.attend(queries=queries)["1"].top(k).values, source.replays

    first, replays = ask(3)
    assert replays == 1
    again, replays = ask(3)
    assert replays == 0
    assert torch.equal(first, again)
    assert ask(4)[1] == 1
    assert ask(3, "step < 5")[1] == 1
    assert ask(3, on_difference="report")[1] == 1  # which may differ
    queries["1"] = queries["1"] + 1
    assert ask(3)[1] == 1


def turned_training(recording: Recording) -> nn.Module:
    """Train a network whose second layer sees the rows turned by one, and in some steps as they are."""
    torch.manual_seed(0)
    model = Turning()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with recording(model, optimizer) as recorder:
        for step in range(6):
            inputs = torch.randn(4 if step != 4 else 6, 5, generator=generator)
            recorder.annotate(sample=torch.arange(len(inputs)))
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    return model


class Turning(nn.Module):
    """Two layers, between which the rows are turned by one where there are six of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 5) -> (B, 3)
        found: torch.Tensor = self.second(torch.tanh(self.first(x)).roll(int(len(x) == 6), 0))
        return found


def plain_rows_training(recording: Recording) -> nn.Module:
    """Train a network whose layers all have the batch's rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer) as recorder:
        for _ in range(5):
            inputs = torch.randn(4, 5)
            recorder.annotate(sample=torch.arange(4))
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    return model


def test_rows_that_the_recording_tried_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = MemoryBlobs()
    record_training(plain_rows_training, blobs)
    source = ReplayedPatterns(Run(blobs), plain_rows_training, held_bytes=0)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("rows are tried")

    monkeypatch.setattr(alignment, "check_rows", fail)
    assert not source.tries_rows
    assert set(going_by(source).attend(queries={"2": torch.randn(2, 4)})["2"].top(2).columns["sample"]) <= {0, 1, 2, 3}
    source.tries_rows = True
    with pytest.raises(RefusedError, match="rows are tried"):
        going_by(source).attend(queries={"2": torch.randn(2, 4)})["2"].top(3)


@pytest.mark.filterwarnings("ignore:Columns per row are left out")
def test_rows_that_were_not_always_the_same_are_tried_again() -> None:
    steps, patterns = MemoryBlobs(), MemoryBlobs()
    record_training(turned_training, steps)
    record_training(turned_training, patterns, keep=Patterns())
    source = ReplayedPatterns(Run(steps), turned_training, held_bytes=0)
    queries = {"second": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))}
    found = going_by(source).attend(queries=queries)["second"].top(26)
    assert source.tries_rows
    assert source.replays == 2  # the first one ended where the rows were not those of the recording
    expected = dualform.open(patterns).attend(queries=queries)["second"].top(26)
    assert found.columns["sample"] == expected.columns["sample"]
    assert torch.equal(found.values, expected.values)


def accumulating_training(recording: Recording) -> nn.Module:
    """Train by two backwards a step and clipping; in some steps the first backward's gradients are thrown away."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with recording(model, optimizer, check_rows=False) as recorder:
        for step in range(6):
            for half in range(2):
                recorder.annotate(sample=torch.arange(4) + 4 * half)
                model(torch.randn(4, 5)).square().sum().backward()
                if step % 2 and not half:
                    optimizer.zero_grad(set_to_none=step % 4 == 1)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model


def single_training(recording: Recording) -> nn.Module:
    """Train a single parameter by two backwards a step."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, check_rows=False):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
    return model


def test_backwards_that_share_the_step_of_a_single_parameter_are_those_of_the_recording() -> None:
    blobs = MemoryBlobs()
    model = record_training(single_training, blobs)
    memory = going_by(ReplayedPatterns(Run(blobs), single_training, held_bytes=0))
    torch.testing.assert_close(memory.weights()["weight"], model.weight.detach())


def test_backwards_that_share_a_step_or_are_cleared_before_it_are_those_of_the_recording() -> None:
    steps, patterns = MemoryBlobs(), MemoryBlobs()
    model = record_training(accumulating_training, steps)
    record_training(accumulating_training, patterns, keep=Patterns())
    memories = [
        going_by(ReplayedPatterns(Run(steps), accumulating_training, held_bytes=0)),
        dualform.open(patterns),
    ]
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    layers = [memory.attend(model, inputs)["2"] for memory in memories]
    assert layers[0].count() == layers[1].count() == 6 * 4 + 3 * 4  # every other step has the patterns of one backward
    found, expected = (layer.top(40, of="contribution", unit=1) for layer in layers)
    assert found.columns["sample"] == expected.columns["sample"]
    torch.testing.assert_close(found.values, expected.values, equal_nan=True, rtol=1e-5, atol=1e-6)
    for name, weight in memories[0].weights().items():
        torch.testing.assert_close(weight, memories[1].weights()[name])
