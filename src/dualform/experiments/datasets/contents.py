"""From the bytes that a source gives to the uncompressed, verified content of a file.

Everything here raises `SourceError`, whose message is one source's reason; the chain in `sources` collects
them. Knows nothing of where the bytes come from.
"""

import gzip
import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import IO

from dualform.errors import DataError


class SourceError(DataError):
    """One source cannot give the files; the message says why."""


def gunzip(content: bytes, *, name: str) -> bytes:
    """Uncompress the content of a gzip file."""
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise SourceError(f"{name} is no complete gzip file ({error})") from error


def verify_checksum(content: bytes, *, sha256: str, name: str) -> bytes:
    """Return the content if it has this sha256."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise SourceError(f"{name} has the wrong checksum: sha256 {found[:16]}…, expected {sha256[:16]}…")
    return content


def read_verified(folder: Path, file: str, *, sha256: str) -> bytes:
    """Read a file that a folder holds either plain or as `.gz`; whichever is sound will do."""
    reasons = []
    for path in (folder / file, folder / f"{file}.gz"):
        try:
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gunzip(content, name=path.name)
            return verify_checksum(content, sha256=sha256, name=path.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except SourceError as error:
            reasons.append(str(error))
        except OSError as error:
            reasons.append(f"{path.name} cannot be read ({error.strerror})")
    raise SourceError("; ".join(reasons) or f"{file} is not there, neither plain nor as .gz")


def read_members(archive: IO[bytes], files: Collection[str]) -> dict[str, bytes]:
    """Read files out of a tar archive, by base name, wherever in it they are; `.gz` members are uncompressed.

    Nothing is unpacked to disk, so a member's path can do no harm.
    """
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                file = name.removesuffix(".gz")
                if not member.isfile() or not {name, file} & set(files):
                    continue
                stream = tar.extractfile(member)
                assert stream is not None, "a regular file always has content"
                content = stream.read()
                if name in files:
                    contents[name] = content
                else:
                    contents[file] = gunzip(content, name=name)
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise SourceError(f"the archive is no complete tar file ({error})") from error
    missing = [file for file in files if file not in contents]
    if missing:
        raise SourceError(f"the archive does not hold {', '.join(missing)}")
    return contents


def read_zip(content: bytes, files: Collection[str]) -> dict[str, bytes]:
    """Read files out of a zip archive, by base name, wherever in it they are. Nothing is unpacked to disk."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {PurePosixPath(name).name: name for name in archive.namelist()}
            missing = [file for file in files if file not in members]
            if missing:
                raise SourceError(f"the archive does not hold {', '.join(missing)}")
            return {file: archive.read(members[file]) for file in files}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise SourceError(f"the archive is no complete zip file ({error})") from error


def cut_book(content: bytes, *, first: str, name: str) -> bytes:
    """Return a book of Project Gutenberg without the header and the licence around it, with plain line ends."""
    book = content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    start, end = book.find(first.encode()), book.find(b"*** END OF ")
    if start < 0 or end < start:
        raise SourceError(f"{name} has no {first.strip()!r} before '*** END OF'")
    return book[start:end]
