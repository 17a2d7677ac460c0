"""The question where an answer comes from: path contributions by group, and the answer to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from dualform.effects.path_contributions import PathParts, PathProbe, PathSettings, path_fold, step_bins
from dualform.engine.model_layers import move
from dualform.engine.reading import kept_rows
from dualform.engine.source import PatternPart
from dualform.errors import QueryError, SelectionError
from dualform.logits import logits_of
from dualform.modes import evaluating

PATH_NOTE = (
    "A path contribution is an account of this training: start, parts and the rest add up to the output. It is no "
    "prediction of what another training would give; effects are."
)


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
    by: By,
    *,
    against: Any,
    over: Bins | None,
    tolerance: float,
    known_state: Sequence[tuple[int, Mapping[str, Tensor]]],
) -> PathContributions:
    """Find what each group of patterns added to a quantity of each input's output."""
    run = table.run
    if table.conditions:
        raise SelectionError(
            "A masked view is no training that took place, so its output has no path. Ask the whole memory, and look "
            "at the groups that the mask leaves out."
        )
    if over is not None and over.column != "step":
        raise SelectionError(f"over is bins of {over.column!r}; expected dualform.bins('step', width=...).")
    if not 0 < tolerance < 1:
        raise QueryError(f"tolerance is {tolerance}; expected a number between 0 and 1, for example 0.02.")
    run.require_recorded("a path contribution")
    for layer in run.layers:
        run.require_values(layer)
    groups = PathGroups(table, by)
    axis = run.description.batch_axis
    targets = _fixed_targets(asked, axis)
    batches, reference = list(asked.batches), None
    if against is not None:
        reference = _Reference(asked, targets, against, axis)
        batches, targets = reference.batches, reference.targets
    probe = PathProbe(asked.model, batches, targets, asked.quantity, run.layers, batch_axis=axis)
    fold = path_fold(
        run,
        probe,
        horizon=table.horizon,
        groups=len(groups.labels),
        by=groups,
        settings=PathSettings(tolerance=tolerance),
        known_state=known_state,
        bins=None if over is None else step_bins(over.width),
    )
    (found,) = table.executor.run(run, [fold])
    return _answer(found, groups, asked.quantity, probe.names, over, reference)


def _answer(
    found: PathParts,
    groups: PathGroups,
    quantity: Quantity,
    layers: Sequence[str],
    over: Bins | None,
    reference: "_Reference | None",
) -> PathContributions:
    size = len(groups.labels)
    flat = found.parts.sum(2)
    numbers = {
        "values": flat[:, :size],
        "start": found.before + flat[:, size],
        "rest": flat[:, size + 1],
        "state": flat[:, size + 2],
        "residual": found.residual,
        "output": found.after,
        "by_layer": found.parts[:, :size],
        "by_step": None if found.bins is None else found.bins[:, :size],
    }
    if reference is not None:
        numbers = {name: None if rows is None else reference.less_mean(rows) for name, rows in numbers.items()}
    bins = 0 if found.bins is None else found.bins.shape[2]
    return PathContributions(
        quantity=getattr(quantity, "__name__", "quantity") if callable(quantity) else quantity,
        by=groups.columns,
        groups=groups.labels,
        layers=tuple(layers),
        steps=tuple(i * over.width for i in range(bins)) if over is not None else (),
        parts_error=found.parts_error,
        evaluations=found.evaluations,
        **numbers,  # type: ignore[arg-type]
    )


def _fixed_targets(asked: Asked, axis: int) -> Tensor | None:
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


class _Reference:
    """Reference inputs beside the ones that were asked about: each asked quantity is measured on all of them."""

    def __init__(self, asked: Asked, targets: Tensor | None, against: Any, axis: int) -> None:
        if not isinstance(against, Tensor) or any(not isinstance(batch, Tensor) for batch in asked.batches):
            raise QueryError("against needs inputs that are tensors: (R, ...) beside inputs (M, ...).")
        if axis or (targets is not None and targets.dim() != 1):
            raise QueryError("against needs one target for each input, along the first axis.")
        self._count = sum(len(batch) for batch in asked.batches)
        self._size = len(against)
        if not self._size:
            raise QueryError("against is empty; expected reference inputs (R, ...).")
        self.batches: list[Any] = list(asked.batches)
        if targets is None:
            self._of = torch.zeros(self._count, dtype=torch.int64)
            self.targets = None
            wanted = 1
        else:
            kinds, self._of = targets.cpu().unique(return_inverse=True)
            self.targets = torch.cat([targets.cpu(), kinds.repeat_interleave(self._size)])
            wanted = len(kinds)
        self.batches += [against for _ in range(wanted)]

    def less_mean(self, rows: Tensor) -> Tensor:
        """Return each input's numbers less the mean of those of the reference inputs with the same target."""
        means = rows[self._count :].unflatten(0, (-1, self._size)).mean(1)
        less: Tensor = rows[: self._count] - means[self._of]
        return less
