"""Put a report together: choose tests, ask about each, write one page within a size."""

import base64
import datetime
import importlib.resources
import json
import platform
import zlib
from collections.abc import Sequence
from html import escape
from typing import Any

import torch

from dualform._version import __version__
from dualform.attend.groups import Bins
from dualform.attend.removal import Removal
from dualform.errors import QueryError
from dualform.progress import bar
from dualform.record.estimate import size_text
from dualform.show.grouping import GroupingColumns, offered_groupings, parse_by
from dualform.show.panels.badge import Badge, rebuild_badge
from dualform.show.predictions import predict, share_right
from dualform.show.report.section import Facts, MaskedGroup, gather, render
from dualform.show.session import Mask, Session
from dualform.show.tables import plain
from dualform.store.format import MANIFEST, checksum

MAX_MASKS = 12
POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'\">"
)
"""What a report may load: its own style and script, and images inside it. Nothing from elsewhere."""
LIMITS = (
    "The identity is exact: every layer's output is what is left of its start plus the sum over recorded training "
    "patterns of coefficient × attention × value. The rebuild errors above say how exactly this run keeps it.",
    "A mask removes recorded updates from that sum and holds everything else of the trajectory as it was: later "
    "errors, momentum, clipping. The model is not retrained, and what a retraining would give is another question.",
    "Attention in one layer compares that layer's inputs only. A pattern with much attention need not have changed the "
    "output much: its value may be small, or point elsewhere. Contributions say that.",
    "Totals over many patterns nearly cancel; small differences between groups can decide. Compare with a random "
    "group of the same size.",
)


def choose_tests(session: Session, count: int) -> list[int]:
    """Return tests to report on: up to half of them wrong ones, the rest right ones of as many classes as there are."""
    if session.targets is None:
        return list(range(min(count, len(session.tests))))
    said = session.predictions()
    wrong = (said != session.targets).nonzero()[:, 0].tolist()[: count // 2]
    seen: set[int] = set()
    varied: list[int] = []
    rest: list[int] = []
    for test in (said == session.targets).nonzero()[:, 0].tolist():
        label = int(session.targets[test])
        (rest if label in seen else varied).append(test)
        seen.add(label)
    return sorted([*wrong, *[*varied, *rest][: count - len(wrong)]])


def default_by(session: Session) -> GroupingColumns:
    """Return the columns that a report groups by when nobody says: the first that the viewer offers."""
    offered = offered_groupings(session.memory, list(session.memory.layers)[-1])
    if not offered:
        return (Bins("step", max(1, -(-session.memory.step // 10))),)
    return parse_by(offered[0].by)


def build_report(
    session: Session,
    *,
    tests: Sequence[int],
    by: GroupingColumns | None = None,
    media: bool = True,
    most_bytes: int = 3_000_000,
) -> str:
    """Return the page; tests that would make it larger than `most_bytes` are left out, and it says so."""
    by = by or default_by(session)
    badge = rebuild_badge(session, by, wait=True)
    masks = mask_each(session, by, tests) if session.exact else []
    sections: list[str] = []
    facts: list[Facts] = []
    left_out: list[int] = []
    frame = len(_page(session, by, badge, [], [], left_out, media=media).encode())
    used = frame
    with bar("reporting", total=len(tests)) as advance:
        for test in tests:
            found = gather(session, test, by)
            section = render(session, found, by, masks, media=media)
            size = len(section.encode()) + len(_packed([found]))
            if used + size > most_bytes:
                left_out.append(test)
            else:
                used += size
                sections.append(section)
                facts.append(found)
            advance(1)
    if not sections:
        raise QueryError(
            f"Not even one test fits into {size_text(most_bytes)}. Allow more (--max-mb), or leave training "
            "samples out (--no-media)."
        )
    return _page(session, by, badge, sections, facts, left_out, media=media)


def mask_each(session: Session, by: GroupingColumns, tests: Sequence[int]) -> list[MaskedGroup]:
    """Mask each group in turn; return what the model says then about these tests, and its accuracy on all tests."""
    groups = session.weights(by).plan.groups[:MAX_MASKS]
    found = []
    inputs = session.tests[list(tests)]
    with bar("masking", total=len(groups)) as advance:
        for group in groups:
            model = session.masked(Mask(Removal(by=by, groups=(group,))))
            after = dict(zip(tests, predict(model, inputs).tolist(), strict=True))
            right = None if session.targets is None else share_right(predict(model, session.tests), session.targets)
            found.append(MaskedGroup(group, after, right))
            advance(1)
    return found


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(plain(value), separators=(",", ":")).encode(), 9)).decode("ascii")


def _page(
    session: Session,
    by: GroupingColumns,
    badge: Badge,
    sections: Sequence[str],
    facts: Sequence[Facts],
    left_out: Sequence[int],
    *,
    media: bool,
) -> str:
    name = session.memory.path.resolve()
    title = f"dualform report: {name.parent.name}/{name.name}"
    style, script = (_asset(asset) for asset in ("report.css", "report.js"))
    told = (
        "Training samples are embedded in this file; mind who may see them."
        if media
        else "No training samples are embedded."
    )
    missing = f"<p>Left out to keep the file small: tests {', '.join(map(str, left_out))}.</p>" if left_out else ""
    limits = "".join(f"<li>{escape(text)}</li>" for text in LIMITS)
    warned = "".join(f'<p class="warning" role="note">{escape(text)}</p>' for text in session.warnings)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{POLICY}<title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<style>{style}</style></head><body><main><h1>{escape(title)}</h1>{warned}<p class="muted">{told} Grouped by '
        f"{escape(', '.join(map(str, by)))}. ◆ target, ▸ what the model says.</p>{missing}"
        f'<div id="tools" hidden></div><h2>Summary</h2>{_summary(session, badge)}{"".join(sections)}'
        f"<h2>What this can and cannot say</h2><ul>{limits}</ul><h2>Provenance</h2>{_provenance(session)}</main>"
        f'<script type="application/octet-stream" id="data">{_packed(facts)}</script>'
        f"<script>{script}</script></body></html>"
    )


def _asset(name: str) -> str:
    return (importlib.resources.files("dualform.show.report") / "assets" / name).read_text(encoding="utf-8")


def _summary(session: Session, badge: Badge) -> str:
    info = session.memory.info()
    rows = [("warning", warning) for warning in session.warnings]
    rows += [
        ("steps", f"{info.steps:,}" + ("" if info.closed else ", still being recorded or cut off")),
        ("optimizer", ", ".join(info.optimizers)),
    ]
    if session.memory.factory is not None:
        spec, arguments = session.memory.factory
        rows.append(("model", f"{spec}({', '.join(f'{k}={v}' for k, v in arguments.items())})"))
    if session.targets is not None and len(session.tests):
        right = float((session.predictions() == session.targets).double().mean())
        rows.append(("accuracy", f"{100 * right:.2f} % of {len(session.tests):,} tests"))
    rows.append(("exactness", badge.verdict or badge.state))
    if badge.not_recorded:
        rows.append(("not recorded", badge.not_recorded.removeprefix("not recorded: ")))
    for layer in badge.layers:
        error, bound = layer.relative_error, layer.bound
        text = "keys only" if error is None else f"{error:.1e} of the change; at most {bound:.1e} is rounding"
        rows.append((f"rebuild error, {layer.layer}", text))
    rows += [
        (name, f"{entry['kind']} {entry['d_in']} → {entry['d_out']}, {entry['patterns']:,} patterns")
        for name, entry in info.layers.items()
    ]
    return _facts(rows)


def _provenance(session: Session) -> str:
    memory = session.memory
    rows = [
        ("made", datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")),
        ("by", f"dualform {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
        ("run recorded", f"{memory.created}, by {', '.join(f'{k} {v}' for k, v in memory.versions.items())}"),
        ("manifest", f"xxh3 {checksum(memory.path / MANIFEST)}"),
        ("stored", size_text(memory.info().bytes)),
    ]
    return _facts(rows)


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<table class="facts"><tbody>{body}</tbody></table>'
