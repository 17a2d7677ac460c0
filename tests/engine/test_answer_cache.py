"""The cache: used, harmless when gone, unwritable, broken or out of date."""

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import dualform
from dualform.engine import answer_cache
from dualform.engine.local import LocalExecutor
from dualform.store import derived_sums, tensors
from dualform.store.blobs import FileEntry
from dualform.store.reader import Run
from helpers.small import batch, files, network, recorded, sgd, state, train

# Every third step of these runs has no annotations, on purpose; what a mask says of that stands in test_unknown.py.
pytestmark = pytest.mark.filterwarnings("ignore::dualform.attend.warn.MaskWarning")

QUESTIONS: dict[str, Callable[[Any], Tensor]] = {
    "attention": lambda layer: layer.totals(by="label").values,
    "contribution": lambda layer: layer.totals(by="label", of="contribution").values,
    "output": lambda layer: layer.output(),
}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that every pass for a sum adds itself to."""
    seen: list[str] = []
    real = LocalExecutor.run

    def watched(self: LocalExecutor, source: Any, jobs: Any) -> Any:
        seen.extend(job.layer for job in jobs if job.measure is None)
        return real(self, source, jobs)

    monkeypatch.setattr(LocalExecutor, "run", watched)
    return seen


def ask(path: Path, model: nn.Module, question: str, look: Callable[[Any], Any] = lambda memory: memory) -> Tensor:
    return QUESTIONS[question](look(dualform.open(path)).attend(model, batch(99)[0], other_model=True)["0"])


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_second_question_needs_no_pass_here_or_in_another_process(run: Path, sums: list[str], question: str) -> None:
    model = recorded(run, 6)
    memory = dualform.open(run)
    first = QUESTIONS[question](memory.attend(model, batch(99)[0])["0"])
    assert sums == ["0"]
    second = QUESTIONS[question](memory.attend(model, batch(99)[0])["0"])
    third = ask(run, model, question)
    assert sums == ["0"], "from memory, then from disk"
    for found in (second, third):
        torch.testing.assert_close(found, first, rtol=0, atol=0)


@pytest.mark.parametrize("question", QUESTIONS)
def test_deleting_the_cache_changes_nothing(run: Path, question: str) -> None:
    model = recorded(run, 6)
    first = ask(run, model, question)
    assert any(name.startswith("cache/") for name in files(run))
    shutil.rmtree(run / "cache")
    torch.testing.assert_close(ask(run, model, question), first, rtol=0, atol=0)
    assert dualform.open(run).verify(model).passed


def test_a_cache_that_cannot_be_written_is_no_error(run: Path) -> None:
    model = recorded(run, 6)
    (run / "cache").write_text("in the way")
    memory = dualform.open(run)
    layer = memory.attend(model, batch(99)[0])["0"]
    assert layer.totals(by="label").values.shape == (6, 4)
    assert (run / "cache").read_text() == "in the way"


def test_a_full_disk_under_the_cache_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = recorded(run, 6)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors, "write_tensors", full)
    assert ask(run, model, "attention").shape == (6, 4)
    assert not [name for name in files(run) if name.startswith("cache/")]


@pytest.mark.parametrize("content", [b"", b"\xff" * 100])
def test_a_broken_file_in_the_cache_is_made_again(run: Path, content: bytes) -> None:
    model = recorded(run, 6)
    first = ask(run, model, "attention")
    (file,) = (run / "cache").iterdir()
    file.write_bytes(content)
    torch.testing.assert_close(ask(run, model, "attention"), first, rtol=0, atol=0)


def test_what_is_larger_than_the_budget_is_not_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, sums: list[str]
) -> None:
    model = recorded(run, 6)
    monkeypatch.setattr(answer_cache, "MAX_CACHED_BYTES", 10)
    layer = dualform.open(run).attend(model, batch(99)[0])["0"]
    layer.totals(by="label")
    layer.totals(by="label")
    assert sums == ["0", "0"]
    assert not [name for name in files(run) if name.startswith("cache/")]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda m: m,
    "at": lambda m: m.at(step=4),
    "where": lambda m: m.where(label=[0, 1]),
    "without": lambda m: m.without(label=[0, 1]),
    "text": lambda m: m.where("label = 0 or label = 1"),
    "long": lambda m: m.where(sample=list(range(3000))),
    "long but one": lambda m: m.where(sample=[i for i in range(3000) if i != 3]),
}


def test_every_view_has_its_own_sums(run: Path) -> None:
    """Asked one after the other with one cache, every view answers as it does alone."""
    model = recorded(run, 6)
    alone = {}
    for name, look in VIEWS.items():
        for question in QUESTIONS:
            shutil.rmtree(run / "cache", ignore_errors=True)
            alone[name, question] = ask(run, model, question, look)
    memory = dualform.open(run)
    for name, look in VIEWS.items():
        for question in QUESTIONS:
            found = QUESTIONS[question](look(memory).attend(model, batch(99)[0], other_model=True)["0"])
            torch.testing.assert_close(found, alone[name, question], rtol=0, atol=0)
    assert not torch.equal(alone["long", "output"], alone["long but one", "output"]), "or this shows nothing"


def test_groupings_with_the_same_text_have_their_own_sums(run: Path) -> None:
    """Widths that print alike, and a column that is named like bins of another."""
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(value=[1e6 * i for i in range(6)], **{"value:1e+06": [0, 0, 0, 1, 1, 1]})
        train(model, optimizer, [2], recorder)
    memory = dualform.open(run)
    layer = memory.attend(model, batch(99)[0])["0"]
    for by, groups in (
        (dualform.bins("value", width=1e6), 6),
        (dualform.bins("value", width=1e6 + 3), 5),
        ("value:1e+06", 2),
    ):
        totals = layer.totals(by=by)
        assert totals.values.shape == (6, groups)
        torch.testing.assert_close(totals.values.sum(dim=1), layer.attention().sum(dim=1), rtol=1e-5, atol=1e-5)


def test_the_cache_of_a_run_that_was_cut_and_went_on_is_not_used(run: Path) -> None:
    model = network()
    optimizer = sgd(model, momentum=0.0)
    with dualform.record(model, optimizer, run, shard_bytes=1000) as recorder:
        train(model, optimizer, range(4), recorder)
        checkpoint = state(model)
        train(model, optimizer, range(4, 8), recorder)
    before = {question: ask(run, model, question) for question in QUESTIONS}
    kept = {path.name: path.read_bytes() for path in (run / "cache").iterdir()}
    model.load_state_dict(checkpoint)
    with dualform.record(model, optimizer, run, shard_bytes=1000, resume=True) as recorder:
        train(model, optimizer, range(14, 18), recorder)  # as many steps, of other batches
    assert dualform.open(run).step == 8
    # Somebody has the old cache, say from a copy of the run: it must not be taken for the new one's.
    (run / "cache").mkdir(exist_ok=True)
    for name, content in kept.items():
        (run / "cache" / name).write_bytes(content)
    for question in QUESTIONS:
        found = ask(run, model, question)
        shutil.rmtree(run / "cache")
        torch.testing.assert_close(found, ask(run, model, question), rtol=0, atol=0)
        assert not torch.equal(found, before[question])


def test_the_cache_of_a_run_that_grows_is_not_used(run: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(model, optimizer, range(2), recorder)
        recorder.flush()
        first = ask(run, model, "attention")
        train(model, optimizer, range(2, 4), recorder)
        recorder.flush()
        second = ask(run, model, "attention")
    assert first.shape != second.shape or not torch.equal(first, second)
    shutil.rmtree(run / "cache")
    torch.testing.assert_close(second, ask(run, model, "attention"), rtol=0, atol=0)


def edit(path: Path, at: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(bytes(content))


def test_a_cached_file_with_other_bytes_is_made_again(run: Path, sums: list[str]) -> None:
    model = recorded(run, 6)
    first = ask(run, model, "attention")
    (file,) = (run / "cache").iterdir()
    for at in (-1, -9, file.stat().st_size // 2):
        edit(file, at)
        torch.testing.assert_close(ask(run, model, "attention"), first, rtol=0, atol=0)
    assert sums == ["0"] * 4
    ask(run, model, "attention")
    assert sums == ["0"] * 4, "what was made again is kept"


@pytest.mark.parametrize("what", ["SUMS_VERSION", "__version__"])
def test_a_cached_file_of_another_version_is_made_again(
    run: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model = recorded(run, 6)
    ask(run, model, "attention")
    monkeypatch.setattr(derived_sums, what, "9.9")
    ask(run, model, "attention")
    assert sums == ["0", "0"]
    ask(run, model, "attention")
    assert sums == ["0", "0"], "and is kept from then on"


def test_a_cached_file_without_version_and_digest_is_made_again(run: Path, sums: list[str]) -> None:
    model = recorded(run, 6)
    first = ask(run, model, "attention")
    (file,) = (run / "cache").iterdir()
    old = {name: 2 * tensor for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(old, file)
    torch.testing.assert_close(ask(run, model, "attention"), first, rtol=0, atol=0)
    assert sums == ["0", "0"]


def test_another_start_or_another_description_has_its_own_sums(run: Path) -> None:
    """The name of a cached sum depends on initial.safetensors and on what the manifest says of layers and columns."""
    recorded(run, 3)
    source = Run(run)
    names = {source.digest}
    manifest = source.manifest
    changed: tuple[dict[str, Any], ...] = (
        {"files": manifest.files | {"initial.safetensors": FileEntry(1, "0")}},
        {"batch_axis": 1},
        {"columns": manifest.columns | {"label": "int32"}},
        {"optimizers": ("Adam",)},
    )
    for changes in changed:
        source.manifest = dataclasses.replace(manifest, **changes)
        del source.digest  # which is remembered
        names.add(source.digest)
    assert len(names) == 5


def answer(value: float) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"sums": torch.full((100,), float(value))}  # 400 bytes, and a header on disk


def test_the_folder_is_bounded_and_the_least_recently_used_goes_first(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(run, 3)
    monkeypatch.setattr(derived_sums, "MAX_SUMS_BYTES", 2500)  # four files
    monkeypatch.setattr(answer_cache, "MAX_CACHED_BYTES", 1000)
    names = {}
    for i in range(7):
        before = set((run / "cache").glob("*")) if i else set()
        answer_cache.AnswerCache(dualform.open(run)._run).get(i, answer(i))
        (names[i],) = set((run / "cache").glob("*")) - before
        os.utime(names[i], ns=(i * 10**9, i * 10**9))
        if i == 3:
            answer_cache.AnswerCache(dualform.open(run)._run).get(0, answer(-1))  # used again, now
    kept = {i for i, path in names.items() if path.exists()}
    assert sum(path.stat().st_size for path in (run / "cache").iterdir()) <= 2500
    assert {0, 6} <= kept
    assert not {1, 2} & kept


def test_what_a_killed_writer_left_in_the_cache_goes(run: Path) -> None:
    recorded(run, 3)
    left = run / "cache" / ".partial-old"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    fresh = run / "cache" / ".partial-new"
    fresh.mkdir()
    answer_cache.AnswerCache(dualform.open(run)._run).get("x", answer(1.0))
    assert not left.exists()
    assert fresh.exists(), "somebody may be writing it"


def test_the_memory_of_the_cache_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(run, 3)
    (run / "cache").write_text("in the way, so that nothing is kept on disk")
    monkeypatch.setattr(answer_cache, "MAX_MEMORY_BYTES", 1000)
    kept = answer_cache.AnswerCache(dualform.open(run)._run)
    for i in (0, 1, 0, 2):
        kept.get(i, answer(i))
    computed = []

    def compute(i: int) -> dict[str, Tensor]:
        computed.append(i)
        return answer(i)()

    for i in (0, 2, 1):
        kept.get(i, functools.partial(compute, i))
    assert computed == [1]
