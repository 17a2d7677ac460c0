from collections.abc import Iterator
from pathlib import Path
import pytest
from conformance.blobs import BlobsConformance
from dualform.store.blobs import Blobs
from dualform.store.object_blobs import ObjectBlobs
from dualform.store.range_cache import RangeCache
from helpers.object_storage import ObjectStorage, serving


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStorage]:
    with serving() as found:
        yield found


class TestObjectBlobs(BlobsConformance):
    @pytest.fixture
    def blobs(self, server: ObjectStorage, tmp_path: Path) -> Blobs:
        return ObjectBlobs(server.address(), cache=RangeCache(tmp_path / "cache", 1 << 24))
