"""A run whose patterns come back with a replay is a source like any other while they are held."""

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualform
from conformance.sources import SourceConformance
from dualform.attend.memory import Memory
from dualform.errors import ReplayError
from dualform.recording.keep import Patterns, Steps
from dualform.replaying import replay_executor
from dualform.replaying.replay_executor import ReplayExecutor
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.replaying.training import Recording, record_training
from dualform.store.blobs import Blobs
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
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
