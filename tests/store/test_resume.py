"""Continuing a run from a checkpoint: where it may stand, what is refused, what is dropped."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import ResumeError, RunExistsError, StoreError
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.manifest import Manifest
from dualform.store.reader import Run
from helpers.small import ROWS, batch, columns, files, listed, network, sgd, state, train

STEPS = 10  # in shards of three, the last of one


class Checkpoints:
    """A run of ten steps with the model's and the optimizer's state after each of 0 to 10 steps."""

    def __init__(self, path: Path, *, close: bool = True, **options: Any) -> None:
        self.path = path
        self.model = network()
        self.optimizer = sgd(self.model)
        self.kept = [self._checkpoint()]
        with dualform.record(self.model, self.optimizer, path, **{"shard_bytes": 1000, **options}) as recorder:
            for step in range(STEPS):
                train(self.model, self.optimizer, [step], recorder)
                self.kept.append(self._checkpoint())
            recorder.flush()
            if not close:
                recorder._sink.abandon()
                recorder._steps._detach()

    def _checkpoint(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, step: int, *, optimizer: bool = True) -> None:
        """Put the model (and the optimizer, or a fresh one) where they stood after `step` steps."""
        self.model.load_state_dict(self.kept[step]["model"])
        self.optimizer = sgd(self.model)
        if optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(self.kept[step]["optimizer"]))  # torch keeps what it is given

    def resume(self, steps: range, resume: bool | int = True, **options: Any) -> int:
        """Continue with these steps; return the step that the recording continued at."""
        options = {"shard_bytes": 1000, **options}
        with dualform.record(self.model, self.optimizer, self.path, resume=resume, **options) as recorder:
            first = recorder.step
            assert dualform.open(self.path).step == first, "the run is readable as soon as it was cut"
            train(self.model, self.optimizer, steps, recorder)
            return first

    def step(self, step: int) -> dict[str, torch.Tensor]:
        """Return the parameters after `step` steps."""
        found: dict[str, torch.Tensor] = self.kept[step]["model"]
        return found


@pytest.fixture
def checkpoints(run: Path) -> Checkpoints:
    return Checkpoints(run)


def assert_whole(path: Path, model: nn.Module, steps: int) -> None:
    memory = dualform.open(path)
    assert memory.step == steps
    assert memory.verify(model).passed
    assert memory.info().closed
    assert files(path) == listed(path)


# Where a run may continue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(STEPS + 1))
def test_a_run_continues_at_any_step_and_later_patterns_are_dropped(checkpoints: Checkpoints, at: int) -> None:
    """At a publish boundary (3, 6, 9), inside a shard, at the very start and at the end."""
    path = checkpoints.path
    checkpoints.load(at)
    assert checkpoints.resume(range(20, 24)) == at
    assert_whole(path, checkpoints.model, at + 4)
    memory = dualform.open(path)
    table = memory.patterns("0").to_pylist()
    assert [row["step"] for row in table] == [step for step in range(at + 4) for _ in range(ROWS)]
    assert [row["pattern"] for row in table] == list(range((at + 4) * ROWS))
    for row in table:
        # What was recorded at step 20 and later stands at step `at` and later now.
        found = columns(row["step"] if row["step"] < at else 20 + row["step"] - at)
        for name in ("sample", "label", "mood"):
            assert row[name] == (found[name][row["row"]] if name in found else None), (row, name)
    for step in range(at + 1):
        assert memory.at(step=step).verify(checkpoints.step(step)).passed
    assert memory.steps().num_rows == 4 * (at + 4)
    # The trajectory is the one that training without recording takes.
    alone = network()
    optimizer = sgd(alone)
    train(alone, optimizer, [*range(at), *range(20, 24)])
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(checkpoints.model.get_parameter(name), parameter, rtol=0, atol=0)


def test_a_run_that_was_cut_may_be_cut_again_and_again(checkpoints: Checkpoints) -> None:
    for at, more in ((8, 3), (4, 1), (4, 0), (2, 2), (0, 0)):
        checkpoints.load(at)
        assert checkpoints.resume(range(at, at + more)) == at
        assert_whole(checkpoints.path, checkpoints.model, at + more)


def test_a_cut_shard_keeps_its_files_and_says_where_it_ends(checkpoints: Checkpoints) -> None:
    checkpoints.load(4)
    checkpoints.resume(range(0))
    shards = Manifest.read(checkpoints.path).shards
    assert [(shard.index, shard.start, shard.stop) for shard in shards] == [(0, 0, 3), (1, 3, 4)]
    assert shards[1].parameters == {}, "the parameters that it logged are those of a step that is gone"
    source = Run(checkpoints.path)
    assert source.count("0") == 4 * ROWS
    assert source.shards[1].rows("0", "keys").take(slice(None))[0].shape == (ROWS, 5)
    assert len(source.shards[1].addresses("0")["row"]) == ROWS


def test_a_run_that_was_not_closed_continues(run: Path) -> None:
    checkpoints = Checkpoints(run, close=False)
    assert not dualform.open(run).info().closed
    checkpoints.load(7)
    assert checkpoints.resume(range(7, 9)) == 7
    assert_whole(run, checkpoints.model, 9)


def test_resume_starts_a_run_where_there_is_none(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, resume=True) as recorder:
        assert recorder.step == 0
        train(model, optimizer, range(2), recorder)
    assert_whole(run, model, 2)


def test_a_number_needs_a_run_to_continue(run: Path) -> None:
    model = network()
    with (
        pytest.raises(ResumeError, match="holds no run to resume at step 3"),
        dualform.record(model, sgd(model), run, resume=3),
    ):
        pytest.fail("there is nothing to resume")


def test_a_fresh_optimizer_is_fine_because_it_is_exact(checkpoints: Checkpoints) -> None:
    checkpoints.load(5, optimizer=False)
    assert checkpoints.resume(range(5, 12)) == 5
    assert_whole(checkpoints.path, checkpoints.model, 12)


def test_a_warm_start_is_continued_warm(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    train(model, optimizer, range(3))  # the momentum buffers are warm when the recording begins
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(3, 6), recorder)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(6, 8), recorder)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    with dualform.record(model, optimizer, run, resume=True) as recorder:
        assert recorder.step == 3
        train(model, optimizer, range(6, 10), recorder)
    assert_whole(run, model, 7)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_coarse_and_keys_only_runs_continue(run: Path, dtype: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "layers": {"0": "keys", "*": "keys+values"}}
    checkpoints = Checkpoints(run, **options)
    checkpoints.load(4)
    assert checkpoints.resume(range(4, 6), **options) == 4
    assert_whole(run, checkpoints.model, 6)


# What is refused --------------------------------------------------------------------------------------------------


def refuse(checkpoints: Checkpoints, match: str, resume: bool | int = True, **options: Any) -> None:
    """Resuming is refused in one line, and the run is as it was."""
    before = {name: (checkpoints.path / name).read_bytes() for name in files(checkpoints.path)}
    with pytest.raises(ResumeError, match=match) as caught:
        checkpoints.resume(range(1), resume, **options)
    assert "\n" not in str(caught.value)
    assert {name: (checkpoints.path / name).read_bytes() for name in files(checkpoints.path)} == before


def test_weights_of_no_step_are_refused(checkpoints: Checkpoints) -> None:
    checkpoints.model.load_state_dict(network(seed=1).state_dict())
    refuse(checkpoints, r"are those of no recorded step \(0 to 10\)")


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_one_foreign_parameter_is_enough_to_be_refused(checkpoints: Checkpoints, name: str) -> None:
    checkpoints.load(6)
    with torch.no_grad():
        checkpoints.model.get_parameter(name).copy_(checkpoints.step(5)[name])
    refuse(checkpoints, "are those of no recorded step")


@pytest.mark.parametrize("at", [4, 6])
def test_a_changed_element_that_the_fingerprint_does_not_see_is_found_by_the_proof(run: Path, at: int) -> None:
    """The fingerprint of a large parameter is of a sample; the proof is of all of it, at a boundary or inside."""
    model = nn.Linear(300, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    torch.manual_seed(0)
    with dualform.record(model, optimizer, run, shard_bytes=3 * 4 * 2 * 304) as recorder:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(2, 300)).square().mean().backward()
            optimizer.step()
            states.append(state(model))
        assert recorder.step == 8
    assert [shard.stop for shard in Manifest.read(run).shards] == [3, 6, 8]
    model.load_state_dict(states[at - 1])
    with torch.no_grad():
        model.weight[0, 1] *= 1.5  # every fourth element is sampled
    with (
        pytest.raises(ResumeError, match=rf"not those of step {at}: 'weight' differs by"),
        dualform.record(model, optimizer, run, resume=True),
    ):
        pytest.fail("this is not the checkpoint")
    model.load_state_dict(states[at - 1])
    with dualform.record(model, optimizer, run, resume=True) as recorder:
        assert recorder.step == at


@pytest.mark.parametrize("at", [5, 6])
@pytest.mark.parametrize("wrong", ["earlier", "noise", "nan"])
def test_a_wrong_momentum_buffer_is_refused(checkpoints: Checkpoints, at: int, wrong: str) -> None:
    checkpoints.load(at)
    buffer = checkpoints.optimizer.state[checkpoints.model.get_parameter("2.weight")]["momentum_buffer"]
    if wrong == "earlier":
        checkpoints.optimizer.load_state_dict(checkpoints.kept[at - 1]["optimizer"])
    else:
        buffer.add_(torch.nan if wrong == "nan" else 0.05 * buffer.abs().mean())
    refuse(checkpoints, rf"The optimizer's momentum_buffer of .* is not that of step {at}")


def test_a_warm_buffer_at_the_start_of_a_cold_run_is_refused(checkpoints: Checkpoints) -> None:
    checkpoints.load(0)
    checkpoints.optimizer.load_state_dict(checkpoints.kept[3]["optimizer"])
    refuse(checkpoints, "is not that of step 0")


def test_weights_that_did_not_move_are_ambiguous_until_the_step_is_given(run: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(4), recorder)
    with (
        pytest.raises(ResumeError, match=r"the same at steps \[0, 1, 2, 3, 4\].*resume=4"),
        dualform.record(model, optimizer, run, resume=True),
    ):
        pytest.fail("which step?")
    with dualform.record(model, optimizer, run, resume=2) as recorder:
        assert recorder.step == 2
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, range(2, 5), recorder)
    assert_whole(run, model, 5)
    model.load_state_dict(network().state_dict())
    with dualform.record(model, optimizer, run, resume=0) as recorder:
        assert recorder.step == 0, "0 is a step, not False"
    assert_whole(run, model, 0)


def test_a_given_step_is_proven_too(checkpoints: Checkpoints) -> None:
    checkpoints.load(5)
    refuse(checkpoints, "not those of step 4", resume=4)
    refuse(checkpoints, "not those of step 6", resume=6)  # where a shard ends, and its checksum is known
    refuse(checkpoints, "Step 11 is outside the recorded run, which has steps 0 to 10", resume=11)
    refuse(checkpoints, "Step -1 is outside", resume=-1)
    assert checkpoints.resume(range(5, 6), 5) == 5


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"layers": ["0"]}, "other layers: '2' was"),
        ({"layers": {"0": "keys", "*": "keys+values"}}, "other layers: '0' was"),
        ({"dtype": "float16"}, "other layers: '0' was"),
        ({"dtype": {"2": "int8"}}, "other layers: '2' was"),
        ({"batch_axis": 1}, "other batch_axis: was 0, is 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*are not recorded")
def test_other_options_are_refused(checkpoints: Checkpoints, options: dict[str, Any], what: str) -> None:
    checkpoints.load(3)
    refuse(checkpoints, f"recorded with {what}", **options)


def test_another_model_is_refused(run: Path) -> None:
    checkpoints = Checkpoints(run)
    checkpoints.model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    checkpoints.optimizer = sgd(checkpoints.model)
    refuse(checkpoints, "recorded with other layers: '4' was None")


def test_an_existing_run_is_never_continued_without_being_asked(checkpoints: Checkpoints) -> None:
    checkpoints.load(5)
    with pytest.raises(RunExistsError, match="Pass resume=True"):
        checkpoints.resume(range(1), resume=False)
    assert dualform.open(checkpoints.path).step == STEPS


# What is left behind ----------------------------------------------------------------------------------------------


def test_what_a_killed_writer_left_is_removed_and_nothing_else(checkpoints: Checkpoints) -> None:
    path = checkpoints.path
    dualform.open(path).add_tests(*batch(0))
    dualform.open(path).attend(checkpoints.model, batch(0)[0])["0"].totals(by="label")  # fills the cache
    for name in (
        ".partial-1-manifest.json",
        "shards/.partial-2-000004.safetensors",
        "shards/000004.safetensors",
        "calls/000004.parquet",
        "steps/000777.parquet",
        ".lock",
    ):
        (path / name).write_text("half")
    checkpoints.load(4)
    checkpoints.resume(range(4, 5))
    assert_whole(path, checkpoints.model, 5)
    assert any(name.startswith("media/tests-") for name in files(path))


def test_a_kill_between_the_cut_and_the_sweep_is_mended_by_the_next_resume(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    checkpoints.load(4)
    with monkeypatch.context() as patch:
        patch.setattr("dualform.store.resume._remove_later_files", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.resume(range(4, 5))
    memory = dualform.open(checkpoints.path)
    assert memory.step == 4
    assert memory.verify(checkpoints.step(4)).passed
    assert files(checkpoints.path) > listed(checkpoints.path), "later shards are still there, but listed nowhere"
    checkpoints.load(4)
    assert checkpoints.resume(range(4, 9)) == 4
    assert_whole(checkpoints.path, checkpoints.model, 9)


def test_a_failing_cut_leaves_the_run_as_it_was(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpoints.load(4)
    with monkeypatch.context() as patch:
        patch.setattr(FolderBlobs, "replace", full)
        with pytest.raises(StoreError, match="No space left on device"):
            checkpoints.resume(range(4, 5))
    memory = dualform.open(checkpoints.path)
    assert memory.step == STEPS
    assert memory.verify(checkpoints.step(STEPS)).passed
    assert files(checkpoints.path) == listed(checkpoints.path)


def test_columns_go_on_in_their_type(checkpoints: Checkpoints) -> None:
    checkpoints.load(5)
    with dualform.record(checkpoints.model, checkpoints.optimizer, checkpoints.path, resume=True) as recorder:
        with pytest.raises(dualform.DualformError, match="'task' held string so far and now holds int64"):
            recorder.annotate(task=1)
        recorder.annotate(label=[0.5] * ROWS)
        train(checkpoints.model, checkpoints.optimizer, [2], recorder)
    memory = dualform.open(checkpoints.path)
    assert memory.info().columns["label"] == "double"
    assert memory.where("label = 0.5").patterns("0")["step"].to_pylist() == [5] * ROWS


def test_a_run_whose_optimizer_has_no_module_in_its_name_is_resumed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs of earlier versions are: `SGD` means torch's."""
    with monkeypatch.context() as patch:
        patch.setattr("dualform.recording.recorded_optimizers.optimizer_name", lambda optimizer: optimizer.__name__)
        checkpoints = Checkpoints(run)
    assert Run(run).manifest.optimizers == ("SGD",)
    checkpoints.load(STEPS)
    assert checkpoints.resume(range(STEPS, STEPS + 3)) == STEPS
    memory = dualform.open(run)
    assert memory.verify(checkpoints.model).passed
    assert memory.info().optimizers == ("SGD",)
    assert set(memory.steps()["optimizer"].to_pylist()) == {"SGD", "torch.optim:SGD"}
