"""Files that a closed run may keep beside its patterns: what people should see, and what the run can be asked with."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from dualform.errors import RunExistsError, StoreError
from dualform.store.format import FileEntry, Manifest, locked
from dualform.store.reader import Run


def add_media(run: Run, files: Mapping[str, Callable[[Path], FileEntry]], *, what: str) -> None:
    """Publish files, each by a function of its path, and list them in the manifest, replacing earlier ones.

    Args:
        run: the run to add to.
        files: relative path -> what publishes it.
        what: what to call them in an error.
    """
    try:
        with locked(run.folder) as mine:
            if not mine:
                raise RunExistsError(f"{run.folder} is being recorded to. Add {what} when it is closed.")
            entries = {name: publish(run.folder / name) for name, publish in files.items()}
            manifest = Manifest.read(run.folder)
            manifest = dataclasses.replace(manifest, files={**manifest.files, **entries})
            manifest.publish(run.folder)
    except OSError as error:
        if isinstance(error, RunExistsError):
            raise
        raise StoreError(f"The {what} could not be written to {run.folder}: {error}.") from error
    run.manifest = manifest
