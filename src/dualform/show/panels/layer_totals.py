"""Totals by group in every layer: attention, magnitude, contribution to or effect on the predicted output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.attend.questions import Totals
from dualform.attend.sums import apply_uses
from dualform.engine.measures import Of
from dualform.errors import SharesOnlyError
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.session import Session, Subject

MAX_TOTALS = 40  # that are shown: the largest in any layer


@dataclass(frozen=True, slots=True)
class OneLayerTotals:
    """The totals of one layer.

    Attributes:
        layer: the layer's name.
        row: the query row that was asked about, of `rows`.
        rows: how many query rows the layer has for this input.
        reason: why `totals` is None.
        totals: one for each group that is shown.
        sum: over all groups, also those that are not shown.
    """

    layer: str
    row: int
    rows: int
    reason: str | None
    totals: list[float] | None
    sum: float | None


@dataclass(frozen=True, slots=True)
class LayerTotals:
    """The totals of every layer, by the same groups in the same order.

    Attributes:
        of: what is summed: "attention", "magnitude", "contribution" or "effect".
        by: the columns that the groups are values of.
        unit: the output unit that the model predicts; contributions and effects are on it.
        unit_name: the output unit as people read it.
        groups: the groups that are shown.
        names: the groups as people read them.
        left_out: how many groups are not shown.
        layers: the totals, layer by layer.
    """

    of: str
    by: list[str]
    unit: int
    unit_name: str
    groups: list[Any]
    names: list[str]
    left_out: int
    layers: list[OneLayerTotals]


def layer_totals(
    session: Session, subject: Subject, by: GroupingColumns, of: Of, *, row: int | None = None
) -> LayerTotals:
    """Return the totals of one input in every layer."""
    spotlight, rows = session.spotlight(subject, row=row)
    unit = int(session.outputs(subject).argmax())
    found: dict[str, dict[Any, float] | None] = {}
    reasons: dict[str, str] = {}
    together: dict[str, Any] = {}
    if of in ("attention", "magnitude") and not session.shares_only:
        (together,) = spotlight.compute(Totals(by=list(by), of=of))  # one reading for all layers
    for name, layer in spotlight.layers.items():
        if of == "effect":
            reason = why_no_effects(session, subject, name)
            if reason is not None:
                found[name], reasons[name] = None, reason
                continue
            effects = session.margin_spotlight(subject, unit)[name].effects(list(by))
            found[name] = dict(zip(effects.groups, effects.values[0].tolist(), strict=True))
        elif of != "contribution":
            try:
                answer = together[name] if name in together else layer.totals(list(by), of=of)
            except SharesOnlyError as error:
                found[name], reasons[name] = None, str(error)
                continue
            found[name] = dict(zip(answer.groups, answer.values[0].tolist(), strict=True))
        elif session.memory.layers[name].store == "keys":
            found[name] = None
            reasons[name] = "Recorded with its keys only: attention, but no contributions."
        elif name not in session.slopes(subject, unit):
            found[name] = None
            reasons[name] = "Part of a larger module: how the output moves with it is not seen."
        else:
            labels, values = _contributions(session, subject, by, name, unit)
            found[name] = dict(zip(labels, values.tolist(), strict=True))
    groups = list({group: None for values in found.values() for group in values or ()})
    shown = groups if len(groups) <= MAX_TOTALS else _largest_groups(groups, found)
    return LayerTotals(
        of=of,
        by=[str(part) for part in by],
        unit=unit,
        unit_name=session.name(unit),
        groups=shown,
        names=[group_name(session.media, by, group) for group in shown],
        left_out=len(groups) - len(shown),
        layers=[
            OneLayerTotals(
                layer=name,
                row=rows[name][0],
                rows=rows[name][1],
                reason=reasons.get(name),
                totals=None if values is None else [values.get(group, 0.0) for group in shown],
                sum=None if values is None else sum(values.values()),
            )
            for name, values in found.items()
        ],
    )


def why_no_effects(session: Session, subject: Subject, layer: str) -> str | None:
    """Return why a layer has no effects to show, or None if it has some."""
    if not subject.inputs.is_floating_point():
        return "Effects are shown where the model gives one output per input."
    if session.memory.layers[layer].store == "keys":
        return "Recorded with its keys only: attention, but no effects."
    return session.margin_spotlight(subject, int(session.outputs(subject).argmax())).outside().get(layer)


def _contributions(
    session: Session, subject: Subject, by: GroupingColumns, layer: str, unit: int
) -> tuple[tuple[Any, ...], Tensor]:
    """Return the groups, and the contribution of each to the model's output `unit` through a layer, (G,).

    A group's contribution to the layer's output is projected on the gradient of the model's output by that output.
    """
    spot = session.whole(subject)[layer]
    slope = session.slopes(subject, unit)[layer].double()  # (rows, d_out)
    by_group = session.weights(by).shares(layer)
    if by_group is not None:
        groups, shares = by_group
        each = [
            (apply_uses({use: share[g] for use, share in shares.items()}, spot.queries) * slope).sum()
            for g in range(len(groups))
        ]
        return groups, torch.stack(each)
    answer = spot.totals(list(by), of="contribution")
    return answer.groups, torch.einsum("qgo,qo->g", answer.values.double(), slope)


def _largest_groups(groups: list[Any], found: dict[str, dict[Any, float] | None]) -> list[Any]:
    """Return the groups whose totals are largest in any layer, each layer relative to its own largest total."""
    size = {
        group: max(
            abs(values.get(group, 0.0)) / (max(map(abs, values.values()), default=0.0) or 1.0)
            for values in found.values()
            if values is not None
        )
        for group in groups
    }
    return sorted(groups, key=lambda group: -size[group])[:MAX_TOTALS]
