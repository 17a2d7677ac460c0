"""The question where an answer comes from: path contributions by group, and the answer to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from dualform.attend.answers import Answer, GroupTotals, grid_lines, group_text
from dualform.attend.groups import Table
from dualform.binning import Bins, By, label_order
from dualform.drawing import picture_of
from dualform.effects.output_gradients import Quantity, measure_quantity
from dualform.effects.path_contributions import path_fold, state_between, step_bins
from dualform.effects.path_probe import PathProbe
from dualform.effects.path_samples import chunk_length, find_sample_parts
from dualform.effects.path_walk import PathParts, PathSettings
from dualform.engine.model_layers import move
from dualform.engine.parameter_steps import optimizer_of
from dualform.engine.reading import kept_rows
from dualform.engine.source import PATH_CONTRIBUTION, PatternPart
from dualform.errors import QueryError, ReplayError, SelectionError
from dualform.identity.families.naming import class_name
from dualform.logits import logits_of
from dualform.modes import evaluating
from dualform.recording.user_warnings import warn_user

PATH_NOTE = (
    "A path contribution is an account of this training: start, parts and the rest add up to the output. It is no "
    "prediction of what another training would give; effects are."
)

PathPer = Literal["sample", "layer"]
"""What single path contributions are those of, where there are no groups."""

SAMPLE = "sample"
"""The column that numbers training samples."""

STEERING_GROUPS = 16
"""Groups that samples are merged into while segments are chosen, by how much these groups' parts change."""

KNOT_BYTES = 1 << 31
"""The most bytes of weights along the path that are kept for single samples; beyond it steps are replayed again."""

REFERENCE_BATCH = 1024
"""Reference inputs that the model sees at once, where there are several kinds of targets."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a spotlight's inputs were asked with, for questions that run the model again."""

    model: nn.Module
    batches: Sequence[Any]
    targets: Tensor | None
    quantity: Quantity


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PathContributions(Answer):
    """What each group of training patterns added to a quantity of the whole network's output.

    For each input: start + values.sum() + state + rest + residual = output. With a reference, all are those of the
    input less the mean over the reference inputs.

    Attributes:
        quantity: what was asked about.
        by: the names of the grouping columns.
        groups: (G,) each group's value, a tuple where there are several columns.
        values: (M, G) the parts, float64.
        start: (M,) the output before the training, and what became of it where weights decay.
        state: (M,) the part of parameters and buffers that no recorded layer covers.
        rest: (M,) the part of what no pattern explains: rounding.
        residual: (M,) what is left over, because gradients are taken at a few points of each segment.
        output: (M,) the quantity.
        layers: the recorded layers.
        by_layer: (M, G, L) the parts through each layer.
        steps: (B,) the first step of each bin, where bins of steps were asked for.
        by_step: (M, G, B) the parts of each bin.
        parts_error: how far the parts are from those of a finer path, relative, estimated by halving segments.
        evaluations: how many times the gradient of all inputs was found.
    """

    quantity: str
    by: tuple[str, ...]
    groups: tuple[Any, ...]
    values: Tensor
    start: Tensor
    state: Tensor
    rest: Tensor
    residual: Tensor
    output: Tensor
    layers: tuple[str, ...]
    by_layer: Tensor
    steps: tuple[float, ...]
    by_step: Tensor | None
    parts_error: float
    evaluations: int

    @property
    def residual_error(self) -> float:
        """The residual relative to the change of the output over the training, over all inputs."""
        change = float((self.output - self.start).abs().sum())
        return float(self.residual.abs().sum()) / change if change else 0.0

    def to_arrow(self) -> pa.Table:
        """Return a row per input and part: the groups, and start, state, rest and residual, whose groups are null."""
        table = GroupTotals("", "path contribution", self.by, self.groups, self.values).to_arrow()
        columns = {name: table[name].to_pylist() for name in table.column_names}
        columns["part"] = ["group"] * len(table)
        for name in ("start", "state", "rest", "residual"):
            for query, value in enumerate(getattr(self, name).tolist()):
                row = {"query": query, "path contribution": value, "part": name}
                for column, cells in columns.items():
                    cells.append(row.get(column))
        return pa.table(columns)

    def top(self, count: int = 5, *, query: int = 0) -> list[tuple[Any, float]]:
        """Return the groups with the largest parts of one input, by size, each with its signed part."""
        if not 0 <= query < len(self.values):
            raise QueryError(f"query is {query}; expected one of the {len(self.values)} inputs, counted from 0.")
        if count < 1:
            raise QueryError(f"count is {count}; expected at least 1.")
        row = self.values[query]
        places = row.abs().topk(min(count, len(row))).indices.tolist()
        return [(self.groups[place], float(row[place])) for place in places]

    def waterfall(self, query: int = 0) -> Any:
        """Return a matplotlib figure of one input's parts: from the start to the output, a bar for each."""
        return picture_of(self, query)

    def __repr__(self) -> str:
        shown = sorted(range(len(self.groups)), key=lambda g: -float(self.values[:, g].abs().sum()))[:12]
        names = [group_text(self.groups[g]) for g in sorted(shown)]
        rows = []
        for q in range(min(len(self.values), 10)):
            ends = [self.start, self.state, self.rest, self.residual, self.output]
            cells = [self.values[q, g] for g in sorted(shown)]
            rows.append([str(q), *(f"{float(x):.4g}" for x in (*cells, *(end[q] for end in ends)))])
        head = ["input", *names, "start", "state", "rest", "residual", "output"]
        more = [] if len(self.groups) <= 12 else [f"... {len(self.groups) - 12} more groups"]
        more += [] if len(self.values) <= 10 else [f"... {len(self.values) - 10} more inputs"]
        exact = (
            f"Parts to about {self.parts_error:.1%}, residual {self.residual_error:.2%} of the change, "
            f"{self.evaluations} gradients."
        )
        title = f"Path contributions to the {self.quantity} by {', '.join(self.by)}"
        return "\n".join([title, *grid_lines(head, rows), *more, exact, PATH_NOTE])


class PathGroups:
    """The group of each pattern of every layer, by one grouping, with labels that all layers share."""

    def __init__(self, table: Table, by: By) -> None:
        self._table = table
        found = {layer: table.group(layer, by) for layer in table.run.layers}
        labels = dict.fromkeys(label for grouping in found.values() for label in grouping.labels)
        self.labels: tuple[Any, ...] = tuple(sorted(labels, key=label_order))
        self.columns = next(iter(found.values())).by
        place = {label: i for i, label in enumerate(self.labels)}
        self._codes = {
            layer: np.asarray([place[label] for label in grouping.labels], dtype=np.int64)[grouping.codes]
            for layer, grouping in found.items()
        }
        self._before: dict[tuple[str, int], int] = {}
        for layer in found:
            before = 0
            for part in table.run.parts():
                self._before[layer, part.index] = before
                before += len(kept_rows(part, layer, table.horizon, table.mask))

    def codes(self, part: PatternPart, layer: str) -> npt.NDArray[np.int64]:
        """Return the group of each pattern of a part and layer; -1 for those of later steps."""
        kept = kept_rows(part, layer, self._table.horizon, self._table.mask)
        codes = np.full(part.count(layer), -1, dtype=np.int64)
        before = self._before[layer, part.index]
        codes[kept] = self._codes[layer][before : before + len(kept)]
        return codes


def find_path_contributions(
    table: Table,
    asked: Asked,
    by: By | None,
    *,
    per: PathPer | None,
    against: Any,
    over: Bins | None,
    tolerance: float,
    known_state: Sequence[tuple[int, Mapping[str, Tensor]]],
) -> PathContributions:
    """Find what each group of patterns, each sample or each layer added to a quantity of each input's output."""
    run = table.run
    _check_question(table, by, per, over, tolerance)
    groups = None if per == "layer" else PathGroups(table, SAMPLE if by is None else by)
    axis = run.description.batch_axis
    targets = fixed_targets(asked, axis)
    batches, reference = list(asked.batches), None
    if against is not None:
        reference = ReferenceInputs(asked, targets, against, axis)
        batches, targets = reference.batches, reference.targets
    units = None if reference is None else reference.units
    probe = PathProbe(asked.model, batches, targets, asked.quantity, run.layers, batch_axis=axis, units=units)
    probe.check_rows()
    _warn_of_late_state(known_state)
    samples = groups if per == "sample" else None
    followed = groups if samples is None else _Merged(samples, STEERING_GROUPS)
    count = 1 if groups is None else len(groups.labels)
    every = None if samples is None else chunk_length(table.horizon)
    narrowest = min([table.horizon, *([] if every is None else [every]), *([] if over is None else [int(over.width)])])
    settings = PathSettings(
        count if samples is None else STEERING_GROUPS,
        tolerance=tolerance,
        by_layer=per == "layer",
        knot_bytes=0 if samples is None else KNOT_BYTES,
        longest=max(1, narrowest // 2),  # two segments at least between forced ends, so that they can be compared
        ends_every=every,
    )
    fold = path_fold(
        run,
        probe,
        horizon=table.horizon,
        by=followed,
        settings=settings,
        known_state=known_state,
        bins=None if over is None else step_bins(over.width),
    )
    (found,) = table.executor.run(run, [fold])
    parts = found.parts
    if samples is not None:
        state_at = state_between(known_state)
        try:
            single = find_sample_parts(run, probe, found.segments, samples, count, state_at=state_at, knots=found.knots)
        except ReplayError as error:
            raise QueryError(
                "Path contributions of single samples go backwards through the steps. A replay only goes forwards, and "
                "this run's patterns are too many to be held for it. Store them: "
                "dualform.replay(train, path, keep=dualform.Patterns()); or ask by groups: by= a column."
            ) from error
        parts = torch.cat([single, parts[:, STEERING_GROUPS:]], dim=1)
    labels, columns = (None, ()) if groups is None else (groups.labels, groups.columns)
    return answer_of_parts(found, parts, labels, columns, asked.quantity, probe.names, over, reference)


def _check_question(table: Table, by: By | None, per: PathPer | None, over: Bins | None, tolerance: float) -> None:
    """Raise unless path contributions can be asked for in this way."""
    run = table.run
    if per is not None and per not in get_args(PathPer):
        raise QueryError(f"per is {per!r}; expected one of {get_args(PathPer)}, or by= a column.")
    if (by is None) == (per is None):
        given = "neither" if by is None else "both"
        raise QueryError(f"path_contributions got {given} of by and per; expected by= a column, or per=...")
    if per is not None and over is not None:
        raise QueryError(f"over needs groups: give by= a column in place of per={per!r}.")
    if table.conditions:
        raise SelectionError(
            "A masked view is no training that took place, so its output has no path. Ask the whole memory, and look "
            "at the groups that the mask leaves out."
        )
    if over is not None and over.column != "step":
        raise SelectionError(f"over is bins of {over.column!r}; expected dualform.bins('step', width=...).")
    if not 0 < tolerance < 1:
        raise QueryError(f"tolerance is {tolerance}; expected a number between 0 and 1, for example 0.02.")
    run.require_recorded(PATH_CONTRIBUTION)
    for layer in run.layers:
        run.require_patterns(layer, PATH_CONTRIBUTION)
        run.require_values(layer)
    if per == "sample":
        if SAMPLE not in table.names:
            raise SelectionError(
                'per="sample" needs a column "sample": record with annotate(sample=ids). '
                f"There are: {', '.join(table.names)}."
            )
        for entry in run.layers.values():
            for parameter in entry.parameters.values():
                kind = optimizer_of(run, parameter)
                if not kind.is_elementwise:
                    raise QueryError(
                        f"Parameter {parameter!r} was trained by {class_name(kind.name)}, whose steps mix rows of a "
                        "gradient: path contributions of single samples are known for optimizers that multiply it "
                        "element by element (SGD, Adam and their kin). Ask by groups: by= a column."
                    )


def _warn_of_late_state(known_state: Sequence[tuple[int, Mapping[str, Tensor]]]) -> None:
    """Warn of uncovered state that is not kept as it was before the first step: its early changes are no part."""
    first = {name: steps for steps, state in reversed(known_state) for name in state}
    late = {name: steps for name, steps in first.items() if steps}
    if late:
        shown = ", ".join(f"{name!r} (after step {steps})" for name, steps in sorted(late.items())[:4])
        more = f" and {len(late) - 4} more" if len(late) > 4 else ""
        warn_user(
            f"The run does not keep {shown}{more} as it was before the first step, but only as it was later. The path "
            "is followed as if it had been so from the start: the part `start` is that of such a network, and `state` "
            "lacks what changed before."
        )


class _Merged:
    """Many groups merged into a few, to steer how finely a path is followed."""

    def __init__(self, groups: PathGroups, count: int) -> None:
        self._groups = groups
        self._count = count

    def codes(self, part: PatternPart, layer: str) -> npt.NDArray[np.int64]:
        """Return the merged group of each pattern of a part and layer; -1 for those of later steps."""
        codes = self._groups.codes(part, layer)
        merged: npt.NDArray[np.int64] = np.where(codes < 0, -1, codes % self._count)
        return merged


def answer_of_parts(
    found: PathParts,
    parts: Tensor,
    groups: tuple[Any, ...] | None,
    columns: tuple[str, ...],
    quantity: Quantity,
    names: Sequence[str],
    over: Bins | None,
    reference: "ReferenceInputs | None",
) -> PathContributions:
    """Return the answer that parts give.

    Args:
        found: what was found along the path.
        parts: (U, G + 3, L) the parts.
        groups: the groups; where there are none, each layer is one.
        columns: the names of the grouping columns.
        quantity: what was asked about.
        names: the layers.
        over: the bins of steps, where they were asked for.
        reference: the reference inputs, if any.
    """
    layers = tuple(names)
    if groups is None:  # (U, 1 + 3, L): the one group's parts through each layer become groups
        through = torch.diag_embed(parts[:, 0])
        parts = torch.cat([through, parts[:, 1:]], dim=1)
    labels = layers if groups is None else groups
    size = len(labels)
    flat = parts.sum(2)
    numbers = {
        "values": flat[:, :size],
        "start": found.before + flat[:, size],
        "rest": flat[:, size + 1],
        "state": flat[:, size + 2],
        "residual": found.after - found.before - flat.sum(1),
        "output": found.after,
        "by_layer": parts[:, :size],
        "by_step": None if found.bins is None else found.bins[:, :size],
    }
    if reference is not None:
        numbers = {name: None if rows is None else reference.less_mean(rows) for name, rows in numbers.items()}
    bins = 0 if found.bins is None else found.bins.shape[2]
    return PathContributions(
        quantity=getattr(quantity, "__name__", "quantity") if callable(quantity) else quantity,
        by=("layer",) if groups is None else columns,
        groups=labels,
        layers=layers,
        steps=tuple(i * over.width for i in range(bins)) if over is not None else (),
        parts_error=found.parts_error,
        evaluations=found.evaluations,
        **numbers,  # type: ignore[arg-type]
    )


def fixed_targets(asked: Asked, axis: int) -> Tensor | None:
    """Return the targets, or what the trained model says, since along the path it says other things."""
    if asked.targets is not None or callable(asked.quantity):
        return asked.targets
    device = next((p.device for p in asked.model.parameters()), torch.device("cpu"))
    said = []
    with torch.no_grad(), evaluating(asked.model):
        for batch in asked.batches:
            here = move(batch, device)
            if isinstance(here, Mapping):
                outputs = asked.model(**here)
            else:
                outputs = asked.model(*here) if isinstance(here, tuple) else asked.model(here)
            logits = logits_of(outputs)
            measure_quantity(outputs, None, asked.quantity, batch_axis=axis)  # says what is wrong with the outputs
            said.append(logits.argmax(-1).cpu())
    return torch.cat(said, dim=min(axis, said[0].dim() - 1))


class ReferenceInputs:
    """Reference inputs beside the ones that were asked about: every quantity that is asked is measured on all of them.

    Attributes:
        batches: the inputs that were asked about, then the reference inputs once for each kind of target.
        targets: of all of these, where there are any.
        units: (n,) each asked input is a unit of its own, and the reference inputs of one kind of target are one unit.
    """

    def __init__(self, asked: Asked, targets: Tensor | None, against: Any, axis: int) -> None:
        if not isinstance(against, Tensor) or any(not isinstance(batch, Tensor) for batch in asked.batches):
            raise QueryError("against needs inputs that are tensors: (R, ...) beside inputs (M, ...).")
        if axis:
            raise QueryError("against needs inputs, and one target for each, along the first axis.")
        self._count = sum(len(batch) for batch in asked.batches)
        size = len(against)
        if not size:
            raise QueryError("against is empty; expected reference inputs (R, ...).")
        self.targets = None
        self._of = torch.zeros(self._count, dtype=torch.int64)
        kinds = 1
        if targets is not None:
            different, self._of = targets.cpu().unique(dim=0, return_inverse=True)
            self.targets = torch.cat([targets.cpu(), different.repeat_interleave(size, dim=0)])
            kinds = len(different)
        together = max(1, REFERENCE_BATCH // size)  # kinds of targets in a batch
        counts = [min(together, kinds - first) for first in range(0, kinds, together)]
        self.batches: list[Any] = [*asked.batches, *(torch.cat([against] * count) for count in counts)]
        self.units = torch.cat([torch.arange(self._count), self._count + torch.arange(kinds).repeat_interleave(size)])

    def less_mean(self, rows: Tensor) -> Tensor:
        """Return each input's numbers less the mean of those of the reference inputs with the same target."""
        less: Tensor = rows[: self._count] - rows[self._count :][self._of]
        return less
