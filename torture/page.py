"""The figures of the campaigns: as a table, as JSON, and as docs/reliability.md."""

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torture.outcome import Outcome

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
LIBRARIES = ("torch", "safetensors", "pyarrow", "numpy")

TITLES = {
    "kills": "Killed at any moment (SIGKILL)",
    "process_kills": "One or all of several processes killed (SIGKILL)",
    "interrupts": "Interrupted at any moment (Ctrl-C)",
    "forgeries": "Corrupted and forged run folders",
    "clients": "A viewer with fifty clients and faults",
}
PROMISES = {
    "kills": (
        "**Promised.** A process that records, resumes, closes, attaches files or writes caches may be killed at any "
        "moment. The run folder then opens at the last published step; every published step, sample and fact is there "
        "once; the weights are rebuilt within rounding; nobody holds the lock; and a training that is resumed from a "
        "checkpoint comes to the same end, with nothing unlisted left in the folder. Steps are published when a shard "
        "is full, and at the first step that ends more than 30 seconds after the shard before. A kill loses the steps "
        "since then.",
        "**Done.** Recordings of seven trainings (of patterns: momentum, several optimizers, keys only, wide inputs "
        "that are stored once; of shares, with momentum and with Adam; of steps) are killed in chains: killed, "
        "examined, resumed from the last published step or an earlier one, killed again, and at last brought to their "
        "end. "
        "Shares go on from the recorder's state of the user's checkpoint, or from what the run keeps; a run of steps "
        "is recorded anew. Moments are drawn within the beginning, the recording and the "
        "closing. Processes that replace attachments are killed, and processes that write cache files, within "
        "milliseconds of a file's beginning. A slow training whose shards never fill is killed with the 30 seconds set "
        "to 0.1; a step older than that and 2 seconds more, for a busy disk, must be there. Everything is compared "
        "with a training that was not recorded.",
    ),
    "process_kills": (
        "**Promised.** Of processes that record a training together, one or all may be killed at any moment. Each step "
        "that all of them had published is there and rebuilds the weights of its training; the processes that are left "
        "end in an error and do not hang; and the run goes on from a checkpoint and comes to its end with all steps, "
        "each once.",
        "**Done.** Two processes record a training over gloo, in chains of kills: of patterns and of shares with "
        "DistributedDataParallel, of patterns of weights that fully_shard divides between them, and of steps of both, "
        "which two processes replay after each kill before all is recorded anew. Half of the kills take one process, "
        "half take both, at a random published step or at a random time from the start. What is left is compared with "
        "a training that was not recorded.",
    ),
    "interrupts": (
        "**Promised.** Ctrl-C may come at any moment of a program's life with dualform: in `record`, `annotate`, the "
        "forward, the backward, the step, `flush`, the closing, attaching, `open`, `attend`, `verify`. It never hangs. "
        "Once the exception is dropped no thread, lock or hook of ours is left; grad mode, autocast and the modules' "
        "training flags are as they were; training on without recording gives the same bits; and the run opens at "
        "its last published step and can be resumed in the same process. A step whose recording was interrupted is "
        "left out, and steps after it are refused by name. A second Ctrl-C while a recording is being closed returns "
        "at once: what was taken is published in the background, and the folder stays locked until that is done.",
        "**Not promised.** `torch.no_grad` and every optimizer's `step` of torch itself leave grad mode off where an "
        "interrupt comes in the instant in which they put it back, recorded or not. Such interrupts are told apart by "
        "their traceback, which has no function of dualform in it, and counted below. `safetensors` may turn an "
        "interrupt that comes while it makes a tensor into an exception of another kind; that is counted too.",
        "**Done.** The trainings are the seven of the kills, of patterns, shares and steps. Interrupts are raised in "
        "the main thread by a timer, aimed into each stage of a recording's or a reader's life, or sent as SIGINT by "
        "another process; some are followed by a second one while the recording is "
        "being closed. After each, everything above is checked, the run is resumed and brought to its end, and its "
        "weights are compared to the bit with a training that was not recorded.",
    ),
    "forgeries": (
        "**Promised.** Whatever is in a run folder, a question ends in the right answer or in an error of dualform's "
        "own, soon and within bounded memory. See [security](security.md) for the limits: annotations that are forged "
        "together with their checksum cannot be told from true ones.",
    ),
    "clients": (
        "**Promised.** The viewer goes on answering, rightly, with many clients at once, clients that break off, and a "
        "run that changes under it.",
    ),
}


def machine() -> dict[str, Any]:
    """Return what the figures depend on: the day, the machine and the versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
    }


def merged(path: Path, about: Mapping[str, Any], outcomes: Sequence[Outcome], *, short: bool, seed: int) -> Any:
    """Return the figures in a file with those of some campaigns replaced."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for outcome in outcomes:
        found[outcome.campaign] = {**dataclasses.asdict(outcome), **about, "short": short, "seed": seed}
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(campaign: str) -> int:
    return list(TITLES).index(campaign) if campaign in TITLES else len(TITLES)


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print what the campaigns did."""
    for outcome in outcomes:
        verdict = f"{len(outcome.failures)} FAILURES" if outcome.failures else "no failure"
        print(f"{outcome.campaign}: {verdict}, {outcome.seconds:.0f} s")
        for name, count in outcome.counts.items():
            print(f"  {count:>8,}  {name}")
        for name, measure in outcome.measures.items():
            print(f"  {measure:>8.3g}  {name}")
        for failure in outcome.failures:
            print(f"  FAILED: {failure}")


def page(figures: Mapping[str, Any]) -> str:
    """Return docs/reliability.md."""
    parts = [
        "# Reliability\n\n"
        "What dualform promises when things go wrong, how that was attacked on purpose, and what it showed. This page "
        "is written by `scripts/torture --page`; every figure comes from the campaigns themselves.\n\n"
        "    scripts/torture                  # every campaign in full; figures to torture/results.json\n"
        "    scripts/torture --only kills     # one of them: kills, process_kills, interrupts, forgeries, clients\n"
        "    scripts/torture --short          # some seconds each, as scripts/test runs them\n"
        "    scripts/torture --page           # write this page from the figures\n\n"
        "Random moments and inputs follow from `--seed`, though the system decides where a process is when a signal "
        "comes. The exit status is 1 if anything failed.\n"
    ]
    parts += [_section(name, figures[name]) for name in sorted(figures, key=_place)]
    missing = [TITLES[name] for name in TITLES if name not in figures]
    if missing:
        parts.append(f"\nNot run yet: {', '.join(text[0].lower() + text[1:] for text in missing)}.\n")
    return "".join(parts)


def _section(name: str, found: Mapping[str, Any]) -> str:
    text = [f"\n## {TITLES.get(name, name)}\n"]
    text += [f"\n{paragraph}\n" for paragraph in PROMISES.get(name, ())]
    failures = found["failures"]
    verdict = f"**{len(failures)} failures**, listed below" if failures else "**no failure**"
    versions = ", ".join(f"{library} {number}" for library, number in found["versions"].items())
    option = " --short" if found["short"] else ""
    text.append(
        f"\n**Shown.** {verdict}. `scripts/torture --only {name}{option} --seed {found['seed']}`, {found['date']}, "
        f"{found['seconds'] / 60:.1f} minutes on {found['system']}; Python {found['python']}, {versions}.\n\n"
    )
    text.append("| what | how often |\n|---|---|\n")
    text += [f"| {what} | {count:,} |\n" for what, count in found["counts"].items()]
    if found["measures"]:
        text.append("\n| measured | |\n|---|---|\n")
        text += [f"| {what} | {measure:.3g} |\n" for what, measure in found["measures"].items()]
    text += [f"\n- FAILED: {failure.splitlines()[0]}" for failure in failures]
    return "".join(text) + ("\n" if failures else "")
