"""The gallery: the pictures of the demo's wrong answer, under the names that README shows."""

from pathlib import Path

import pytest

from dualform.errors import DataError
from dualform.experiments.gallery import copy_pictures

README = Path(__file__).parents[2] / "README.md"


def test_pictures_of_the_wrong_answer_are_copied_under_the_names_that_readme_shows(tmp_path: Path) -> None:
    figures = [tmp_path / f"digits-{kind}-{name}.png" for kind in ("right-0", "wrong-2") for name in ("curves", "top")]
    for path in figures:
        path.write_bytes(path.name.encode())
    copied = copy_pictures(figures, tmp_path / "figures")
    assert [path.read_bytes() for path in copied] == [b"digits-wrong-2-curves.png", b"digits-wrong-2-top.png"]
    assert f"docs/figures/{copied[0].name}" in README.read_text(encoding="utf-8")


def test_a_demo_without_a_mistake_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--seed"):
        copy_pictures([tmp_path / "digits-right-0-curves.png"], tmp_path / "figures")
