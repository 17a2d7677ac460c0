"""Files of this machine as the store sees them: blobs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from dualform.store.blobs import Blob
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.tensors import write_parts


def file_blob(path: Path) -> Blob:
    """Return a file as a blob of its folder."""
    return Blob(FolderBlobs(path.parent), path.name)


def file_checksum(path: Path) -> str:
    """Return the checksum of a file, as the manifest has it."""
    return file_blob(path).checksum()


def write_parts_file(path: Path, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Write tensors in parts to a file."""
    with path.open("wb") as file:
        write_parts(file, tensors)
