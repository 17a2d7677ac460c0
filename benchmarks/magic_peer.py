"""bergson's MAGIC beside unrolled effects: the same derivative of the same fine-tuning, by another implementation.

    python -m benchmarks.magic_peer --page docs/results.md

Needs bergson and torchopt, which the suite does not install: `pip install bergson` in an environment of its own.
"""

import argparse
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import dualform
from dualform.effects.output_gradients import measure_quantity
from dualform.experiments.page import Section, write_page
from dualform.experiments.study_summary import Grid
from dualform.experiments.tuning_study import QUANTITY, Tuning, TuningCase, TuningStudy, by_sample, make_tuning
from dualform.store.memory_blobs import MemoryBlobs

TESTS = 3
STUDY = TuningStudy()


class WeightedLoss(nn.Module):
    """A network as bergson's trainer calls it: numbers of samples and their weights in, the weighted mean loss out."""

    def __init__(self, tuning: Tuning, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._tuning = tuning

    def forward(self, input_ids: Tensor, example_weight: Tensor) -> Tensor:  # (B, 2), (B,) -> ()
        """Return the weighted mean loss."""
        return (self._tuning.losses(self.network, input_ids[:, 0]) * example_weight).mean()


class Batches:
    """The steps of a fine-tuning, as bergson's trainer reads them."""

    device = torch.device("cpu")
    requires_grad = True

    def __init__(self, tuning: Tuning) -> None:
        self.weights = nn.Parameter(torch.ones(len(tuning.train)))
        self._rows = tuning.rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows = self._rows[number]
        return {"input_ids": rows[:, None].repeat(1, 2), "example_weight": self.weights[rows]}


EPS_ROOT = 1e-17
"""What bergson adds to second moments, by default, before their root is taken."""


def magic(tuning: Tuning, case: TuningCase, test: int, *, eps_root: float = 0.0) -> tuple[Tensor, float]:
    """Return MAGIC's derivative of one test input's loss by the weight of each sample (N,), and its seconds."""
    import torchopt
    from bergson.magic.trainer import BackwardState, Trainer

    optimizer: Any = (
        torchopt.sgd(case.learning_rate, momentum=0.9)
        if case.optimizer == "SGD"
        else torchopt.adamw(case.learning_rate, eps=case.eps, eps_root=eps_root, weight_decay=0.01)
    )
    network = tuning.make()
    network.load_state_dict(tuning.start)
    trainer, state = Trainer.initialize(WeightedLoss(tuning, network.train()), optimizer)
    batches, folder = Batches(tuning), tempfile.mkdtemp()
    end = trainer.train(state, batches, save_dir=folder, save_mode="sqrt")
    trained = {name: tensor.detach().requires_grad_() for name, tensor in end.params.items()}
    inner = {name.removeprefix("network."): tensor for name, tensor in trained.items()}
    outputs = torch.func.functional_call(network.eval(), inner, (tuning.test[test : test + 1],))
    quantity = measure_quantity(outputs, tuning.test_targets[test : test + 1], QUANTITY).sum()
    gradients = torch.autograd.grad(quantity, list(trained.values()))
    network.train()
    states = [torch.zeros_like(one) for one in end.differentiable_tensors()[len(trained) :]]
    start = process_time()
    begun = BackwardState(dict(zip(trained, gradients, strict=True)), states, torch.zeros(len(tuning.train)))
    found: Tensor = trainer.backward(folder, batches, begun, end, cleanup=False).weight_grads
    seconds = process_time() - start
    shutil.rmtree(folder)
    return found.detach().double(), seconds


def compare(case: TuningCase) -> tuple[str, ...]:
    """Return a row of the table: how far the two derivatives are apart, and the seconds of each for one input."""
    tuning = make_tuning(dataclasses.replace(STUDY, tests=TESTS), dataclasses.replace(case, dropout=0.0), seed=0)
    blobs, train = MemoryBlobs(), tuning.training()
    model = dualform.record_training(train, blobs)
    spotlight = dualform.open(blobs, train=train).attend(
        model, tuning.test, targets=tuning.test_targets, quantity=QUANTITY
    )
    start = process_time()
    ours = by_sample(tuning, spotlight.effects(method="unrolled"))
    seconds = (process_time() - start) / TESTS
    theirs = [magic(tuning, case, test) for test in range(TESTS)]
    said = f"{_apart(ours, theirs):.0e}"
    if said == "nan":
        again = [magic(tuning, case, test, eps_root=EPS_ROOT) for test in range(TESTS)]
        said = f"MAGIC's is NaN; with eps_root {EPS_ROOT:g}: {_apart(ours, again):.0e}"
    name = case.name.removesuffix(", dropout")
    return name, said, f"{seconds:.2f} s", f"{sum(spent for _, spent in theirs) / TESTS:.2f} s"


def _apart(ours: Tensor, theirs: Sequence[tuple[Tensor, float]]) -> float:
    """Return the largest relative difference of any input's derivatives; NaN where one is."""
    each = [(mine - found).norm() / mine.norm() for mine, (found, _) in zip(ours, theirs, strict=True)]
    return float(torch.stack(each).amax())


def main() -> None:
    """Compare, print the table, and write its section where a page is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the study's cases, from 0; by default all")
    given = parser.parse_args()
    page: Path | None = given.page
    chosen = range(len(STUDY.cases)) if given.cases is None else given.cases
    rows = tuple(compare(STUDY.cases[at]) for at in chosen)
    for row in rows:
        print(*row, sep=" | ")
    columns = ("fine-tuning", "largest relative difference", "unrolled, for an input", "MAGIC, for an input")
    note = (
        f"Of {TESTS} test inputs. Processor time of one thread, without the recording and MAGIC's own training. "
        "bergson runs with its own AdamW: the root of a second moment has no derivative where all gradients were zero, "
        "which eps_root, a small number under the root, avoids; it makes another training."
    )
    grid = Grid("The derivative by the weight of each sample, from two implementations", columns, rows, note)
    text = (
        "bergson's MAGIC differentiates its own trainer. Given fine-tunings of the study of the same run again, "
        "without dropout, its derivative is that of unrolled effects wherever it is finite, and so is its score.",
        f"Made by `python -m benchmarks.magic_peer --cases {' '.join(map(str, chosen))} --page docs/results.md`.",
    )
    if page is not None:
        write_page(page, [Section("tuning-magic", "Fine-tuning, beside bergson's MAGIC", text, [grid])])


if __name__ == "__main__":
    main()
