"""Ways to break or forge a run folder, as cases: each changes a copy of a good run in one place.

Three kinds: plain corruption, after which checksums no longer agree; one field of the manifest that is hostile or gone;
and files that were changed while the manifest gives their new sizes and checksums, as a forger would. The last two also
give the manifest the checksum that fits.
"""

import functools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualform.store.blobs import Blob
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.manifest import sealed
from torture.good_runs import GoodRun

Apply = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Case:
    """One change to a copy of a good run."""

    kind: str  # "corrupted", "field" or "forged"
    run: int  # which of the good runs
    what: str  # the change in words; its first word is the file or the path in the manifest
    apply: Apply


# Plain corruption -------------------------------------------------------------------------------------------------


def corruptions(runs: list[GoodRun], number: int) -> Iterator[Case]:
    """Yield cases of files that are changed, cut, exchanged or replaced, of one run."""
    run = runs[number]
    for name in _files(run.path):
        for i in range(6):
            yield Case("corrupted", number, f"{name} flipped {i}", _on(name, _flip))
            yield Case("corrupted", number, f"{name} cut {i}", _on(name, _cut))
        for what, change in (("extended", _extend), ("emptied", _empty), ("zeroed", _zero), ("deleted", Path.unlink)):
            yield Case("corrupted", number, f"{name} {what}", _on(name, change))
        for what, change in (
            ("a link to itself", _link),
            ("a folder", _folder),
            ("a FIFO", _fifo),
            ("a device", _device),
        ):
            yield Case("corrupted", number, f"{name} is {what}", _on(name, change))
        for other in _files(run.path):
            if other != name and other.rpartition(".")[2] == name.rpartition(".")[2]:
                yield Case("corrupted", number, f"{name} swapped with {other}", _swapped(name, other))
        foreign = runs[(number + 1) % len(runs)].path / name
        if foreign.is_file():
            yield Case("corrupted", number, f"{name} of another run", _on(name, _copied(foreign)))


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


Change = Callable[[Path], object]


def _on(name: str, change: Callable[..., object]) -> Apply:
    """Return a change of one file; one that takes chance is given it."""

    def apply(folder: Path, chance: random.Random) -> None:
        path = folder / name
        _own(path)
        change(path, chance) if change in (_flip, _cut, _extend) else change(path)

    return apply


def _own(path: Path) -> None:
    """Give a copied run a file of its own, where it shares one with the good run by a hard link."""
    if path.is_file() and not path.is_symlink():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)


def _flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def _extend(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 100)))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _zero(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _copied(source: Path) -> Change:
    return lambda path: shutil.copyfile(source, path)


def _swapped(name: str, other: str) -> Apply:
    def apply(folder: Path, chance: random.Random) -> None:
        aside = folder / "aside"
        (folder / name).rename(aside)
        (folder / other).rename(folder / name)
        aside.rename(folder / other)

    return apply


# One field of the manifest ----------------------------------------------------------------------------------------


def _nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


HOSTILE: dict[str, Any] = {
    "null": None, "true": True, "false": False, "0": 0, "1": 1, "-1": -1, "7": 7, "2**31": 2**31, "2**63": 2**63,
    "10**40": 10**40, "0.5": 0.5, "1e400": float("inf"), "NaN": float("nan"), "empty text": "", "../x": "../x",
    "/etc/passwd": "/etc/passwd", "a NUL": "a\0b", "a surrogate": "\ud800", "a huge text": "x" * 100_000,
    "markup": "<script>[/x]\x1b[31m", "[]": [], "{}": {}, "[1]": [1], "a deep list": _nested(400),
    "an object": {"bytes": 1, "xxh3": "0" * 16}, "sixteen zeros": "0" * 16, "float64": "float64", "keys": "keys",
}  # fmt: skip
"""Values that a field is set to in turn."""


def fields(runs: list[GoodRun], number: int) -> Iterator[Case]:
    """Yield cases in which one field of a run's manifest is hostile, gone, renamed, or exchanged with a sibling."""
    for file in sorted(runs[number].path.rglob("manifest.json")):  # several, of a run of several processes
        place = file.relative_to(runs[number].path).parent.as_posix()
        for path in _paths(json.loads(file.read_text())):
            name = "/".join(map(str, path if place == "." else (place, *path)))
            for what, value in HOSTILE.items():
                set_to = functools.partial(_set_field, value=value)
                yield Case("field", number, f"{name} = {what}", _edited(place, set_to, path))
            yield Case("field", number, f"{name} gone", _edited(place, lambda at, key: at.pop(key), path))
            yield Case("field", number, f"{name} renamed", _edited(place, _renamed, path))
            yield Case("field", number, f"{name} twice", _edited(place, _doubled, path))
            yield Case("field", number, f"{name} exchanged", _edited(place, _exchanged, path))
            yield Case("field", number, f"{name} nudged", _edited(place, _nudged, path))


def _set_field(at: Any, key: Any, *, value: Any) -> None:
    at[key] = value


def _paths(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in children:
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _edited(place: str, change: Callable[..., object], path: tuple[Any, ...]) -> Apply:
    def apply(folder: Path, chance: random.Random) -> None:
        file = folder / place / "manifest.json"
        raw = json.loads(file.read_text())
        at = raw
        for key in path[:-1]:
            at = at[key]
        change(at, path[-1])
        _own(file)
        file.write_text(sealed(raw))

    return apply


def _renamed(at: Any, key: Any) -> None:
    if isinstance(at, dict):
        at[f"{key}x"] = at.pop(key)
    else:
        at.reverse()


def _doubled(at: Any, key: Any) -> None:
    if isinstance(at, list):
        at.insert(key, at[key])
    else:
        at[f"{key} again"] = at[key]


def _exchanged(at: Any, key: Any) -> None:
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    other = keys[(keys.index(key) + 1) % len(keys)]
    at[key], at[other] = at[other], at[key]


def _nudged(at: Any, key: Any) -> None:
    value = at[key]
    if isinstance(value, bool):
        at[key] = not value
    elif isinstance(value, int | float):
        at[key] = value + 1
    elif isinstance(value, str | list):
        at[key] = value[:-1]
    elif value:
        value.pop(next(iter(value)))


# Forged files -----------------------------------------------------------------------------------------------------


def forgeries(runs: list[GoodRun], number: int) -> Iterator[Case]:
    """Yield cases in which a file of one run is another, and the manifest says so."""
    run = runs[number]
    for name in _files(run.path):
        if Path(name).name == "manifest.json" or name.startswith("cache/"):
            continue
        for i in range(8):
            yield Case("forged", number, f"{name} flipped {i}", _forged(name, _flip))
        yield Case("forged", number, f"{name} cut", _forged(name, _cut))
        yield Case("forged", number, f"{name} emptied", _forged(name, _empty))
        yield Case("forged", number, f"{name} extended", _forged(name, _extend))
        for other in _files(run.path):
            if other != name and other.rpartition(".")[2] == name.rpartition(".")[2]:
                yield Case("forged", number, f"{name} is {other}", _forged(name, _copied(run.path / other)))
        for what, change in _table_changes(run.path / name) if name.endswith(".parquet") else ():
            yield Case("forged", number, f"{name} {what}", _forged(name, change))
        for what, change in _tensor_changes(run.path / name) if name.endswith(".safetensors") else ():
            yield Case("forged", number, f"{name} {what}", _forged(name, change))
        if name.endswith(".json"):
            for what, text in _TEXTS.items():
                yield Case("forged", number, f"{name} is {what}", _forged(name, _written(text)))
            for path in _paths(json.loads((run.path / name).read_text())):
                for what, value in HOSTILE.items():
                    yield Case("forged", number, f"{name} {path} = {what}", _forged(name, _json_set(path, value)))


_TEXTS = {
    "a list": b"[]",
    "a number": b"1e999",
    "deep": b"[" * 50_000,
    "no text": b"\xff\xfe",
    "a text": b'"x"',
    "{}": b"{}",
}


def _written(content: bytes) -> Change:
    return lambda path: path.write_bytes(content)


def _json_set(path: tuple[Any, ...], value: Any) -> Change:
    def change(file: Path) -> None:
        raw = json.loads(file.read_text())
        at = raw
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        file.write_text(json.dumps(raw))

    return change


def _forged(name: str, change: Callable[..., object]) -> Apply:
    """Return a change of one file, after which the manifest gives its new size and checksum, and its new place."""

    def apply(folder: Path, chance: random.Random) -> None:
        path = folder / name
        _own(path)
        change(path, chance) if change in (_flip, _cut, _extend) else change(path)
        home = next(above for above in path.parents if (above / "manifest.json").is_file())
        file = home / "manifest.json"
        raw = json.loads(file.read_text())
        for listed in (raw["files"], *(shard["files"] for shard in raw["shards"])):
            for key, entry in listed.items():
                if home / entry.get("at", key) == path:
                    blob = Blob(FolderBlobs(path.parent), path.name)
                    entry |= {"bytes": blob.size(), "xxh3": blob.checksum()}
                    if "at" in entry:
                        stem, ending = key.rsplit(".", 1)
                        entry["at"] = f"{stem}-{entry['xxh3']}.{ending}"
                        path.rename(home / entry["at"])
        _own(file)
        file.write_text(sealed(raw))

    return apply


_NUMBERS = (-1, 0, 1, 5, 2**31 - 1, 2**40, 2**62, -(2**63))


def _table_changes(path: Path) -> Iterator[tuple[str, Change]]:
    """Yield changes of a table: values, types, missing, doubled and shuffled rows and columns, and bombs."""
    table = pq.read_table(path)
    for name in table.column_names:
        kind = table.schema.field(name).type
        for i, row in enumerate({0, table.num_rows // 2, table.num_rows - 1} if table.num_rows else ()):
            for value in _values(kind):
                yield f"{name}[{row}] = {str(value)[:20]}", _cell(name, row, value)
            yield f"{name}[{row}] gone {i}", _cell(name, row, None)
        yield f"{name} all the same", _constant(name)
        yield f"{name} dropped", _drop(name)
        yield f"{name} renamed", _rename(name)
        for other in (
            pa.string(),
            pa.float32(),
            pa.int8(),
            pa.binary(),
            pa.timestamp("s"),
            pa.list_(pa.int64()),
            pa.null(),
        ):
            yield f"{name} as {other}", _retyped(name, other)
        for other in table.column_names:
            if other != name and table.schema.field(other).type == kind:
                yield f"{name} is {other}", _replaced(name, other)
    yield "without rows", lambda file: pq.write_table(pq.read_table(file).slice(0, 0), file)
    yield "without its first row", lambda file: pq.write_table(pq.read_table(file).slice(1), file)
    yield "without its last row", lambda file: pq.write_table(pq.read_table(file).slice(0, table.num_rows - 1), file)
    yield "twice", lambda file: pq.write_table(pa.concat_tables([table, table]), file)
    yield "reversed", lambda file: pq.write_table(table.take(np.arange(table.num_rows)[::-1]), file)
    yield "with a column more", lambda file: pq.write_table(table.append_column("more", pa.nulls(table.num_rows)), file)
    yield "with zstd", lambda file: pq.write_table(table, file, compression="zstd")
    yield "with gzip", lambda file: pq.write_table(table, file, compression="gzip")
    yield "without dictionaries", lambda file: pq.write_table(table, file, use_dictionary=False)
    yield "in parts of a row", lambda file: pq.write_table(table, file, row_group_size=1)
    for codec in ("snappy", "zstd"):
        yield f"with rows for gigabytes, {codec}", _bomb_of_rows(codec)
        yield f"with texts for gigabytes, {codec}", _bomb_of_texts(codec)
    for text in (b"PAR1", b"PAR1" + b"\xff" * 40 + b"PAR1", b"PAR1\x15\x04" + b"\xff\xff\xff\x7fPAR1"):
        yield f"is {text[:12]!r}", _written(text)


def _values(kind: Any) -> tuple[Any, ...]:
    if pa.types.is_integer(kind):
        return tuple(n for n in _NUMBERS if -(2 ** (kind.bit_width - 1)) <= n < 2 ** (kind.bit_width - 1))
    if pa.types.is_floating(kind):
        return (-1.0, 0.0, 1.0, 1e308, float("nan"), float("inf"), 1e-320)
    if pa.types.is_boolean(kind):
        return (True, False)
    if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
        return ([], [0], [None], [1] * 5, [2**62], [-1] * 100_000)
    if pa.types.is_list(kind):
        return ([], [1.0] * 5, [0.0], [float("nan")], [None], [2.0], [1.0] * 100_000)
    return (
        "",
        "x",
        "0",
        "2",
        "SGD",
        "Adam",
        "Muon",
        "6,4:1,6",
        "9999999,9999999:1,1",
        "1:99999999999",
        "y" * 1_000_000,
    )


def _cell(name: str, row: int, value: Any) -> Change:
    def change(file: Path) -> None:
        table = pq.read_table(file)
        cells = table[name].to_pylist()
        cells[row] = value
        _set(file, table, name, pa.array(cells, type=table.schema.field(name).type))

    return change


def _set(file: Path, table: Any, name: str, column: Any) -> None:
    pq.write_table(table.set_column(table.column_names.index(name), name, column), file)


def _constant(name: str) -> Change:
    def change(file: Path) -> None:
        table = pq.read_table(file)
        _set(file, table, name, table[name].take([0] * table.num_rows) if table.num_rows else table[name])

    return change


def _drop(name: str) -> Change:
    return lambda path: pq.write_table(pq.read_table(path).drop_columns([name]), path)


def _rename(name: str) -> Change:
    def change(file: Path) -> None:
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([f"{n}x" if n == name else n for n in table.column_names]), file)

    return change


def _retyped(name: str, kind: Any) -> Change:
    def change(file: Path) -> None:
        table = pq.read_table(file)
        try:
            _set(file, table, name, table[name].cast(kind))
        except pa.ArrowException:  # no such value of that type, or none that parquet can write
            _set(file, table, name, pa.nulls(table.num_rows, kind))

    return change


def _replaced(name: str, other: str) -> Change:
    def change(file: Path) -> None:
        table = pq.read_table(file)
        _set(file, table, name, table[other])

    return change


def _bomb_of_rows(codec: str) -> Change:
    """Return a change to a small file whose rows, all alike, take gigabytes."""

    def change(file: Path) -> None:
        table = pq.read_table(file)
        first = table.slice(0, 1) if table.num_rows else pa.table({"label": [1]})
        many = pa.concat_tables([first] * 1000).combine_chunks()
        with pq.ParquetWriter(file, many.schema, compression=codec) as writer:
            group = pa.concat_tables([many] * 500)
            for _ in range(4):
                writer.write_table(group, row_group_size=group.num_rows)

    return change


def _bomb_of_texts(codec: str) -> Change:
    """Return a change to a small file whose texts, kept once in a dictionary, take gigabytes when spelled out."""

    def change(file: Path) -> None:
        table = pq.read_table(file)
        first = table.slice(0, 1) if table.num_rows else pa.table({"task": ["x"]})
        many = pa.concat_tables([first] * 10_000).combine_chunks()
        for i, field in enumerate(many.schema):
            if field.type == pa.string():
                many = many.set_column(
                    i, field.name, pa.array(["x" * 500_000]).take([0] * 1).dictionary_encode().take([0] * 10_000)
                )
        pq.write_table(many, file, compression=codec, store_schema=False, dictionary_pagesize_limit=1 << 30)

    return change


def _tensor_changes(path: Path) -> Iterator[tuple[str, Change]]:
    """Yield changes of the header and of the numbers of a safetensors file."""
    header, _ = _split(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        for field, values in {
            "dtype": ("F64", "F32", "F16", "I64", "I8", "BOOL", "X", "", 3, None, "F8_E4M3", "C64"),
            "shape": (
                [],
                [0],
                [-1],
                [1],
                [2**31, 2**31],
                [2**63],
                None,
                "x",
                [1.5],
                [[1]],
                entry["shape"][::-1],
                [*entry["shape"], 1],
            ),
            "data_offsets": ([0, 0], [-8, 8], [0, 2**63], [8, 0], [1], None, [0.5, 1], "x", [0, 10**30]),
        }.items():
            for value in values:
                yield f"{name} {field} = {str(value)[:30]}", _header_set(name, field, value)
        yield f"{name} gone", _header_remove(name)
        yield f"{name} renamed", _header_rename(name)
        for what, numbers in _DATA.items():
            yield f"{name} {what}", _data_set(name, numbers)
    yield "header twice", _header_text(lambda text: text[:-1] + b"," + text[1:] if len(text) > 2 else b"{}")
    yield "header deep", _header_text(lambda text: b'{"x":' * 20_000 + b"1" + b"}" * 20_000)
    yield "header list", _header_text(lambda text: b"[]")
    yield "header empty", _header_text(lambda text: b"{}")
    yield "header no text", _header_text(lambda text: b"\xff" * 20)
    yield "header surrogate", _header_text(lambda text: b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}')
    for length in (0, 1, 2**31, 2**63 - 1, 2**64 - 1):
        yield f"header length {length}", _header_length(length)


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _header_edit(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(path: Path) -> None:
        header, data = _split(path)
        edit(header)
        _join(path, json.dumps(header).encode(), data)

    return change


def _header_remove(name: str) -> Change:
    return _header_edit(lambda header: header.pop(name))


def _header_rename(name: str) -> Change:
    return _header_edit(lambda header: header.__setitem__(f"{name}x", header.pop(name)))


def _header_set(name: str, field: str, value: Any) -> Change:
    return _header_edit(lambda header: header[name].__setitem__(field, value))


def _header_text(edit: Callable[[bytes], bytes]) -> Change:
    def change(path: Path) -> None:
        header, data = _split(path)
        _join(path, edit(json.dumps(header).encode()), data)

    return change


def _header_length(length: int) -> Change:
    return lambda path: path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


_DATA: dict[str, Callable[[bytes], bytes]] = {
    "zeroed": lambda data: b"\0" * len(data),
    "all ones": lambda data: b"\xff" * len(data),
    "huge": lambda data: (b"\xff\xff\xff\x7e" * (len(data) // 4 + 1))[: len(data)],
    "infinite": lambda data: (np.full(len(data) // 4 + 1, np.inf, np.float32).tobytes())[: len(data)],
    "reversed": lambda data: data[::-1],
    "one bit more": lambda data: bytes([data[0] ^ 64]) + data[1:] if data else data,
    "small numbers": lambda data: (np.arange(len(data) // 4 + 1, dtype=np.int32).tobytes())[: len(data)],
}


def _data_set(name: str, numbers: Callable[[bytes], bytes]) -> Change:
    def change(path: Path) -> None:
        header, data = _split(path)
        begin, end = header[name]["data_offsets"]
        _join(path, json.dumps(header).encode(), data[:begin] + numbers(data[begin:end]) + data[end:])

    return change
