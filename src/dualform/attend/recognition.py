"""Is this the model that was recorded? A few hundred elements of each parameter are compared with what the run logged.

Cheap enough for every question. It recognises a model; it does not prove that every weight is right (`verify` does).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dualform.engine.beside_patterns import KnownState
from dualform.engine.fingerprints import fingerprint, matching_steps
from dualform.engine.source import PatternSource
from dualform.lazy import compute as pc
from dualform.recording.sinks import sample
from dualform.recording.watch import plain_name

MAX_NAMED_DIFFERENCES = 3  # differing parts that a message names


def logged_marks(run: PatternSource, horizon: int) -> dict[str, str]:
    """Return the fingerprint of each covered parameter after `horizon` steps, as far as the run knows it."""
    if horizon == run.steps and run.final is not None:
        return {name: fingerprint(sample(tensor)) for name, tensor in run.final.items()}
    marks = {name: fingerprint(sample(tensor)) for name, tensor in run.initial.items()}  # what no optimizer moves
    if horizon and run.steps_table.num_rows:
        table = run.steps_table.filter(pc.field("step") == horizon - 1)
        marks |= dict(zip(table["parameter"].to_pylist(), table["fingerprint"].to_pylist(), strict=True))
    return marks


def differing_parts(
    run: PatternSource, model: nn.Module, marks: Mapping[str, str], state: KnownState | None
) -> list[str]:
    """Return the names of a model's parts that are not those of the recording.

    Args:
        run: the run.
        model: the model to recognise.
        marks: what `logged_marks` returned for the step to compare with.
        state: the uncovered state to compare with; None where it is not known for that step.
    """
    live = {plain_name(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found = []
    for name, mark in marks.items():
        entry = run.description.parameters[name]
        if (
            name not in live
            or tuple(live[name].shape) != entry.shape
            or _fingerprint_of(live[name], entry.dtype) != mark
        ):
            found.append(name)
    for name, value in (state.values if state is not None else {}).items():
        # A buffer of another shape is one that the model makes as it goes, such as a table of positions.
        if name in live and live[name].shape == value.shape and not _same(live[name], value):
            found.append(name)
    return found


def _fingerprint_of(tensor: Tensor, dtype: str) -> str:
    return fingerprint(sample(tensor).cpu().to(getattr(torch, dtype)))


def _same(live: Tensor, value: Tensor) -> bool:
    here, there = sample(live).cpu().to(value.dtype), sample(value)
    return bool(torch.equal(here, there)) or fingerprint(here) == fingerprint(there)  # NaN equals itself by its bytes


def other_model_text(run: PatternSource, model: nn.Module, names: list[str], horizon: int) -> str:
    """Say that a model is not the recorded one, which parts differ, and which step's weights it has if any."""
    listed = ", ".join(map(repr, names[:MAX_NAMED_DIFFERENCES])) + (
        f" and {len(names) - MAX_NAMED_DIFFERENCES} more" if len(names) > MAX_NAMED_DIFFERENCES else ""
    )
    live = {plain_name(name): tensor for name, tensor in model.named_parameters()}
    covered = {name: live[name] for name in run.description.parameters if name in live}
    steps = matching_steps(run, covered) - {horizon} if len(covered) == len(run.description.parameters) else set()
    which = f" Its recorded weights are those after step {max(steps)}." if steps else ""
    return (
        f"This model is not the recorded one after step {horizon}: {listed} differ.{which} Ask with the model of that "
        "step, for example memory.trained(model) at the end, or pass other_model=True if another one is meant."
    )
