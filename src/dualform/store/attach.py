"""Put files beside a run's patterns: whole, and listed in its manifest like everything else."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from dualform.errors import RunExistsError, StoreError
from dualform.recording.media import Files
from dualform.store.folder import remove_partial, remove_unlisted
from dualform.store.format import FileEntry, locked, publish_by_content, write_tensors
from dualform.store.manifest import Manifest
from dualform.store.reader import Run


def publish_files(folder: Path, files: Files) -> dict[str, FileEntry]:
    """Publish files in a run folder; return their entries for the manifest, which is the caller's to change."""
    entries = {}
    for name, content in files.items():
        if isinstance(content, str):
            write: Callable[[Path], object] = functools.partial(Path.write_text, data=content, encoding="utf-8")
        else:
            write = functools.partial(write_tensors, tensors=content)
        entries[name] = publish_by_content(folder, name, write)
    return entries


def remove_replaced(folder: Path, manifest: Manifest) -> None:
    """Remove attached files that the manifest does not list: replaced ones, and what killed attachments left."""
    remove_partial(folder)
    remove_unlisted(folder, {entry.at or name for name, entry in manifest.files.items()}, ["media"])


def attach(run: Run, files: Files) -> None:
    """Add files to a run that nobody is recording, replacing earlier ones of the same names."""
    try:
        with locked(run.folder) as mine:
            if not mine:
                raise RunExistsError(f"{run.folder} is being recorded to. Add to it when it is closed.")
            entries = publish_files(run.folder, files)
            manifest = Manifest.read(run.folder)
            manifest = dataclasses.replace(manifest, files={**manifest.files, **entries})
            manifest.publish(run.folder)
            remove_replaced(run.folder, manifest)
    except OSError as error:
        if isinstance(error, RunExistsError):
            raise
        raise StoreError(f"{', '.join(files)} could not be written to {run.folder}: {error}.") from error
    run.manifest = manifest
