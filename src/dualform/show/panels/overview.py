"""A description of the run: for the page's header, and for the choices that the page offers."""

from dataclasses import dataclass
from typing import Any

from dualform.engine.source import groupings_text
from dualform.show.grouping import OfferedGrouping, offered_groupings
from dualform.show.panels.hints import Hint, annotation_hints
from dualform.show.predictions import MASK_NOTE
from dualform.show.session import Session


@dataclass(frozen=True, slots=True)
class Overview:
    """The run, its model, its layers, its groupings, and the kind of its inputs.

    Attributes:
        name: the run's folder, short.
        path: the run's folder.
        steps: how many steps were recorded.
        closed: whether the recording was closed.
        bytes: the size of the run on disk.
        optimizers: the optimizers' names.
        model: the factory that makes the model, where the run remembers it.
        arguments: of the factory.
        layers: each layer's name, kind, sizes and number of patterns.
        patterns: how many patterns there are in all layers.
        uncovered: parameters that no recorded layer covers, with their numbers of elements.
        groupings: the columns that patterns can be grouped by.
        columns: all columns.
        output_layer: the layer whose outputs are the model's outputs.
        tests: how many test examples there are.
        kind: of a test example: "text", "image", or "none" of these.
        shape: of a test image.
        images: whether the run keeps the training images.
        shows_inputs: whether images of tests are the model's inputs themselves, since the run keeps none.
        hints: panel -> what it lacks in this run, and what to record for it.
        draw: whether an input can be drawn.
        prompt: whether an input can be typed.
        labels: the names of the classes.
        exact: whether every layer has its values.
        shares: the groupings by which the run keeps shares in place of patterns; none where it keeps patterns.
        replays: whether patterns are not stored, and come back with a replay of the training.
        warnings: which parts of the model are not those of the recording.
        note: that a mask is not a retraining.
    """

    name: str
    path: str
    steps: int
    closed: bool
    bytes: int
    optimizers: Any
    model: str | None
    arguments: dict[str, Any] | None
    layers: list[dict[str, Any]]
    patterns: int
    uncovered: dict[str, int]
    groupings: list[OfferedGrouping]
    columns: list[str]
    output_layer: str | None
    tests: int
    kind: str
    shape: list[int] | None
    images: bool
    shows_inputs: bool
    hints: dict[str, Hint]
    draw: bool
    prompt: bool
    labels: list[str] | None
    exact: bool
    shares: list[str]
    replays: bool
    warnings: list[str]
    note: str = MASK_NOTE


def run_overview(session: Session) -> Overview:
    """Describe the run; the description is computed once per session."""
    found: Overview = session.answers.get("run", lambda: _overview(session))
    return found


def _overview(session: Session) -> Overview:
    memory = session.memory
    info = memory.info()
    text = session.media.text
    images = session.test_images
    can_draw = session.media.scale is not None and len(session.tests) > 0
    return Overview(
        name=memory.path.name if memory.path.name != "run" else f"{memory.path.parent.name}/run",
        path=memory.location,
        steps=info.steps,
        closed=info.closed,
        bytes=info.bytes,
        optimizers=info.optimizers,
        model=None if memory.factory is None else memory.factory[0],
        arguments=None if memory.factory is None else dict(memory.factory[1]),
        layers=[{"name": name, **layer} for name, layer in info.layers.items()],
        patterns=sum(layer["patterns"] for layer in info.layers.values()),
        uncovered=dict(info.uncovered),
        groupings=offered_groupings(memory, list(memory.layers)[-1]),
        columns=list(info.columns),
        output_layer=session.output_layer,
        tests=len(session.tests),
        kind=_kind(session),
        shape=None if images is None else list(images.shape[1:]),
        images=session.media.has_images,
        shows_inputs=session.shows_inputs,
        hints=annotation_hints(session),
        draw=can_draw and images is not None and images.dim() == 3,  # drawings are grey
        prompt=text is not None and (text.unit != "pieces" or session.media.tokenizer is not None),
        labels=None if session.media.labels is None else list(session.media.labels),
        exact=session.exact,
        shares=[groupings_text([by]) for by in memory.kept_groupings] if session.shares_only else [],
        replays=session.replays,
        warnings=list(session.warnings),
    )


def _kind(session: Session) -> str:
    """Return the kind of a test example: "text", "image", or "none" of these."""
    tokens = not session.tests.is_floating_point() or not len(session.tests)
    if session.media.text is not None and tokens:
        return "text"
    return "image" if session.test_images is not None else "none"
