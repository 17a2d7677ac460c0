"""Totals by group in every layer: attention, magnitude, contribution to or effect on the predicted output."""

from typing import Any, cast

import torch
from torch import Tensor

from dualform.attend.sums import apply_uses
from dualform.engine.measures import Of
from dualform.show.viewer.ask import Ask
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import By, Session, Subject, group_name

MOST = 40  # groups that are shown; the largest in any layer


@question("/api/layers")
def layers(session: Session, ask: Ask) -> dict[str, Any]:
    """Return each layer's totals, the same groups in the same order."""
    of = ask.choice("of", ("attention", "magnitude", "contribution", "effect"))
    return totals(session, ask.subject(session), ask.by(session), of, row=ask.optional("row"))


def totals(session: Session, subject: Subject, by: By, of: str, *, row: int | None = None) -> dict[str, Any]:
    """Return the totals of one input in every layer."""
    spotlight, rows = session.spotlight(subject, row=row)
    unit = int(session.outputs(subject).argmax())
    found: dict[str, dict[Any, float] | None] = {}
    reasons: dict[str, str] = {}
    for name, layer in spotlight.layers.items():
        if of == "effect":
            reason = no_effects(session, subject, name)
            if reason is not None:
                found[name], reasons[name] = None, reason
                continue
            effects = session.asked(subject, unit)[name].effects(list(by))
            found[name] = dict(zip(effects.groups, effects.values[0].tolist(), strict=True))
        elif of != "contribution":
            answer = layer.totals(list(by), of=cast("Of", of))
            found[name] = dict(zip(answer.groups, answer.values[0].tolist(), strict=True))
        elif session.memory.layers[name].store == "keys":
            found[name] = None
            reasons[name] = "Recorded with its keys only: attention, but no contributions."
        elif name not in session.slopes(subject, unit):
            found[name] = None
            reasons[name] = "Part of a larger module: how the output moves with it is not seen."
        else:
            labels, values = contributions(session, subject, by, name, unit)
            found[name] = dict(zip(labels, values.tolist(), strict=True))
    groups = _order(found)
    shown = groups if len(groups) <= MOST else _largest(groups, found)
    return {
        "of": of,
        "by": [str(part) for part in by],
        "unit": unit,
        "unit_name": session.name(unit),
        "groups": shown,
        "names": [group_name(session, by, group) for group in shown],
        "left_out": len(groups) - len(shown),
        "layers": [
            {
                "layer": name,
                "row": rows[name][0],
                "rows": rows[name][1],
                "reason": reasons.get(name),
                "totals": None if values is None else [values.get(group, 0.0) for group in shown],
                "sum": None if values is None else sum(values.values()),
            }
            for name, values in found.items()
        ],
    }


def no_effects(session: Session, subject: Subject, layer: str) -> str | None:
    """Say why a layer has no effects to show, if it has none."""
    if not subject.inputs.is_floating_point():
        return "Effects are shown where the model gives one output per input."
    if session.memory.layers[layer].store == "keys":
        return "Recorded with its keys only: attention, but no effects."
    return session.asked(subject, int(session.outputs(subject).argmax())).outside().get(layer)


def contributions(session: Session, subject: Subject, by: By, layer: str, unit: int) -> tuple[tuple[Any, ...], Tensor]:
    """Return what each group adds to the model's output `unit` through a layer, (G,).

    What it adds to the layer's output, projected on how the model's output moves with that.
    """
    spot = session.whole(subject)[layer]
    slope = session.slopes(subject, unit)[layer].double()  # (rows, d_out)
    kept = session.weights(by).shares(layer)
    if kept is not None:
        groups, shares = kept
        each = [
            (apply_uses({use: share[g] for use, share in shares.items()}, spot.queries) * slope).sum()
            for g in range(len(groups))
        ]
        return groups, torch.stack(each)
    answer = spot.totals(list(by), of="contribution")
    return answer.groups, torch.einsum("qgo,qo->g", answer.values.double(), slope)


def _order(found: dict[str, dict[Any, float] | None]) -> list[Any]:
    groups: dict[Any, None] = {}
    for values in found.values():
        groups |= dict.fromkeys(values or {})
    return list(groups)


def _largest(groups: list[Any], found: dict[str, dict[Any, float] | None]) -> list[Any]:
    size = {
        group: max(
            abs(values.get(group, 0.0)) / (max(map(abs, values.values()), default=0.0) or 1.0)
            for values in found.values()
            if values is not None
        )
        for group in groups
    }
    return sorted(groups, key=lambda group: -size[group])[:MOST]
