"""Copy a run from one place to another: from a folder into object storage, back, or between any two.

The files of the manifest that is there at the beginning are copied, each compared with its checksum on the way, and
the manifest last: a copy that was cut off is no run. A run that is still being recorded is copied as far as it was
published.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from dualform.errors import CorruptError, RunExistsError, StoreError
from dualform.progress import bar
from dualform.store.blobs import READ_BYTES, Blob, Blobs
from dualform.store.format import MANIFEST, rank_folder
from dualform.store.places import Place, as_blobs
from dualform.store.reader import Run

ATTEMPTS = 5  # at opening a run whose manifest is being replaced


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """A run that was copied: its new place, and the number and bytes of its files, the manifest included."""

    location: str
    files: int
    bytes: int


def copy_run(source: Place, target: Place) -> CopiedRun:
    """Copy a run to a place that holds none."""
    there = as_blobs(target)
    run, manifests = _opened(as_blobs(source))
    there.make_ready()
    with there.lease() as mine:
        if not mine:
            raise RunExistsError(f"{there.location} is being written to. Wait for its end, or choose another place.")
        if there.size(MANIFEST) is not None:
            raise RunExistsError(f"{there.location} holds a recorded run already. Choose another place.")
        listed = run.files()
        total = sum(entry.bytes for entry in listed.values())
        with bar("copying", total=total) as advance:
            for name, entry in listed.items():
                found = there.publish(name, _writes(run.blobs, name, advance))
                if (found.bytes, found.xxh3) != (entry.bytes, entry.xxh3):
                    there.remove(name)
                    raise CorruptError(
                        f"{Blob(run.blobs, name)} is not the file that the manifest lists: it was changed, or replaced "
                        "by a recording that goes on. Copy the run again, or restore the file."
                    )
        for folder, content in manifests.items():
            (there.within(folder) if folder else there).replace(MANIFEST, content, was=None)
    return CopiedRun(there.location, len(listed) + len(manifests), total + sum(map(len, manifests.values())))


def _opened(blobs: Blobs) -> tuple[Run, dict[str, bytes]]:
    """Return a run, and the contents of the very manifests that it was opened with: folder -> content, "" the last."""
    for _ in range(ATTEMPTS):
        run = Run(blobs)
        folders = {rank_folder(rank): one for rank, one in enumerate(run.others, start=1) if one is not None}
        found: dict[str, bytes] = {}
        for folder, one in [*folders.items(), ("", run)]:
            content, tag = one.blobs.load(MANIFEST)
            if tag == one.manifest_tag:
                found[folder] = content
        if len(found) == len(folders) + 1:
            return run, found
    raise StoreError(f"{blobs.location} changes faster than it can be opened. Copy it when its recording rests.")


def _writes(blobs: Blobs, name: str, advance: Callable[[int], object]) -> Callable[[BinaryIO], None]:
    """Return what writes the content of a blob to a file."""

    def write(file: BinaryIO) -> None:
        with blobs.open(name) as content:
            while block := content.read(READ_BYTES):
                file.write(block)
                advance(len(block))

    return write
