"""One misclassified image, asked five questions: attention, contribution, path contribution, mask and effect.

Every question gives each class of training images a number; `questions_page.py` sets them side by side.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import dualform
from dualform.attend.memory import Memory
from dualform.experiments.findings import Row
from dualform.experiments.image_training import Task
from dualform.show.figures import LayerPanels, totals
from dualform.show.predictions import predict_units


def ask_questions(memory: Memory, model: nn.Module, task: Task, reference: Tensor, figure: Path) -> Row | None:
    """Ask all questions about the first test image that the model gets wrong, and draw the answers; None if none is.

    Args:
        memory: the recorded training, with a column `label`.
        model: the trained model.
        task: its data.
        reference: reference inputs for path contributions.
        figure: the file of the figure.
    """
    outputs = predict_units(model, task.test)
    wrong = (outputs != task.test_labels).nonzero()[:, 0].tolist()
    if not wrong:
        return None
    place = wrong[0]
    image, said, true = task.test[place : place + 1], int(outputs[place]), int(task.test_labels[place])
    last = list(memory.layers)[-1]
    classes = sorted(set(task.train_labels.tolist()))
    quantity = dualform.contrast(said, true)

    def attention() -> Tensor:
        return memory.attend(model, image)[last].totals("label").values[0]

    def contribution() -> Tensor:
        values = memory.attend(model, image)[last].totals("label", of="contribution").values[0]
        return values[:, said] - values[:, true]

    def path() -> Tensor:
        spotlight = memory.attend(model, image, quantity=quantity)
        return spotlight.path_contributions(by="label", against=reference).values[0]

    def mask() -> Tensor:
        whole = quantity(_logits(model, image), None)
        each = [quantity(_logits(memory.without(label=c).apply(model), image), None) for c in classes]
        return whole - torch.cat(each)

    def effect() -> Tensor:
        return memory.attend(model, image, quantity=quantity).effects(by="label").values[0]

    asked: dict[str, Callable[[], Tensor]] = {
        "attention": attention,
        "contribution": contribution,
        "path contribution": path,
        "mask": mask,
        "effect": effect,
    }
    on_gpu = next(model.parameters()).is_cuda
    clock = time.perf_counter if on_gpu else time.process_time  # on a CPU the processor's, other programs' left out
    answers: dict[str, Row] = {}
    for name, ask in asked.items():
        start = clock()
        values = ask().double().cpu()
        seconds = clock() - start
        answers[name] = {"values": values.tolist(), "leads": classes[int(values.argmax())], "seconds": seconds}
    figure.parent.mkdir(parents=True, exist_ok=True)
    layers = {name: torch.tensor(answer["values"]).numpy() for name, answer in answers.items()}
    title = f"A {true} that the network takes for a {said}"
    totals(figure, LayerPanels(layers, classes, true, said, title), measure="of each class of training images")
    return {"test": place, "said": said, "true": true, "classes": classes, "answers": answers}


@torch.no_grad()
def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits: Tensor = model.eval()(inputs.to(device))
    return logits
