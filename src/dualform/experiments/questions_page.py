"""docs/questions.md: five questions about one misclassified image, side by side. No number in it is typed by hand."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from dualform.experiments.findings import Row
from dualform.experiments.page import markdown
from dualform.experiments.study_summary import Grid

FIGURE = "questions.png"

QUESTIONS: Mapping[str, tuple[str, str, str, str]] = {
    "attention": (
        "Which training patterns does this layer match the input with?",
        'spotlight[layer].totals("label")',
        "which keys are like the query, exactly, in the one layer that is asked",
        "what those patterns did to the output: a key that matches may carry a small value, or one of either sign",
    ),
    "contribution": (
        "What do training patterns add to this layer's output?",
        'spotlight[layer].totals("label", of="contribution")',
        "a complete sum: start + contributions = the layer's output, exactly",
        "anything about earlier layers: the layer's query was itself made by training",
    ),
    "path contribution": (
        "Where does the network's answer come from?",
        'spotlight.path_contributions(by="label", against=reference)',
        "a complete sum through all layers: start + parts + rest = the output, with the residual and the error of the "
        "parts printed",
        "what another training would give; and the parts of one bare logit, which name its own class whatever the "
        "input: ask a contrast, against a reference",
    ),
    "mask": (
        "What does the network say without these recorded updates?",
        "memory.without(label=...).apply(model)",
        "the output of a network whose weights lack those updates, exactly",
        "what a network would say that never saw the samples: the other updates answered to them, and stay",
    ),
    "effect": (
        "What would a training without these samples change?",
        'spotlight.effects(by="label")',
        "a prediction of retraining, the best of these five by measurement",
        "exactness: effects do not sum to the output, and their error is only known where retraining was done",
    ),
}
"""Each question in words, its call, what its answer may claim, and what it may not."""

SCORES = {"attention": "attention", "contribution": "direct", "path contribution": "path", "effect": "effects"}
"""The score of the retraining evaluation that belongs to a question."""


def write_questions(findings: Row, figures: Path, page: Path, *, command: str) -> None:
    """Write the page, and copy its figure beside it.

    Args:
        findings: of the study of path contributions on digits, with the part on questions.
        figures: the folder with its figures.
        page: the file to write.
        command: the command line that made the findings.
    """
    asked = findings["questions"]
    folder = page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(figures / FIGURE, folder / FIGURE)
    said, true = asked["said"], asked["true"]
    training = findings["cost"]["training"]
    parts = [
        "# Which question do I ask?",
        "Five questions can be asked about an answer of a trained network. They are not five ways to compute one "
        "thing: each has its own meaning, and each may claim something that the others may not.",
        f"Made by `{command}`. Test image {asked['test']} of digits is a {true} that the network takes for a {said}. "
        f"For each question, each class of training images gets a number; where two logits are involved, it is about "
        f"{said} rather than {true}.",
        f"![Five panels with a bar for each class: attention, contribution, path contribution, mask, "
        f"effect](figures/{FIGURE})",
        _claims(),
        markdown(_answers(asked)),
        markdown(_measured(findings, training)),
        "Ask for a **path contribution** to see where an answer came from, for a **mask** to try the network without "
        "some of its updates, and for an **effect** before you remove data and train again. **Attention** and "
        "**contributions** are what the others are made of: exact, layer by layer, and cheap for any number of "
        "patterns. [docs/math.md](math.md) derives all five.",
    ]
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n", "utf-8")


def _claims() -> str:
    lines = []
    for name, (question, call, may, may_not) in QUESTIONS.items():
        lines += [
            f"## {name.capitalize()}: {question[0].lower()}{question[1:]}\n",
            f"`{call}`\n",
            f"- It may claim {may}.",
            f"- It may not claim {may_not}.\n",
        ]
    return "\n".join(lines)


def _answers(asked: Row) -> Grid:
    rows = []
    for name, answer in asked["answers"].items():
        order = sorted(zip(answer["values"], asked["classes"], strict=True), reverse=True)
        shown = [f"{label} ({value:+.3g})" for value, label in (*order[:2], order[-1])]
        rows.append((name, *shown))
    columns = ("question", "leading class", "second", "last")
    note = "Attention is that of the last layer, without a sign of its own to compare with the other rows."
    return Grid(f"What each says here: {asked['said']} rather than {asked['true']}", columns, tuple(rows), note)


def _measured(findings: Row, training: float) -> Grid:
    scores = findings["retraining"]
    rows = []
    for name, answer in findings["questions"]["answers"].items():
        key = SCORES.get(name)
        found = [f"{scores[config][key]:.2f}" if key else "-" for config in scores]
        rows.append((name, f"{answer['seconds']:.2f}", f"{answer['seconds'] / training:.1f}", *found))
    columns = ("question", "seconds", "trainings", *(f"LDS, {config}" for config in scores))
    note = (
        "Seconds (the processor's) for this one image by all classes, beside the plain training of "
        f"{training:.1f} s. LDS is the linear datamodeling score: the rank correlation of what sums of samples' "
        "numbers predict with what retraining on halves of the data gave (1 is perfect); of attention its absolute "
        "value in all layers, of contributions those to the margin along fixed gradients. A mask was not scored by it."
    )
    return Grid("What it costs, and how well it predicts retraining", columns, tuple(rows), note)
