"""The pictures that README and docs/index.md begin with: of the demo's first test digit that the network gets wrong."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dualform.errors import DataError
from dualform.experiments.demo import run_demo

PICTURES = ("curves", "top")  # of the demo's figures; in the gallery each is called demo-<name>.png


def draw_gallery(folder: Path, *, seed: int = 0) -> list[Path]:
    """Run the demo and put its pictures into a folder, in place of those that are there; return them."""
    with TemporaryDirectory() as scratch:
        return copy_pictures(run_demo(Path(scratch) / "demo", seed=seed).figures, folder)


def copy_pictures(figures: Sequence[Path], folder: Path) -> list[Path]:
    """Copy the gallery's pictures from among the demo's figures; return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    copied = []
    for name in PICTURES:
        wrong = [path for path in figures if "-wrong-" in path.name and path.stem.endswith(f"-{name}")]
        if not wrong:
            raise DataError(
                "The demo's network gets every test digit right, so there is no mistake to show. Give another --seed."
            )
        copied.append(Path(shutil.copyfile(wrong[0], folder / f"demo-{name}.png")))
    return copied
