"""Edits of a run's files, whose checksums in the manifest are made to fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from helpers.blob_files import file_checksum
from helpers.manifests import write_manifest

Edit = Callable[[Any], Any]
"""Takes a table and returns another."""


def sign(folder: Path, name: str) -> None:
    """Let the manifest give a file's size and checksum as they are now."""
    raw = json.loads((folder / "manifest.json").read_text())
    for listed in (raw["files"], *(shard["files"] for shard in raw["shards"])):
        if name in listed:
            listed[name] |= {"bytes": (folder / name).stat().st_size, "xxh3": file_checksum(folder / name)}
    write_manifest(folder, raw)


def edit_table(folder: Path, name: str, edit: Edit, **options: Any) -> None:
    pq.write_table(edit(pq.read_table(folder / name)), folder / name, **options)
    sign(folder, name)


def cell(column: str, row: int, value: Any) -> Edit:
    def edit(table: Any) -> Any:
        cells = table[column].to_pylist()
        cells[row] = value
        kind = table.schema.field(column).type
        return table.set_column(table.column_names.index(column), column, pa.array(cells, type=kind))

    return edit
