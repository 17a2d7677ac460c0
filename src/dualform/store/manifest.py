"""The manifest of a run folder: what `manifest.json` says, as dataclasses, and how it is read and written.

The last entry of a manifest is the checksum of all text before it, so that a damaged byte is noticed. A manifest may
also come from somebody who computed that checksum, so it is believed only after three looks: the JSON itself (size,
nesting, keys that come twice), each entry by its type and range (msgspec converts the document to the dataclasses
below), and all entries against each other (`manifest_check.py`). The files that it lists are looked at elsewhere, when
they are read.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import torch
import xxhash

from dualform.engine.description import Count, LayerEntry, ParameterEntry, RowsEntry, Shape, TrainingEntry
from dualform.errors import FormatError, RunNotFoundError
from dualform.printable import cut
from dualform.recording.model_state import StateKind
from dualform.store import version1
from dualform.store.blobs import Blob, Blobs, Checksum, FileEntry, Tag
from dualform.store.documents import indented, parse_json
from dualform.store.format import MANIFEST
from dualform.store.manifest_check import problems
from dualform.store.places import as_blobs
from dualform.store.row_encoding import ROW_SCALED

FORMAT = "dualform"
VERSION = 5
"""The version of a run with a layer whose inputs are stored in place of its keys."""
DIVIDED_VERSION = 4
"""The version of a run of several processes that have rows of parameters, and of no such layer."""
WHOLE_VERSION = 3
"""The version of a run of several processes that have whole parameters, which readers of that version can read too."""
PLAIN_VERSION = 2
"""The same of a run of one process."""
MAX_MANIFEST_BYTES = 128 << 20
"""Size above which a manifest is refused: about 4 KB for each of 30,000 shards, a recording of ten days."""
MAX_DEPTH = 64
"""Number of lists and objects inside each other, above which a manifest is refused; only a factory's arguments nest."""

MaybeChecksum = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]
"""An xxh3 checksum as hexadecimal, or nothing."""
Processes = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
"""How many processes recorded a run together."""
LabelType = Literal["none", "bool", "int64", "double", "string"]
"""The type of a group's value in one column."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A part of the model's state that no recorded layer covers."""

    kind: StateKind
    shape: Shape
    dtype: str
    xxh3: (
        MaybeChecksum  # of its bytes: a frozen parameter's at the start, everything's at the end; empty where not taken
    )
    reason: str = ""  # why it can be neither kept nor compared


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A published range of steps, `start <= step < stop`.

    A resumed run may lower `stop`: patterns from there on are still in the file but no longer part of the memory.
    """

    index: Count
    start: Count
    stop: Count
    files: dict[str, FileEntry]
    key_range: dict[str, tuple[float, float]]  # layer -> (least, greatest) key element
    parameters: dict[str, Checksum]  # parameter -> xxh3 of its bytes after the last step
    pools: dict[str, tuple[Count, Count]] = field(
        default_factory=dict
    )  # layer with a pool -> (first number, keys here)
    state_after: Count | None = None  # the number of steps after which `stale` and the file of uncovered state hold
    stale: tuple[str, ...] = ()  # uncovered state that had changed by then and is not kept


@dataclass(frozen=True, slots=True)
class GroupColumnEntry:
    """A column that groups patterns; with a width, its numbers cut into bins."""

    column: str
    width: Annotated[float, msgspec.Meta(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class GroupingEntry:
    """One way in which shares are grouped.

    Attributes:
        columns: the columns, one after the other.
        labels: the groups in the order in which they came: for each column the type of its value and the value as text.
        rest: whether the last group holds all patterns whose own groups are not kept.
    """

    columns: tuple[GroupColumnEntry, ...]
    labels: tuple[tuple[tuple[LabelType, str], ...], ...]
    rest: bool = False


@dataclass(frozen=True, slots=True)
class SharesEntry:
    """What is kept of shares by group.

    Attributes:
        groupings: how they are grouped.
        horizons: after which steps they are kept, ascending, each with a file.
        state: after which step the recording of them can go on, with a file; None where it cannot.
        earlier_state: of several processes, the same after the step before: another one may not have come further.
    """

    groupings: tuple[GroupingEntry, ...]
    horizons: tuple[Count, ...] = ()
    state: Count | None = None
    earlier_state: Count | None = None

    @property
    def states(self) -> tuple[int, ...]:
        """The steps after which the recording of shares can go on."""
        return tuple(step for step in (self.earlier_state, self.state) if step is not None)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that the run folder promises."""

    layers: dict[str, LayerEntry]
    parameters: dict[str, ParameterEntry]
    optimizers: tuple[str, ...]
    uncovered: dict[str, Count]  # trained parameters that no layer covers -> number of elements
    batch_axis: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    created: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    closed: bool = False
    no_final: str = ""  # why a closed run has no final parameters; empty where it has
    columns: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()
    factory: str | None = None
    factory_arguments: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, RowsEntry] = field(default_factory=dict)  # layers that were tried
    uncovered_state: dict[str, StateEntry] | None = None  # nothing where the run was recorded without it
    shares: SharesEntry | None = None  # nothing where the run keeps no shares
    training: TrainingEntry | None = None  # nothing where the training cannot be run again
    checkpoints: tuple[Count, ...] | None = None
    """The numbers of steps at the checkpoints that the run was made from, but for the first; None: it was recorded."""
    rank: Count = 0  # the number of the process that recorded it, of several
    processes: tuple[
        tuple[Count, Processes], ...
    ] = ()  # first step -> how many recorded from there on; nothing for one

    divided: bool = False
    """Whether processes keep their own rows of parameters, which a reader puts together in the order of ranks."""

    @property
    def steps(self) -> int:
        """The number of published steps."""
        return self.shards[-1].stop if self.shards else 0

    def inputs_dtype(self, layer: str) -> torch.dtype:
        """Return the dtype of a layer's inputs where they are stored in place of keys: one without scales of rows.

        Where rows have scales it is the one that is trained: the scale of a key is that of its own largest element.
        """
        entry = self.layers[layer]
        stored: torch.dtype = getattr(torch, entry.dtype)
        if stored not in ROW_SCALED:
            return stored
        trained: torch.dtype = getattr(torch, self.parameters[entry.uses[0].parameter].dtype)
        return trained

    def to_json(self) -> str:
        """Return the manifest as it stands in the folder."""
        several = bool(self.rank or self.processes)
        version = DIVIDED_VERSION if self.divided else WHOLE_VERSION if several else PLAIN_VERSION
        if any(layer.unfolding is not None for layer in self.layers.values()):
            version = VERSION
        head = {"format": FORMAT, "version": version, "steps": self.steps}
        body = msgspec.to_builtins(self, enc_hook=_plain)
        if not several:
            del body["rank"], body["processes"]
        if not self.divided:
            del body["divided"]
        for entry in (*body["files"].values(), *(e for shard in body["shards"] for e in shard["files"].values())):
            if not entry["at"]:
                del entry["at"]
        if self.shares is None:
            del body["shares"]
        elif self.shares.earlier_state is None:
            del body["shares"]["earlier_state"]
        if self.training is None:
            del body["training"]
        if self.checkpoints is None:
            del body["checkpoints"]
        for layer in body["layers"].values():
            if layer["unfolding"] is None:
                del layer["unfolding"]
            layer["uses"] = [{name: x for name, x in use.items() if x not in (None, (), [])} for use in layer["uses"]]
        return sealed(head | body)

    @classmethod
    def from_json(cls, text: str | bytes, *, path: object) -> "Manifest":
        """Read a manifest, refusing other formats, newer versions, and whatever cannot be true of a run."""
        raw = _parsed(text, path)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise RunNotFoundError(f"{path} does not describe a dualform run. Give the folder of a recorded run.")
        if type(raw.get("version")) is not int or not version1.VERSION <= raw["version"] <= VERSION:
            raise FormatError(
                f"{path} has format version {cut(repr(raw.get('version')))}; this dualform reads versions "
                f"{version1.VERSION} to {VERSION}. Install a newer dualform to open it."
            )
        if raw["version"] > version1.VERSION:
            _check_seal(text, path)
        if missing := [name for name in _REQUIRED if name not in raw]:
            raise _mangled(path, f"there is no {missing[0]!r}")
        try:
            found = msgspec.convert(version1.upgraded(raw) if raw["version"] == version1.VERSION else raw, cls)
        except (msgspec.ValidationError, RecursionError, FormatError) as error:
            raise _mangled(path, str(error)) from error
        if type(raw["steps"]) is not int or raw["steps"] != found.steps:
            raise _mangled(path, f"'steps' is {cut(repr(raw['steps']))}, but the shards hold {found.steps}")
        if (problem := next(problems(found), None)) is not None:
            raise _mangled(path, problem)
        return found

    @classmethod
    def read(cls, place: str | os.PathLike[str] | Blobs) -> "Manifest":
        """Read the manifest of a run."""
        return cls.read_tagged(as_blobs(place))[0]

    @classmethod
    def read_tagged(cls, blobs: Blobs) -> tuple["Manifest", Tag]:
        """Read the manifest of a run, with the tag that has to be given to replace it."""
        path = Blob(blobs, MANIFEST)
        if not blobs.exists():
            raise RunNotFoundError(f"{blobs.location} is not a folder. Give the folder that dualform.record wrote to.")
        if (size := blobs.size(MANIFEST)) is None:
            raise RunNotFoundError(
                f"{blobs.location} holds no {MANIFEST}, so it is not a recorded run. "
                "Give the folder or address that dualform.record wrote to."
            )
        if size > MAX_MANIFEST_BYTES:
            raise _too_large(path)
        content, tag = blobs.load(MANIFEST)
        return cls.from_json(content, path=path), tag

    def publish(self, blobs: Blobs, *, was: Tag | None) -> Tag:
        """Replace the run's manifest by this one, atomically, if it is still the one of a tag; return the new tag."""
        return blobs.replace(MANIFEST, self.to_json().encode(), was=was)


def _plain(value: object) -> str | int | float:
    """Return a text or number of a derived class (a version of torch, a number of numpy) as Python's own."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} cannot be written to a manifest")


def sealed(document: Mapping[str, Any]) -> str:
    """Return a document as a manifest's text: JSON whose last entry, `xxh3`, is the checksum of the text before it."""
    body = indented({name: entry for name, entry in document.items() if name != "xxh3"}).removesuffix("\n}")
    return f'{body},\n "xxh3": "{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n'


_SEAL = re.compile(rb',\n "xxh3": "([0-9a-f]{16})"\n\}\n\Z')


def _check_seal(text: str | bytes, path: object) -> None:
    """Raise `FormatError` where the text of a manifest is not the one that its last entry is the checksum of."""
    content = text.encode() if isinstance(text, str) else text
    seal = _SEAL.search(content, max(0, len(content) - 64))
    if seal is None:
        raise FormatError(
            f"{path} does not end with its checksum: it was cut or edited, or written by a version of dualform between "
            "two releases. Restore it from a copy of the run, or record it again."
        )
    if xxhash.xxh3_64_hexdigest(content[: seal.start()]) != seal[1].decode():
        raise FormatError(
            f"{path} was changed after it was written: its checksum does not fit. Restore it from a copy of the run."
        )


_OPTIONAL = {
    "no_final",
    "rows",
    "uncovered_state",
    "shares",
    "training",
    "checkpoints",
    "rank",
    "processes",
    "divided",
}  # entries that runs of earlier versions lack
_REQUIRED = ("steps", *(entry.name for entry in dataclasses.fields(Manifest) if entry.name not in _OPTIONAL))


def _mangled(path: object, reason: str) -> FormatError:
    return FormatError(f"{path} lacks or mangles an entry ({cut(reason, 400)}). Restore it from a copy of the run.")


def _too_large(path: object) -> FormatError:
    return FormatError(f"{path} has more than {MAX_MANIFEST_BYTES >> 20} MB. Restore it from a copy of the run.")


def _parsed(text: str | bytes, path: object) -> Any:
    """Return the document, refusing one that is too large, too deep, or no JSON."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise _too_large(path)
    try:
        raw = parse_json(text)
    except ValueError as error:
        reason = cut(str(error), 200)
        raise FormatError(f"{path} is not JSON ({reason}). Restore it from a copy of the run.") from error
    if isinstance(raw, Mapping) and _is_deep(raw.get("factory_arguments")):
        raise _mangled(path, f"'factory_arguments' has more than {MAX_DEPTH} levels")
    return raw


def _is_deep(value: Any) -> bool:
    """Say whether lists and objects lie inside each other more than `MAX_DEPTH` times."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
