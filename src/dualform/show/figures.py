"""Figures (matplotlib) of one test example: the attention of each layer by group, and the top training images.

Colour-blind safe and readable at half width: the groups are told apart by place and label, and only the target and the
model's output are coloured. Takes arrays, not memories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TARGET = "#0072B2"
OUTPUT = "#B24500"
OTHER = "#9A9A9A"
Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class LayerPanels:
    """One test example's values by group, one panel per layer.

    Attributes:
        layers: layer -> values, (G, ...) each.
        groups: (G,) the groups: classes, or (task, class) pairs.
        target: the example's class.
        output: the class that the model says.
        title: the title of the figure.
    """

    layers: Mapping[str, Array]
    groups: Sequence[Any]
    target: Any
    output: Any
    title: str

    @property
    def tasks(self) -> list[Any]:
        """The tasks, where groups are pairs."""
        return list(dict.fromkeys(group[0] for group in self.groups if isinstance(group, tuple)))

    def figure(self, *, width: float, height: float) -> tuple[Any, list[tuple[Any, str, Array]]]:
        """Return a figure of this size, and the axes of each panel with its layer and values."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, len(self.layers), squeeze=False)[0]
        return figure, [(one, *panel) for one, panel in zip(axes, self.layers.items(), strict=True)]

    def style(self, group: Any) -> tuple[str, float, int]:
        """Return colour, width and order of a group by its class."""
        if _class(group) == self.target:
            return TARGET, 2.0, 3
        return (OUTPUT, 2.0, 2) if _class(group) == self.output else (OTHER, 0.8, 1)


def curves(path: Path, panels: LayerPanels) -> Path:
    """Draw each group's strongest patterns, sorted, (G, k) in each panel; NaN ends a line."""
    figure, drawn = panels.figure(width=3.4 * len(panels.layers), height=3.0)
    tasks = panels.tasks
    for axes, layer, values in drawn:
        for group, line in zip(panels.groups, values, strict=True):
            colour, width, order = panels.style(group)
            dashes = (0, (4, 2)) if tasks and group[0] != tasks[0] else "solid"
            ranks = np.arange(1, len(line) + 1)
            axes.plot(ranks, line, color=colour, linewidth=width, zorder=order, linestyle=dashes)
            finite = line[np.isfinite(line)]
            if len(finite) and order > 1:
                axes.annotate(f"{_class(group)} ", (1, finite[0]), color=colour, fontsize=8, ha="right", va="center")
        axes.set_xscale("log")
        axes.set_xlim(left=0.6)
        axes.set_title(layer, fontsize=9)
        axes.set_xlabel("rank of the training pattern", fontsize=8)
        _tidy(axes)
    drawn[0][0].set_ylabel("attention", fontsize=8)
    _finish(figure, panels, mark="dashed")
    return _save_figure(figure, path)


def totals(path: Path, panels: LayerPanels, *, measure: str = "total attention") -> Path:
    """Draw each group's total of a measure, (G,) in each panel."""
    groups, tasks = panels.groups, panels.tasks
    figure, drawn = panels.figure(width=max(3.4, 0.2 * len(groups)) * len(panels.layers), height=2.8)
    for axes, layer, values in drawn:
        places = np.arange(len(groups))
        for place, group, value in zip(places, groups, values, strict=True):
            second = bool(tasks) and group[0] != tasks[0]
            axes.bar(place, value, color=panels.style(group)[0], hatch="///" if second else None, edgecolor="white")
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xticks(places, [str(_class(group)) for group in groups], fontsize=7)
        axes.set_xlabel("class, in each task" if tasks else "class", fontsize=8)
        axes.set_title(layer, fontsize=9)
        _tidy(axes)
    drawn[0][0].set_ylabel(measure, fontsize=8)
    _finish(figure, panels, mark="hatched")
    return _save_figure(figure, path)


def gallery(
    path: Path, query: Array, rows: Mapping[str, Sequence[tuple[str, Array]]], *, caption: str, title: str
) -> Path:
    """Draw a test image beside the training images that each layer attends to most, a row per layer."""
    from matplotlib.figure import Figure

    columns = 1 + max(len(items) for items in rows.values())
    figure = Figure(figsize=(1.5 * columns, 1.75 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for line, (layer, items) in enumerate(rows.items()):
        shown = [(caption if line == 0 else "", query if line == 0 else None), *items]
        for axes, (text, image) in zip(panels[line], shown, strict=False):
            if image is not None:
                axes.imshow(image, cmap="gray_r", interpolation="nearest")
            axes.set_title(text, fontsize=7)
        panels[line][1].set_ylabel(layer, fontsize=8)
        for axes in panels[line]:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=9)
    return _save_figure(figure, path)


def _class(group: Any) -> Any:
    return group[1] if isinstance(group, tuple) else group


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    axes.yaxis.get_offset_text().set_fontsize(7)


def _finish(figure: Any, panels: LayerPanels, *, mark: str) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=TARGET, label=f"target: {panels.target}")]
    if panels.output != panels.target:
        handles.append(Patch(color=OUTPUT, label=f"the model's output: {panels.output}"))
    handles.append(Patch(color=OTHER, label="other classes"))
    if panels.tasks:
        plain, marked = panels.tasks
        handles.append(Patch(color="none", label=f"plain: {plain}, {mark}: {marked}"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.suptitle(panels.title, fontsize=9)


def _save_figure(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def waterfall(answer: Any, query: int) -> Any:
    """Draw one input's path contributions (`PathContributions`), from the start to the output, a bar for each part."""
    from matplotlib.figure import Figure

    from dualform.attend.answers import group_text

    named = zip(answer.groups, answer.values[query].tolist(), strict=True)
    groups = sorted(((group_text(group), value) for group, value in named), key=lambda bar: -abs(bar[1]))
    bars = [("start", float(answer.start[query])), *groups]
    bars += [(name, float(getattr(answer, name)[query])) for name in ("state", "rest", "residual")]
    figure = Figure(figsize=(6.0, 0.9 + 0.24 * len(bars)), layout="constrained")
    axes = figure.subplots()
    reached = 0.0
    for place, (_, value) in enumerate(bars):
        colour = OTHER if place == 0 or place > len(groups) else TARGET if value >= 0 else OUTPUT
        axes.barh(place, value, left=reached, color=colour, height=0.7)
        reached += value
        axes.plot([reached, reached], [place, place + 1], color=OTHER, linewidth=0.6)
    axes.barh(len(bars), float(answer.output[query]), color="black", height=0.7)
    names = [*(name for name, _ in bars), "output"]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.use_sticky_edges = False  # a bar that ends at the edge keeps a margin
    axes.invert_yaxis()
    axes.axvline(0, color=OTHER, linewidth=0.6)
    axes.set_title(f"Where the {answer.quantity} comes from, by {', '.join(answer.by)}", fontsize=9)
    axes.set_xlabel(f"residual {answer.residual_error:.1%}, parts to about {answer.parts_error:.1%}", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    return figure
