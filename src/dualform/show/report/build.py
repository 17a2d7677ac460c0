"""Put a report together: choose tests, ask about each, write one page within a size."""

import base64
import datetime
import json
import platform
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dualform._version import __version__
from dualform.attend.path import PATH_NOTE
from dualform.attend.removal import Removal
from dualform.errors import QueryError
from dualform.progress import bar
from dualform.recording.estimate import size_text
from dualform.show.grouping import GroupingColumns, default_by
from dualform.show.panels.badge import Badge, rebuild_badge
from dualform.show.panels.path_account import PathAccount
from dualform.show.predictions import predict_units, share_right
from dualform.show.report.section import MaskedGroup, TestAnswers, ask_about_test, section_html
from dualform.show.session import Mask, Session
from dualform.show.templating import render, template_source
from dualform.show.terminal_tables import plain

if TYPE_CHECKING:
    from markupsafe import Markup

MAX_MASKS = 12
LIMITS = (
    "The identity is exact: every layer's output is what is left of its start plus the sum over recorded training "
    "patterns of coefficient × attention × value. The rebuild errors above say how exactly this run keeps it.",
    "A mask removes recorded updates from that sum and holds everything else of the trajectory as it was: later "
    "errors, momentum, clipping. The model is not retrained, and what a retraining would give is another question.",
    "Attention in one layer compares that layer's inputs only. A pattern with much attention need not have changed the "
    "output much: its value may be small, or point elsewhere. Contributions say that.",
    PATH_NOTE,
    "Totals over many patterns nearly cancel; small differences between groups can decide. Compare with a random "
    "group of the same size.",
)


def choose_tests(session: Session, count: int) -> list[int]:
    """Return the tests to report on: up to half wrong predictions, the rest right predictions of many classes."""
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


def build_report(
    session: Session,
    *,
    tests: Sequence[int],
    by: GroupingColumns | None = None,
    media: bool = True,
    most_bytes: int = 3_000_000,
    paths: Mapping[int, PathAccount | str] | None = None,
) -> str:
    """Return the page; it leaves out and lists the tests that would make it larger than `most_bytes`.

    Args:
        session: the opened run.
        tests: the numbers of the tests.
        by: the columns that training patterns are grouped by; by default the first grouping that is offered.
        media: show the tests and training samples, not only numbers.
        most_bytes: the size of the page at most.
        paths: where the answer to each test comes from, or why that is not known; tests without an entry say nothing.
    """
    by = by or default_by(session.memory)
    badge = rebuild_badge(session, by, wait=True)
    masks = mask_each(session, by, tests) if session.exact else []
    sections: list[Markup] = []
    facts: list[TestAnswers] = []
    left_out: list[int] = []
    frame = len(_page(session, by, badge, [], [], left_out, media=media).encode())
    used = frame
    with bar("reporting", total=len(tests)) as advance:
        for test in tests:
            found = ask_about_test(session, test, by, path=(paths or {}).get(test))
            section = section_html(session, found, by, masks, media=media)
            size = len(section.encode()) + 1 + len(_packed([found]))
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
    """Mask each group in turn; return the model's predictions for these tests, and its accuracy on all tests."""
    groups = session.weights(by).plan.groups[:MAX_MASKS]
    found = []
    inputs = session.tests[list(tests)]
    with bar("masking", total=len(groups)) as advance:
        for group in groups:
            model = session.masked(Mask(Removal(by=by, groups=(group,))))
            after = dict(zip(tests, predict_units(model, inputs).tolist(), strict=True))
            right = (
                None if session.targets is None else share_right(predict_units(model, session.tests), session.targets)
            )
            found.append(MaskedGroup(group, after, right))
            advance(1)
    return found


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(plain(value), separators=(",", ":")).encode(), 9)).decode("ascii")


def _page(
    session: Session,
    by: GroupingColumns,
    badge: Badge,
    sections: Sequence["Markup"],
    facts: Sequence[TestAnswers],
    left_out: Sequence[int],
    *,
    media: bool,
) -> str:
    name = session.memory.path.resolve()
    return render(
        "page.html",
        title=f"dualform report: {name.parent.name}/{name.name}",
        style=template_source("report.css"),
        script=template_source("report.js"),
        warnings=session.warnings,
        media=media,
        by=", ".join(map(str, by)),
        left_out=left_out,
        summary=_summary(session, badge),
        sections=sections,
        limits=LIMITS,
        provenance=_provenance(session),
        data=_packed(facts),
    )


def _summary(session: Session, badge: Badge) -> "Markup":
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
        if layer.unexplained is not None:
            text += f"; unexplained {layer.unexplained:.1e}, rounding {layer.rounding or 0.0:.1e}"
        rows.append((f"rebuild error, {layer.layer}", text))
    rows += [
        (name, f"{entry['kind']} {entry['d_in']} → {entry['d_out']}, {entry['patterns']:,} patterns")
        for name, entry in info.layers.items()
    ]
    return render("facts.html", rows=rows)


def _provenance(session: Session) -> "Markup":
    memory = session.memory
    rows = [
        ("made", datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")),
        ("by", f"dualform {__version__}, torch {torch.__version__}, Python {platform.python_version()}"),
        ("run recorded", f"{memory.created}, by {', '.join(f'{k} {v}' for k, v in memory.versions.items())}"),
        ("manifest", f"xxh3 {memory.manifest_checksum()}"),
        ("stored", size_text(memory.info().bytes)),
    ]
    return render("facts.html", rows=rows)
