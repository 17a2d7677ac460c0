"""A recording that keeps shares: what it publishes, when, and how it goes on."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.binning import Bins
from dualform.errors import CorruptError, FormatError, QueryError, RefusedError, ResumeError, StoreError
from dualform.recording import share_fold
from dualform.store.manifest import Manifest, sealed
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run
from dualform.store.tensors import TensorFile, publish_tensors

BY = ("label",)


def make(optimizer: str = "AdamW") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    options: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    }
    return model, options[optimizer](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        recorder.annotate(label=torch.arange(8) % (2 if step < 3 else 3), step_half=step % 2)
        optimizer.zero_grad()
        model(torch.randn(8, 5, generator=generator)).sin().square().mean().backward()
        optimizer.step()


def shares_of(blobs: MemoryBlobs | Path, horizon: int | None = None) -> Mapping[str, torch.Tensor]:
    run = Run(blobs)
    kept = run.kept_shares
    assert kept is not None
    return {name: kept.shares(name, BY, horizon=horizon).shares for name in run.manifest.parameters}


def spreads_of(blobs: MemoryBlobs) -> Mapping[str, torch.Tensor]:
    run = Run(blobs)
    kept = run.kept_shares
    assert kept is not None
    found = {name: kept.gradient_spread(name) for name in run.manifest.parameters}
    return {name: spread for name, spread in found.items() if spread is not None}


def recorded(steps: int = 7, optimizer: str = "AdamW", **options: Any) -> tuple[MemoryBlobs, nn.Module]:
    blobs = MemoryBlobs()
    model, trainer = make(optimizer)
    with dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label", **options)) as recorder:
        train(model, trainer, recorder, range(steps))
    return blobs, model


def test_a_shares_run_keeps_no_patterns_and_everything_else() -> None:
    blobs, model = recorded(at=[2, 4])
    run = Run(blobs)
    assert {entry.store for entry in run.layers.values()} == {"shares"}
    assert all(run.count(layer) == 0 for layer in run.layers)
    assert run.manifest.columns == {"label": "int64", "step_half": "int64"}
    assert run.final is not None
    assert torch.equal(run.final["0.weight"], model.get_parameter("0.weight"))
    assert len(run.facts("0.weight")[0].step) == 7
    kept = run.kept_shares
    assert kept is not None
    assert kept.horizons == (2, 4, 7)
    assert kept.labels(BY) == (0, 1, 2)
    assert kept.key_sums("0", BY).counts.tolist() == [3 * 4 + 4 * 3, 3 * 4 + 4 * 3, 4 * 2]
    assert kept.key_sums("0", BY, horizon=2).counts.tolist() == [8, 8, 0]
    assert kept.key_sums("2", BY).lowest == 0.0  # behind a ReLU
    with pytest.raises(QueryError, match="keeps no shares after 3 steps, but after 2, 4, 7"):
        kept.shares("0.weight", BY, horizon=3)
    with pytest.raises(QueryError, match="no shares by"):
        kept.shares("0.weight", ("source",))
    torch.testing.assert_close(shares_of(recorded(4)[0]), shares_of(blobs, 4), rtol=0, atol=0)
    assert dualform.open(blobs).verify(model).passed


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_run_goes_on_from_a_flush_and_from_an_older_checkpoint(optimizer: str) -> None:
    uninterrupted = recorded(9, optimizer)[0]
    whole, spreads = shares_of(uninterrupted), spreads_of(uninterrupted)
    assert list(spreads) == (["0.bias", "2.bias"] if optimizer == "AdamW" else [])
    for older in (False, True):
        blobs = MemoryBlobs()
        model, trainer = make(optimizer)
        with dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label")) as recorder:
            train(model, trainer, recorder, range(5))
            recorder.flush()
            checkpoint = (model.state_dict(), trainer.state_dict(), recorder.state_dict())
            checkpoint = torch.utils._pytree.tree_map(
                lambda x: x.clone() if isinstance(x, torch.Tensor) else x, checkpoint
            )
            train(model, trainer, recorder, range(5, 7 if older else 5))
        model, trainer = make(optimizer)
        model.load_state_dict(checkpoint[0])
        trainer.load_state_dict(checkpoint[1])
        keep = dualform.Shares(by="label")
        if older:
            with pytest.raises(ResumeError, match=r"load_state_dict"):
                dualform.record(model, trainer, blobs, keep=keep, resume=True).start()
        again = dualform.record(model, trainer, blobs, keep=keep, resume=True)
        if older:
            again.load_state_dict(checkpoint[2])
        with again:
            assert again.step == 5
            train(model, trainer, again, range(5, 9))
        torch.testing.assert_close(shares_of(blobs), whole, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(spreads_of(blobs), spreads, rtol=1e-6, atol=0)
        run = Run(blobs)
        assert run.manifest.shares is not None
        assert run.manifest.shares.horizons == (9,)
        assert set(blobs.list("shares/")) == {name for name in run.manifest.files if "shares/" in name}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_shares_after_a_named_step_are_published_where_a_recording_goes_on_from_it(optimizer: str) -> None:
    """As where a process was killed when the facts of the step were published, and its shares were not yet."""
    blobs = MemoryBlobs()
    model, trainer = make(optimizer)
    with dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label")) as recorder:
        train(model, trainer, recorder, range(4))
        at = copy.deepcopy((model.state_dict(), trainer.state_dict(), recorder.state_dict()))
        train(model, trainer, recorder, range(4, 6))
    model, trainer = make(optimizer)
    model.load_state_dict(at[0])
    trainer.load_state_dict(at[1])
    again = dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label", at=[4]), resume=True)
    again.load_state_dict(at[2])
    with again:
        train(model, trainer, again, range(4, 7))
    kept = Run(blobs).manifest.shares
    assert kept is not None
    assert kept.horizons == (4, 7)
    assert dualform.open(blobs).at(step=4).verify(at[0]).passed
    torch.testing.assert_close(shares_of(blobs, 4), shares_of(recorded(7, optimizer, at=[4])[0], 4))


def test_a_resumed_run_that_takes_no_step_keeps_what_its_state_says_of_rounding() -> None:
    blobs, trained = recorded(3)
    model, trainer = make()
    model.load_state_dict(trained.state_dict())
    again = dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label"), resume=True)
    with again:
        state = again.state_dict()["sink"]
    assert "spread.1" in state["shares"]
    assert "spread_square.1" in state["resume"]
    assert list(spreads_of(blobs)) == ["0.bias", "2.bias"]


def test_resuming_with_other_groups_is_refused() -> None:
    blobs, trained = recorded(3)
    model, trainer = make()
    model.load_state_dict(trained.state_dict())
    with pytest.raises(ResumeError, match=r"shares by \[\['label'\]\]"):
        dualform.record(model, trainer, blobs, keep=dualform.Shares(by="step_half"), resume=3).start()


def test_too_many_groups_are_refused_before_the_step_with_their_bytes() -> None:
    model, trainer = make()
    with dualform.record(model, trainer, MemoryBlobs(), keep=dualform.Shares(by="label", groups=2)) as recorder:
        train(model, trainer, recorder, range(3))
        before = model[0].weight.detach().clone()  # type: ignore[index]
        with pytest.raises(RefusedError, match=r"2 is one group more than the 2 .* Each group takes up to 456 B"):
            train(model, trainer, recorder, range(3, 4))
        assert torch.equal(before, model[0].weight)  # type: ignore[index]
    blobs, _ = recorded(5, groups=2, rest=True)
    kept = Run(blobs).kept_shares
    assert kept is not None
    assert kept.labels(BY) == (0, 1, "rest")


def test_too_little_memory_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_fold, "free_bytes", lambda device: 10_000)
    model, trainer = make()
    with pytest.raises(RefusedError, match=r"Shares of 64 groups take 29.6 kB on cpu, which has 10.0 kB free"):
        dualform.record(model, trainer, MemoryBlobs(), keep=dualform.Shares(by="label")).start()
    dualform.record(model, trainer, MemoryBlobs(), keep=dualform.Shares(by="label", groups=8)).start().close()
    asked = {"why": dualform.PathQuestion(torch.zeros(2, 5), quantity=dualform.contrast(1, 0))}
    keep = dualform.Shares(by="label", groups=8, paths=asked)
    assert (dualform.estimate(model, torch.zeros(2, 5), steps=1, keep=keep).device or 0) > 10_000
    with pytest.raises(RefusedError, match="Shares of 8 groups take 1"):
        dualform.record(model, trainer, MemoryBlobs(), keep=keep).start()


def test_patterns_of_chosen_layers_are_kept_beside_shares() -> None:
    blobs = MemoryBlobs()
    model, trainer = make()
    keep: list[dualform.Shares | dualform.Patterns]
    keep = [dualform.Shares(by=[["label"], ["label", Bins("step", 2)]]), dualform.Patterns(layers="2")]
    with dualform.record(model, trainer, blobs, keep=keep) as recorder:
        train(model, trainer, recorder, range(4))
    run = Run(blobs)
    assert {name: entry.store for name, entry in run.layers.items()} == {"0": "shares", "2": "keys+values"}
    assert run.count("2") == 32
    kept = run.kept_shares
    assert kept is not None
    assert kept.groupings == (BY, ("label", "step:2"))
    for name in run.manifest.parameters:
        fine, coarse = kept.shares(name, ("label", "step:2")), kept.shares(name, BY)
        torch.testing.assert_close(fine.shares.sum(0), coarse.shares.sum(0), rtol=1e-5, atol=1e-7)
    expected = dualform.open(blobs).share_source("label").shares("2.weight", BY)
    torch.testing.assert_close(kept.shares("2.weight", BY).shares, expected.shares.float(), rtol=1e-4, atol=1e-7)


def test_what_patterns_would_be_refused_for_is_measured() -> None:
    """Gradient noise, and parameters in bfloat16."""
    blobs = MemoryBlobs()
    model, trainer = make()
    model = model.bfloat16()
    trainer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label")) as recorder:
        for step in range(4):
            recorder.annotate(label=torch.arange(8) % 2)
            trainer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(8, 5, dtype=torch.bfloat16)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.01 * torch.randn_like(parameter.grad)
            trainer.step()
    kept = Run(blobs).kept_shares
    assert kept is not None
    found = kept.shares("0.weight", BY)
    live = model.get_parameter("0.weight").detach().double()
    whole = found.start + found.shares.double().sum(0) + found.unexplained + found.rounding
    torch.testing.assert_close(whole, live, rtol=1e-6, atol=1e-7)
    assert float(found.unexplained.norm()) > 1e-3 * float(found.shares.norm())
    assert float(found.rounding.norm()) > 0


def test_after_a_step_that_was_folded_in_part_nothing_more_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = MemoryBlobs()
    model, trainer = make()
    recorder = dualform.record(model, trainer, blobs, keep=dualform.Shares(by="label")).start()
    train(model, trainer, recorder, range(2))
    recorder.flush()

    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(share_fold, "follow_together", fail)
        with pytest.raises(RefusedError, match="no room"):
            train(model, trainer, recorder, range(2, 3))
    with pytest.raises(dualform.DualformError, match="An earlier step was not"):
        train(model, trainer, recorder, range(3, 4))
    with pytest.raises(StoreError, match="not folded into the shares"):
        recorder.flush()
    recorder.close()
    kept = Run(blobs).kept_shares
    assert kept is not None
    assert kept.horizons == (2,)


def test_shares_in_host_memory_are_the_same() -> None:
    torch.testing.assert_close(shares_of(recorded(device="cpu")[0]), shares_of(recorded()[0]), rtol=0, atol=0)


FILE = "shares/000000003.safetensors"


def replace_in_file(blobs: MemoryBlobs, name: str, tensor: torch.Tensor) -> None:
    """Put another tensor into the file of shares after step 3, as a forger would."""
    run = Run(blobs)
    entry = publish_tensors(blobs, FILE, {**TensorFile(run.blob(FILE)).tensors(), name: tensor})
    dataclasses.replace(run.manifest, files={**run.manifest.files, FILE: entry}).publish(blobs, was=run.manifest_tag)


@pytest.mark.parametrize("grouping", [0, 1])
def test_a_share_that_was_changed_fails_verify_in_any_grouping(grouping: int) -> None:
    blobs = MemoryBlobs()
    model, optimizer = make()
    with dualform.record(model, optimizer, blobs, keep=dualform.Shares(by=[["label"], ["step_half"]])) as recorder:
        train(model, optimizer, recorder, range(3))
    assert dualform.open(blobs).verify(model).passed
    name = f"share.{grouping}.0.0.1"
    replace_in_file(blobs, name, TensorFile(Run(blobs).blob(FILE)).tensors()[name] * 1.5)
    assert not dualform.open(blobs).verify(model).passed


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("share.0.0.0.0", torch.zeros(6, 4), "expected"),
        ("share.0.0.0.99", torch.zeros(6, 5), "does not know"),
        ("share.0.00.0.0", torch.zeros(6, 5), "does not know"),
        ("unexplained.0", torch.zeros(6, 5, dtype=torch.float64), "expected"),
        ("spread.1", torch.zeros(6), "expected"),
        ("spread.9", torch.zeros(6, dtype=torch.float64), "does not know"),
        ("keys.0.0", torch.zeros(1000, 5, dtype=torch.float64), "expected"),
        ("start_number.77", torch.zeros((), dtype=torch.float64), "does not know"),
    ],
)
def test_forged_files_of_shares_are_refused(name: str, tensor: torch.Tensor, words: str) -> None:
    blobs, _ = recorded(3)
    replace_in_file(blobs, name, tensor)
    kept = Run(blobs).kept_shares
    assert kept is not None
    with pytest.raises(CorruptError, match=words):
        kept.shares("0.weight", BY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"horizons": [3, 3]}, "ascending"),
        ({"horizons": [99]}, "not among both"),
        ({"state": 1}, "not among both"),
        ({"groupings": []}, "no grouping"),
        ({"groupings": [{"columns": [{"column": "label"}], "labels": [[["int64", "x"]]]}]}, "no int64"),
        ({"groupings": [{"columns": [{"column": "label"}], "labels": [[]]}]}, "one value for each column"),
    ],
)
def test_forged_manifests_of_shares_are_refused(change: Mapping[str, Any], words: str) -> None:

    blobs, _ = recorded(3)
    document = json.loads(blobs.load("manifest.json")[0])
    document["shares"] |= change
    with pytest.raises(FormatError, match=words):
        Manifest.from_json(sealed(document), path="manifest.json")
    del document["shares"]
    with pytest.raises(FormatError, match="keeps no shares"):
        Manifest.from_json(sealed(document), path="manifest.json")
