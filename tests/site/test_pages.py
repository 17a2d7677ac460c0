"""Every block of Python on the pages is run, in the order of its page, or says on the page why it is not.

The blocks of a page share their names, as cells of a notebook do. What a page takes as given (`model`, `loader`, ...)
is made by code in comments on it, `<!-- given ... -->`, which readers do not see; `<!-- not run: the reason -->` before
a block leaves it out.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(
    r"<!-- given\n(?P<given>.*?)-->|(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```python\n(?P<block>.*?)```", re.DOTALL
)
ELSEWHERE = {"integrations.md": "tests/integrations/test_documentation.py"}
"""Pages whose blocks are scripts by themselves, and the test that runs each of them."""
PACKAGES = {"lora.md": ("transformers", "peft"), "language.md": ()}
"""Packages that a page's code needs beside those that dualform itself needs."""

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8") and page.name not in ELSEWHERE]


def code_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of whatever is to be run of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    for found in CODE.finditer(text):
        group = "given" if found["given"] is not None else "block"
        if found["reason"] is None:
            yield text[: found.start(group)].count("\n"), found[group]


def test_every_block_is_found() -> None:
    for page in WITH_CODE:
        text = page.read_text(encoding="utf-8")
        assert text.count("```python") == sum(found["block"] is not None for found in CODE.finditer(text)), page.name
        assert text.count("<!-- given") == sum(found["given"] is not None for found in CODE.finditer(text)), page.name


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in PACKAGES.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # what a page sets ends with it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for line, code in code_of(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)  # an error names the line of the page
    assert "FAILED" not in capsys.readouterr().out  # what a verification that did not pass prints
