"""One training sample as an input sees it: its occurrences and their attention in every layer. For comparing pins."""

from typing import Any

from dualform.show.viewer.ask import Ask, BadQuestion
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import Session, Subject


@question("/api/sample")
def sample(session: Session, ask: Ask) -> dict[str, Any]:
    """Return a sample's columns, and for each layer the attention to each of its occurrences."""
    if "sample" not in session.memory.columns:
        raise BadQuestion("The run has no column named sample.")
    return occurrences(session, ask.subject(session), ask.number("sample"), row=ask.optional("row"))


def occurrences(session: Session, subject: Subject, number: int, *, row: int | None = None) -> dict[str, Any]:
    """Return one sample's occurrences."""
    view = session.answers.get(("sample", number), lambda: session.memory.where(sample=number).unwarned())
    spotlight, _ = session.spotlight(subject, row=row)
    layers = []
    steps: list[int] = []
    label = None
    for name, spot in spotlight.layers.items():
        table = view.patterns(name, columns=["step", *(["label"] if "label" in view.columns else [])])
        if not table.num_rows:
            raise BadQuestion(f"There is no training sample {number} in this run.")
        steps = table["step"].to_pylist()
        label = table["label"][0].as_py() if "label" in table.column_names else None
        attention = view.attend(queries={name: spot.queries})[name].attention()[0].tolist()
        layers.append({"layer": name, "total": sum(attention), "attention": attention})
    return {
        "sample": number,
        "label": label,
        "label_name": session.name(label) if isinstance(label, int) else label,
        "image": session.media.image(number) is not None,
        "steps": steps,
        "layers": layers,
    }
