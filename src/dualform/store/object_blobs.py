"""A run in object storage (S3, Google, Azure), over obstore: a blob is an object, and rows are read by ranges.

An object appears whole, and the manifest is put on the condition that it is still the one that was read, so that
writers elsewhere are noticed. A blob is read on the condition that it is the one that was there when the run was
opened: a blob that somebody replaced is an error and not a wrong answer. What fails for a moment is tried again, by
obstore with growing pauses; what fails for good is a `RemoteError` that says where and why. Messages of obstore are not
passed on, since they quote addresses and answers in which keys and tokens may stand.
"""

import contextlib
import datetime
import io
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import xxhash

from dualform.errors import RemoteError, RunExistsError, StoreError
from dualform.store.blobs import Blobs, ByteSpan, FileEntry, Tag, Write, changed_error
from dualform.store.folder import FOLDERS, OWN_NAMES, TOP_NAMES
from dualform.store.format import FROZEN, INITIAL, LOCK, MANIFEST
from dualform.store.object_address import endpoint, parse_address
from dualform.store.object_lease import Lease
from dualform.store.range_cache import BLOCK_BYTES, RangeCache, cache_bytes, cache_place
from dualform.store.summed_file import SummedFile

if TYPE_CHECKING:
    import obstore.store

REQUEST_BYTES = 32 * BLOCK_BYTES  # bytes of one request; more are asked for side by side
REQUEST_SECONDS = 60.0  # in which one request has to be answered
RETRIES = 8  # of one request by obstore
FIRST_PAUSE_SECONDS = 0.2  # before a request is tried again; each further pause is twice as long
RETRY_SECONDS = 120.0  # after which a request is not tried again
PUBLISH_ATTEMPTS = 3  # at an upload whose connection was lost, each with obstore's own retries
MAX_CONNECTIONS = 16  # requests side by side
MAX_WHOLE_BYTES = 8 << 20  # a blob up to this size is read at once where it is read as a file
FILE_BUFFER_BYTES = 1 << 20  # of larger blobs that are read as files
PUT_MARK = "dualformput"  # metadata that names one put, to find out what a lost answer said; Azure takes no hyphen

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """Requests to the storage, and the bytes of blobs that were read and written by them."""

    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class ObjectBlobs(Blobs):
    """The blobs of one run in object storage: `ObjectBlobs("s3://bucket/run")`.

    Attributes:
        traffic: what was asked of the storage by this object.
        cache: ranges that were read, on this machine's disk.
    """

    def __init__(self, address: str, *, cache: RangeCache | None = None) -> None:
        self.address = parse_address(address)
        self.cache = RangeCache(cache_place(), cache_bytes()) if cache is None else cache
        self.traffic = Traffic()
        self._store = _open_store(self.address.scheme, self.address.bucket)
        self._known: dict[str, _Known] = {}  # blobs as they were when somebody looked last
        self._lock = threading.Lock()  # of the counters
        self._lease: Lease | None = None  # that this object holds

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectBlobs, (str(self.address),)

    def within(self, folder: str) -> "ObjectBlobs":
        """Return a folder below this address as a place of its own."""
        return ObjectBlobs(f"{self.address}/{folder}", cache=self.cache)

    @property
    def location(self) -> str:
        """The address."""
        return str(self.address)

    def load(self, name: str) -> tuple[bytes, Tag]:
        """Return the content of a blob as it is now, and its tag."""
        content, found = self._whole(name)
        return content, self._tag(found.meta)

    def size(self, name: str) -> int | None:
        """Return how many bytes a blob has now; None where there is none of that name."""
        try:
            return self._look(name).size
        except FileNotFoundError:
            return None

    def sizes(self, names: Sequence[str]) -> Mapping[str, int | None]:
        """Return how many bytes blobs have now, by listing the place once; these are the ones that are read then."""
        self._known = {}
        for meta, name in self._listed():
            self._known[name] = _Known(meta["size"], meta["e_tag"] or "")
        return {name: self._known[name].size if name in self._known else None for name in names}

    def ranges(self, name: str, spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        """Return parts of a blob, from the cache where they are there, the others side by side."""
        known = self._known.get(name) or self._look(name)
        if any(offset + count > known.size for offset, count in spans):
            raise OSError(f"{self.location}/{name} ends too early")
        if not self.cache.limit:
            pieces = [(offset + start, min(REQUEST_BYTES, count - start)) for offset, count in spans
                      for start in range(0, count, REQUEST_BYTES)]  # fmt: skip
            found = iter(self._side_by_side([partial(self._range, name, known, *piece) for piece in pieces]))
            return [memoryview(b"".join(next(found) for _ in range(0, count, REQUEST_BYTES))) for _, count in spans]
        return self._cached_ranges(name, known, spans)

    def publish(self, name: str, write: Write) -> FileEntry:
        """Let `write` make the content of a blob, and put it: readers see all of it or nothing."""
        return self.stage(name, write).publish()

    def stage(self, name: str, write: Write) -> "_StagedObject":
        """Let `write` make the content of a blob in a temporary file, to be put later."""
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed when the blob is put, or discarded)
        try:
            summed = SummedFile(file)
            write(summed)  # type: ignore[arg-type]
            summed.finish()
        except BaseException:
            file.close()
            raise
        return _StagedObject(self, name, file, summed.count, summed.digest.hexdigest())

    def replace(self, name: str, content: bytes, *, was: Tag | None) -> Tag:
        """Replace a blob if its content is still the one of the tag `was`."""
        self._check_lease()
        tag = self._put_if(name, content, was)
        if tag is None:
            raise changed_error(self, name)
        return tag

    def list(self, prefix: str = "") -> Sequence[str]:
        """Return the names of our own blobs that begin with a prefix."""
        return [name for _, name in self._listed(prefix)]

    def remove(self, name: str) -> None:
        """Remove a blob; does nothing where there is none."""
        self._check_lease()
        self._delete(name)

    @contextmanager
    def lease(self) -> Iterator[bool]:
        """Hold the lease of the place; gives whether it could be had. It ends a minute after a kill at the latest."""
        lease = Lease(self)
        if not lease.acquire():
            yield False
            return
        self._lease = lease
        try:
            yield True
        finally:
            self._lease = None
            lease.release()

    def identity(self) -> Hashable:
        """Return the address, and the storage that it is an address of."""
        return (str(self.address), endpoint(self.address.scheme))

    def make_ready(self) -> None:
        """Raise where the place holds anything but a run, or the rest of one that was killed at its start."""
        names = {name for _, name in self._objects()}
        if names and MANIFEST not in names and not names <= {LOCK, INITIAL, FROZEN}:
            raise RunExistsError(f"{self.location} is not empty and holds no run. Choose a new address.")

    def open(self, name: str) -> BinaryIO:
        """Return a blob as a file: a small one is read at once, a large one through a buffer."""
        known = self._known.get(name) or self._look(name)
        if known.size <= MAX_WHOLE_BYTES:
            return io.BytesIO(self.ranges(name, [(0, known.size)])[0])
        return io.BufferedReader(_ObjectFile(self, name, known.size), FILE_BUFFER_BYTES)

    def stamp(self, name: str) -> Hashable | None:
        """Return the tag of a blob."""
        try:
            return self._tag(self._head(name))
        except FileNotFoundError:
            return None

    def by_use(self, prefix: str) -> Sequence[tuple[str, int]]:
        """Return the names and sizes of the blobs with a prefix, the one that was put last first."""
        found = sorted(self._listed(prefix), key=lambda each: each[0]["last_modified"], reverse=True)
        return [(name, meta["size"]) for meta, name in found]

    # What a lease needs -------------------------------------------------------------------------------------------

    def lease_content(self) -> tuple[bytes, str, datetime.datetime] | None:
        """Return the lease as it is: its content, its tag, and when it was put; None where there is none."""
        try:
            content, found = self._whole(LOCK)
        except FileNotFoundError:
            return None
        return content, self._tag(found.meta), found.meta["last_modified"]

    def put_lease(self, content: bytes, was: str | None) -> str | None:
        """Put the lease if it is still the one of a tag (None: none); return its new tag, None if it is not."""
        return self._put_if(LOCK, content, was)

    def remove_lease(self) -> None:
        """Remove the lease."""
        self._delete(LOCK)

    def storage_time(self) -> datetime.datetime:
        """Return the time by the storage's clock: the time of an object that is put for that."""
        name = f"{LOCK}-{uuid.uuid4().hex}"
        self._put_if(name, b"", None)
        try:
            found: datetime.datetime = self._head(name)["last_modified"]
            return found
        finally:
            self._delete(name)

    # Requests -----------------------------------------------------------------------------------------------------

    def upload(self, name: str, file: BinaryIO, size: int) -> None:
        """Put the content of a file; what is lost on the way is put again, from its first byte."""
        import obstore

        self._check_lease()
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(PUBLISH_ATTEMPTS):
            file.seek(0)
            try:
                with self._request(name, written=size):
                    found = obstore.put(self._store, self.address.key(name), file, chunk_size=REQUEST_BYTES)
                break
            except RemoteError:
                if attempt + 1 == PUBLISH_ATTEMPTS:
                    raise
                time.sleep(pause)
                pause *= 2
        self._known[name] = _Known(size, found["e_tag"] or "")

    def _whole(self, name: str) -> tuple[bytes, Any]:
        """Return the content of a blob as it is now, and obstore's result."""
        import obstore

        with self._request(name):
            found = obstore.get(self._store, self.address.key(name))
            content = bytes(found.bytes())
        self._count(read=len(content))
        return content, found

    def _look(self, name: str) -> "_Known":
        """Return what a blob is now. If it is seen for the first time, this is the one that is read from here on."""
        meta = self._head(name)
        found = _Known(meta["size"], meta["e_tag"] or "")
        self._known.setdefault(name, found)
        return found

    def _head(self, name: str) -> Any:
        import obstore

        with self._request(name):
            return obstore.head(self._store, self.address.key(name))

    def _delete(self, name: str) -> None:
        import obstore

        self._known.pop(name, None)
        with contextlib.suppress(FileNotFoundError), self._request(name):
            obstore.delete(self._store, self.address.key(name))

    def _range(self, name: str, known: "_Known", offset: int, count: int) -> bytes:
        """Return a part of a blob as it was known."""
        import obstore

        condition = {"if_match": known.e_tag} if known.e_tag else {}
        try:
            with self._request(name):
                options: Any = {"range": (offset, offset + count), **condition}
                content = bytes(obstore.get(self._store, self.address.key(name), options=options).bytes())
        except _OtherContentError:
            raise RemoteError(
                f"{self.location}/{name} was replaced after the run was opened. Open the run again."
            ) from None
        self._count(read=len(content))
        if len(content) != count:
            raise RemoteError(f"{self.location}/{name} gave {len(content)} bytes of {count}. Try again.")
        return content

    def _cached_ranges(self, name: str, known: "_Known", spans: Sequence[ByteSpan]) -> Sequence[memoryview]:
        key = xxhash.xxh3_128_hexdigest(repr((self.identity(), name, known.size, known.e_tag)).encode())
        blocks = sorted({
            block for offset, count in spans if count
            for block in range(offset // BLOCK_BYTES, (offset + count - 1) // BLOCK_BYTES + 1)
        })  # fmt: skip
        held: dict[int, bytes | memoryview] = dict(self.cache.get(key, known.size, blocks))
        missing = _runs([block for block in blocks if block not in held], REQUEST_BYTES // BLOCK_BYTES)
        places = [(first * BLOCK_BYTES, min(last * BLOCK_BYTES, known.size)) for first, last in missing]
        asked = [partial(self._range, name, known, start, stop - start) for start, stop in places]
        for (first, last), content in zip(missing, self._side_by_side(asked), strict=True):
            whole = memoryview(content)
            self.cache.put(key, known.size, first, whole)
            for block in range(first, last):
                held[block] = whole[(block - first) * BLOCK_BYTES : (block - first + 1) * BLOCK_BYTES]
        return [_cut(held, offset, count) for offset, count in spans]

    def _side_by_side(self, calls: Sequence[Callable[[], T]]) -> Sequence[T]:
        """Return the results of calls that wait for the storage, in their order."""
        return [call() for call in calls] if len(calls) < 2 else list(_connections().map(lambda call: call(), calls))

    def _put_if(self, name: str, content: bytes, was: Tag | None) -> Tag | None:
        """Put a blob on the condition that it is the one of a tag (None: not there); None where it is another.

        Where an answer is lost, the put may have happened, and the condition fails when it is tried again. So each put
        carries a mark, which tells ours from that of another writer.
        """
        import obstore

        mark, pause = uuid.uuid4().hex, FIRST_PAUSE_SECONDS
        which = "version" if self.address.scheme == "gs" else "e_tag"
        mode: Any = "create" if was is None else {which: was}
        for attempt in range(PUBLISH_ATTEMPTS):
            try:
                with self._request(name, written=len(content)):
                    attributes: Any = {PUT_MARK: mark}
                    key = self.address.key(name)
                    found = obstore.put(
                        self._store, key, content, mode=mode, attributes=attributes, use_multipart=False
                    )
                return self._tag(found)
            except _OtherContentError:
                return self._marked(name, mark)
            except RemoteError:
                if attempt + 1 == PUBLISH_ATTEMPTS:
                    raise
                time.sleep(pause)
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _marked(self, name: str, mark: str) -> Tag | None:
        """Return the tag of a blob if a put of ours with this mark made it."""
        try:
            found = self._whole(name)[1]
        except FileNotFoundError:
            return None
        return self._tag(found.meta) if found.attributes.get(PUT_MARK) == mark else None

    def _listed(self, prefix: str = "") -> Iterator[tuple[Any, str]]:
        """Yield our own blobs that begin with a prefix, as obstore describes them, and their names."""
        for meta, name in self._objects():
            folder, _, last = name.rpartition("/")
            own = OWN_NAMES.fullmatch(last) if folder in FOLDERS else name in TOP_NAMES
            if own and name.startswith(prefix):
                yield meta, name

    def _objects(self) -> Sequence[tuple[Any, str]]:
        """Return every object of the place, as obstore describes it, and its name."""
        import obstore

        found = []
        with self._request(""):
            for chunk in obstore.list(self._store, f"{self.address.prefix}/", chunk_size=1000):
                found += [(meta, meta["path"].removeprefix(f"{self.address.prefix}/")) for meta in chunk]
        return found

    def _tag(self, meta: Any) -> Tag:
        found = meta["version" if self.address.scheme == "gs" else "e_tag"]
        if not found:
            raise RemoteError(f"{self.location}: the storage gives no ETags, by which two writers are told apart.")
        return str(found)

    def _check_lease(self) -> None:
        if self._lease is not None and self._lease.lost:
            raise StoreError(
                f"The lease of {self.location} could not be renewed in time, and somebody else may write there by now. "
                "Open the run again, and resume the recording from a checkpoint."
            )

    def _count(self, *, requests: int = 0, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.traffic.requests += requests
            self.traffic.bytes_read += read
            self.traffic.bytes_written += written

    @contextmanager
    def _request(self, name: str, *, written: int = 0) -> Iterator[None]:
        """Ask the storage: errors become ours, and keep nothing of obstore's messages."""
        from obstore import exceptions

        self._count(requests=1, written=written)
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError) as error:
            found = self._error(name, error)
        else:
            return
        raise found

    def _error(self, name: str, error: BaseException) -> Exception:
        from obstore import exceptions

        at, text = f"{self.location}/{name}".rstrip("/"), str(error)
        if isinstance(error, exceptions.PreconditionError | exceptions.AlreadyExistsError | FileExistsError):
            return _OtherContentError()
        if "NoSuchBucket" in text:
            return RemoteError(f"{at}: there is no bucket {self.address.bucket!r}. Make it, or correct the address.")
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
            return FileNotFoundError(2, "No such blob", at)
        status = re.search(r"status code: (\d{3})", text)
        if isinstance(error, PermissionError) or (status and status[1] in ("401", "403")):
            return RemoteError(
                f"{at}: the storage refused permission{f' ({status[1]})' if status else ''}. Check the credentials in "
                "your environment, and what they allow."
            )
        if "169.254.169.254" in text or "redential" in text:
            return RemoteError(
                f"{at}: no credentials were found. Set those of your storage in the environment (for S3 "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)."
            )
        if status:
            return RemoteError(f"{at}: the storage answered with status {status[1]}, also when asked again.")
        if re.search(r"(?<!retry_)[Tt]imeout|TimedOut|timed out", text):
            return RemoteError(f"{at}: the storage gave no answer in {REQUEST_SECONDS:g} s, also when asked again.")
        return RemoteError(f"{at}: there is no connection to the storage, also when tried again. Check the network.")


@dataclass(frozen=True, slots=True)
class _Known:
    """A blob as it was when somebody looked."""

    size: int
    e_tag: str


class _OtherContentError(Exception):
    """A condition on the content of a blob does not hold."""


@dataclass(slots=True)
class _StagedObject:
    """The content of a blob in a temporary file, which is not put yet."""

    blobs: ObjectBlobs
    name: str
    file: BinaryIO
    bytes: int
    xxh3: str

    def publish(self, name: str | None = None) -> FileEntry:
        """Put it under its name, or another; return its entry."""
        try:
            self.blobs.upload(self.name if name is None else name, self.file, self.bytes)
        finally:
            self.discard()
        return FileEntry(self.bytes, self.xxh3)

    def discard(self) -> None:
        """Remove the temporary file."""
        self.file.close()


class _ObjectFile(io.RawIOBase):
    """A large blob as a file that is read by ranges."""

    def __init__(self, blobs: ObjectBlobs, name: str, size: int) -> None:
        self._blobs, self._name, self._size, self._at = blobs, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._blobs.ranges(self._name, [(self._at, count)])[0]
        self._at += count
        return count


def _open_store(scheme: str, bucket: str) -> "obstore.store.ObjectStore":
    """Return obstore's client for a bucket, with what the environment says of credentials and endpoint."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise RemoteError(
            f"A run at {scheme}://... needs the package obstore: pip install 'dualform[cloud]'."
        ) from error
    retry: Any = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_SECONDS),
            "max_backoff": timedelta(seconds=15),
            "base": 2,
        },
    }
    client: Any = {"timeout": timedelta(seconds=REQUEST_SECONDS), "connect_timeout": timedelta(seconds=10)}
    if endpoint(scheme).startswith("http://"):
        client["allow_http"] = True
    try:
        return from_url(
            f"{scheme}://{bucket}", client_options=client, retry_config=retry, **_profile_credentials(scheme)
        )
    except RemoteError:
        raise
    except Exception as error:  # of obstore or boto3, whose words may quote a setting
        kind = type(error).__name__
    raise RemoteError(
        f"{scheme}://{bucket}: the settings of the storage in your environment cannot be used ({kind}). Check its "
        "variables, and the profile if one is named."
    )


def _profile_credentials(scheme: str) -> dict[str, Any]:
    """Return the credentials of an AWS profile where one is in use; everything else obstore finds by itself."""
    shared = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    named = os.environ.get("AWS_PROFILE")
    if scheme != "s3" or os.environ.get("AWS_ACCESS_KEY_ID") or not (named or Path(shared).expanduser().exists()):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise RemoteError("The credentials of an AWS profile need the package boto3: pip install boto3.") from error
    session = boto3.Session()
    if session.get_credentials() is None:
        return {}
    region = {"region": session.region_name} if session.region_name else {}
    return {"credential_provider": Boto3CredentialProvider(session), **region}


def _runs(blocks: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges of at most `most`: the first, and the one behind the last."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block and block - found[-1][0] < most:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


def _cut(held: Mapping[int, bytes | memoryview], offset: int, count: int) -> memoryview:
    """Return a span of a blob from its blocks."""
    if not count:
        return memoryview(b"")
    first, last = offset // BLOCK_BYTES, (offset + count - 1) // BLOCK_BYTES
    start = offset - first * BLOCK_BYTES
    if first == last:
        return memoryview(held[first])[start : start + count]
    return memoryview(b"".join(held[block] for block in range(first, last + 1)))[start : start + count]


_pool: list[ThreadPoolExecutor] = []  # of threads that wait for answers, made when first needed
_pool_lock = threading.Lock()


def _connections() -> ThreadPoolExecutor:
    with _pool_lock:
        if not _pool:
            _pool.append(ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="dualform-storage"))
        return _pool[0]


os.register_at_fork(after_in_child=_pool.clear)
