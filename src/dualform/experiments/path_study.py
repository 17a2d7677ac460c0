"""The study of path contributions: test errors, forgetting, cost, and how well samples' parts predict retraining."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.attend.path import PathContributions
from dualform.drawing import picture_of
from dualform.errors import DataError
from dualform.experiments.findings import Clock, Row, describe_machine, store_findings
from dualform.experiments.image_studies import ImageStudy, image_study, load_sets
from dualform.experiments.image_training import Task, make_tasks, train_classifier
from dualform.experiments.models import mlp
from dualform.experiments.questions import ask_questions
from dualform.experiments.questions_page import FIGURE
from dualform.experiments.retraining import evaluate_effects
from dualform.experiments.retraining import scores as scores_of_retraining
from dualform.experiments.retraining_config import RetrainingConfig
from dualform.show.predictions import predict_units
from dualform.show.terminal_tables import plain

ABOUT = "study.json"
"""The file that says which study and seed a folder holds."""

STEP_BINS = 6
"""Bins of steps of each task, in the continual part with a number of updates of its own."""

LDS_METHODS = ("effects", "path", "direct", "attention", "ceiling")
"""Scores of the retraining evaluation that stand beside path contributions."""


@dataclass(frozen=True, slots=True)
class PathStudy:
    """What to do.

    Attributes:
        data: mnist, or digits for a small and quick one.
        tests: test inputs of the continual part, and of the measurement of cost.
        errors: the most test errors that are looked at.
        reference: training inputs whose mean is the reference.
        width: steps of a bin, in the continual part.
        updates: how many each task gets in the continual part, where they are not as many as in the continual study.
    """

    data: str = "mnist"
    tests: int = 100
    errors: int = 100
    reference: int = 32
    width: int = 500
    updates: int | None = None

    @property
    def is_small(self) -> bool:
        """Whether single samples are asked about and networks trained again and again, which takes long on mnist."""
        return self.data == "digits"

    @property
    def evaluations(self) -> tuple[RetrainingConfig, ...]:
        """The evaluations against retraining, on digits: one split and one recording each, with SGD and AdamW."""
        common: dict[str, Any] = {
            "data": "digits", "epochs": 15, "subsets": 50, "seeds": 4, "recordings": 1, "models": 1, "splits": 1,
            "path": True,
        }  # fmt: skip
        return (
            RetrainingConfig(name="digits, SGD", learning_rate=0.1, **common),
            RetrainingConfig(name="digits, AdamW", optimizer="AdamW", learning_rate=0.001, weight_decay=0.01, **common),
        )


def path_study(data: str, *, updates: int | None = None) -> PathStudy:
    """Return the study on `mnist` or, small, on `digits`."""
    if data not in ("mnist", "digits"):
        raise DataError(f"The study of path contributions runs on mnist or digits; {data!r} came.")
    study = PathStudy(data, errors=60) if data == "mnist" else PathStudy(data, width=100)
    if updates is None:
        return study
    return dataclasses.replace(study, updates=updates, width=max(1, updates // STEP_BINS))


def reproduce_path(study: PathStudy, folder: Path, *, seed: int, device: str = "cpu", keep: bool = True) -> Row:
    """Run the study with one seed and return its findings; goes on where it stopped.

    Args:
        study: what to do.
        folder: gets `run/`, `figures/`, a file for each part that is done, and the findings; those that are there
            already are not made again.
        seed: of the networks and the order of their training.
        device: where to train and ask.
        keep: keep the recorded patterns (gigabytes) of the first training.
    """
    about = plain({"study": study, "seed": seed})
    if folder.exists() and _read(folder / ABOUT) != about:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    trained = _Trained(study, folder, seed=seed, device=device)
    parts: dict[str, Callable[[Clock], Any]] = {
        "errors": lambda clock: clock("errors", lambda: _errors_findings(trained(clock), study, folder / "figures")),
        "cost": lambda clock: clock("cost", lambda: _cost_findings(trained(clock), study, device)),
        "forgetting": lambda clock: _forgetting_findings(study, folder / "continual", clock, seed=seed, device=device),
    }
    if study.is_small:
        parts["retraining"] = lambda clock: _retraining_findings(study, folder / "retraining", clock, device=device)
        parts["questions"] = lambda clock: _question_findings(trained(clock), study, folder)  # for docs/questions.md
    found: dict[str, Row] = {}
    for name, make in parts.items():
        done = _read(folder / f"part-{name}.json")
        if done is None:
            clock = Clock({})
            done = plain({"found": make(clock), "seconds": clock.seconds, "machine": describe_machine(device)})
            (folder / f"part-{name}.json").write_text(json.dumps(done, indent=1) + "\n")
        found[name] = done
    if not keep and trained.run.exists():
        shutil.rmtree(trained.run)
    findings = {
        **about,
        **{name: part["found"] for name, part in found.items()},
        "seconds": {what: spent for part in found.values() for what, spent in part["seconds"].items()},
        "machine": found["errors"]["machine"],
    }
    return store_findings(folder, findings)


def _read(path: Path) -> Any:
    """Return what a JSON file holds, or None if there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A recorded training on one task, ready to be asked."""

    run: Path
    memory: Memory
    model: nn.Module
    task: Task
    plan: ImageStudy


class _Trained:
    """The training on one task: done once, and kept in the study's folder until all parts are done."""

    def __init__(self, study: PathStudy, folder: Path, *, seed: int, device: str) -> None:
        self.run = folder / "run"
        self._weights = folder / "model.safetensors"
        self._plan = image_study("single", study.data)
        self._seed = seed
        self._device = device
        self._known: _Asked | None = None

    def __call__(self, clock: Clock) -> _Asked:
        """Return the recorded training, which is done where the folder does not hold it yet."""
        if self._known is None:
            plan, device = self._plan, self._device
            (task,) = make_tasks(load_sets(plan.tasks))
            if self._weights.is_file() and self.run.is_dir():
                model = _network(task, plan)
                model.load_state_dict(load_file(self._weights))
                model = model.to(device)
            else:
                _make_empty(self.run)
                model = clock("training", lambda: _train([task], plan, self.run, self._seed, device))
                save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, self._weights)
            self._known = _Asked(self.run, dualform.open(self.run), model, task, plan)
        return self._known


def _network(task: Task, plan: ImageStudy) -> nn.Module:
    return mlp([task.train.shape[1], *plan.recipe.hidden, len(task.images.class_names)])


def _question_findings(asked: _Asked, study: PathStudy, folder: Path) -> Row | None:
    """Ask five questions about one error."""
    figure = folder / "figures" / FIGURE
    return ask_questions(asked.memory, asked.model, asked.task, _reference(asked.task, study), figure)


def _reference(task: Task, study: PathStudy) -> Tensor:
    return task.train[: study.reference]


def _make_empty(run: Path) -> None:
    """Remove what an interrupted training left."""
    if run.exists():
        shutil.rmtree(run)


def _train(tasks: Sequence[Task], study: ImageStudy, run: Path, seed: int, device: str) -> nn.Module:
    return train_classifier(tasks, study.phases, study.recipe, run, seed=seed, device=device)


def _seconds(action: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return how long an action took, and its result: a GPU's time, or on a CPU the processor's, others left out."""
    on_gpu = device.startswith("cuda")
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    result = action()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start, result


def _plain_training(task: Task, study: ImageStudy, device: str) -> None:
    """Train as the study does, without recording."""
    torch.manual_seed(0)
    recipe = study.recipe
    model = _network(task, study).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
    for _ in range(study.steps):
        rows = torch.randint(len(task.train), (recipe.batch,))
        loss = functional.cross_entropy(model(task.train[rows].to(device)), task.train_labels[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()


def _cost_findings(asked: _Asked, study: PathStudy, device: str) -> Row:
    """Return the seconds of one plain training, and of path contributions of test inputs by label and by sample.

    Answers that the run keeps in its cache are forgotten first: an interrupted study may have asked already.
    """
    task, plan = asked.task, asked.plan
    short = dataclasses.replace(plan, phases=(dataclasses.replace(plan.phases[0], steps=10),))
    _plain_training(task, short, device)  # loads what a first training has to load
    training, _ = _seconds(lambda: _plain_training(task, plan, device), device)
    tests = slice(study.tests)
    shutil.rmtree(asked.run / "cache", ignore_errors=True)
    memory = dualform.open(asked.run)
    spotlight = memory.attend(asked.model, task.test[tests], targets=task.test_labels[tests], quantity="logit")
    reference = _reference(task, study)
    rows = []
    questions: dict[str, Callable[[], PathContributions]] = {
        "by label": lambda: spotlight.path_contributions(by="label"),
        "by label, against the reference": lambda: spotlight.path_contributions(by="label", against=reference),
    }
    if study.is_small:
        questions["per sample"] = lambda: spotlight.path_contributions(per="sample")
    for what, ask in questions.items():
        seconds, found = _seconds(ask, device)
        rows.append({"what": what, "seconds": seconds, "trainings": seconds / training, **_quality(found)})
    return {"training": training, "rows": rows}


def _quality(found: PathContributions) -> Row:
    return {
        "evaluations": found.evaluations,
        "parts_error": found.parts_error,
        "residual": found.residual_error,
    }


def contrast_of_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the difference of two logits of each input, (B,), which its targets (B, 2) name."""
    logits = outputs.gather(1, targets.to(outputs.device))
    return logits[:, 0] - logits[:, 1]


def _errors_findings(asked: _Asked, study: PathStudy, figures: Path) -> Row:
    """Look at test errors: which class leads "said rather than true", and which a control logit, by each method."""
    memory, model, task = asked.memory, asked.model, asked.task
    outputs = predict_units(model, task.test)
    wrong = (outputs != task.test_labels).nonzero()[:, 0][: study.errors]
    inputs, said, true = task.test[wrong], outputs[wrong], task.test_labels[wrong]
    control = _control_classes(said, true, len(task.images.class_names))
    targets = torch.cat([torch.stack([said, true], dim=1), torch.stack([control, true], dim=1)])
    spotlight = memory.attend(model, torch.cat([inputs, inputs]), targets=targets, quantity=contrast_of_targets)
    rows: list[Row] = []
    for against, how in ((None, ""), (_reference(task, study), ", against the reference")):
        found = spotlight.path_contributions(by="label", against=against)
        order = found.values.argsort(dim=1, descending=True)
        ranked = torch.tensor(found.groups)[order]
        for what, first, mine in (
            ("said rather than true", said, ranked[: len(said)]),
            ("a control class rather than true", control, ranked[len(said) :]),
        ):
            rows.append(
                {
                    "method": f"path contributions to {what}{how}",
                    "named_leads": _share(mine[:, 0] == first),
                    "said_leads": _share(mine[:, 0] == said),
                    "true_leads": _share(mine[:, 0] == true),
                    "true_least": _share(mine[:, -1] == true),
                    **_quality(found),
                }
            )
        if against is not None and len(wrong):
            _draw(found, figures / "path-waterfall.png")
    vote = memory.attend(model, inputs).vote(by="label")
    for layer, winners in vote.winners.items():
        leading = torch.tensor([-1 if winner is None else int(winner) for winner in winners])
        rows.append(
            {
                "method": f"attention of {layer}",
                "named_leads": _share(leading == said),
                "said_leads": _share(leading == said),
                "true_leads": _share(leading == true),
                "true_least": None,
            }
        )
    first_error = {"test": int(wrong[0]), "said": int(said[0]), "true": int(true[0])} if len(wrong) else None
    return {"errors": len(wrong), "rows": rows, "first": first_error}


def _control_classes(said: Tensor, true: Tensor, classes: int) -> Tensor:
    """Return for each error the next class after both that is neither the said nor the true one."""
    control = (torch.maximum(said, true) + 1) % classes
    for _ in range(2):
        control = torch.where((control == said) | (control == true), (control + 1) % classes, control)
    return control


def _draw(found: PathContributions, path: Path) -> None:
    """Draw the first input's parts, where matplotlib is installed."""
    try:
        figure = picture_of(found, 0)
    except ImportError:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def _share(hits: Tensor) -> float:
    return float(hits.double().mean()) if len(hits) else float("nan")


def _forgetting_findings(study: PathStudy, run: Path, clock: Clock, *, seed: int, device: str) -> Row:
    """Train on two tasks in sequence, and say how much of the first task's margins the second took away, and when."""
    continual = image_study("continual", study.data)
    if study.updates is not None:
        phases = tuple(dataclasses.replace(phase, steps=study.updates) for phase in continual.phases)
        continual = dataclasses.replace(continual, phases=phases)
    tasks = make_tasks(load_sets(continual.tasks))
    _make_empty(run)
    model = clock("training on two tasks", lambda: _train(tasks, continual, run, seed, device))
    memory = dualform.open(run)
    first, second = (task.name for task in tasks)
    tests = slice(study.tests)
    spotlight = memory.attend(model, tasks[0].test[tests], targets=tasks[0].test_labels[tests], quantity="margin")
    bins = dualform.bins("step", width=study.width)
    found = clock("forgetting", lambda: spotlight.path_contributions(by="task", over=bins))
    shutil.rmtree(run)
    place = {name: found.groups.index(name) for name in (first, second)}
    gained, taken = (found.values[:, place[name]] for name in (first, second))
    assert found.by_step is not None, "bins of steps were asked for"
    return {
        "tasks": [first, second],
        "updates": [phase.steps for phase in continual.phases],
        "start": float(found.start.mean()),
        "gained": float(gained.mean()),
        "taken": float(taken.mean()),
        "output": float(found.output.mean()),
        "rest": float((found.state + found.rest + found.residual).mean()),
        "lost_share": _share(taken < 0),
        "layers": {
            layer: {name: float(found.by_layer[:, place[name], i].mean()) for name in place}
            for i, layer in enumerate(found.layers)
        },
        "steps": {
            str(int(step)): {name: float(found.by_step[:, place[name], i].mean()) for name in place}
            for i, step in enumerate(found.steps)
        },
        **_quality(found),
    }


def _retraining_findings(study: PathStudy, folder: Path, clock: Clock, *, device: str) -> Row:
    """Return the linear datamodeling score of path contributions of samples, beside other methods'."""
    found = {}
    for config in study.evaluations:
        here = folder / config.name.replace(", ", "-")
        clock("retraining", partial(evaluate_effects, config, here, device=device))
        scores = scores_of_retraining(config, here)
        found[config.name] = {name: scores[name][0] for name in LDS_METHODS}
    return found
