"""Make the pictures of the viewer and the report that the README and the docs show, in both themes.

.venv/bin/python scripts/screenshots.py RUN [--test 8] [--mask 6] [--folder docs/figures]
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

COLOURS = 160  # of a picture: enough for flat panels, and a third of the bytes


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--test", type=int, default=8)
    parser.add_argument("--mask", default="6", help="the group that is masked, as JSON")
    parser.add_argument("--folder", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        sys.exit("This needs Chromium: apt-get install chromium.")
    dualform = [sys.executable, "-c", "from dualform.cli import main; main()"]
    server = subprocess.Popen([*dualform, "view", str(arguments.run)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            state = f"{address}&test={arguments.test}&g={arguments.mask}"
            for theme in ("light", "dark"):
                viewer(browser, state, theme, arguments.folder / f"viewer-{theme}.png")
            report = Path(folder) / "report.html"
            subprocess.run(
                [*dualform, "report", str(arguments.run), "-o", str(report), "-t", str(arguments.test)], check=True
            )
            page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme="light")
            page.goto(report.as_uri())
            page.locator("section.test").scroll_into_view_if_needed()
            box = page.locator("section.test").bounding_box()
            assert box is not None
            page.evaluate(f"window.scrollBy(0, {box['y']})")
            save(page.screenshot(), arguments.folder / "report.png")
            browser.close()
    finally:
        server.terminate()
        server.wait(20)


def viewer(browser: Browser, address: str, theme: str, path: Path) -> None:
    """Take a picture of the viewer when everything is there."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme=theme)  # type: ignore[arg-type]
    page.goto(address)
    page.wait_for_selector("body[data-ready=all]", timeout=120_000)
    page.wait_for_selector(".badge.good", timeout=300_000)
    page.wait_for_selector("#history li", timeout=120_000)
    page.wait_for_timeout(500)
    save(page.screenshot(), path)
    page.close()


def save(picture: bytes, path: Path) -> None:
    """Write a picture with few colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
