"""The run keeps the state that no recorded layer covers, and a reader puts it back or says what it does not know."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.errors import CorruptError, QueryError
from dualform.store import kept_state
from dualform.store.manifest import Manifest
from dualform.store.reader import Run
from helpers.manifests import write_manifest
from helpers.small import files, listed, network, recorded


class Mixed(nn.Module):
    """A network with a state of every kind: covered, trained and uncovered, frozen, and buffers."""

    shift: Tensor
    counts: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.frozen = nn.Parameter(torch.randn(5, 6, generator=generator), requires_grad=False)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.randn(6, generator=generator))
        self.head = nn.Linear(6, 3)
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.shift += 0.01
            self.counts += 1
        found: Tensor = self.head(self.norm(inputs @ self.frozen) * self.scale + self.shift.float())
        return found


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Iterator[int]:
    """Train a model on random batches that can be learnt, and yield after each step."""
    for step in range(count):
        inputs = torch.randn(8, 5)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()
        yield step


def learn(run: Path, model: nn.Module | None = None, *, count: int = 6, **options: Any) -> Any:
    model = Mixed() if model is None else model
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dualform.record(model, optimizer, run, **options):
        for _ in steps(model, optimizer, count):
            pass
    return model


pytestmark = pytest.mark.filterwarnings("ignore:.*are not recorded:UserWarning")


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer of a model, those that are not persistent included."""
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def same(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = whole(model), whole(expected)
    assert list(found) == list(wanted)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0, msg=name)


def test_trained_is_the_whole_model_to_the_bit(run: Path) -> None:
    model = learn(run)
    fresh = Mixed(seed=7)
    same(dualform.open(run).trained(fresh), model)
    assert not torch.equal(fresh.scale, model.scale), "a copy was changed"


def test_the_files_are_published_and_listed(run: Path) -> None:
    learn(run)
    assert {"frozen.safetensors", "uncovered.safetensors", "uncovered/000000.safetensors"} <= listed(run)
    assert files(run) == listed(run)
    entries = json.loads((run / "manifest.json").read_text())["uncovered_state"]
    kinds = {name: entry["kind"] for name, entry in entries.items()}
    assert kinds == {
        "frozen": "frozen",
        "scale": "trained",
        "shift": "buffer",
        "counts": "buffer",
        "norm.running_mean": "buffer",
        "norm.running_var": "buffer",
        "norm.num_batches_tracked": "buffer",
    }
    dualform.open(run).verify()
    content = bytearray((run / "uncovered.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "uncovered.safetensors").write_bytes(bytes(content))
    with pytest.raises(CorruptError, match=r"uncovered\.safetensors"):
        dualform.open(run).verify()


def test_a_fully_covered_model_without_buffers_has_no_such_files(run: Path) -> None:
    recorded(run, 3)
    assert not [name for name in files(run) if "uncovered" in name or "frozen" in name]
    assert Manifest.read(run).uncovered_state == {}


def test_recording_the_state_changes_nothing_of_the_training(run: Path) -> None:
    torch.manual_seed(0)
    plain = Mixed()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([plain.scale, *plain.norm.parameters(), *plain.head.parameters()], lr=0.1)
    for _ in steps(plain, optimizer, 6):
        pass
    torch.manual_seed(0)
    same(learn(run, Mixed(), shard_bytes=100), plain)


def test_a_run_that_grows_and_one_that_was_cut_off_can_be_asked(run: Path) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    recorder = dualform.record(model, optimizer, run)
    with recorder:
        for _ in steps(model, optimizer, 4):
            recorder.flush()
        memory = dualform.open(run)
        assert not memory.info().closed
        found = memory.trained(Mixed(seed=7))
        for name in ("frozen", "scale", "shift", "counts", "norm.running_mean", "norm.num_batches_tracked"):
            torch.testing.assert_close(whole(found)[name], whole(model)[name], rtol=0, atol=0)
        torch.testing.assert_close(whole(found)["head.weight"], whole(model)["head.weight"])
        masked = memory.where("step = 0").at(step=2).trained(Mixed(seed=7))
        torch.testing.assert_close(whole(masked)["head.weight"], whole(model)["head.weight"])


def test_what_is_too_large_for_every_shard_is_unknown_until_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_state, "SHARD_STATE_BYTES", 10)
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    recorder = dualform.record(model, optimizer, run)
    with recorder:
        for _ in steps(model, optimizer, 2):
            recorder.flush()
        with pytest.raises(QueryError, match="'scale' is not kept before the recording is closed"):
            dualform.open(run).trained(Mixed())
    same(dualform.open(run).trained(Mixed(seed=7)), model)


def test_large_frozen_parameters_are_compared_by_their_checksum(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_state, "FROZEN_BYTES", 10)
    model = learn(run)
    assert "frozen.safetensors" not in listed(run)
    same(dualform.open(run).trained(Mixed(seed=0)), model)
    with pytest.raises(QueryError, match="'frozen' differs from the checksum") as caught:
        dualform.open(run).trained(Mixed(seed=7))
    assert "accept_unknown=True" in str(caught.value)
    accepted = dualform.open(run).trained(Mixed(seed=7), accept_unknown=True)
    torch.testing.assert_close(accepted.frozen, Mixed(seed=7).frozen, rtol=0, atol=0)
    torch.testing.assert_close(accepted.scale, model.scale, rtol=0, atol=0)


@pytest.mark.parametrize("limit", [1 << 20, 10])
def test_a_frozen_parameter_that_moves_all_the_same_is_found(
    run: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """As the slow copy of a teacher does, which no optimizer holds."""
    monkeypatch.setattr(kept_state, "FROZEN_BYTES", limit)
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    recorder = dualform.record(model, optimizer, run)
    with recorder:
        for _ in steps(model, optimizer, 3):
            model.frozen.data.mul_(0.9)
        recorder.flush()
        found = dualform.open(run).trained(Mixed(seed=0))
        torch.testing.assert_close(found.frozen, model.frozen, rtol=0, atol=0)
    if limit > 10:
        same(dualform.open(run).trained(Mixed(seed=0)), model)
    else:
        with pytest.raises(QueryError, match="'frozen' differs"):
            dualform.open(run).trained(Mixed(seed=0))
        same(dualform.open(run).trained(model), model)


def old(run: Path) -> None:
    """Make a run look as if an earlier version had recorded it."""
    raw = json.loads((run / "manifest.json").read_text())
    for name in ("frozen.safetensors", "uncovered.safetensors"):
        raw["files"].pop(name, None)
        (run / name).unlink(missing_ok=True)
    del raw["uncovered_state"]
    for shard in raw["shards"]:
        del shard["state_after"], shard["stale"]
        shard["files"] = {name: entry for name, entry in shard["files"].items() if "uncovered" not in name}
    write_manifest(run, raw)


def test_an_old_run_opens_and_says_that_nothing_is_known(run: Path) -> None:
    model = learn(run)
    old(run)
    memory = dualform.open(run)
    assert memory.verify().passed
    with pytest.raises(QueryError, match=r"6 parts|7 parts") as caught:
        memory.trained(model)
    assert "did not keep it" in str(caught.value)
    same(memory.trained(model, accept_unknown=True), model)
    assert "not known" in repr(memory.info())


def test_an_old_run_of_a_fully_covered_model_needs_nothing_more(run: Path) -> None:
    model = recorded(run, 3)
    old(run)
    same(dualform.open(run).trained(network(seed=3)), model)


class Odd(nn.Module):
    """A model whose state cannot all be written: each buffer is of a kind that is hard to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.lazy = nn.LazyLinear(4)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("wide", torch.polar(torch.ones(4).double(), torch.arange(4.0).double()))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("meta", torch.empty(3, device="meta"))
        self.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("number", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        base = torch.arange(12.0).reshape(3, 4)
        self.register_buffer("part", base[:, 1:3])
        self.register_buffer("turned", base.T)
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.register_buffer("brain", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("eighth", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("conjugate", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.counts = {"seen": 3}

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(inputs)
        return found


class Counting(Odd):
    """The same with a state of its own that is no tensor."""

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch's own copy of a quantized tensor
def test_what_cannot_be_kept_is_listed_and_never_ends_a_training(run: Path) -> None:
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run, layers=["head"]):
        for _ in steps(model, optimizer, 2):
            pass
    entries = Manifest.read(run).uncovered_state
    assert entries is not None
    reasons = {name: entry.reason for name, entry in entries.items() if entry.reason}
    assert set(reasons) == {"lazy.weight", "lazy.bias", "sparse", "meta", "quantized", "_extra_state"}
    assert "Counting" in reasons["_extra_state"]
    with pytest.raises(QueryError) as caught:
        dualform.open(run).trained(Counting())
    assert "6 parts" in str(caught.value)
    found, doubts = dualform.open(run).restored(Counting())
    assert doubts == reasons
    restored = dict(found.named_buffers())
    for name, tensor in model.named_buffers():
        if name not in reasons:
            assert torch.equal(restored[name].to(torch.complex128), tensor.to(torch.complex128)), name
    assert dualform.open(run).verify().passed


def test_a_complex_buffer_is_compared_by_its_checksum(run: Path) -> None:
    class Turning(nn.Module):
        def __init__(self, by: float = 1.0) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.register_buffer("turns", torch.polar(torch.ones(4), by * torch.arange(4.0)), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.head(inputs)
            return found

    model = learn(run, Turning())
    same(dualform.open(run).trained(Turning()), model)
    with pytest.raises(QueryError, match="'turns' differs from the checksum"):
        dualform.open(run).trained(Turning(2.0))


def test_an_unregistered_layer_that_the_optimizer_trains_is_not_known(run: Path) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.layers = [nn.Linear(5, 4)]

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.head(self.layers[0](inputs))
            return found

    model = Hidden()
    optimizer = torch.optim.SGD([*model.head.parameters(), *model.layers[0].parameters()], lr=0.1)
    with dualform.record(model, optimizer, run):
        for _ in steps(model, optimizer, 2):
            pass
    with pytest.raises(QueryError, match="is held by the optimizer but is no part of the model"):
        dualform.open(run).trained(Hidden())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it, and hides that by default
def test_tied_and_compiled_names_are_plain_and_single(run: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.scale = nn.Parameter(torch.ones(3))
            self.again = self.scale
            self.norm = nn.BatchNorm1d(3)
            self.mirror = self.norm

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.mirror(self.head(inputs)) * self.again
            return found

    model = Tied()
    compiled: Any = torch.compile(model, backend="eager")
    learn(run, compiled)
    entries = Manifest.read(run).uncovered_state
    assert entries is not None
    assert set(entries) == {"scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    found = dualform.open(run).trained(Tied())
    same(found, model)
    assert found.again is found.scale


def test_a_buffer_of_another_shape_or_not_there_yet_is_put_in(run: Path) -> None:
    class Caching(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.register_buffer("seen", torch.zeros(0, 5), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.seen = torch.cat([self.seen, inputs.detach()])
                if "late" not in self._buffers:
                    self.register_buffer("late", torch.ones(2))
            found: Tensor = self.head(inputs)
            return found

    model = learn(run, Caching())
    same(dualform.open(run).trained(Caching()), model)


def test_a_model_of_another_structure_is_named(run: Path) -> None:
    learn(run)
    wrong = Mixed()
    wrong.scale = nn.Parameter(torch.ones(9))
    with pytest.raises(QueryError, match=r"'scale' is \(6,\) in the memory, but \(9,\) in this model"):
        dualform.open(run).trained(wrong)
    more = Mixed()
    more.register_buffer("more", torch.ones(2))
    with pytest.raises(QueryError, match="'more' was not there when the run was recorded"):
        dualform.open(run).trained(more)


def test_a_resumed_run_keeps_its_own_state(run: Path) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dualform.record(model, optimizer, run, shard_bytes=100):
        for _ in steps(model, optimizer, 4):
            pass
    model.frozen.data.add_(1.0)
    with dualform.record(model, optimizer, run, resume=True):
        for _ in steps(model, optimizer, 2):
            pass
    assert files(run) == listed(run)
    same(dualform.open(run).trained(Mixed(seed=7)), model)


def test_a_shard_that_was_cut_knows_no_state(run: Path) -> None:
    learn(run)
    source = Run(run)
    shard = dataclasses.replace(source.manifest.shards[-1], stop=3)
    cut = dataclasses.replace(source.manifest, shards=(shard,), closed=False)
    cut.publish(source.blobs, was=source.manifest_tag)
    with pytest.raises(QueryError, match="not kept before the recording is closed"):
        dualform.open(run).trained(Mixed())


def test_the_recording_does_not_hold_the_model_alive(run: Path) -> None:
    from dualform.recording.model_state import UncoveredState

    model = Mixed()
    state = UncoveredState(model, [], [])
    assert state.parts()
    del model
    assert state.parts() is None


def test_a_model_that_cannot_hold_the_values_is_refused(run: Path) -> None:
    model = learn(run)
    with pytest.raises(QueryError, match="is bfloat16 in this model, which cannot hold the recorded float32 values"):
        dualform.open(run).trained(Mixed().bfloat16())
    wide = dualform.open(run).trained(Mixed().double())
    torch.testing.assert_close(wide.scale.float(), model.scale, rtol=0, atol=0)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    recorded_on = run.parent / "plain"
    learn_plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(learn_plain.parameters(), lr=0.1)
    with dualform.record(learn_plain, optimizer, recorded_on):
        learn_plain(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(QueryError, match="meta device"):
        dualform.open(recorded_on).trained(empty)


def test_extra_state_is_asked_for_at_both_ends_only(run: Path) -> None:
    asked = []

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = self.head(inputs)
            return found

        def get_extra_state(self) -> Any:
            asked.append(1)

    learn(run, Telling(), shard_bytes=100)
    assert len(asked) == 2
    assert Manifest.read(run).uncovered_state == {}
