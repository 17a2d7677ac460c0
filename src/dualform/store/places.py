"""From the place of a run, as a user names it, to its blobs: a path, an address of object storage, or `Blobs`."""

import os

from dualform.store.blobs import Blobs
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.object_address import is_address

Place = str | os.PathLike[str] | Blobs


def as_blobs(place: Place) -> Blobs:
    """Return the place of a run as `Blobs`: a path is a folder's, "s3://bucket/run" that of an object storage."""
    if isinstance(place, Blobs):
        return place
    if is_address(place):
        from dualform.store.object_blobs import ObjectBlobs  # which needs obstore

        return ObjectBlobs(os.fspath(place))
    return FolderBlobs(place)
