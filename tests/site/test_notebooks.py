"""The notebooks run as they stand, one of them in a kernel of its own, and are kept with outputs that are small."""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 60_000
IN_A_KERNEL = "own-mlp"
"""The notebook that a kernel of its own runs, which imports everything again."""
PACKAGES = {"lora-sources": ("transformers", "peft")}


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["lora-sources", "mislabelled-images", "own-mlp"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_small(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert path.stat().st_size < MAX_BYTES
    assert sum(bool(cell.get("outputs")) for cell in cells) >= 3, "run scripts/docs --notebooks"
    assert not any(output["output_type"] == "error" for cell in cells for output in cell.get("outputs", ()))


@pytest.mark.campaign  # one notebook always runs, and so do the recipes of these two subjects (test_pages.py)
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != IN_A_KERNEL], ids=lambda path: path.stem)
def test_it_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a shell of this process, which does with a cell what a kernel does and has imported torch already."""
    shells = pytest.importorskip("IPython.core.interactiveshell")
    plots = pytest.importorskip("matplotlib.pyplot")
    for package in PACKAGES.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(plots, "show", lambda: plots.close("all"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a kernel, where a warning is no error
        shell = shells.InteractiveShell(history_load_length=0)
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                shell.run_cell("".join(cell["source"]), store_history=False).raise_error()
    assert "FAILED" not in capsys.readouterr().out  # what a verification that did not pass prints


@pytest.mark.slow
def test_it_runs_in_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path = FOLDER / f"{IN_A_KERNEL}.ipynb"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the kernel imports what this process does
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
