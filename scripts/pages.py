"""Gather the pages of the documentation site: docs/ as it is, and pages made of files that lie elsewhere.

.venv/bin/python scripts/pages.py build/docs

Made anew are the notebooks as pages with their outputs, CONTRIBUTING.md and CHANGELOG.md, and the lists of refusals and
other messages (`messages.py`). `scripts/docs` builds the site of
what is gathered here.
"""

import argparse
import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import messages  # beside this file

ROOT = Path(__file__).resolve().parents[1]
PROJECT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
REFUSALS_HERE = "<!-- every refusal -->"
MESSAGES_HERE = "<!-- every other message -->"
MAX_OUTPUT_LINES = 60  # of a notebook's output; what is longer is cut on the page, and whole in the notebook


def main() -> None:
    """Gather the pages in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    gather(parser.parse_args().target)


def gather(target: Path) -> None:
    """Write every page of the site to a folder, which is emptied first."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.ipynb", "findings", ".ipynb_checkpoints"))
    for source, page in PROJECT_PAGES.items():
        (target / page).write_text(links_from_root((ROOT / source).read_text(encoding="utf-8")), encoding="utf-8")
    for page, mark, made in (
        ("refusals.md", REFUSALS_HERE, messages.refusal_sections()),
        ("messages.md", MESSAGES_HERE, messages.message_sections()),
    ):
        text = (target / page).read_text(encoding="utf-8")
        (target / page).write_text(text.replace(mark, made), encoding="utf-8")
    (target / "notebooks").mkdir(exist_ok=True)
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        write_notebook_page(notebook, target / "notebooks")


def links_from_root(text: str) -> str:
    """Return a page of the root folder with its links to docs/ as a page inside of docs/ has them.

    >>> links_from_root("[a](docs/math.md#top), [b](CHANGELOG.md), [c](https://x.org/docs/y.md)")
    '[a](math.md#top), [b](changelog.md), [c](https://x.org/docs/y.md)'
    """
    text = re.sub(r"\]\(docs/", "](", text)
    for source, page in PROJECT_PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def write_notebook_page(notebook: Path, folder: Path) -> None:
    """Write a notebook as a page: its text, its code, and what each cell put out, pictures as files beside the page."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    parts = []
    for number, cell in enumerate(content["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for place, output in enumerate(cell["outputs"]):
            parts.extend(_output(output, folder, f"{notebook.stem}-{number}-{place}"))
    title, _, rest = "\n\n".join(parts).partition("\n")
    note = f"*This page is the notebook `docs/notebooks/{notebook.name}`, with what it put out.*"
    (folder / f"{notebook.stem}.md").write_text(f"{title}\n\n{note}\n{rest}\n", encoding="utf-8")


def _output(output: dict[str, Any], folder: Path, name: str) -> list[str]:
    """Return what a cell put out as Markdown; a picture is written to the folder."""
    if output["output_type"] == "stream":
        return [_text("".join(output["text"]))]
    data = output.get("data", {})
    if "image/png" in data:
        (folder / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
        return [f"![What the cell above draws]({name}.png)"]
    return [_text("".join(data["text/plain"]))] if "text/plain" in data else []


def _text(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    if len(lines) > MAX_OUTPUT_LINES:
        lines = [*lines[:MAX_OUTPUT_LINES], f"... and {len(lines) - MAX_OUTPUT_LINES} lines more"]
    return "```text\n" + "\n".join(lines) + "\n```"


if __name__ == "__main__":
    main()
