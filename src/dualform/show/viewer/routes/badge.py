"""How exact the run is: the rebuild error per layer, a by-product of preparing the group weights."""

from typing import Any

from dualform.record.estimate import size_text
from dualform.show.viewer.ask import Ask
from dualform.show.viewer.job import describe
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import By, Session


@question("/api/badge")
def badge(session: Session, ask: Ask) -> dict[str, Any]:
    """Say how well the run rebuilds its weights; the first time in its life that is prepared in the background."""
    return rebuild_badge(session, ask.by(session))


def rebuild_badge(session: Session, by: By, *, wait: bool = False) -> dict[str, Any]:
    """Return the rebuild error of each layer, whether it passed, and what is kept for masks."""
    keys_only = [name for name, entry in session.memory.layers.items() if entry.store == "keys"]
    covered = session.memory.coverage
    found: dict[str, Any] = {
        "state": "keys only",
        "layers": [],
        "keys_only": keys_only,
        "plan": None,
        "progress": None,
        "uncovered": covered.uncovered,
        "uncovered_share": covered.uncovered_share,
        "not_recorded": str(covered),
        "verdict": "",
    }
    if len(keys_only) == len(session.memory.layers):
        return found
    preparation = session.prepare(by)
    if wait:
        preparation.thread.join()
    plan = session.weights(by).plan
    found["plan"] = {
        "bins": plan.bins,
        "width": plan.width,
        "groups": len(plan.groups),
        "bytes": plan.bytes,
        "text": f"{size_text(plan.bytes)} of {size_text(plan.budget)}",
    }
    if preparation.error is not None:
        return {**found, "state": "failed", "error": preparation.error}
    if preparation.thread.is_alive():
        return {**found, "state": "preparing", "progress": describe(preparation.job)}
    rows = [
        {
            "layer": name,
            "relative_error": check.error,
            "bound": check.bound,
            "passed": check.passed,
            "keys_only": name in keys_only,
        }
        for name, check in preparation.checks.items()
    ]
    passed = "passed" if all(row["passed"] for row in rows) else "high"
    verdict = covered.passed_text if rows and passed == "passed" else ""
    return {**found, "state": passed if rows else "not measured", "layers": rows, "verdict": verdict}
