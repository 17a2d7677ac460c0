"""The demo: train on digits, record, verify, attend and mask in under a minute, every number measured."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import dualform
from dualform.attend.memory import Memory
from dualform.engine.verification import Verification
from dualform.errors import RunExistsError
from dualform.experiments.agreement import Agreement, agreement
from dualform.experiments.datasets import load
from dualform.experiments.image_examples import Closeup, attend_examples, choose_examples, draw_figures
from dualform.experiments.image_training import ClassifierRecipe, Phase, Task, accuracy, make_tasks, train_classifier
from dualform.opening import published_stamp
from dualform.show.predictions import predict_units
from dualform.show.report.write import write_report

DEMO_RECIPE = ClassifierRecipe(hidden=(128, 128), learning_rate=0.02, momentum=0.9, clip=1.0, batch=64)
DEMO_STEPS = 600
REPORT_TESTS = 6  # in the report
MASKED_LABEL = 3  # the class that is masked away
MARK_FILE = "dualform-demo"  # a file that says the folder is the demo's own, to be replaced at will


@dataclass(frozen=True, slots=True)
class Masked:
    """Test accuracies on one class and on all others, under a view of the memory."""

    what: str
    on_label: float
    on_rest: float


@dataclass(frozen=True, slots=True, eq=False)
class Demo:
    """Everything that the demo found out."""

    folder: Path
    memory: Memory
    model: nn.Module
    tasks: Sequence[Task]
    seconds: float  # of training and recording
    accuracy: float
    verification: Verification
    table: Sequence[Agreement]
    closeup: Closeup
    masked: Sequence[Masked]
    figures: Sequence[Path]
    report: Path


def run_demo(folder: Path, *, seed: int = 0) -> Demo:
    """Train, record, verify, attend, mask, and draw."""
    _make_room(folder)
    tasks = make_tasks([load("digits")])
    task = tasks[0]
    start = time.perf_counter()
    model = train_classifier(tasks, [Phase((task.name,), DEMO_STEPS)], DEMO_RECIPE, folder / "run", seed=seed)
    seconds = time.perf_counter() - start
    memory = dualform.open(folder / "run")
    verification = memory.verify(model)
    outputs = predict_units(model, task.test)
    vote = memory.attend(model, task.test).vote(by="label")
    closeup = attend_examples(memory, model, choose_examples(task, outputs, right=2, wrong=1), by="label")
    report = folder / "report.html"
    write_report(memory, report, tests=REPORT_TESTS, model=model)
    return Demo(
        folder=folder,
        memory=memory,
        model=model,
        tasks=tasks,
        seconds=seconds,
        accuracy=accuracy(model, task),
        verification=verification,
        table=agreement(vote, task.test_labels, outputs),
        closeup=closeup,
        masked=_masked_rows(memory, model, task),
        figures=draw_figures(closeup, tasks, folder / "figures", prefix="digits"),
        report=report,
    )


def _masked_rows(memory: Memory, model: nn.Module, task: Task) -> list[Masked]:
    last = list(memory.layers)[-1]
    without = memory.without(label=MASKED_LABEL)
    views = {
        "everything": model,
        f"without the {MASKED_LABEL}s in the last layer": without.apply(model, layers=[last]),
        f"without the {MASKED_LABEL}s in any layer": without.apply(model),
        f"as it was after {DEMO_STEPS // 10} steps": memory.at(step=DEMO_STEPS // 10).apply(model),
        "without a random half of each batch": memory.without(coin=1).apply(model),
    }
    rows = []
    for what, masked in views.items():
        hits = (predict_units(masked, task.test) == task.test_labels).double()
        on_label = task.test_labels == MASKED_LABEL
        rows.append(Masked(what, float(hits[on_label].mean()), float(hits[~on_label].mean())))
    return rows


def _make_room(folder: Path) -> None:
    if (folder / MARK_FILE).is_file():
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()):
        what = "a recorded run" if published_stamp(folder) is not None else "other files"
        raise RunExistsError(f"{folder} holds {what}. Give the demo a folder of its own: dualform demo --folder PATH.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK_FILE).write_text("Made by `dualform demo`, which replaces this folder when it is run again.\n")
