"""One training sample as an input sees it: its occurrences and their attention in every layer. For comparing pins."""

from dataclasses import dataclass
from typing import Any

from dualform.errors import QueryError
from dualform.show.session import Session, Subject


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer to each occurrence of a sample, and its sum."""

    layer: str
    total: float
    attention: list[float]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The occurrences of one training sample.

    Attributes:
        sample: the sample's number.
        label: its label, where there are labels.
        label_name: the label as people read it.
        image: whether the run keeps an image of it.
        steps: the step of each occurrence.
        layers: the attention to each occurrence, layer by layer.
    """

    sample: int
    label: Any
    label_name: Any
    image: bool
    steps: list[int]
    layers: list[LayerAttention]


def sample_occurrences(session: Session, subject: Subject, number: int, *, row: int | None = None) -> Occurrences:
    """Return the attention of an input to every occurrence of one training sample."""
    if "sample" not in session.memory.columns:
        raise QueryError("The run has no column named sample.")
    view = session.answers.get(("sample", number), lambda: session.memory.where(sample=number).unwarned())
    spotlight, _ = session.spotlight(subject, row=row)
    layers = []
    steps: list[int] = []
    label = None
    for name, spot in spotlight.layers.items():
        table = view.patterns(name, columns=["step", *(["label"] if "label" in view.columns else [])])
        if not table.num_rows:
            raise QueryError(f"There is no training sample {number} in this run.")
        steps = table["step"].to_pylist()
        label = table["label"][0].as_py() if "label" in table.column_names else None
        attention = view.attend(queries={name: spot.queries})[name].attention()[0].tolist()
        layers.append(LayerAttention(name, sum(attention), attention))
    return Occurrences(
        sample=number,
        label=label,
        label_name=session.name(label) if isinstance(label, int) else label,
        image=session.media.image(number) is not None,
        steps=steps,
        layers=layers,
    )
