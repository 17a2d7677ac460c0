"""The site builds strictly; every link, picture and public name is there; it asks no other server for anything."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import dualform

ROOT = Path(__file__).parents[2]
PHONE = {"width": 390, "height": 844}
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Attributes by which a page loads something when it is opened."""

pytest.importorskip("zensical", reason="pip install -c constraints.txt '.[docs]'")


class Page(HTMLParser):
    """The links, ids and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, loads, or is called."""
        found = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and (target := found.get("href")):
            self.links.append(target)
        if (
            tag in LOADED
            and (target := found.get(LOADED[tag]))
            and found.get("rel") not in ("canonical", "next", "prev")
        ):
            self.loads.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as scripts/docs builds it, but elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "scripts" / "pages.py", folder / "build" / "docs"], check=True)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "paths: [src]" in settings
    source = json.dumps(str(ROOT / "src"))
    (folder / "mkdocs.yml").write_text(settings.replace("paths: [src]", f"paths: [{source}]"), encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "-c", "from zensical.main import cli; cli()", "build", "--strict", "--clean"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the site."""
    return {path: Page(path) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].ids if target in pages else {parts.fragment}
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    home = site / "index.html"
    linked = {(home.parent / unquote(urlsplit(link).path)).resolve() for link in pages[home].links}
    left_out = {path for path in pages if path.name != "404.html"} - {home.resolve()} - linked
    assert {path.relative_to(site).as_posix() for path in left_out} == set()


@pytest.mark.slow
def test_nothing_is_loaded_from_another_server(site: Path, pages: dict[Path, Page]) -> None:
    assert [load for page in pages.values() for load in page.loads if urlsplit(load).netloc] == []
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")) == []


def test_every_public_name_is_documented_with_an_example() -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    blocks = "".join(re.findall(r"```python\n(.*?)```", reference, re.DOTALL))
    for name in dualform.__all__:
        doctest = ">>> " in (getattr(dualform, name).__doc__ or "")
        assert doctest or re.search(rf"dualform\.{name}\b", blocks), f"{name} has no example that is run"
        assert name == "__version__" or f"::: dualform.{name}\n" in reference, f"{name} is on no page of the API"


@pytest.mark.browser
@pytest.mark.parametrize("scripts", [True, False], ids=["javascript", "no javascript"])
def test_a_phone_can_read_it(site: Path, chromium: Any, scripts: bool) -> None:
    page = chromium.new_page(viewport=PHONE, java_script_enabled=scripts)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index", "start", "keep", "refusals", "recipes/mislabelled", "api/asking", "support", "performance"):
        page.goto((site / f"{name}.html").as_uri())
        heading = page.locator("article h1").first
        assert heading.is_visible(), name
        right = page.locator("article").first.bounding_box()
        assert right is not None
        assert right["x"] + right["width"] <= PHONE["width"] + 1, name
        if scripts:
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
    assert [address for address in asked if not address.startswith(("file:", "data:", "blob:"))] == []
    page.close()
