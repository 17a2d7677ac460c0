"""As much of the protocols of Google's and Azure's storages as a run needs, in a thread of this process.

Objects lie in a dictionary. What the two services do differently is done differently here: Google tells versions of an
object apart by its generation, Azure by its ETag, and Azure takes only identifiers as names of metadata.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Service = Literal["gs", "az"]
ACCOUNT, KEY = "account", "c2VjcmV0LW9mLXRoZS10ZXN0cw=="
BUCKET = "bucket"
META = {"gs": "x-goog-meta-", "az": "x-ms-meta-"}


@dataclass(slots=True)
class StoredObject:
    """An object: its content, which of all puts made it, and its metadata."""

    content: bytes
    number: int
    metadata: dict[str, str]


@dataclass(slots=True)
class OtherStorage:
    """A running storage with one bucket, or container."""

    service: Service
    objects: dict[str, StoredObject] = field(default_factory=dict)
    puts: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    refuses: bool = False  # every request, with a 403
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    storage: OtherStorage

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Answer with a list of objects, or an object."""
        parts = urlsplit(self.path)
        if parts.path.strip("/") == BUCKET:
            self._list(parse_qs(parts.query).get("prefix", [""])[0])
            return
        found = self._find()
        if found is None:
            return
        content, start, stop = found.content, 0, len(found.content)
        if (span := self.headers.get("Range") or self.headers.get("x-ms-range")) is not None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1)
        if (tag := self.headers.get("If-Match")) is not None and tag != f'"{found.number}"':
            self._answer(412)
            return
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} if span else {}
        self._answer(206 if span else 200, content[start:stop], {**headers, **self._described(found)})

    def do_HEAD(self) -> None:
        """Describe an object."""
        if (found := self._find()) is not None:
            self._answer(200, found.content, self._described(found))

    def do_PUT(self) -> None:
        """Put an object, if its condition holds."""
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        service, at = self.storage.service, self._key()
        mark = META[service]
        metadata = {name.lower().removeprefix(mark): value for name, value in self.headers.items()
                    if name.lower().startswith(mark)}  # fmt: skip
        with self.storage.lock:
            there = self.storage.objects.get(at)
            number = "0" if there is None else str(there.number)
            if self.storage.refuses:
                self._answer(403)
                return
            if service == "az" and not all(name.isidentifier() for name in metadata):
                self._answer(400, b"InvalidMetadata")
                return
            new, same = self.headers.get("If-None-Match") == "*", self.headers.get("If-Match", f'"{number}"')
            wanted = self.headers.get("x-goog-if-generation-match", number) if service == "gs" else same.strip('"')
            if wanted != number or (service == "az" and new and there is not None):
                self._answer(409 if new else 412)
                return
            self.storage.puts += 1
            made = self.storage.objects[at] = StoredObject(content, self.storage.puts, metadata)
        self._answer(201, b"", self._described(made))

    def do_DELETE(self) -> None:
        """Remove an object."""
        found = self.storage.objects.pop(self._key(), None)
        self._answer(404 if found is None else 202)

    def do_POST(self) -> None:
        """Remove objects as Azure's client asks for it: by several requests in the body of one."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        answers = []
        for number, at in enumerate(re.findall(r"DELETE (\S+) HTTP", body)):
            self.storage.objects.pop(unquote(urlsplit(at).path).lstrip("/").removeprefix(f"{BUCKET}/"), None)
            answers.append(
                f"--answers\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                "HTTP/1.1 202 Accepted\r\nx-ms-version: 2023-11-03\r\n\r\n"
            )
        content = "".join([*answers, "--answers--\r\n"]).encode()
        self._answer(202, content, {"Content-Type": "multipart/mixed; boundary=answers"})

    def _list(self, prefix: str) -> None:
        """Answer with the objects whose names begin with a prefix, as either service writes it."""
        rows = []
        for name, found in sorted(self.storage.objects.items()):
            if not name.startswith(prefix):
                continue
            size = len(found.content)
            if self.storage.service == "gs":
                rows.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;{found.number}&quot;</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
            else:
                rows.append(
                    f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}"
                    f"</Last-Modified><Content-Length>{size}</Content-Length><Content-Type>x</Content-Type>"
                    f"<Etag>&quot;{found.number}&quot;</Etag></Properties></Blob>"
                )
        listed = "".join(rows)
        body = f"<ListBucketResult>{listed}</ListBucketResult>"
        if self.storage.service == "az":
            body = f"<EnumerationResults><Blobs>{listed}</Blobs><NextMarker /></EnumerationResults>"
        self._answer(200, body.encode())

    def _key(self) -> str:
        at = unquote(urlsplit(self.path).path).lstrip("/")
        self.storage.requests.append((self.command, at))
        return at.removeprefix(f"{BUCKET}/")

    def _find(self) -> StoredObject | None:
        found = self.storage.objects.get(self._key())
        if found is None or self.storage.refuses:
            self._answer(403 if self.storage.refuses else 404)
            return None
        return found

    def _described(self, found: StoredObject) -> dict[str, str]:
        mark = META[self.storage.service]
        generation = {"x-goog-generation": str(found.number)} if self.storage.service == "gs" else {}
        metadata = {f"{mark}{name}": value for name, value in found.metadata.items()}
        return {"ETag": f'"{found.number}"', "Last-Modified": formatdate(usegmt=True), **generation, **metadata}

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving_other(service: Service, folder: Path) -> Iterator[tuple[OtherStorage, str, dict[str, str]]]:
    """Run a storage; give it, its endpoint, and the environment by which its client finds credentials."""
    storage = OtherStorage(service)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"storage": storage}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    if service == "gs":
        account = folder / "account.json"
        names = ("private_key", "private_key_id", "client_email")
        account.write_text(json.dumps({"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(names, "")}))
        environment = {"GOOGLE_SERVICE_ACCOUNT": str(account)}
    else:
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
    try:
        yield storage, endpoint, environment
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
