"""Where an answer comes from: the network's output for an input, as a sum over what it was trained on.

The question is a contrast by default, "9 rather than 7": the parts of one output alone are large, cancel each other,
and name the output's own class whatever the input. For the same reason an input is compared with reference inputs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.attend.path import PATH_NOTE, PathContributions
from dualform.binning import Bins
from dualform.effects.output_gradients import Quantity, contrast
from dualform.errors import DualformError, QueryError
from dualform.logits import logits_of
from dualform.show.grouping import GroupingColumns, group_name
from dualform.show.job import Cancelled
from dualform.show.session import Session, Subject

MAX_BARS = 12  # groups that have a bar of their own; the others share one
MAX_PATH_BINS = 12  # of steps
REFERENCE_INPUTS = 16
SHARED_REFERENCES = 4  # of a report, where each contrast needs them anew


@dataclass(frozen=True, slots=True)
class PathBar:
    """One part of an output.

    Attributes:
        kind: "reference", "start", "group", "others", "state", "rest" or "residual".
        name: the part as people read it.
        value: what it adds to the output.
        group: the group, where the part is a group's.
    """

    kind: str
    name: str
    value: float
    group: Any = None


@dataclass(frozen=True, slots=True)
class PathAccount:
    """A quantity of the network's output for one input, as a sum of parts: the bars' values sum to `output`.

    Attributes:
        said: the output unit that is asked about.
        said_name: that unit as people read it.
        instead: the unit that it is compared with; None where the output `said` itself is asked about.
        instead_name: that unit as people read it.
        question: the quantity in words.
        by: the columns that the groups are values of.
        output: the quantity for this input.
        references: the number of reference inputs; their mean output is the first bar, and the others are what this
            input has beyond their mean.
        bars: the parts, the groups' from the largest to the smallest.
        steps: the first step of each bin of steps, and the step after the last bin.
        over_steps: the parts of the groups that have a bar, by bin of steps.
        together: the sum of all groups' parts, by bin of steps.
        parts_error: how far the parts are from those of a finer path, relative; an estimate.
        residual_error: the residual relative to the change of the output over the training.
        gradients: how many times the gradient of all inputs was found.
        note: what the parts may and may not claim.
    """

    said: int
    said_name: str
    instead: int | None
    instead_name: str | None
    question: str
    by: list[str]
    output: float
    references: int
    bars: list[PathBar]
    steps: list[int]
    over_steps: list[list[float]]
    together: list[float]
    parts_error: float
    residual_error: float
    gradients: int
    note: str = PATH_NOTE


@dataclass(frozen=True, slots=True)
class PathOffer:
    """What the panel says of an account: the account, or what finding it takes.

    Attributes:
        account: the account; None where it was not found yet.
        inputs: of how many inputs the gradient is followed, reference inputs included.
        steps: how many steps of the training are gone through.
        seconds: how long the last account of this session took; None where there was none.
        note: what path contributions may and may not claim.
    """

    account: PathAccount | None
    inputs: int
    steps: int
    seconds: float | None
    note: str = PATH_NOTE


@dataclass(frozen=True, slots=True)
class PathUnits:
    """The output units that a question is about: `said` rather than `instead`, or the output `said` itself."""

    said: int
    instead: int | None


def usual_units(outputs: Tensor, target: int | None) -> PathUnits:
    """Return what is asked by default: what the model says, rather than the target or, where it is right, the second.

    >>> usual_units(torch.tensor([0.1, 2.0, 1.0]), 0)
    PathUnits(said=1, instead=0)
    >>> usual_units(torch.tensor([0.1, 2.0, 1.0]), 1)
    PathUnits(said=1, instead=2)
    """
    said = int(outputs.argmax())
    if len(outputs) < 2:
        return PathUnits(said, None)
    if target is not None and target != said and 0 <= target < len(outputs):
        return PathUnits(said, target)
    others = outputs.clone()
    others[said] = -torch.inf
    return PathUnits(said, int(others.argmax()))


@dataclass(frozen=True, slots=True)
class PairedContrast:
    """The contrast of each input's own two classes, so that inputs with different contrasts share one path.

    An input's target is said × classes + instead.
    """

    classes: int

    @property
    def __name__(self) -> str:
        """The name of the quantity, as answers say it."""
        return "logit of each input's own class rather than another"

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the difference for each input, (B,); at the last position, where there are several."""
        logits = logits_of(outputs)
        last = logits[:, -1] if logits.dim() == 3 else logits
        pairs = torch.stack([targets // self.classes, targets % self.classes], dim=1).to(last.device)
        found: Tensor = last.gather(1, pairs)
        return found[:, 0] - found[:, 1]


def offer_path(
    session: Session, subject: Subject, by: GroupingColumns, units: PathUnits, *, references: int, start: bool
) -> PathOffer:
    """Return the account of an input's output if it is kept with the run, or if it is to be found now.

    Args:
        session: the opened run.
        subject: the input.
        by: the columns that training patterns are grouped by.
        units: what is asked about.
        references: how many tests the input is compared with; 0 for none.
        start: find the account where it is not kept, which may take as long as the training did.
    """
    against = reference_inputs(session, subject, references)
    question: dict[str, Any] = {"by": list(by), "against": against, "over": bins_of_steps(session)}
    found = session.path_spotlight(subject, *_quantity(units)).kept_path_contributions(**question)
    if found is None and start:
        began = time.monotonic()
        found = session.path_spotlight(subject, *_quantity(units), own_model=True).path_contributions(**question)
        session.path_seconds = time.monotonic() - began
    account = None
    if found is not None:
        outputs = session.outputs(subject).double()
        output = float(outputs[units.said]) - (0.0 if units.instead is None else float(outputs[units.instead]))
        account = _account(session, found, 0, by, units, output, 0 if against is None else len(against))
    inputs = 1 + (0 if against is None else len(against))
    return PathOffer(account, inputs, session.memory.step, session.path_seconds)


def account_tests(session: Session, tests: Sequence[int], by: GroupingColumns) -> dict[int, PathAccount | str]:
    """Return the account of each test's usual contrast, by one path for all of them; or why there is none."""
    subjects = [session.test(test) for test in tests]
    outputs = [session.outputs(subject).double() for subject in subjects]
    if not subjects or len(outputs[0]) < 2:
        return dict.fromkeys(tests, "The model has one output, so there is nothing to contrast it with.")
    units = [usual_units(values, subject.target) for values, subject in zip(outputs, subjects, strict=True)]
    classes = len(outputs[0])
    targets = torch.tensor([one.said * classes + (one.instead or 0) for one in units])
    whole = Subject(("tests", *tests), torch.cat([subject.inputs for subject in subjects]))
    against = reference_inputs(session, None, SHARED_REFERENCES)
    try:
        spotlight = session.path_spotlight(whole, PairedContrast(classes), targets, own_model=True)
        found = spotlight.path_contributions(list(by), against=against, over=bins_of_steps(session))
    except (Cancelled, OSError):
        raise
    except DualformError as error:  # a memory that keeps less, or an optimizer whose path is refused
        return dict.fromkeys(tests, str(error))
    accounts: dict[int, PathAccount | str] = {}
    for i, (test, values, one) in enumerate(zip(tests, outputs, units, strict=True)):
        output = float(values[one.said] - values[one.instead or 0])
        accounts[test] = _account(session, found, i, by, one, output, 0 if against is None else len(against))
    return accounts


def reference_inputs(session: Session, subject: Subject | None, count: int) -> Tensor | None:
    """Return up to `count` tests, evenly spread and without the input itself; None where there are none."""
    if session.memory.batch_axis or count < 1:
        return None
    own = None if subject is None else subject.test
    others = [test for test in range(len(session.tests)) if test != own]
    if not others:
        return None
    chosen = sorted({others[i * len(others) // count] for i in range(count)})
    return session.tests[chosen]


def bins_of_steps(session: Session) -> Bins:
    """Return the bins of steps that an output's coming about is shown by."""
    return Bins("step", max(1, -(-session.memory.step // MAX_PATH_BINS)))


def _quantity(units: PathUnits) -> tuple[Quantity, Tensor | None]:
    """Return the quantity that is asked about, and the targets that it needs."""
    if units.instead is None:
        return "logit", torch.tensor([units.said])
    if units.instead == units.said:
        raise QueryError(f"The output {units.said} is compared with itself; expected two different outputs.")
    return contrast(units.said, units.instead), None


def _account(
    session: Session,
    found: PathContributions,
    row: int,
    by: GroupingColumns,
    units: PathUnits,
    output: float,
    references: int,
) -> PathAccount:
    """Return one input's account of its path contributions."""
    values = found.values[row].tolist()
    order = sorted(range(len(values)), key=lambda g: -abs(values[g]))
    shown, rest = order[:MAX_BARS], order[MAX_BARS:]
    name, other = session.name(units.said), None if units.instead is None else session.name(units.instead)
    bars = []
    if references:
        mean = output - float(found.output[row])
        bars.append(PathBar("reference", f"reference ({references})", mean))
    bars.append(PathBar("start", "start", float(found.start[row])))
    bars += [
        PathBar("group", group_name(session.media, by, found.groups[g]), values[g], found.groups[g]) for g in shown
    ]
    if rest:
        bars.append(
            PathBar(
                "others",
                "1 other group" if len(rest) == 1 else f"{len(rest)} other groups",
                sum(values[g] for g in rest),
            )
        )
    if bool(found.state.any()):
        bars.append(PathBar("state", "not recorded", float(found.state[row])))
    bars.append(PathBar("rest", "rounding", float(found.rest[row])))
    bars.append(PathBar("residual", "residual", float(found.residual[row])))
    over = found.by_step
    return PathAccount(
        said=units.said,
        said_name=name,
        instead=units.instead,
        instead_name=other,
        question=f"output {name}" if other is None else f"{name} rather than {other}",
        by=[str(part) for part in by],
        output=output,
        references=references,
        bars=bars,
        steps=[*map(int, found.steps), session.memory.step],
        over_steps=[] if over is None else [over[row, g].tolist() for g in shown],
        together=[] if over is None else over[row].sum(0).tolist(),
        parts_error=found.parts_error,
        residual_error=found.residual_error,
        gradients=found.evaluations,
    )
