"""Run the notebooks of docs/notebooks, and keep what they put out.

.venv/bin/python scripts/notebooks.py [NAME ...]

What differs from one run to the next without a meaning (execution counts, times, ids of cells) is not kept.
"""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
MAX_SECONDS = 600  # of one cell


def main() -> None:
    """Run the notebooks that the command line names, by default all."""
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(run(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def run(path: Path) -> Any:
    """Return a notebook as it is after all of its cells have run in a kernel of their own, in its folder."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    NotebookClient(notebook, timeout=MAX_SECONDS, resources={"metadata": {"path": str(path.parent)}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = None
                output.get("data", {}).pop("text/html", None)  # the same as text, and many times as large
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


if __name__ == "__main__":
    main()
