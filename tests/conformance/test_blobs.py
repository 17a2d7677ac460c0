"""A folder, memory, S3 and one SQLite file pass the suite of `Blobs`; runs in them answer the README's questions."""

import contextlib
import copy
import dataclasses
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from conformance.blobs import MANIFEST, BlobsConformance
from dualform.errors import CorruptError, FormatError, RunExistsError, RunNotFoundError, StoreError
from dualform.show.report.write import write_report
from dualform.store import reader
from dualform.store.blobs import (
    Blobs,
    ByteSpan,
    FileEntry,
    Tag,
    Write,
    changed_error,
    content_entry,
    content_parts,
    content_tag,
    written_content,
)
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.format import LOCK
from dualform.store.memory_blobs import MemoryBlobs
from helpers.language_models import TEXT, Letters, characters, record_output_model
from helpers.object_storage import ObjectStorage, can_serve, serving
from helpers.small import sgd

# The toy: blobs as rows of one SQLite file. ---------------------------------------------------------------------------


class SqliteBlobs(Blobs):
    """The blobs of one run in a file of SQLite."""

    location = ""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._run("create table if not exists blobs (name text primary key, content blob, tag text)")

    def load(self, name: str) -> tuple[bytes, Tag]:
        rows, _ = self._run("select content, tag from blobs where name = ?", name)
        if not rows:
            raise FileNotFoundError(2, "No such blob", name)
        return rows[0]

    def size(self, name: str) -> int | None:
        rows, _ = self._run("select length(content) from blobs where name = ?", name)
        return rows[0][0] if rows else None

    def ranges(self, name: str, spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        return content_parts(self.load(name)[0], spans)

    def publish(self, name: str, write: Write) -> FileEntry:
        content = written_content(write)
        self._run("insert or replace into blobs values (?, ?, ?)", name, content, content_tag(content))
        return content_entry(content)

    def replace(self, name: str, content: bytes, *, was: Tag | None) -> Tag:
        change = "insert or ignore into blobs (content, tag, name) select ?, ?, ? where ? is null"
        if was is not None:
            change = "update blobs set content = ?, tag = ? where name = ? and tag = ?"
        if not self._run(change, content, content_tag(content), name, was)[1]:
            raise changed_error(self, name)
        return content_tag(content)

    def list(self, prefix: str = "") -> Sequence[str]:
        every = "select name from blobs where name <> 'lease' and substr(name, 1, ?) = ?"
        rows, _ = self._run(every, len(prefix), prefix)
        return [name for (name,) in rows]

    def remove(self, name: str) -> None:
        self._run("delete from blobs where name = ?", name)

    @contextlib.contextmanager
    def lease(self) -> Iterator[bool]:
        _, mine = self._run("insert or ignore into blobs values ('lease', '', '')")
        try:
            yield bool(mine)
        finally:
            if mine:
                self.remove("lease")

    def _run(self, command: str, *values: Any) -> tuple[Any, int]:
        with contextlib.closing(sqlite3.connect(self.location, timeout=60)) as file, file:
            found = file.execute(command, values)
            return found.fetchall(), found.rowcount


# The suite ------------------------------------------------------------------------------------------------------------


SERVERS: list[ObjectStorage] = []  # the S3 server of this file's tests


@pytest.fixture(scope="module", autouse=True)
def object_storage() -> Iterator[None]:
    """Run an S3 server for the tests of this file, where its packages are installed."""
    if not can_serve():
        yield
        return
    with serving() as server:
        SERVERS.append(server)
        yield
        SERVERS.clear()


def object_place(path: Path) -> Blobs:
    """Return a new place on the S3 server, with a cache of ranges beside the test's other files."""
    if not SERVERS:
        pytest.skip("object storage is tested with obstore and moto: pip install 'dualform[cloud]' 'moto[server]'")
    from dualform.store.object_blobs import ObjectBlobs
    from dualform.store.range_cache import RangeCache

    return ObjectBlobs(SERVERS[0].address(), cache=RangeCache(path / "ranges", 1 << 24))


PLACES: dict[str, Callable[[Path], Blobs]] = {
    "object": object_place,
    "folder": lambda path: FolderBlobs(path / "run"),
    "memory": lambda path: MemoryBlobs(),
    "sqlite": lambda path: SqliteBlobs(path / "run.sqlite"),
}


class TestFolderBlobs(BlobsConformance):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return PLACES["folder"](tmp_path)


class TestObjectBlobs(BlobsConformance):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return PLACES["object"](tmp_path)


class TestMemoryBlobs(BlobsConformance):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return PLACES["memory"](tmp_path)


class TestSqliteBlobs(BlobsConformance):
    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        return PLACES["sqlite"](tmp_path)


# The questions of the README ------------------------------------------------------------------------------------------


class Samples:
    """A small task whose inputs come again in every epoch, so that their keys are stored once."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(36, 40, generator=generator)
        self.labels = self.inputs[:, :3].argmax(dim=1)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self, recorder: dualform.Recorder, steps: Sequence[int]) -> None:
        for step in steps:
            rows = torch.arange(12) * 3 % 36 + step % 3
            recorder.annotate(sample=rows, label=self.labels[rows], task="early" if step < 5 else "late")
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(self.inputs[rows]), self.labels[rows]).backward()
            self.optimizer.step()


def made() -> nn.Module:
    """Make the model of the task, as the run remembers it."""
    return Samples().model


def record_and_resume(place: Blobs, **options: Any) -> Samples:
    """Record nine steps, go back to the sixth, and go on from there to the twelfth."""
    task = Samples()
    options = {"shard_bytes": 6000, "factory": f"{__name__}:made", **options}
    with dualform.record(task.model, task.optimizer, place, **options) as recorder:
        recorder.media(labels=["a", "b", "c"])
        task.train(recorder, range(6))
        recorder.flush()
        kept = copy.deepcopy([task.model.state_dict(), task.optimizer.state_dict()])
        assert dualform.open(place).step == 6, "a run that grows can be asked"
        with pytest.raises(RunExistsError, match="is being recorded to"):
            dualform.open(place).add_media(labels=["x"])
        with pytest.raises(RunExistsError, match="by this process"):
            dualform.record(other := made(), sgd(other), place).start()
        task.train(recorder, range(6, 9))
    with pytest.raises(RunExistsError, match="holds a recorded run already"):
        dualform.record(task.model, task.optimizer, place).start()
    task.model.load_state_dict(kept[0])
    task.optimizer.load_state_dict(kept[1])
    with dualform.record(task.model, task.optimizer, place, resume=True, **options) as recorder:
        assert recorder.step == 6
        task.train(recorder, range(6, 12))
    return task


def answers(place: Blobs, folder: Path, **options: Any) -> dict[str, Any]:
    """Record to a place, and ask everything that the README asks."""
    task = record_and_resume(place, **options)
    model, inputs, targets = task.model.eval(), task.inputs[:4] + 0.1, task.labels[:4]
    memory = dualform.open(place)
    memory.add_tests(inputs[:2], targets[:2])
    memory.add_tests(inputs, targets)
    memory.add_media(labels=["A", "B", "C"], images=torch.arange(36 * 4).view(36, 2, 2).byte(), samples=range(36))
    memory = dualform.open(place)
    verified = memory.verify(model)
    assert verified.passed, verified
    assert memory.verify().passed
    found: dict[str, Any] = {"steps": memory.step, "layers": list(memory.layers), "columns": memory.columns}
    found["info"] = dataclasses.replace(memory.info(), path="", bytes=0)
    spotlight = memory.attend(model, inputs, targets=targets, quantity="margin")
    for name in memory.layers:
        layer = spotlight[name]
        for of in ("attention", "magnitude", "contribution"):
            found[f"{name} totals {of}"] = layer.totals(by="label", of=of).values
            found[f"{name} top {of}"] = layer.top(5, of=of).values
        by_sample = layer.top(5, per="sample", of="contribution")
        found[f"{name} best"], found[f"{name} columns"] = by_sample.values, str(layer.top(3))
        found[f"{name} binned"] = layer.totals(by=["task", dualform.bins("step", width=4)]).values
        found[f"{name} output"] = layer.output()
        found[f"{name} patterns"] = memory.patterns(name)
    totals, best = spotlight.compute(dualform.Totals(by="label"), dualform.Top(5))
    found["computed"] = [answer[name].values for answer in (totals, best) for name in memory.layers]
    found["vote"] = str(spotlight.vote(by="label"))
    found["effects"], found["by label"] = spotlight.effects().values, str(spotlight.effects(by="label").top(3))
    found["effects of patterns"] = spotlight["0"].effects(per="pattern").values
    found["best effects"], found["outside"] = (
        spotlight["0"].top(5, of="effect", per="sample").values,
        spotlight.outside(),
    )
    for name, view in {
        "sql": memory.where("step >= 3 and label in (0, 2)"),
        "composed": memory.without(task="late").at(step=8),
        "without": memory.without(label=2),
    }.items():
        found[f"{name} weights"], found[f"{name} shares"] = view.weights(), view.shares()
        found[f"{name} masked"] = view.apply(model)(inputs).detach()
    with torch.no_grad():
        torch.testing.assert_close(memory.trained(made()).eval()(inputs), model(inputs))  # buffers included
    tests, known = dualform.open(place).tests()
    assert known is not None
    found["tests"], found["targets"] = tests, known
    found["image"], found["label"] = memory.media.image(3), memory.media.labels
    outcome = write_report(memory, folder / "report.html", tests=3, model=model)
    page = (folder / "report.html").read_text().replace(memory.path.as_posix(), "")
    found["report"] = (
        outcome.tests,
        re.sub(r"dualform report: [^<]*|xxh3 \w{16}|20\d\d-[\d:T+-]+|[\d.]+ [kM]?B", "", page),
    )
    text, language_model = record_output_model(place_for_text(place))
    text.add_corpus(characters())
    answer = text.attend_text(language_model, TEXT[:6], tokenizer=Letters())
    found["text"] = re.sub(r"run\S*", "", str(answer))
    return found


def place_for_text(place: Blobs) -> Blobs:
    """Return another place of the same kind."""
    if isinstance(place, FolderBlobs):
        return FolderBlobs(f"{place.folder}-text")
    if place.location.startswith("s3:"):
        return type(place)(f"{place.location}-text")  # type: ignore[call-arg]
    return MemoryBlobs() if isinstance(place, MemoryBlobs) else SqliteBlobs(Path(f"{place.location}-text"))


def same(one: Any, other: Any) -> bool:
    """Say whether two answers are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """The answers of a run in a folder; also where files are too large to be mapped, and rows are stored coarsely."""
    folder = tmp_path_factory.mktemp("folder")
    options = {} if request.param == "plain" else {"dtype": "float16"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "MAPPED_RUN_BYTES", reader.MAPPED_RUN_BYTES if request.param == "plain" else 0)
        yield options, answers(PLACES["folder"](folder), folder, **options)


ASKED = [
    ("plain", "memory"),
    ("plain", "sqlite"),
    *(("float16 in pieces", kind) for kind in ("memory", "sqlite", "object")),
]


@pytest.mark.parametrize(("expected", "kind"), ASKED, indirect=["expected"])
def test_every_place_gives_the_answers_of_a_folder(kind: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    options, wanted = expected
    found = answers(PLACES[kind](tmp_path), tmp_path, **options)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same(found[name], wanted[name])] == []


def test_the_comparison_can_fail() -> None:
    assert same({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]})
    assert not same({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]})


# Two that write -------------------------------------------------------------------------------------------------------


def break_in(place: Blobs) -> None:
    """End the lease of whoever writes, as a file system without locks would."""
    if isinstance(place, FolderBlobs):
        (place.folder / LOCK).unlink()
    elif isinstance(place, SqliteBlobs):
        place.remove("lease")
    elif place.location.startswith("s3:"):
        place.remove(LOCK)
    else:
        assert isinstance(place, MemoryBlobs)
        place._holder = None


@pytest.mark.parametrize("kind", PLACES)
def test_of_two_recordings_that_both_got_in_one_goes_on(kind: str, tmp_path: Path) -> None:
    place, first, second = PLACES[kind](tmp_path), Samples(), Samples()
    recorder = dualform.record(first.model, first.optimizer, place).start()
    first.train(recorder, range(3))
    recorder.flush()
    break_in(place)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    with dualform.record(second.model, second.optimizer, place, resume=True) as other:
        second.train(other, range(3, 6))
        other.flush()
        first.train(recorder, range(3, 4))
        with pytest.raises(StoreError, match="somebody else writes"):
            recorder.flush()
        with contextlib.suppress(StoreError):
            recorder.close()
        second.train(other, range(6, 7))
    memory = dualform.open(place)
    assert memory.step == 7
    assert memory.verify(second.model).passed


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_run_and_what_is_damaged_is_said_of_every_place(kind: str, tmp_path: Path) -> None:
    place = PLACES[kind](tmp_path)
    with pytest.raises(RunNotFoundError, match=re.escape(place.location)):
        dualform.open(place)
    task = Samples()
    with dualform.record(task.model, task.optimizer, place) as recorder:
        task.train(recorder, range(3))
    name = "shards/000000.safetensors"
    content = bytearray(place.load(name)[0])
    content[-3] ^= 1
    place.publish(name, lambda file: file.write(content))
    with pytest.raises(CorruptError, match=re.escape(f"{place.location}/{name} has checksum")):
        dualform.open(place).verify()
    place.publish(name, lambda file: file.write(content[:-3]))
    with pytest.raises(CorruptError, match="was cut short or changed"):
        dualform.open(place)
    place.remove(name)
    with pytest.raises(CorruptError, match="listed in the manifest but missing"):
        dualform.open(place)
    manifest, tag = place.load(MANIFEST)
    place.replace(MANIFEST, manifest[:-9], was=tag)
    with pytest.raises(FormatError, match="is not JSON"):
        dualform.open(place)
