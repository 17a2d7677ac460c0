"""A manifest is believed only when all of it can be true: one named malformation after the other is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualform
from dualform.errors import FormatError, RunNotFoundError
from dualform.identity.parameter_use import ParameterUse
from dualform.store.manifest import MAX_DEPTH, Manifest, sealed
from dualform.store.use_check import use_problem
from helpers.small import recorded

WIDE = 40  # keys that are wide enough for a pool


class Pooled(nn.Module):
    """A network whose first layer sees the same samples in every epoch, beside an embedding and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3)
        self.first = nn.Linear(WIDE, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        found: torch.Tensor = self.last(torch.cat([hidden, self.table(tokens)], dim=1))
        return found


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run with a pool, an embedding, uncovered state, and attached tests."""
    path = tmp_path_factory.mktemp("manifest") / "run"
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, tokens, labels = torch.randn(8, WIDE), torch.arange(8) % 6, torch.arange(8) % 3
    with dualform.record(model, optimizer, path, shard_bytes=1) as recorder:
        for step in range(4):
            rows = slice(4 * (step % 2), 4 * (step % 2) + 4)
            recorder.annotate(label=labels[rows])
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[rows], tokens[rows]), labels[rows]).backward()
            optimizer.step()
    dualform.open(path).add_tests(inputs)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed run of 7 steps in 3 shards."""
    path = tmp_path_factory.mktemp("manifest") / "run"
    recorded(path, 7)
    return path


def document(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def refused(raw: Any, match: str) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        Manifest.from_json(sealed(raw), path=Path("manifest.json"))
    assert "Restore it from a copy" in str(caught.value)


def test_good_manifests_are_accepted_and_written_as_they_were_read(plain: Path, pooled: Path) -> None:
    for folder in (plain, pooled):
        text = (folder / "manifest.json").read_text()
        assert Manifest.from_json(text, path=folder).to_json() == text
    assert document(pooled)["shards"][0]["pools"] == {"first": [0, 4]}


def test_any_changed_byte_is_noticed(pooled: Path) -> None:
    content = (pooled / "manifest.json").read_bytes()
    chance = random.Random(0)
    places = [chance.randrange(len(content)) for _ in range(400)] + list(range(len(content) - 40, len(content)))
    for at in places:
        for bit in range(8):
            damaged = bytearray(content)
            damaged[at] ^= 1 << bit
            with pytest.raises((FormatError, RunNotFoundError)):
                Manifest.from_json(bytes(damaged), path=pooled)


def test_a_manifest_without_its_checksum_is_refused(plain: Path) -> None:
    raw = {name: entry for name, entry in document(plain).items() if name != "xxh3"}
    with pytest.raises(FormatError, match="does not end with its checksum"):
        Manifest.from_json(json.dumps(raw), path=plain)
    with pytest.raises(FormatError, match="its checksum does not fit"):
        Manifest.from_json(sealed(raw).replace('"dualform"', '"dualform" ', 1), path=plain)


def test_uncovered_state_that_was_kept_must_be_listed(pooled: Path) -> None:
    raw = document(pooled)
    del raw["files"]["uncovered.safetensors"]
    refused(raw, r"was kept when the run was closed, but 'files' does not list 'uncovered\.safetensors'")


Change = Callable[[Any], object]

REFUSED: dict[str, tuple[Change, str]] = {
    # Types and ranges
    "negative step": (lambda m: m["shards"][0].update(start=-1), r"shards.*start"),
    "huge number": (lambda m: m["shards"][0].update(stop=2**63), r"shards.*stop"),
    "a float for a count": (lambda m: m["layers"]["0"].update(d_in=5.0), r"layers.*d_in"),
    "a bool for a count": (lambda m: m["layers"]["0"].update(d_in=True), r"layers.*d_in"),
    "null for a mapping": (lambda m: m.update(columns=None), "columns"),
    "a list for a mapping": (lambda m: m.update(parameters=[]), "parameters"),
    "a text for a list": (lambda m: m.update(optimizers="SGD"), "optimizers"),
    "an unknown store": (lambda m: m["layers"]["0"].update(store="values"), "store"),
    "an unknown outcome": (lambda m: m.update(rows={"0": {"outcome": "maybe", "reason": ""}}), "outcome"),
    "an unknown kind of state": (
        lambda m: m.update(uncovered_state={"x": {"kind": "odd", "shape": [], "dtype": "", "xxh3": ""}}),
        "kind",
    ),
    "a checksum that is none": (lambda m: m["files"]["initial.safetensors"].update(xxh3="../x"), "xxh3"),
    "a checksum with a line behind": (lambda m: m["files"]["initial.safetensors"].update(xxh3="0" * 16 + "\n"), "xxh3"),
    "a batch axis below 0": (lambda m: m.update(batch_axis=-1), "batch_axis"),
    "a closed that is a number": (lambda m: m.update(closed=1), "closed"),
    "a factory that is a list": (lambda m: m.update(factory=["os:system"]), "factory"),
    "deep arguments": (lambda m: m.update(factory_arguments={"x": nested(MAX_DEPTH)}), "factory_arguments"),
    # Steps and shards
    "another number of steps": (lambda m: m.update(steps=6), "'steps' is 6"),
    "steps that are a text": (lambda m: m.update(steps="7"), "'steps' is '7'"),
    "a shard that is gone": (lambda m: m["shards"].pop(1), "shard 2 has steps 6 to 7; expected its start at 3"),
    "shards in another order": (lambda m: m["shards"].reverse(), "lacks or mangles"),
    "a shard twice": (lambda m: m["shards"].insert(0, m["shards"][0]), "shard 0"),
    "an index that is another's": (lambda m: m["shards"][1].update(index=0), "shard 0 follows shard 0"),
    "a shard without files": (lambda m: m["shards"][0].update(files={}), "shard 0 lists no files"),
    "a shard that lists three files": (lambda m: m["shards"][0]["files"].pop("calls/000000.parquet"), "shard 0 lists"),
    "a shard with another's file": (
        lambda m: rename(m["shards"][0]["files"], "calls/000000.parquet", "calls/000001.parquet"),
        "shard 0 lists",
    ),
    "a shard file outside": (
        lambda m: rename(m["shards"][0]["files"], "calls/000000.parquet", "../calls/000000.parquet"),
        "shard 0 lists",
    ),
    "a shard file elsewhere": (
        lambda m: m["shards"][0]["files"]["calls/000000.parquet"].update(at="calls/000001.parquet"),
        "lies elsewhere",
    ),
    "a range of an unknown layer": (lambda m: m["shards"][0]["key_range"].update(x=[0, 1]), "'key_range' names 'x'"),
    "a range of three": (lambda m: m["shards"][0]["key_range"].update({"0": [0, 1, 2]}), "key_range"),
    "a mark of an unknown parameter": (lambda m: m["shards"][0]["parameters"].update(x="0" * 16), "checksum of 'x'"),
    # Layers and parameters
    "a layer that lost its weight": (lambda m: m["layers"]["0"]["uses"].pop(0), "no layer has .*0.weight"),
    "a layer without parameters": (lambda m: m["layers"].update(x={**m["layers"]["0"], "uses": []}), "no uses"),
    "a layer that is gone": (lambda m: m["layers"].pop("0"), "no layer has the parameter"),
    "a parameter that is gone": (lambda m: m["parameters"].pop("0.weight"), "which is not in 'parameters'"),
    "another shape": (lambda m: m["parameters"]["0.weight"].update(shape=[4, 6]), "does not fit use 'weight'"),
    "a huge shape": (lambda m: m["parameters"]["0.weight"].update(shape=[2**31, 2**31]), "does not fit use 'weight'"),
    "another width": (lambda m: m["layers"]["0"].update(d_in=6), "does not fit"),
    "an unknown dtype": (lambda m: m["parameters"]["0.weight"].update(dtype="float7"), "torch does not know"),
    "a dtype that is a function": (lambda m: m["layers"]["0"].update(dtype="zeros"), "stored as 'zeros'"),
    "rows stored as integers without scales": (lambda m: m["layers"]["0"].update(dtype="int16"), "stored as 'int16'"),
    "rows stored as integers": (lambda m: m["layers"]["0"].update(dtype="int64"), "stored as 'int64'"),
    "a coarse parameter with values": (lambda m: m["parameters"]["0.weight"].update(dtype="bfloat16"), "bfloat16"),
    "an unknown map": (lambda m: m["layers"]["0"]["uses"][0].update(map="wight"), "used by the map 'wight'"),
    "half a span": (lambda m: m["layers"]["0"]["uses"][0].update(keys=[0]), "keys"),
    "a use of a name twice": (
        lambda m: m["layers"]["0"]["uses"][0].update(name="bias"),
        "two of one|no layer has",
    ),
    "a slice that takes memory": (
        lambda m: m["layers"]["0"]["uses"][1].update(values=[[0, 99999999999]], value_width=99999999999),
        "does not lie within a value",
    ),
    "rows of an unknown layer": (
        lambda m: m.update(rows={"x": {"outcome": "proved", "reason": ""}}),
        "'rows' names 'x'",
    ),
    "a covered parameter that is uncovered": (lambda m: m["uncovered"].update({"0.weight": 20}), "as uncovered"),
    # Columns
    "a column of an odd type": (lambda m: m["columns"].update(label="list<item: int64>"), "column 'label' holds"),
    "a column with a name of ours": (lambda m: m["columns"].update(step="int64"), "cannot be a user's column"),
    # Files
    "no initial parameters": (lambda m: m["files"].pop("initial.safetensors"), "does not list 'initial.safetensors'"),
    "no final parameters": (lambda m: m["files"].pop("final.safetensors"), "does not list 'final.safetensors'"),
    "an absolute name": (lambda m: m["files"].update({"/etc/passwd": entry()}), "no name of a run's file"),
    "a name that goes up": (lambda m: m["files"].update({"media/../../x.json": entry()}), "no name of a run's file"),
    "a name with a backslash": (lambda m: m["files"].update({"media\\x.json": entry()}), "no name of a run's file"),
    "a name with NUL": (lambda m: m["files"].update({"media/x\0.json": entry()}), "no name of a run's file"),
    "a place outside": (
        lambda m: m["files"].update({"media/tests.safetensors": entry(at="../tests.safetensors")}),
        "expected a name after its content",
    ),
    "a place that is another file's": (
        lambda m: m["files"].update({"media/tests.safetensors": entry(at="initial.safetensors")}),
        "expected a name after its content",
    ),
    "initial parameters elsewhere": (
        lambda m: m["files"]["initial.safetensors"].update(at="final.safetensors"),
        "expected a name after its content",
    ),
}

REFUSED_OF_POOLED: dict[str, tuple[Change, str]] = {
    "a pool's count 0": (lambda m: m["shards"][0]["pools"].update(first=[0, 0]), "the pool of 'first' goes on at 4"),
    "a pool that begins later": (lambda m: m["shards"][0]["pools"].update(first=[1, 4]), "goes on at 1, not at 0"),
    "a pool of a negative size": (lambda m: m["shards"][0]["pools"].update(first=[0, -4]), "pools"),
    "a pool of an unknown layer": (lambda m: m["shards"][0]["pools"].update(x=[0, 1]), "'pools' names 'x'"),
    "a pool of whole numbers": (lambda m: m["shards"][0]["pools"].update(table=[0, 1]), "whole numbers"),
    "state without its step": (lambda m: m["shards"][0].update(state_after=None), "not the step of it"),
    "a table of another width": (lambda m: m["layers"]["table"].update(d_in=2), "map 'rows'"),
    "an attachment at another content's name": (
        lambda m: m["files"]["media/tests.safetensors"].update(xxh3="0" * 16),
        "expected a name after its content",
    ),
}


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def rename(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def entry(at: str = "") -> dict[str, Any]:
    return {"bytes": 1, "xxh3": "0" * 16} | ({"at": at} if at else {})


@pytest.mark.parametrize("what", REFUSED)
def test_a_manifest_is_refused_with(what: str, plain: Path) -> None:
    change, match = REFUSED[what]
    raw = document(plain)
    change(raw)
    refused(raw, match)


@pytest.mark.parametrize("what", REFUSED_OF_POOLED)
def test_a_manifest_of_a_pooled_run_is_refused_with(what: str, pooled: Path) -> None:
    change, match = REFUSED_OF_POOLED[what]
    raw = document(pooled)
    change(raw)
    refused(raw, match)


# The document -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"format": ' + '{"a":' * 100_000, "not JSON"),
        ('{"format": "dualform", "format": "dualform"}', "the key 'format' comes twice"),
        ('{"format": "dualform", "version": 1, "x": {"a": 1, "b": 2, "a": 3}}', "the key 'a' comes twice"),
        ('{"format": "dualform", "version": 1, "created": "\\ud800"}', "not JSON"),
        (b'{"format": "\xff"}', "not JSON"),
        ("", "not JSON"),
        ('{"format": "dualform", "version": ' + "9" * 5000 + "}", "not JSON"),
        ('{"format": "dualform", "version": true}', "format version True"),
        ('{"format": "dualform", "version": 1e400}', "format version inf"),
    ],
)
def test_a_document_that_is_none_is_refused(text: str | bytes, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        Manifest.from_json(text, path=Path("manifest.json"))


def test_a_document_that_is_too_large_is_refused_before_it_is_read(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualform.store.manifest.MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(FormatError, match="has more than"):
        Manifest.read(plain)
    with pytest.raises(RunNotFoundError):
        Manifest.read(tmp_path)


def test_entries_of_the_future_are_ignored(plain: Path) -> None:
    raw = document(plain)
    raw["dreams"] = [[[]]]
    raw["layers"]["0"]["colour"] = "blue"
    raw["shards"][0]["weather"] = None
    assert Manifest.from_json(sealed(raw), path=plain) == Manifest.read(plain)


def test_a_name_beyond_ascii_survives(plain: Path) -> None:
    raw = document(plain)
    raw["factory_arguments"] = {"näme": "\N{SNOWMAN} \N{GRINNING FACE}"}
    assert Manifest.from_json(sealed(raw), path=plain).factory_arguments == raw["factory_arguments"]


def test_ranges_of_keys_that_were_not_finite_are_read(plain: Path) -> None:
    raw = document(plain)
    raw["shards"][0]["key_range"]["0"] = [float("-inf"), float("nan")]
    assert Manifest.from_json(sealed(raw), path=plain).shards[0].key_range["0"][0] == float("-inf")


# Uses of parameters ------------------------------------------------------------------------------------------------


def use(map_name: str, **slices: Any) -> ParameterUse:
    return ParameterUse("weight", "0.weight", map_name, **slices)


@pytest.mark.parametrize(
    ("use", "d_in", "d_out", "shape"),
    [
        (use("outer"), 5, 4, (4, 5)),
        (use("outer"), 18, 4, (4, 2, 3, 3)),
        (use("outer"), 0, 4, (4, 0)),
        (use("transposed"), 5, 4, (5, 4)),
        (use("grouped"), 12, 4, (4, 2, 3)),
        (use("transposed_kernel"), 10, 4, (5, 4, 2)),
        (use("transposed_kernel", groups=2), 12, 6, (4, 3, 3)),
        (use("rows"), 1, 4, (9, 4)),
        (use("scale"), 4, 4, (4,)),
        (use("scale"), 4, 4, (2, 2)),
        (use("bias"), 5, 4, (4,)),
        (use("outer", keys=(2, 5)), 5, 4, (4, 3)),
        (use("outer", keys=(0, 5), values=((0, 2), (4, 6)), value_width=6), 8, 6, (4, 5)),
        (use("outer", rows=(3, 6)), 2, 3, (9, 2)),
        (use("bias", rows=(3, 6)), 2, 3, (9,)),
    ],
)
def test_a_shape_that_fits_its_use(use: ParameterUse, d_in: int, d_out: int, shape: tuple[int, ...]) -> None:
    assert use_problem(use, d_in, d_out, shape) == ""
    free = use.map == "rows" or use.rows is not None  # other rows may be there and not be used
    other = (*shape, 3) if free else (shape[0] + 1, *shape[1:])
    assert "does not fit" in use_problem(use, d_in, d_out, other)


@pytest.mark.parametrize("shape", [(4,), (6, 3), (3, 3, 3)])
def test_a_kernel_whose_channels_do_not_fall_into_its_groups(shape: tuple[int, ...]) -> None:
    found = use("transposed_kernel", groups=2)
    assert "does not fit" in use_problem(found, 9, 6, shape)


@pytest.mark.parametrize(
    "use",
    [
        use("outer", keys=(0, 9)),
        use("outer", rows=(0, 9)),
        use("outer", values=((0, 4),), value_width=5),
        use("outer", keys=(0, int("9" * 99))),
    ],
)
def test_a_use_that_does_not_lie_within_its_layer(use: ParameterUse) -> None:
    assert "does not lie within" in use_problem(use, 5, 4, (4, 5))


@pytest.mark.parametrize(
    "role",
    [
        "", "weight(", "weight(keys=3)", "weight(keys=a:b)", "weight(keys=-1:2)", "weight(colour=0:2)",
        "weight(values=0:2)", "weight(keys=2:1)", "weight(keys=0:9)", "weight(rows=0:9)", "weight(values=0:4/5)",
        "Weight", "weight(keys=0:" + "9" * 99 + ")", "weight(keys=0:" + "9" * 9999 + ")", "weıght",
    ],
)  # fmt: skip
def test_a_role_of_version_1_that_is_none(plain: Path, role: str) -> None:
    raw = document(plain)
    raw["version"] = 1
    for name, entry in raw["layers"].items():
        entry["parameters"] = {each["name"]: each["parameter"] for each in entry.pop("uses")}
        assert Manifest.from_json(sealed(raw), path=plain) if name == list(raw["layers"])[-1] else True
    rename(raw["layers"]["0"]["parameters"], "weight", role)
    with pytest.raises(FormatError, match="lacks or mangles"):
        Manifest.from_json(sealed(raw), path=plain)
