"""What the run is: for the header, and for what the page may offer."""

from typing import Any

from dualform.show.ask import MASK_NOTE
from dualform.show.viewer.ask import Ask
from dualform.show.viewer.questions import question
from dualform.show.viewer.session import Session, grouping_columns


@question("/api/run")
def run(session: Session, ask: Ask) -> dict[str, Any]:
    """Describe the run, its model, its layers, its groupings, and what kind of input it takes."""
    return {**session.answers.get("run", lambda: _describe(session)), "note": MASK_NOTE}


def _describe(session: Session) -> dict[str, Any]:
    memory = session.memory
    info = memory.info()
    text = session.media.text
    columns = grouping_columns(memory, list(memory.layers)[-1])
    kind = "text" if text is not None else "image" if session.test_images is not None else "none"
    can_draw = session.media.scale is not None and len(session.tests) > 0 and session.test_images is not None
    grey = can_draw and session.test_images is not None and session.test_images.dim() == 3
    return {
        "name": memory.path.name if memory.path.name != "run" else f"{memory.path.parent.name}/run",
        "path": str(memory.path),
        "steps": info.steps,
        "closed": info.closed,
        "bytes": info.bytes,
        "optimizers": info.optimizers,
        "model": None if memory.factory is None else memory.factory[0],
        "arguments": None if memory.factory is None else dict(memory.factory[1]),
        "layers": [{"name": name, **layer} for name, layer in info.layers.items()],
        "patterns": sum(layer["patterns"] for layer in info.layers.values()),
        "uncovered": dict(info.uncovered),
        "groupings": columns,
        "columns": list(info.columns),
        "output_layer": session.output_layer,
        "tests": len(session.tests),
        "kind": kind,
        "shape": list(session.test_images.shape[1:]) if session.test_images is not None else None,
        "images": session.media.has_images,
        "draw": bool(grey),
        "prompt": text is not None and text.unit != "pieces",  # the viewer has no tokenizer
        "labels": list(session.media.labels) if session.media.labels is not None else None,
        "exact": session.exact,
        "warnings": list(session.warnings),
    }
