"""The answers of `dualform attend --of path`: where the output for an input comes from, and how a terminal shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dualform.attend.memory import Memory
from dualform.attend.path import PATH_NOTE, PathContributions
from dualform.binning import Bins
from dualform.effects.output_gradients import Quantity, contrast
from dualform.effects.slopes import output_rows
from dualform.errors import QueryError
from dualform.modes import evaluation_copy
from dualform.printable import printable
from dualform.show.grouping import GroupingColumns, default_by, parse_by
from dualform.show.input_answers import late_queries_text
from dualform.show.model_loading import load_inputs, load_model
from dualform.show.panels.path_account import usual_units
from dualform.show.predictions import model_failures_named, run_model
from dualform.show.terminal_tables import console, print_grid


@dataclass(frozen=True, slots=True)
class PathAnswer:
    """Where one input's output comes from.

    Attributes:
        test: the number of the input.
        quantity: what was asked about.
        output: the quantity for this input; with reference inputs, less its mean over them.
        references: the number of reference inputs.
        parts: a row for each part: what kind it is, the group's values, and what it adds.
        over_steps: a row for each group and bin of steps, where bins were asked for.
        parts_error: how far the parts are from those of a finer path, relative; an estimate.
        residual_error: the residual relative to the change of the output over the training.
        gradients: how many times the gradient of all inputs was found.
        note: what the parts may and may not claim, and doubts about the model.
    """

    test: int
    quantity: str
    output: float
    references: int
    parts: list[dict[str, Any]]
    over_steps: list[dict[str, Any]]
    parts_error: float
    residual_error: float
    gradients: int
    note: str


def answer_path(
    memory: Memory,
    *,
    model: str | None,
    inputs: Path | None,
    tests: Sequence[int],
    by: GroupingColumns | None,
    quantity: str | None,
    units: tuple[int, int] | None,
    against: str | None,
    over: str | None,
    tolerance: float,
    accept_untrained: bool = False,
    trust: bool = False,
) -> list[PathAnswer]:
    """Ask where the outputs for the chosen inputs come from.

    Args:
        memory: the memory.
        model: `package.module:factory`; by default the one that the run remembers.
        inputs: a file of inputs; by default the tests that the run keeps.
        tests: the numbers of the inputs to ask about.
        by: the columns that training patterns are grouped by; by default the first grouping that is offered.
        quantity: "logit", "margin" or "loss" of the target, in place of a contrast.
        units: the contrast: this output rather than that one; by default what the model says rather than the target or,
            where it is right, rather than the second.
        against: reference inputs: how many of the inputs, from the first on, or a file of them.
        over: bins of steps, as "step:100": also the parts of each bin.
        tolerance: how much parts may change when the path is followed twice as finely.
        accept_untrained: answer with the factory's own values for what the run does not keep, instead of refusing.
        trust: call the functions that the run remembers, wherever they are defined.
    """
    if quantity is not None and units is not None:
        raise QueryError("Both --quantity and --contrast were given. Ask about one of them.")
    rows, targets = load_inputs(memory, inputs)
    outside = [test for test in tests if not 0 <= test < len(rows)]
    if outside:
        raise QueryError(f"There is no input {outside[0]}; there are 0 to {len(rows) - 1}.")
    bins = _step_bins(over)
    loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    net = evaluation_copy(loaded.model)
    memory = memory.unwarned()
    columns = default_by(memory) if by is None else by
    classes = targets if targets is not None and targets.dim() == 1 and not targets.is_floating_point() else None
    answers = []
    for test in tests:
        given = rows[test : test + 1]
        target = None if classes is None else classes[test : test + 1]
        asked: Quantity
        wanted: Tensor | None = None
        if quantity is None:
            asked = _contrast(net, given, None if target is None else int(target), units)
        else:
            asked, wanted = cast("Quantity", quantity), target
        with model_failures_named(given):
            spotlight = memory.attend(net, given, targets=wanted, quantity=asked, other_model=True)
        reference = _reference(memory, rows, against)
        found = spotlight.path_contributions(list(columns), against=reference, over=bins, tolerance=tolerance)
        note = " ".join(filter(None, (*loaded.warnings, PATH_NOTE, late_queries_text(memory))))
        answers.append(_path_answer(test, found, 0 if reference is None else len(reference), note))
    return answers


def parse_contrast(text: str) -> tuple[int, int]:
    """Read a contrast as `dualform attend --contrast` takes it.

    >>> parse_contrast("9,7")
    (9, 7)
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or parts[0] == parts[1]:
        raise QueryError(
            f'--contrast is {text!r}; expected two different outputs by their numbers, for example 9,7 for "9 rather '
            'than 7".'
        )
    return int(parts[0]), int(parts[1])


def _contrast(net: torch.nn.Module, given: Tensor, target: int | None, units: tuple[int, int] | None) -> Quantity:
    """Return the contrast that is asked about, the usual one where none was given."""
    if units is not None:
        return contrast(*units)
    usual = usual_units(output_rows(run_model(net, given))[-1].float(), target)
    if usual.instead is None:
        raise QueryError("The model has one output, so there is nothing to contrast it with. Give --quantity logit.")
    return contrast(usual.said, usual.instead)


def _step_bins(over: str | None) -> Bins | None:
    """Read the bins of steps that --over names."""
    if over is None:
        return None
    columns = parse_by(over)
    if len(columns) != 1 or not isinstance(columns[0], Bins):
        raise QueryError(f"--over is {over!r}; expected bins of steps, for example step:100.")
    return columns[0]


def _reference(memory: Memory, rows: Tensor, against: str | None) -> Tensor | None:
    """Return the reference inputs that --against names: the first so many inputs, or those of a file."""
    if against is None:
        return None
    if not against.isdecimal():
        return load_inputs(memory, Path(against))[0]
    if not 0 < int(against) <= len(rows):
        raise QueryError(f"--against is {against}; there are {len(rows)} inputs to compare with.")
    return rows[: int(against)]


def _path_answer(test: int, found: PathContributions, references: int, note: str) -> PathAnswer:
    """Return the answer about one input."""
    order = sorted(range(len(found.groups)), key=lambda g: -abs(float(found.values[0, g])))
    groups = [dict(zip(found.by, _values(found.groups[g], found.by), strict=True)) for g in range(len(found.groups))]
    parts = [{"part": "start", **dict.fromkeys(found.by), "adds": float(found.start[0])}]
    parts += [{"part": "group", **groups[g], "adds": float(found.values[0, g])} for g in order]
    for name in ("state", "rest", "residual"):
        parts.append({"part": name, **dict.fromkeys(found.by), "adds": float(getattr(found, name)[0])})
    over = []
    if found.by_step is not None:
        over = [
            {**groups[g], "from step": int(step), "adds": float(found.by_step[0, g, i])}
            for g in order
            for i, step in enumerate(found.steps)
        ]
    return PathAnswer(
        test=test,
        quantity=found.quantity,
        output=float(found.output[0]),
        references=references,
        parts=parts,
        over_steps=over,
        parts_error=found.parts_error,
        residual_error=found.residual_error,
        gradients=found.evaluations,
        note=note,
    )


def _values(group: Any, by: Sequence[str]) -> tuple[Any, ...]:
    return tuple(group) if len(by) > 1 else (group,)


def show_paths(answers: Sequence[PathAnswer]) -> None:
    """Print where outputs come from as tables, the largest parts first."""
    screen = console()
    for answer in answers:
        beside = f", less the mean of {answer.references} reference inputs" if answer.references else ""
        title = f"input {answer.test}: {answer.quantity} = {answer.output:.4g}{beside}"
        head = list(answer.parts[0])
        print_grid(screen, title, head, [[row[name] for name in head] for row in answer.parts])
        screen.print(
            f"Parts to about {answer.parts_error:.1%}, residual {answer.residual_error:.2%} of the change, "
            f"{answer.gradients} gradients."
        )
        if answer.over_steps:
            columns = list(answer.over_steps[0])
            print_grid(screen, "over steps", columns, [[row[name] for name in columns] for row in answer.over_steps])
        screen.print()
    for note in dict.fromkeys(answer.note for answer in answers):
        screen.print(printable(note))
