"""How exact the run is: the rebuild error per layer, a by-product of preparing the group weights."""

from dataclasses import dataclass, replace

from dualform.engine.verification import Verification
from dualform.recording.estimate import size_text
from dualform.show.grouping import GroupingColumns
from dualform.show.job import Progress, job_progress
from dualform.show.session import Session


@dataclass(frozen=True, slots=True)
class LayerBadge:
    """How well one layer's weights are rebuilt from its patterns."""

    layer: str
    relative_error: float | None  # of the change since the start
    bound: float | None  # the error that rounding explains
    passed: bool
    keys_only: bool
    unexplained: float | None = None  # where the layer keeps shares: what no pattern explains, of the change
    rounding: float | None = None  # where the layer keeps shares: what the steps did beyond their maps, of the change


@dataclass(frozen=True, slots=True)
class KeptForMasks:
    """The group weights that are kept in memory, so that masks are live."""

    bins: int  # of steps
    width: int  # steps per bin
    groups: int
    bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Badge:
    """How well a run rebuilds its weights.

    Attributes:
        state: "passed", "explains", "high", "not measured", "preparing", "needs replay", "failed" or "keys only".
        layers: the measurements, once the group weights are prepared.
        keys_only: the layers that were recorded with their keys only.
        plan: the group weights kept for masks; None if no layer has values.
        progress: of the preparation, while the state is "preparing".
        uncovered: trained parameters that no recorded layer covers: name -> number of elements.
        uncovered_share: the share of the trained elements that is not covered.
        not_recorded: the uncovered part in words.
        verdict: the sentence that a passed run deserves, or how much of the change shares explain.
        error: why the preparation failed.
    """

    state: str
    layers: list[LayerBadge]
    keys_only: list[str]
    plan: KeptForMasks | None
    progress: Progress | None
    uncovered: dict[str, int]
    uncovered_share: float
    not_recorded: str
    verdict: str = ""
    error: str | None = None


def rebuild_badge(session: Session, by: GroupingColumns, *, wait: bool = False) -> Badge:
    """Return the rebuild error of each layer, whether it passed, and the size of the group weights kept for masks.

    The first question about a run begins to prepare its group weights in the background.

    Args:
        session: the opened run.
        by: the columns that masks will group by.
        wait: return only when the group weights are prepared.
    """
    keys_only = [name for name, entry in session.memory.layers.items() if entry.store == "keys"]
    covered = session.memory.coverage
    badge = Badge(
        state="keys only",
        layers=[],
        keys_only=keys_only,
        plan=None,
        progress=None,
        uncovered=dict(covered.uncovered),
        uncovered_share=covered.uncovered_share,
        not_recorded=str(covered),
    )
    if len(keys_only) == len(session.memory.layers):
        return badge
    preparation = session.prepare(by)
    if wait:
        preparation.thread.join()
    plan = session.weights(by).plan
    text = f"{size_text(plan.bytes)} of {size_text(plan.budget)}"
    badge = replace(badge, plan=KeptForMasks(plan.bins, plan.width, len(plan.groups), plan.bytes, text))
    if preparation.needs_replay is not None:
        return replace(badge, state="needs replay", error=str(preparation.needs_replay))
    if preparation.error is not None:
        return replace(badge, state="failed", error=preparation.error)
    if preparation.thread.is_alive():
        return replace(badge, state="preparing", progress=job_progress(preparation.job))
    layers = [
        LayerBadge(
            name,
            check.error,
            check.bound,
            check.passed,
            name in keys_only,
            check.unexplained,
            None if check.unexplained is None else check.rounding,
        )
        for name, check in preparation.checks.items()
    ]
    if not layers:
        return replace(badge, state="not measured")
    outcome = Verification(session.memory.step, 0, tuple(preparation.checks.values()), covered)
    if outcome.explained is not None:
        return replace(badge, state="explains", layers=layers, verdict=outcome.verdict)
    if not outcome.passed:
        return replace(badge, state="high", layers=layers)
    return replace(badge, state="passed", layers=layers, verdict=covered.passed_text)
