"""Manifests that a test has changed: written with the checksum that fits, as a forger would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualform.store.manifest import sealed


def write_manifest(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a document as the manifest of a run folder, with its checksum."""
    (folder / "manifest.json").write_text(sealed(document))
