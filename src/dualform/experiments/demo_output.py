"""How the demo's findings look in a terminal, and as JSON."""

from typing import Any

from dualform.experiments.demo import MASKED_LABEL, Demo
from dualform.experiments.image_examples import attended, training_image
from dualform.recording.estimate import size_text
from dualform.show.predictions import MASK_NOTE
from dualform.show.terminal_images import draw, join_blocks
from dualform.show.terminal_tables import cell, console, percent, print_grid


def show_demo(demo: Demo) -> None:
    """Print everything, most important first."""
    screen = console()
    task = demo.tasks[0]
    screen.print(
        f"Trained a {'-'.join(map(str, demo.memory.factory[1]['widths'])) if demo.memory.factory else ''} network on "
        f"{len(task.train):,} digits in {demo.memory.step} steps and {demo.seconds:.1f} s, recording every pattern. "
        f"Test accuracy {percent(demo.accuracy)}.\n"
    )
    rows = [
        (layer.layer, layer.patterns, size_text(layer.bytes), f"{layer.error or 0:.1e}", layer.passed)
        for layer in demo.verification.layers
    ]
    title = "Is it exact? Every weight, rebuilt from the recorded patterns alone"
    print_grid(screen, title, ["layer", "patterns", "stored", "rebuild error", "passed"], rows)
    screen.print()

    table = [
        (row.layer, percent(row.target_when_wrong), percent(row.output_when_wrong), percent(row.when_right))
        for row in demo.table
    ]
    title = "The class with the largest total attention is ..."
    head = ["layer", "the target (model wrong)", "the output (model wrong)", "the target (model right)"]
    print_grid(screen, title, head, table)
    screen.print()

    for query, example in enumerate(demo.closeup.examples):
        verdict = "right" if example.right else "WRONG"
        screen.print(
            f"Test digit {example.number}: a {example.target}, and the model says {example.output} ({verdict}). "
            "The training digits it attends to most, over all their occurrences:",
            style="bold",
        )
        for layer in demo.closeup.top:
            blocks = [("test digit", draw(example.image))]
            for row in attended(demo.closeup, layer, query):
                caption = f"a {row['label']}, seen {row['occurrences']} times, {cell(row['attention'])}"
                blocks.append((caption, draw(training_image(demo.tasks, row["sample"]))))
            screen.print(f"layer {layer}")
            screen.print(join_blocks(blocks))
        screen.print()

    masked = [(row.what, percent(row.on_label), percent(row.on_rest)) for row in demo.masked]
    print_grid(
        screen,
        "What would it say without them? Test accuracy",
        ["memory", f"on {MASKED_LABEL}s", "on the rest"],
        masked,
    )
    screen.print(f"{MASK_NOTE}\n")
    screen.print(f"Figures: {demo.folder / 'figures'}", soft_wrap=True)
    screen.print(f"Report:  {demo.report} (open it in a browser)", soft_wrap=True)
    run = demo.memory.path
    screen.print(f"Look:    dualform view {run}  (a page with live masks)", soft_wrap=True)
    screen.print(f"Next: dualform attend {run} --by label --test 5", soft_wrap=True)
    screen.print(f"      dualform mask {run} --without 'label = 3 and step >= 100'", soft_wrap=True)


def demo_json(demo: Demo) -> dict[str, Any]:
    """Return everything as JSON can hold it."""
    return {
        "run": str(demo.memory.path),
        "steps": demo.memory.step,
        "seconds": demo.seconds,
        "accuracy": demo.accuracy,
        "verified": demo.verification.passed,
        "layers": [
            {"layer": layer.layer, "patterns": layer.patterns, "bytes": layer.bytes, "relative_error": layer.error}
            for layer in demo.verification.layers
        ],
        "agreement": demo.table,
        "examples": [
            {
                "test": example.number,
                "target": example.target,
                "output": example.output,
                "top": {layer: attended(demo.closeup, layer, query) for layer in demo.closeup.top},
            }
            for query, example in enumerate(demo.closeup.examples)
        ],
        "masked": demo.masked,
        "figures": [str(path) for path in demo.figures],
        "report": str(demo.report),
    }
