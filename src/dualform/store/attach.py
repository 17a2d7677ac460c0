"""Put files beside a run's patterns: whole, and listed in its manifest like everything else."""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import BinaryIO

from dualform.errors import RunExistsError, StoreError
from dualform.recording.media import Files
from dualform.store.blobs import Blobs, FileEntry, Write, publish_by_content
from dualform.store.manifest import Manifest
from dualform.store.reader import Run
from dualform.store.tensors import write_tensors


def publish_files(blobs: Blobs, files: Files) -> dict[str, FileEntry]:
    """Publish files beside a run's patterns; return their entries, which the caller puts into the manifest."""
    entries = {}
    for name, content in files.items():
        if isinstance(content, str):
            text = content.encode()
            write: Write = functools.partial(_write_bytes, content=text)
        else:
            write = functools.partial(write_tensors, tensors=content)
        entries[name] = publish_by_content(blobs, name, write)
    return entries


def _write_bytes(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def remove_replaced(blobs: Blobs, manifest: Manifest) -> None:
    """Remove attached files that the manifest does not list: replaced files, and files of killed processes."""
    blobs.remove_unpublished()
    remove_unlisted(blobs, {entry.at or name for name, entry in manifest.files.items()}, ["media/"])


def remove_unlisted(blobs: Blobs, listed: Collection[str], prefixes: Sequence[str]) -> None:
    """Remove the blobs with some prefixes whose names are not listed."""
    for prefix in prefixes:
        for name in blobs.list(prefix):
            if name not in listed:
                blobs.remove(name)


def attach(run: Run, files: Files) -> None:
    """Add files to a run that nobody is recording, replacing earlier ones of the same names."""
    try:
        with run.blobs.lease() as mine:
            if not mine:
                raise RunExistsError(f"{run.name} is being recorded to. Add to it when it is closed.")
            entries = publish_files(run.blobs, files)
            manifest, tag = Manifest.read_tagged(run.blobs)
            manifest = dataclasses.replace(manifest, files={**manifest.files, **entries})
            manifest.publish(run.blobs, was=tag)
            remove_replaced(run.blobs, manifest)
    except OSError as error:
        if isinstance(error, RunExistsError | StoreError):
            raise
        raise StoreError(f"{', '.join(files)} could not be written to {run.name}: {error}.") from error
    run.published = manifest
    run.manifest = dataclasses.replace(run.manifest, files=manifest.files)
