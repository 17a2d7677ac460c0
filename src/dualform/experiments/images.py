"""Run an image study, from data to numbers and figures; its findings are stored as JSON beside the run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import dualform
from dualform.attend.memory import Memory
from dualform.experiments.agreement import agreement
from dualform.experiments.findings import Clock, Row, finish_study, make_room, verified_findings
from dualform.experiments.image_examples import attend_examples, choose_examples, draw_figures
from dualform.experiments.image_studies import ImageStudy, load_sets
from dualform.experiments.image_training import Task, accuracy, make_tasks, train_classifier
from dualform.recording.keep import Shares
from dualform.show.predictions import predict_units
from dualform.show.terminal_tables import plain

CLOSE = 1000  # test examples per task for which attention is compared between tasks


def reproduce_from_shares(study: ImageStudy, folder: Path, *, seed: int, device: str = "cpu") -> Row:
    """Run the continual study with one seed, keeping shares by task in place of patterns, and return its findings.

    Args:
        study: the continual study.
        folder: gets `run/` and the findings; findings that are there already are returned as they are.
        seed: of the network and the order of its training.
        device: where to train and attend.
    """
    found = make_room(folder, study, seed=seed, keep=True)
    if found is not None:
        return found
    clock = Clock({})
    tasks = clock("data", lambda: make_tasks(load_sets(study.tasks)))
    run = folder / "run"
    shares = Shares(by=["task", "coin"], at=[study.phases[0].steps], resumable=False)
    model = clock(
        "training",
        lambda: train_classifier(tasks, study.phases, study.recipe, run, seed=seed, device=device, keep=shares),
    )
    memory = dualform.open(run)
    findings: Row = {
        **verified_findings(memory, model, study, clock, seed=seed),
        "accuracy": {task.name: accuracy(model, task) for task in tasks},
        "masks": clock("masks", lambda: _masks_findings(memory, model, tasks, study)),
        "given_back": clock("given back", lambda: _given_back_findings(memory, model, tasks, study)),
        "bytes": memory.info().bytes,
        "patterns_bytes": _patterns_bytes(model, tasks[0], study),
        "groupings": memory.kept_groupings,
    }
    return finish_study(folder, findings, clock, device=device, keep=True)


def _patterns_bytes(model: nn.Module, task: Task, study: ImageStudy) -> int:
    """Return how many bytes the patterns of a study would take."""
    device = next(model.parameters()).device
    return dualform.estimate(model, task.train[: study.recipe.batch].to(device), steps=study.steps).total


def _given_back_findings(memory: Memory, model: nn.Module, tasks: Sequence[Task], study: ImageStudy) -> Row:
    """Count tests of the first task that were right before the second: how many still are, and are under the mask."""
    first, second = tasks
    views = {
        "before": memory.at(step=study.phases[0].steps).apply(model),
        "after": model,
        "masked": memory.without(task=second.name).apply(model),
    }
    right = {name: predict_units(view, first.test) == first.test_labels for name, view in views.items()}
    lost = right["before"] & ~right["after"]
    return {
        "right before": int(right["before"].sum()),
        "forgotten": int(lost.sum()),
        "forgotten, right under the mask": int((lost & right["masked"]).sum()),
    }


def reproduce_images(study: ImageStudy, folder: Path, *, seed: int, device: str = "cpu", keep: bool = True) -> Row:
    """Run a study with one seed and return its findings.

    Args:
        study: what to do.
        folder: gets `run/`, `figures/` and the findings; findings that are there already are returned as they are.
        seed: of the network and the order of its training.
        device: where to train and attend.
        keep: keep the recorded patterns (gigabytes) after the findings are drawn from them.
    """
    found = make_room(folder, study, seed=seed, keep=keep)
    if found is not None:
        return found
    clock = Clock({})
    tasks = clock("data", lambda: make_tasks(load_sets(study.tasks)))
    run = folder / "run"
    model = clock(
        "training", lambda: train_classifier(tasks, study.phases, study.recipe, run, seed=seed, device=device)
    )
    memory = dualform.open(run)
    findings: Row = {
        **verified_findings(memory, model, study, clock, seed=seed),
        "accuracy": {task.name: accuracy(model, task) for task in tasks},
        "table_1": clock("table 1", lambda: _table_1_findings(memory, model, tasks[0])) if len(tasks) == 1 else None,
        "sharing": clock("sharing", lambda: _sharing_findings(memory, model, tasks)) if len(tasks) > 1 else None,
        "masks": clock("masks", lambda: _masks_findings(memory, model, tasks, study))
        if study.name == "continual"
        else None,
        "forgotten": clock("forgotten", lambda: _forgotten_findings(memory, model, tasks, study))
        if study.name == "continual"
        else None,
    }
    findings["figures"] = clock("figures", lambda: _figures(memory, model, tasks, study, folder / "figures"))
    return finish_study(folder, findings, clock, device=device, keep=keep)


def _table_1_findings(memory: Memory, model: nn.Module, task: Task) -> Row:
    """Return the agreement of attention with target and output, by magnitude (the authors' sums) and signed."""
    spotlight = memory.attend(model, list(task.test.split(1000)))
    outputs = predict_units(model, task.test)
    return {
        of: plain(agreement(spotlight.vote(by="label", of=of), task.test_labels, outputs))
        for of in ("magnitude", "attention")
    }


def _sharing_findings(memory: Memory, model: nn.Module, tasks: Sequence[Task]) -> list[Row]:
    """Return, per layer and tested task, how attention is shared between the tasks' patterns."""
    rows = []
    for tested in tasks:
        spotlight = memory.attend(model, tested.test[:CLOSE])
        vote = spotlight.vote(by=["task", "label"])
        for name, layer in spotlight.layers.items():
            totals = layer.totals("task", of="magnitude")
            shares = (totals.values / totals.values.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
            won = [winner[0] == tested.name for winner in vote.winners[name]]
            rows.append(
                {
                    "layer": name,
                    "tested": tested.name,
                    "share": dict(zip(totals.groups, shares, strict=True)),
                    "largest_total_in_own_task": sum(won) / len(won),
                }
            )
    return rows


def _masks_findings(memory: Memory, model: nn.Module, tasks: Sequence[Task], study: ImageStudy) -> list[Row]:
    """Return both tasks' accuracies of the memory and of its masked views."""
    second = tasks[1]
    switch = study.phases[0].steps
    masked = memory.without(task=second.name)
    views: list[tuple[str, Callable[[], nn.Module]]] = [
        ("everything", lambda: model),
        (f"without {second.name}", lambda: masked.apply(model)),
        (f"as it was after step {switch}", lambda: memory.at(step=switch).apply(model)),
        *(
            (f"without {second.name}, {name} alone", lambda name=name: masked.apply(model, layers=[name]))
            for name in memory.layers
        ),
        ("without a random half of each batch", lambda: memory.without(coin=1).apply(model)),
    ]
    rows = []
    for what, make in views:
        view = make()
        rows.append({"memory": what, **{task.name: accuracy(view, task) for task in tasks}})
    return rows


def _forgotten_findings(memory: Memory, model: nn.Module, tasks: Sequence[Task], study: ImageStudy) -> Row:
    """Look at tests of the first task that were right before the second and are wrong after it."""
    first, second = tasks
    before = predict_units(memory.at(step=study.phases[0].steps).apply(model), first.test) == first.test_labels
    outputs = predict_units(model, first.test)
    after = outputs == first.test_labels
    rows = []
    for what, chosen in (("forgotten", before & ~after), ("still right", before & after)):
        test_rows = chosen.nonzero()[:, 0][:CLOSE]
        if not len(test_rows):
            continue
        spotlight = memory.attend(model, first.test[test_rows])
        vote = spotlight.vote(by=["task", "label"])
        for name, layer in spotlight.layers.items():
            totals = layer.totals("task", of="magnitude")
            place = totals.groups.index(second.name)
            share = (totals.values[:, place] / totals.values.sum(dim=1)).mean()
            winners = vote.winners[name]
            said = outputs[test_rows].tolist()
            rows.append(
                {
                    "tests": what,
                    "layer": name,
                    "share_of_second_task": float(share),
                    "largest_total_in_second_task": _share_of_hits(task == second.name for task, _ in winners),
                    "largest_total_is_the_output": _share_of_hits(
                        label == output for (_, label), output in zip(winners, said, strict=True)
                    ),
                }
            )
    counts = {"forgotten": int((before & ~after).sum()), "still right": int((before & after).sum())}
    return {"counts": counts, "rows": rows}


def _share_of_hits(hits: Any) -> float:
    flags = [bool(hit) for hit in hits]
    return sum(flags) / len(flags)


def _figures(memory: Memory, model: nn.Module, tasks: Sequence[Task], study: ImageStudy, folder: Path) -> list[str]:
    by: str | list[str] = "label" if len(tasks) == 1 else ["task", "label"]
    names: list[str] = []
    for task in tasks:
        outputs: Tensor = predict_units(model, task.test)
        closeup = attend_examples(memory, model, choose_examples(task, outputs, right=1, wrong=1), by=by)
        paths = draw_figures(closeup, tasks, folder, prefix=f"{study.name}-{task.name}")
        names += [path.name for path in paths]
    return names
