"""What the writer puts on disk, and when: shards, odd steps, odd columns, odd parameters, failures."""

import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.errors import AnnotationError, RefusedError, StoreError
from dualform.store.blobs import Blobs
from dualform.store.manifest import Manifest
from dualform.store.shard_writing import ShardWriter
from dualform.store.tensors import publish_tensors
from dualform.store.writer import DiskWriter
from helpers.small import ROWS, State, batch, columns, files, listed, network, recorded, sgd, state, train


def ranges(path: Path) -> list[tuple[int, int]]:
    return [(shard.start, shard.stop) for shard in Manifest.read(path).shards]


# When shards are published ----------------------------------------------------------------------------------------


def test_flush_publishes_what_was_recorded_and_the_run_is_readable_meanwhile(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(3), recorder)
        assert dualform.open(run).step == 0, "nothing is published yet"
        recorder.flush()
        memory = dualform.open(run)
        assert memory.step == 3
        assert memory.verify(model).passed
        assert not memory.info().closed
        recorder.flush()
        assert ranges(run) == [(0, 3)], "there was nothing to publish"
        train(model, optimizer, range(3, 5), recorder)
    assert ranges(run) == [(0, 3), (3, 5)]
    assert dualform.open(run).info().closed
    assert dualform.open(run).verify().passed


@pytest.mark.parametrize("shard_bytes", [0, 1, 400, 1000, 10**9])
def test_shards_are_whole_steps_that_follow_each_other(run: Path, shard_bytes: int) -> None:
    model = recorded(run, 7, shard_bytes=shard_bytes)
    found = ranges(run)
    step_bytes = 4 * ROWS * (5 + 4 + 4 + 3)
    per_shard = max(1, -(-shard_bytes // step_bytes))
    assert found == [(start, min(start + per_shard, 7)) for start in range(0, 7, per_shard)]
    assert dualform.open(run).verify(model).passed
    assert files(run) == listed(run)


def test_the_number_of_shards_changes_no_answer(tmp_path: Path) -> None:
    memories = []
    for shard_bytes in (0, 1000, 10**9):
        model = recorded(tmp_path / str(shard_bytes), 8, shard_bytes=shard_bytes)
        memories.append(dualform.open(tmp_path / str(shard_bytes)))
    for memory in memories[1:]:
        assert memory.patterns("0").to_pylist() == memories[0].patterns("0").to_pylist()
        for name, weight in memory.weights().items():
            torch.testing.assert_close(weight, memories[0].weights()[name], rtol=1e-6, atol=1e-7)
        one, other = (m.attend(model, batch(99)[0])["2"].totals(by="label") for m in (memory, memories[0]))
        torch.testing.assert_close(one.values, other.values, rtol=1e-6, atol=1e-6)


def test_what_waits_to_be_written_is_bounded_in_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that stands still makes training wait before it has handed over more than the queue may hold."""
    go = threading.Event()
    real = ShardWriter._write_shard

    def wait(self: ShardWriter, *arguments: Any) -> None:
        go.wait(10)
        real(self, *arguments)

    monkeypatch.setattr(ShardWriter, "_write_shard", wait)
    model = network()
    optimizer = sgd(model)
    step_bytes = 4 * ROWS * (5 + 4 + 4 + 3)
    seal_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    limit = 3 * (step_bytes + seal_bytes)
    taken = []
    with dualform.record(model, optimizer, run, shard_bytes=0, queue_bytes=limit) as recorder:

        def run_training() -> None:
            for step in range(12):
                train(model, optimizer, [step], recorder)
                taken.append(step)

        trainer = threading.Thread(target=run_training)
        trainer.start()
        trainer.join(0.5)
        assert trainer.is_alive(), "training should be waiting for the writer"
        # Two shards of a step are being written, a third one waits for the first; the queue holds two more pairs.
        assert len(taken) <= 5
        go.set()
        trainer.join(10)
        assert not trainer.is_alive()
    assert dualform.open(run).verify(model).passed
    assert dualform.open(run).step == 12


# Odd steps --------------------------------------------------------------------------------------------------------


def test_an_empty_memory_can_be_asked_everything(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        pass
    memory = dualform.open(run)
    assert memory.step == 0
    assert memory.verify().passed
    assert memory.verify(model).passed
    for name, weight in memory.weights().items():
        torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=0, atol=0)
    assert all(float(share.abs().sum()) == 0.0 for share in memory.shares().values())
    assert memory.patterns("0").num_rows == 0
    assert memory.steps().num_rows == 0
    assert memory.info().layers["0"]["patterns"] == 0
    inputs = batch(0)[0]
    torch.testing.assert_close(memory.attend(model, inputs)["0"].output(), model[0](inputs).detach(), rtol=1e-6,
                               atol=1e-6)  # fmt: skip
    assert memory.at(step=0).verify().passed


def test_steps_without_patterns_are_steps(run: Path) -> None:
    """Decay and momentum act without any gradient of a pattern; every shard here is a different kind of empty."""
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        states: list[State] = []
        for gradient in (None, True, 0.0, None, True):
            if gradient is True:
                train(model, optimizer, [len(states)], recorder)
            else:
                optimizer.zero_grad(set_to_none=gradient is None)
                optimizer.step()
            states.append(state(model))
            recorder.flush()
    memory = dualform.open(run)
    assert memory.step == 5
    assert memory.patterns("0")["step"].to_pylist() == [1] * ROWS + [4] * ROWS
    for step, expected in enumerate(states, start=1):
        assert memory.at(step=step).verify(expected).passed
    assert memory.where("step < 1").patterns("0").num_rows == 0
    assert memory.where(step=4).patterns("2").num_rows == ROWS


def test_empty_batches_leave_no_patterns(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for rows in (0, 0, 3):
            inputs, labels = batch(0, rows=rows)
            recorder.annotate(label=labels.tolist(), task="spät")
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels, reduction="sum").backward()
            optimizer.step()
            recorder.flush()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert memory.patterns("0", columns=["step", "label", "task"]).to_pylist() == [
        {"step": 2, "label": label, "task": "spät"} for label in batch(0, rows=3)[1].tolist()
    ]
    assert memory.info().columns == {"label": "int64", "task": "string"}, "an empty list says nothing about a type"


class Switch(nn.Module):
    """Uses its second layer only when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(5, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.always(x)
        return self.sometimes(z) if self.on else z


def test_layers_may_have_no_patterns_in_a_shard_or_at_all(run: Path) -> None:
    model = Switch()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=0) as recorder:
        for step in range(6):
            model.on = step in (2, 3)
            recorder.annotate(sample=list(range(ROWS)))
            optimizer.zero_grad()
            model(batch(step)[0]).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert [memory.patterns(name).num_rows for name in ("always", "sometimes", "never")] == [36, 12, 0]
    assert memory.where("sample < 2").patterns("sometimes")["pattern"].to_pylist() == [0, 1, 6, 7]
    assert memory.patterns("never").num_rows == 0
    model.on = True
    spotlight = memory.attend(model, batch(9)[0], layers=["always", "sometimes"])
    assert spotlight["sometimes"].totals(by="step").groups == (2, 3)
    torch.testing.assert_close(spotlight["sometimes"].output(), model(batch(9)[0]).detach(), rtol=1e-5, atol=1e-6)


# Odd parameters ---------------------------------------------------------------------------------------------------


def test_a_frozen_bias_beside_accumulated_gradients(run: Path) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with dualform.record(model, optimizer, run, shard_bytes=500):
        for step in range(0, 9, 3):
            optimizer.zero_grad()
            for micro in range(step // 3 + 1):
                inputs, labels = batch(step + micro)
                functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert set(memory.patterns("0")["micro"].to_pylist()) == {0, 1, 2}
    torch.testing.assert_close(memory.weights()["0.bias"], model.get_parameter("0.bias").detach(), rtol=0, atol=0)


def test_a_bias_that_is_frozen_only_where_gradients_are_accumulated(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=0):
        for step in range(4):
            micros = 1 + step % 2
            model[0].bias.requires_grad_(micros == 1)
            optimizer.zero_grad()
            for micro in range(micros):
                inputs, labels = batch(10 * step + micro)
                functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    assert dualform.open(run).verify(model).passed


def test_parameters_that_no_optimizer_has_never_move(run: Path) -> None:
    model = network()
    scale = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    with pytest.warns(UserWarning, match="not recorded"):
        recorder = dualform.record(model, optimizer, run, layers="*")
    with recorder:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch(0)[0]) * scale, batch(0)[1]).backward()
        optimizer.step()
        recorder.flush()
        optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert memory.step == 2
    assert memory.patterns("0").num_rows == 0


def test_layers_can_be_stored_in_different_dtypes(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, dtype={"2": "float16"}) as recorder:
        train(model, optimizer, range(6), recorder)
    memory = dualform.open(run)
    assert {name: entry.dtype for name, entry in memory.layers.items()} == {"0": "float32", "2": "float16"}
    exact, rounded = memory.verify(model).layers
    assert exact.error is not None
    assert rounded.error is not None
    assert exact.error < 1e-5 < rounded.error < 2e-3
    with pytest.raises(ValueError, match="dtype is 'float8'"):
        dualform.record(model, sgd(model), run / "other", dtype={"*": "float8"})  # type: ignore[dict-item]


def test_keys_of_a_bfloat16_layer_can_be_stored(run: Path) -> None:
    model = network().bfloat16()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers={"*": "keys"}) as recorder:
        train(model, optimizer, range(3), recorder)
    memory = dualform.open(run)
    assert memory.verify(model).passed
    inputs = batch(9)[0].bfloat16()
    expected = inputs.float() @ torch.cat([batch(step)[0].bfloat16() for step in range(3)]).float().T
    torch.testing.assert_close(memory.attend(model, inputs)["0"].attention(), expected, rtol=1e-6, atol=1e-6)


def test_a_bare_layer_is_a_model(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(4), recorder)
    memory = dualform.open(run)
    assert list(memory.layers) == [""]
    assert memory.verify(model).passed
    torch.testing.assert_close(
        memory.attend(model, batch(9)[0])[""].output(), model(batch(9)[0]).detach(), rtol=1e-5, atol=1e-6
    )


# Odd columns ------------------------------------------------------------------------------------------------------


def with_columns(path: Path, *annotations: dict[str, Any], flush: bool = True) -> Memory:
    """Record a step for each of these, every one in a shard of its own or all in one."""
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path) as recorder:
        for step, found in enumerate(annotations):
            if found:
                recorder.annotate(**found)
            inputs, labels = batch(step, rows=2)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if flush:
                recorder.flush()
    return dualform.open(path)


def column(memory: Memory, name: str) -> list[Any]:
    found: list[Any] = memory.patterns("0")[name].to_pylist()
    return found


@pytest.mark.parametrize("flush", [True, False])
def test_a_column_of_integers_may_become_floats_and_stays_so(run: Path, flush: bool) -> None:
    memory = with_columns(run, {"c": [1, 2]}, {"c": [0.5, 1.5]}, {"c": [3, 4]}, flush=flush)
    assert column(memory, "c") == [1.0, 2.0, 0.5, 1.5, 3.0, 4.0]
    assert memory.info().columns == {"c": "double"}
    assert memory.where(c=1).patterns("0")["step"].to_pylist() == [0]
    assert memory.where("c > 1").patterns("0")["step"].to_pylist() == [0, 1, 2, 2]


@pytest.mark.parametrize("flush", [True, False])
def test_columns_may_come_late_and_stay_away(run: Path, flush: bool) -> None:
    memory = with_columns(run, {}, {"a": ["x", "y"]}, {"b": True}, {"a": "z", "b": [False, True]}, flush=flush)
    assert column(memory, "a") == [None, None, "x", "y", None, None, "z", "z"]
    assert column(memory, "b") == [None, None, None, None, True, True, False, True]
    assert memory.where(a=None).patterns("0")["step"].to_pylist() == [0, 0, 2, 2]


def test_an_empty_list_leaves_the_type_of_its_column_open(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for names in ([], ["a", "b"], []):
            recorder.annotate(name=names)
            inputs, labels = batch(0, rows=len(names))
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels, reduction="sum").backward()
            optimizer.step()
    assert column(dualform.open(run), "name") == ["a", "b"]


def test_names_and_strings_may_be_anything(run: Path) -> None:
    memory = with_columns(run, {"größe": ["süß", ""], "my column": [1, 2], "select": ["'", '"'], "日本": "語"})
    assert column(memory, "größe") == ["süß", ""]
    assert memory.where(größe="süß").patterns("0")["row"].to_pylist() == [0]
    assert memory.where("\"größe\" = 'süß'").patterns("0")["row"].to_pylist() == [0]
    assert memory.where("\"my column\" = 2 and 日本 = '語'").patterns("0")["row"].to_pylist() == [1]
    assert memory.where("\"select\" = ''''").patterns("0")["row"].to_pylist() == [0]
    layer = memory.attend(network(), batch(0)[0], other_model=True)["0"]
    assert layer.totals(by="größe").groups == ("", "süß")
    assert layer.totals(by=["日本", "my column"]).groups == (("語", 1), ("語", 2))


def test_a_column_that_changes_its_type_is_refused_before_the_step_and_loses_nothing(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(2), recorder)
        with pytest.raises(AnnotationError, match=r"'task' held string so far and now holds int64"):
            recorder.annotate(fresh=1, task=3)
        recorder.annotate(fresh="text is fine, for the first attempt stored nothing")
        train(model, optimizer, range(2, 4), recorder)
    memory = dualform.open(run)
    assert memory.step == 4
    assert memory.verify(model).passed


def test_integers_of_every_width_and_numpy_booleans(run: Path) -> None:
    memory = with_columns(
        run,
        {"a": np.array([1, 255], np.uint8), "b": np.array([True, False]), "c": torch.tensor([1.5, 2.5]).half()},
    )
    assert (column(memory, "a"), column(memory, "b"), column(memory, "c")) == ([1, 255], [True, False], [1.5, 2.5])
    assert memory.patterns("0").schema.field("a").type == pa.int64()


# Failures ---------------------------------------------------------------------------------------------------------


def fails_after(shards: int) -> Callable[..., None]:
    """Return a `_write_shard` that has published this many shards when the disk is full."""
    real = ShardWriter._write_shard
    published: list[bool] = []

    def write_shard(self: ShardWriter, *arguments: Any) -> None:
        if len(published) == shards:
            raise OSError(28, "No space left on device")
        published.append(True)
        real(self, *arguments)

    return write_shard


def test_a_failing_writer_raises_at_a_later_step_and_keeps_what_it_published(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardWriter, "_write_shard", fails_after(2))
    model = network()
    optimizer = sgd(model)
    states = []

    def record() -> None:
        with dualform.record(model, optimizer, run, shard_bytes=0) as recorder:
            for step in range(20):
                states.extend(train(model, optimizer, [step], recorder))
            recorder.flush()

    with (
        pytest.raises(StoreError, match="No space left on device"),
        pytest.warns(UserWarning, match="could not be closed properly"),
    ):
        record()
    memory = dualform.open(run)
    assert memory.step == 2
    assert memory.verify(states[1]).passed
    assert files(run) == listed(run)


def test_a_run_is_left_only_when_no_shard_is_being_published(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that fails at once leaves the one before it time to be published while the folder is still locked."""
    failing, published = fails_after(2), []
    publish = ShardWriter.publish_manifest

    def slow(self: ShardWriter, **changes: Any) -> None:
        if changes.get("shards"):
            time.sleep(0.2)
        publish(self, **changes)
        published.append(self.manifest.steps)

    monkeypatch.setattr(ShardWriter, "_write_shard", failing)
    monkeypatch.setattr(ShardWriter, "publish_manifest", slow)
    model = network()
    optimizer = sgd(model)

    def record() -> None:
        with dualform.record(model, optimizer, run, shard_bytes=0) as recorder:
            train(model, optimizer, range(20), recorder)

    with pytest.raises(StoreError, match="No space left on device"):
        record()
    assert published[-1] == dualform.open(run).step == 2
    assert files(run) == listed(run), "nor is a lock left"


def test_shards_that_are_written_are_let_go_of(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long recording that nobody flushes holds the parameters of its last two shards, and not of all."""
    held: list[weakref.ref[Tensor]] = []
    write = ShardWriter.write

    def watched(self: ShardWriter, parameters: Mapping[str, Tensor], state: Any) -> None:
        held.extend(weakref.ref(tensor) for tensor in list(parameters.values())[:1])
        write(self, parameters, state)

    monkeypatch.setattr(ShardWriter, "write", watched)
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, shard_bytes=0) as recorder:
        for step in range(12):
            train(model, optimizer, [step], recorder)
        deadline = time.monotonic() + 20
        while (len(held) < 12 or sum(one() is not None for one in held) > 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(held) == 12
        assert sum(one() is not None for one in held) <= 2


def test_a_shard_that_fails_is_told_of_at_the_next_step_that_is_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when two more shards are full."""
    monkeypatch.setattr(ShardWriter, "_write_shard", fails_after(0))
    model = network()
    optimizer = sgd(model)
    taken: list[int] = []

    def record() -> None:
        with dualform.record(model, optimizer, run, shard_bytes=1) as recorder:
            for step in range(200):
                if step == 1:
                    recorder._sink._shard_bytes = 1 << 40  # type: ignore[attr-defined]
                train(model, optimizer, [step], recorder)
                taken.append(step)
                time.sleep(0.01)

    with (
        pytest.raises(StoreError, match="No space left on device"),
        pytest.warns(UserWarning, match="could not be closed properly"),
    ):
        record()
    assert len(taken) < 100


def test_with_detach_a_failing_writer_warns_and_training_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardWriter, "_write_shard", fails_after(1))
    model, alone = network(), network()
    optimizer = sgd(model)
    states = []

    def record() -> None:
        with dualform.record(model, optimizer, run, shard_bytes=0, on_failure="detach") as recorder:
            states.extend(train(model, optimizer, range(20), recorder))
            recorder.flush()
            train(model, optimizer, range(20, 25), recorder)
            recorder.flush()

    with pytest.warns(UserWarning, match=r"Recording stopped at step \d+ .*No space left on device"):
        record()
    train(alone, sgd(alone), range(25))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, alone.get_parameter(name), rtol=0, atol=0)
    memory = dualform.open(run)
    assert memory.step == 1
    assert memory.verify(states[0]).passed
    assert files(run) == listed(run), "nor is a lock left"


def regularised(model: nn.Sequential) -> None:
    """Leave a gradient on the model that no patterns explain."""
    inputs, labels = batch(5)
    model.zero_grad()
    (functional.cross_entropy(model(inputs), labels) + model.get_parameter("0.weight").square().sum()).backward()


def test_with_detach_a_refused_step_keeps_everything_before_it(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, on_failure="detach") as recorder:
        train(model, optimizer, range(5), recorder)
        before = state(model)
        regularised(model)
        with pytest.warns(UserWarning, match=r"Recording stopped at step 5 "):
            optimizer.step()
        train(model, optimizer, range(6, 8), recorder)
    memory = dualform.open(run)
    assert memory.step == 5
    assert memory.verify(before).passed
    assert files(run) == listed(run)


def test_with_raise_a_refused_step_keeps_everything_before_it(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(5), recorder)
        regularised(model)
        with pytest.raises(RefusedError):
            optimizer.step()
    memory = dualform.open(run)
    assert memory.step == 5
    assert memory.verify(model).passed
    assert files(run) == listed(run)


def test_a_user_who_swallows_a_lost_step_is_told_again_and_the_memory_stays_exact(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps after one that was not taken must not be added up as if nothing were missing."""
    model = network()
    optimizer = sgd(model)
    real = DiskWriter._check_space

    def interrupted(self: DiskWriter, record: Any) -> None:
        if record.step == 2:
            self._checked = True
            raise KeyboardInterrupt
        self._checked = record.step > 2

    monkeypatch.setattr(DiskWriter, "_check_space", interrupted)
    recorder = dualform.record(model, optimizer, run)
    recorder.__enter__()
    states = train(model, optimizer, range(2), recorder)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, [2], recorder)
    for go_on in (lambda: train(model, optimizer, [3], recorder), lambda: recorder.__exit__(None, None, None)):
        with pytest.raises(StoreError, match="An earlier step was not recorded"):
            go_on()
    monkeypatch.setattr(DiskWriter, "_check_space", real)
    memory = dualform.open(run)
    assert memory.step == 2, "what came before is published all the same"
    assert memory.verify(states[1]).passed
    assert not memory.info().closed
    for name, parameter in model.named_parameters():
        parameter.data.copy_(states[1][name])
    with dualform.record(model, sgd(model), run, resume=True):
        pass
    assert files(run) == listed(run)


def test_when_the_final_parameters_cannot_be_written_the_steps_are_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualform.store import writer

    def publish_all_but_final(blobs: Blobs, name: str, tensors: Any) -> Any:
        if name == "final.safetensors":
            raise OSError(28, "No space left on device")
        return publish_tensors(blobs, name, tensors)

    monkeypatch.setattr(writer, "publish_tensors", publish_all_but_final)
    model = network()
    optimizer = sgd(model)
    with (
        pytest.raises(StoreError, match=r"final parameters could not be written.*No space left"),
        dualform.record(model, optimizer, run) as recorder,
    ):
        train(model, optimizer, range(3), recorder)
    memory = dualform.open(run)
    assert memory.step == 3
    assert memory.verify(model).passed
    assert files(run) == listed(run)


def test_no_thread_survives_a_recording(run: Path, tmp_path: Path) -> None:
    def writers() -> int:
        return sum(thread.name == "dualform-writer" for thread in threading.enumerate())

    recorded(run, 3)
    assert writers() == 0
    model = network()
    optimizer = sgd(model)
    with (
        warnings.catch_warnings(action="ignore"),
        dualform.record(model, optimizer, tmp_path / "other", on_failure="detach") as recorder,
    ):
        train(model, optimizer, [0], recorder)
        optimizer.zero_grad()
        model.get_parameter("0.weight").square().sum().backward()
        optimizer.step()
        assert recorder.step == 1
    assert writers() == 0


def test_columns_of_a_step_are_those_that_were_annotated(run: Path) -> None:
    recorded(run, 4)
    table = dualform.open(run).patterns("2")
    for step in range(4):
        found = columns(step)
        rows = [row for row in table.to_pylist() if row["step"] == step]
        for i, row in enumerate(rows):
            for name in ("sample", "label", "task", "mood"):
                entry = found.get(name)
                expected = entry if entry is None or isinstance(entry, str) else entry[i]
                assert row[name] == expected, (step, i, name)


def test_steps_are_published_after_a_while_however_small_they_are(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small run that is killed has lost only its last seconds."""
    monkeypatch.setattr(sys.modules[DiskWriter.__module__], "PUBLISH_SECONDS", 0.0)
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(3), recorder)
        deadline = time.monotonic() + 20
        while dualform.open(run).step < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert dualform.open(run).step == 3
    assert dualform.open(run).verify(model).passed
