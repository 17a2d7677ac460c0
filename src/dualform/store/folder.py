"""The names of files in a run folder: published files, and partial files that were not published.

A run folder may come from somebody else, or lie on a disk that others write to. A link in it, followed for writing or
deleting, would reach files outside.
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from dualform.store.format import FINAL, FROZEN, INITIAL, LOCK, MANIFEST, STARTING, UNCOVERED

PARTIAL = ".partial-"
FOLDERS = ("shards", "calls", "annotations", "steps", "uncovered", "media", "shares", "unexplained", "restart", "cache")
TOP_NAMES = frozenset({MANIFEST, INITIAL, FINAL, FROZEN, UNCOVERED, STARTING})
OWN_NAMES = re.compile(
    r"\d{6}\.(safetensors|parquet)|[a-z]+(-[0-9a-f]{16})?\.(safetensors|json)|(state-)?\d{9}\.safetensors"
    r"|[0-9a-f]{32}\.safetensors"
)
"""Names of the files in `FOLDERS`: shards by number, media by kind and checksum, sums by digest, others by step."""
PARTIAL_NAMES = re.compile(re.escape(PARTIAL) + r"[A-Za-z0-9._-]+")


def check_no_link(path: Path) -> None:
    """Raise `OSError` where a file's folder inside the run is a link: writing there would write elsewhere."""
    if path.parent.name in FOLDERS and path.parent.is_symlink():
        raise OSError(f"{path.parent} is a link, and nothing is written through it")


def own_files(folder: Path, kinds: Collection[str] = FOLDERS) -> Iterator[Path]:
    """Yield the files below a run's folders that have names of ours; none that is a link or lies behind one."""
    for kind in kinds:
        place = folder / kind
        if place.is_symlink() or not place.is_dir():
            continue
        for path in place.iterdir():
            if OWN_NAMES.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                yield path


def partial_files(folder: Path, kinds: Collection[str] = FOLDERS) -> Iterator[Path]:
    """Yield the partial files, and folders of partial files, that killed writers left in a run folder."""
    for place in (folder, *(folder / kind for kind in kinds)):
        if (place != folder and place.is_symlink()) or not place.is_dir():
            continue
        for path in place.iterdir():
            if PARTIAL_NAMES.fullmatch(path.name) and not path.is_symlink():
                yield path


def remove_folder(folder: Path) -> None:
    """Remove a folder and the files in it, as far as that can be done; folders inside it stay.

    Not `shutil.rmtree`: where Ctrl-C comes as it closes a file descriptor, it closes that number once more.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()


def is_foreign(folder: Path) -> bool:
    """Say whether a folder holds other files than a run, or than the rest of a run that was killed at its start."""
    names = {path.name for path in folder.iterdir()}
    if not names or MANIFEST in names:
        return False
    return LOCK not in names or any(
        name not in (LOCK, INITIAL, FROZEN, STARTING) and not name.startswith(PARTIAL) for name in names
    )
