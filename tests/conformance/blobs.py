"""What every `Blobs` must be: blobs appear whole or not at all, and one writer at a time replaces the manifest."""

import threading
from functools import partial
from typing import BinaryIO

import pytest
import xxhash

from dualform.errors import StoreError
from dualform.store.blobs import Blob, Blobs, FileEntry, publish_by_content

MANIFEST = "manifest.json"
SHARD = "shards/000000.safetensors"
SUM = "cache/0123456789abcdef0123456789abcdef.safetensors"
CONTENT = bytes(range(256)) * 5


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


class BlobsConformance:
    """Derive from it, with a fixture `blobs`: an empty place for a run."""

    @pytest.fixture(autouse=True)
    def ready(self, blobs: Blobs) -> None:
        blobs.make_ready()

    def test_an_empty_place_holds_nothing(self, blobs: Blobs) -> None:
        assert blobs.exists()
        assert list(blobs.list()) == []
        assert blobs.size(SHARD) is None
        assert blobs.stamp(MANIFEST) is None
        with pytest.raises(FileNotFoundError):
            blobs.load(SHARD)
        with pytest.raises(FileNotFoundError):
            blobs.ranges(SHARD, [(0, 1)])
        with pytest.raises(FileNotFoundError):
            blobs.open(SHARD)
        blobs.remove(SHARD)

    def test_what_is_published_is_read(self, blobs: Blobs) -> None:
        def write(file: BinaryIO) -> None:
            file.write(CONTENT[:700])
            file.write(b"")
            file.write(memoryview(CONTENT)[700:])

        entry = blobs.publish(SHARD, write)
        assert entry == FileEntry(len(CONTENT), xxhash.xxh3_64_hexdigest(CONTENT))
        assert blobs.load(SHARD)[0] == CONTENT
        assert blobs.size(SHARD) == len(CONTENT)
        spans = [(0, 3), (1000, 280), (5, 0), (2, 4)]
        assert [bytes(part) for part in blobs.ranges(SHARD, spans)] == [CONTENT[a : a + n] for a, n in spans]
        with pytest.raises(OSError, match="ends too early"):
            blobs.ranges(SHARD, [(0, 3), (1000, 281)])
        assert Blob(blobs, SHARD).checksum() == entry.xxh3
        path = blobs.local_path(SHARD)
        assert path is None or path.read_bytes() == CONTENT

    def test_a_blob_is_read_like_a_file(self, blobs: Blobs) -> None:
        blobs.publish(SHARD, lambda file: file.write(CONTENT))
        with blobs.open(SHARD) as file:
            assert file.read(10) == CONTENT[:10]
            assert file.seek(-8, 2) == len(CONTENT) - 8
            assert file.read() == CONTENT[-8:]
            assert file.read() == b""
            assert file.seek(700) == file.tell() == 700
            assert file.read(5) == CONTENT[700:705]

    def test_a_failing_write_changes_nothing(self, blobs: Blobs) -> None:
        def fail(file: BinaryIO) -> None:
            file.write(b"half")
            raise OSError("no space")

        for before in (None, b"old"):
            if before is not None:
                blobs.publish(SHARD, partial(_write, before))
            with pytest.raises(OSError, match="no space"):
                blobs.publish(SHARD, fail)
            assert blobs.size(SHARD) == (None if before is None else 3)
        assert list(blobs.list()) == [SHARD]

    def test_what_is_staged_appears_when_it_is_published(self, blobs: Blobs) -> None:
        staged = blobs.stage(SHARD, lambda file: file.write(CONTENT))
        assert staged.xxh3 == xxhash.xxh3_64_hexdigest(CONTENT)
        assert blobs.size(SHARD) is None
        assert list(blobs.list()) == []
        assert staged.publish() == FileEntry(len(CONTENT), staged.xxh3)
        assert blobs.load(SHARD)[0] == CONTENT
        blobs.stage(SUM, lambda file: file.write(b"x")).discard()
        assert list(blobs.list()) == [SHARD]

    def test_a_name_after_the_content_leaves_the_earlier_blob(self, blobs: Blobs) -> None:
        first = publish_by_content(blobs, "media/tests.safetensors", lambda file: file.write(b"one"))
        second = publish_by_content(blobs, "media/tests.safetensors", lambda file: file.write(b"two"))
        assert {first.at, second.at} == set(blobs.list("media/"))
        assert first.at == f"media/tests-{first.xxh3}.safetensors"
        assert (blobs.load(first.at)[0], blobs.load(second.at)[0]) == (b"one", b"two")

    def test_names_are_listed_by_their_beginning(self, blobs: Blobs) -> None:
        names = {MANIFEST, SHARD, "shards/000012.safetensors", "calls/000000.parquet", SUM, "initial.safetensors"}
        for name in names:
            blobs.publish(name, lambda file: file.write(b"x"))
        assert set(blobs.list()) == names
        assert set(blobs.list("shards/")) == {SHARD, "shards/000012.safetensors"}
        assert set(blobs.list("shards/00001")) == {"shards/000012.safetensors"}
        assert set(blobs.list("steps/")) == set()
        blobs.remove(SHARD)
        assert set(blobs.list()) == names - {SHARD}
        assert dict(blobs.by_use("cache/")) == {SUM: 1}
        blobs.mark_used(SUM)
        blobs.remove_unpublished()
        assert set(blobs.list()) == names - {SHARD}

    def test_the_manifest_is_replaced_by_whom_knows_it(self, blobs: Blobs) -> None:
        first = blobs.replace(MANIFEST, b"one", was=None)
        assert blobs.load(MANIFEST) == (b"one", first)
        stamp = blobs.stamp(MANIFEST)
        second = blobs.replace(MANIFEST, b"two", was=first)
        assert blobs.load(MANIFEST) == (b"two", second)
        assert blobs.stamp(MANIFEST) not in (stamp, None)
        for stale in (first, None, "never"):
            with pytest.raises(StoreError, match="somebody else"):
                blobs.replace(MANIFEST, b"three", was=stale)
        assert blobs.load(MANIFEST) == (b"two", second)
        blobs.remove(MANIFEST)
        with pytest.raises(StoreError, match="somebody else"):
            blobs.replace(MANIFEST, b"three", was=second)
        assert list(blobs.list()) == []

    def test_of_many_that_replace_at_once_one_gets_through(self, blobs: Blobs) -> None:
        tag = blobs.replace(MANIFEST, b"before", was=None)
        begin = threading.Barrier(6)
        outcomes: list[int | None] = []

        def replace(number: int) -> None:
            begin.wait()
            try:
                blobs.replace(MANIFEST, b"%d" % number, was=tag)
                outcomes.append(number)
            except StoreError:
                outcomes.append(None)

        threads = [threading.Thread(target=replace, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [outcome for outcome in outcomes if outcome is not None]
        assert len(outcomes) == 6
        assert blobs.load(MANIFEST)[0] == b"%d" % winner

    def test_one_lease_at_a_time(self, blobs: Blobs) -> None:
        with blobs.lease() as first:
            assert first
            with blobs.lease() as second:
                assert not second
            with blobs.lease() as third:
                assert not third, "who did not get the lease must not end it"
        with blobs.lease() as again:
            assert again
        assert list(blobs.list()) == []

    def test_a_place_is_known_by_its_identity(self, blobs: Blobs) -> None:
        assert blobs.identity() == blobs.identity()
        assert blobs.location in str(Blob(blobs, SHARD))
        free = blobs.free_bytes()
        assert free is None or free > 0
