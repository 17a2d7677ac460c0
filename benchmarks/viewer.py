"""How long people wait for the viewer, measured through a real browser; and twenty clients at once.

    dualform reproduce single --seeds 1 --folder runs/reproduce
    .venv/bin/python benchmarks/viewer.py runs/reproduce/single-mnist-0/run

The server runs as users run it, in a process of its own. Times are from the click (or the navigation) to the page that
shows the answer, painted. The first time a run is viewed its group weights are prepared; that is reported apart.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Page, sync_playwright

GOALS = {  # milliseconds, at the median
    "first view": 2000,
    "another test: prediction": 300,
    "another test: patterns": 300,
    "mask": 100,
}
PAGE = Path(__file__).parents[1] / "docs" / "viewer.md"
BEGIN, END = "<!-- measured -->", "<!-- end measured -->"
CLICK = """
async ([selector, panels]) => {
  const shown = () => panels.map((id) => document.getElementById(id).dataset.shown ?? "");
  const old = shown();
  const times = panels.map(() => null);
  const start = performance.now();
  document.querySelector(selector).click();
  while (times.includes(null)) {
    if (performance.now() - start > 60000) throw new Error("no answer in a minute");
    await new Promise((resolve) => {
      const turn = new MessageChannel();
      turn.port1.onmessage = resolve;
      turn.port2.postMessage(0);
    });
    const fresh = shown().map((text, i) => times[i] === null && text !== old[i]);
    if (fresh.includes(true)) {
      await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));  // painted
      fresh.forEach((is, i) => { if (is) times[i] = performance.now() - start; });
    }
  }
  return times;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the folder of a recorded run with images and tests")
    parser.add_argument("--repeat", type=int, default=50, help="clicks of each kind")
    parser.add_argument("--clients", type=int, default=20, help="clients at once")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", action="store_true", help="write the table into docs/viewer.md")
    arguments = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        sys.exit("This needs Chromium: apt-get install chromium.")
    command = [sys.executable, "-c", "from dualform.cli import main; main()", "view", arguments.run]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        found = measure(address, executable, arguments.repeat, server.pid)
        found |= at_once(address, arguments.clients)
    finally:
        server.terminate()
        server.wait(10)
    found["machine"] = {"cores": os.cpu_count(), "load": os.getloadavg()}
    print(json.dumps(found, indent=1) if arguments.json else table(found))
    if arguments.page:
        write_page(found)


def measure(address: str, executable: str, repeat: int, server: int) -> dict[str, Any]:
    """Measure what one person sees."""
    chance = random.Random(0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        start = time.perf_counter()
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(address)
        page.wait_for_selector("body[data-ready=all]", timeout=600_000)
        opening = time.perf_counter() - start
        page.wait_for_selector(".badge.good, .badge.amber-box", timeout=600_000)
        preparing = time.perf_counter() - start
        first = [_first(browser, address) for _ in range(5)]
        before = cpu_seconds(server)
        tests = [_another(page, chance) for _ in range(repeat)]
        quiet(page)
        between = cpu_seconds(server)
        masks = [_mask(page, chance) for _ in range(repeat)]
        quiet(page)
        after = cpu_seconds(server)
        browser.close()
    return {
        "cold": {"first view of this server, s": opening, "masks prepared after, s": preparing},
        "first view": _summary(first),
        "another test: prediction": _summary([prediction for prediction, _ in tests]),
        "another test: patterns": _summary([max(both) for both in tests]),
        "mask": _summary(masks),
        "cpu": {  # what the server computes, whoever else keeps the machine busy
            "another test, all panels, ms": 1000 * (between - before) / repeat,
            "mask, and all tests under it, ms": 1000 * (after - between) / repeat,
        },
    }


def _first(browser: Any, address: str) -> float:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    start = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("#prediction[data-shown]")
    page.wait_for_selector("#top[data-shown] .card")
    page.wait_for_selector("#layers svg")
    page.wait_for_selector("#browser .test")
    milliseconds = 1000 * (time.perf_counter() - start)
    context.close()
    return milliseconds


def _another(page: Page, chance: random.Random) -> tuple[float, float]:
    quiet(page)
    page.evaluate(f"document.querySelector('#browser [role=listbox]').scrollTop = {chance.randrange(0, 100_000)}")
    page.wait_for_timeout(60)
    ids: list[str] = page.eval_on_selector_all("#browser .test[aria-selected=false]", "e => e.map(x => x.id)")
    prediction, patterns = page.evaluate(CLICK, [f"#{chance.choice(ids)}", ["prediction", "top"]])
    return prediction, patterns


def _mask(page: Page, chance: random.Random) -> float:
    quiet(page)
    count = page.locator("#mask .chip[data-group]").count()
    chip = f"#mask .chip:nth-child({1 + chance.randrange(count)})"
    return float(page.evaluate(CLICK, [chip, ["prediction"]])[0])


def quiet(page: Page) -> None:
    """Wait until nothing is being asked any more, as somebody who reads does."""
    page.wait_for_timeout(350)
    page.wait_for_selector("[aria-busy=true]", state="detached", timeout=60_000)


def at_once(address: str, clients: int) -> dict[str, Any]:
    """Let clients ask everything at the same time; count what is not answered."""
    base, token = address.split("/?token=")
    paths = ("prediction", "layers", "top", "curves", "time")

    def everything(client_number: int) -> list[tuple[int, float]]:
        answers = []
        with httpx.Client(base_url=base, timeout=300) as client:
            client.get("/", params={"token": token})
            for path in paths:
                start = time.perf_counter()
                response = client.get(
                    f"/api/{path}", params={"test": client_number, "by": "label", "g": client_number % 10}
                )
                answers.append((response.status_code, 1000 * (time.perf_counter() - start)))
        return answers

    with ThreadPoolExecutor(clients) as pool:
        answers = [one for found in pool.map(everything, range(clients)) for one in found]
    errors = sum(status != 200 for status, _ in answers)
    return {
        "at once": {
            "clients": clients,
            "questions": len(answers),
            "errors": errors,
            **_summary([t for _, t in answers]),
        }
    }


def cpu_seconds(process: int) -> float:
    """Return the processor time that a process has used, on Linux."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _summary(milliseconds: list[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {"median": statistics.median(ordered), "least": ordered[0], "worst": ordered[-1], "count": len(ordered)}


def write_page(found: dict[str, Any]) -> None:
    """Replace the table in docs/viewer.md by what was measured."""
    rows = ["| what | median, ms | least | worst | goal | |", "|---|---|---|---|---|---|"]
    for name, goal in GOALS.items():
        one = found[name]
        verdict = "met" if one["median"] < goal else "**missed**"
        numbers = " | ".join(f"{one[which]:.0f}" for which in ("median", "least", "worst"))
        rows.append(f"| {name} ({one['count']} times) | {numbers} | {goal} | {verdict} |")
    crowd = found["at once"]
    numbers = " | ".join(f"{crowd[which]:.0f}" for which in ("median", "least", "worst"))
    asked = f"{crowd['clients']} clients at once, {crowd['questions']} questions, {crowd['errors']} errors"
    rows.append(f"| {asked} | {numbers} | | |")
    cpu = "; ".join(f"{name}: {value:.0f}" for name, value in found["cpu"].items())
    cold = "; ".join(f"{name}: {value:.1f}" for name, value in found["cold"].items())
    machine = f"{found['machine']['cores']} cores, load {found['machine']['load'][0]:.1f} at the end"
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest_of_page = text.partition(BEGIN)
    _, end, after = rest_of_page.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} lacks the marks {BEGIN} and {END}.")
    body = "\n".join(["", *rows, "", f"Processor time of {cpu}. Cold: {cold}. {machine}.", ""])
    PAGE.write_text(f"{before}{BEGIN}{body}{END}{after}", encoding="utf-8")


def table(found: dict[str, Any]) -> str:
    lines = [f"{'what':24} {'median ms':>10} {'least':>8} {'worst':>8} {'goal':>7}"]
    for name, goal in GOALS.items():
        one = found[name]
        verdict = "met" if one["median"] < goal else "MISSED"
        lines.append(f"{name:24} {one['median']:10.0f} {one['least']:8.0f} {one['worst']:8.0f} {goal:7} {verdict}")
    crowd = found["at once"]
    asked = f"{crowd['clients']} clients, {crowd['questions']} questions"
    lines.append(f"{asked}: {crowd['errors']} errors, median {crowd['median']:.0f} ms")
    lines += [f"processor time, {name}: {value:.0f}" for name, value in found["cpu"].items()]
    lines += [f"{name}: {value:.1f}" for name, value in found["cold"].items()]
    lines.append(f"{found['machine']['cores']} cores, load {found['machine']['load'][0]:.1f} (others work here too)")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
