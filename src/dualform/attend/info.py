"""What a memory holds, in a few lines."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualform.engine.source import PatternSource, groupings_text
from dualform.engine.verification import percent_text, stored_bytes
from dualform.identity.families.naming import class_name
from dualform.recording.estimate import size_text


@dataclass(frozen=True, slots=True)
class Info:
    """What a memory holds."""

    path: str
    steps: int
    closed: bool
    view: str
    layers: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, str]
    uncovered: Mapping[str, int]
    optimizers: tuple[str, ...]
    bytes: int
    shares: tuple[tuple[str, ...], ...] = ()  # the groupings by which shares are kept
    horizons: tuple[int, ...] = ()  # after how many steps shares are kept
    no_final: str = ""  # why a closed run has no final weights
    explained: float | None = None  # of a run made from checkpoints: the explained share of the change of its weights
    not_kept: Mapping[str, str] | None = None  # uncovered state whose final values are not kept, and why; None: no word

    def __repr__(self) -> str:
        lines = [f"{self.path}: {self.steps} steps, {size_text(self.bytes)}, trained by {', '.join(self.optimizers)}"]
        if not self.closed:
            lines.append("still being recorded, or cut off; this is what was published")
        if self.no_final:
            lines.append(f"no final weights were kept: {self.no_final}")
        if self.explained is not None:
            lines.append(f"made from checkpoints: explains {percent_text(self.explained)} of the change of the weights")
        if self.view:
            lines.append(f"view: {self.view}")
        lines += [
            f"  {name}: {layer['kind']} {layer['d_in']} -> {layer['d_out']}, {layer['patterns']:,} patterns, "
            f"{layer['store']}, {layer['dtype']}{_rows(layer)}"
            for name, layer in self.layers.items()
        ]
        if self.shares:
            after = f"after steps {', '.join(map(str, self.horizons))}" if self.horizons else "not published yet"
            lines.append(f"shares: by {groupings_text(self.shares)}; {after}")
        lines.append(f"columns: {', '.join(self.columns) or 'none'}")
        if self.uncovered:
            lines.append(f"not recorded: {', '.join(self.uncovered)}")
        if self.not_kept is None:
            lines.append("the values of what is not recorded, buffers included, are not known")
        elif self.not_kept:
            lines.append("values not kept: " + "; ".join(f"{name} {why}" for name, why in self.not_kept.items()))
        return "\n".join(lines)


def _rows(layer: Mapping[str, Any]) -> str:
    """Return what is known of a layer's rows, for its line."""
    if layer["rows"] is None:
        return ""
    why = "" if layer["rows"]["outcome"] == "proved" else f" ({layer['rows']['reason']})"
    return f", rows {layer['rows']['outcome']}{why}"


def describe_run(run: PatternSource, view: str) -> Info:
    """Describe a run; `view` says which part of it is looked at."""
    described = run.description
    explanation = run.explanation()
    layers = {
        name: {
            "kind": entry.kind,
            "d_in": entry.d_in,
            "d_out": entry.d_out,
            "store": entry.store,
            "dtype": entry.dtype,
            "patterns": run.seen(name),
            "bytes": stored_bytes(run, name),
            "rows": dataclasses.asdict(described.rows[name]) if name in described.rows else None,
        }
        for name, entry in run.layers.items()
    }
    return Info(
        path=run.name,
        steps=run.steps,
        closed=described.closed,
        view=view,
        layers=layers,
        columns=described.columns,
        uncovered=described.uncovered,
        optimizers=tuple(map(class_name, described.optimizers)),
        bytes=0 if run.run_files is None else run.run_files.size(),
        shares=() if run.kept_shares is None else run.kept_shares.groupings,
        horizons=() if run.kept_shares is None else run.kept_shares.horizons,
        no_final=described.no_final,
        explained=None if explanation is None else explanation.explained,
        not_kept=_not_kept(run),
    )


def _not_kept(run: PatternSource) -> dict[str, str] | None:
    """Return the uncovered state whose values the run does not keep, with the reason; None where it says nothing."""
    state = None if run.run_files is None else run.run_files.known_state()
    if state is None:
        return None
    return dict(state.unknown) | dict.fromkeys(state.checksums, "is known by its checksum alone")
