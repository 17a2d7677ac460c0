"""The cache folder: where it is, and how a file gets into it whole or not at all.

Does not verify anything; only verified content is written here. Any failure to write is an `OSError`.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder that fetched data sets are kept in, a folder each.

    It is `datasets` in the folder that `DUALFORM_CACHE` names, or else in the platform's cache folder for
    dualform. None where the platform's is unknown, because platformdirs is not installed.
    """
    named = os.environ.get("DUALFORM_CACHE")
    if named:
        return Path(named).expanduser() / "datasets"
    try:
        import platformdirs
    except ImportError:
        return None
    return Path(platformdirs.user_cache_dir("dualform", appauthor=False)) / "datasets"


def check_writable(folder: Path) -> None:
    """Raise `OSError` unless files can be made in a folder; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files, each through a temporary sibling, so that no reader ever sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        partial = folder / f".{file}-{secrets.token_hex(8)}.partial"
        try:
            with partial.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(folder / file)
        finally:  # after Ctrl-C too, nothing partial stays behind
            partial.unlink(missing_ok=True)
