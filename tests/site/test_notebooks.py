"""The notebooks run as they stand, in a kernel of their own, and are kept with outputs that are small."""

import json
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 60_000
PACKAGES = {"lora-sources": ("transformers", "peft")}


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["lora-sources", "mislabelled-images", "own-mlp"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_small(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert path.stat().st_size < MAX_BYTES
    assert sum(bool(cell.get("outputs")) for cell in cells) >= 3, "run scripts/docs --notebooks"
    assert not any(output["output_type"] == "error" for cell in cells for output in cell.get("outputs", ()))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for package in PACKAGES.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the kernel imports what this process does
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
