"""docs/results.md: sections made from findings. No number in it is typed by hand.

A study has a section of its own, between two marks, and writing one leaves the others as they are.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dualform.experiments.study_summary import Grid

HEAD = """# Results

Every section of this page is made by the command that stands in it, from the runs themselves; no number is typed by
hand. The paper is Irie, Csordás and Schmidhuber, "The Dual Form of Neural Networks Revisited" (ICML 2022).
"""

ORDER = ("single", "joint", "continual", "continual-shares", "aesop", "aesop-paper", "wikitext2", "wikitext2-paper")
"""The paper's studies come first, in the paper's order; others follow as they come."""


@dataclass(frozen=True, slots=True)
class Section:
    """A study's section.

    Attributes:
        name: the study's, and the section's.
        title: its heading.
        text: what was done and how, one paragraph each.
        grids: its tables.
        more: Markdown that follows the tables.
        figures: file name -> where it lies; copied beside the page.
        captions: file name -> what it shows.
    """

    name: str
    title: str
    text: tuple[str, ...]
    grids: Sequence[Grid]
    more: str = ""
    figures: Mapping[str, Path] = field(default_factory=dict)
    captions: Mapping[str, str] = field(default_factory=dict)


def write_page(path: Path, sections: Sequence[Section]) -> None:
    """Write sections into the page, replacing those of the same names, and copy their figures beside it."""
    there = _read_sections(path.read_text("utf-8")) if path.is_file() else {}
    for section in sections:
        _copy_figures(section, path.parent / "figures" / "results")
        there[section.name] = _render(section)
    names = sorted(there, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    parts = [f"{_section_mark(name)}\n{there[name].strip()}\n{_section_mark(name, end=True)}\n" for name in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEAD, *parts]), "utf-8")


def _section_mark(name: str, *, end: bool = False) -> str:
    return f"<!-- {'end' if end else 'section'} {name} -->"


def _read_sections(page: str) -> dict[str, str]:
    """Return the sections of a page, by name."""
    found = re.finditer(r"<!-- section (\S+) -->\n(.*?)\n<!-- end \1 -->", page, re.DOTALL)
    return {match[1]: match[2] for match in found}


def _copy_figures(section: Section, folder: Path) -> None:
    for old in folder.glob(f"{section.name}-*.png"):
        old.unlink()
    for name, source in section.figures.items():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / name)


def _render(section: Section) -> str:
    lines = [f"## {section.title}\n", *(f"{paragraph}\n" for paragraph in section.text)]
    lines += [markdown(grid) for grid in section.grids]
    lines += [section.more] if section.more else []
    if section.figures:
        lines.append("### Single test examples\n")
        lines += [f"![{section.captions[name]}](figures/results/{name})\n" for name in section.figures]
    return "\n".join(lines)


def markdown(grid: Grid) -> str:
    """Return a table as Markdown."""
    table = [
        f"### {grid.title}\n",
        "| " + " | ".join(grid.columns) + " |",
        "|" + "---|" * len(grid.columns),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in grid.rows),
        "",
    ]
    return "\n".join([*table, f"{grid.note}\n"] if grid.note else table)


def made_by(command: str, seeds: int) -> str:
    """Return the sentence that says where a section's numbers come from."""
    spread = f" Numbers are means ± standard deviations over {seeds} seeds." if seeds > 1 else " One seed."
    return f"Made by `{command}`.{spread}"
