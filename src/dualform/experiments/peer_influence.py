"""EK-FAC influence by kronfluence, where it is installed: what studies compare effects with."""

import copy
import importlib.util
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dualform.effects.output_gradients import Quantity, measure_quantity

DAMPINGS: Sequence[float | None] = (1e-8, 1e-6, 1e-4, 1e-2, None)
"""The dampings that are tried; None is kronfluence's own choice."""


def ekfac_is_installed() -> bool:
    """Say whether kronfluence is installed."""
    return importlib.util.find_spec("kronfluence") is not None


def find_ekfac_effects(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    quantity: Quantity,
    *,
    dampings: Sequence[float | None] = DAMPINGS,
) -> dict[str, Tensor]:
    """Return the EK-FAC influence of each training sample on the quantity of each test input, by damping, (M, N).

    The sign is that of effects: positive where training on the sample is said to raise the quantity.

    Args:
        model: the trained network; linear layers and convolutions count.
        train: inputs (N, ...) and targets.
        test: inputs (M, ...) and targets.
        quantity: what is asked about.
        dampings: the dampings to try.
    """
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Question(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, targets = batch
            flat, wanted = model(inputs).flatten(0, -2), targets.flatten()
            if sample:
                with torch.no_grad():
                    wanted = torch.multinomial(flat.softmax(dim=-1), 1).flatten()
            loss = nn.functional.cross_entropy(flat, wanted, reduction="sum")
            return loss / (targets[0].numel() if targets.dim() > 1 else 1)  # a mean over a passage's characters

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            inputs, targets = batch
            return -measure_quantity(model(inputs), targets, quantity).sum()

    task, found = Question(), {}
    prepared = prepare_model(copy.deepcopy(model).eval(), task)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about what kronfluence calls
        analyzer = Analyzer("peer", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
        rows = TensorDataset(*train)
        arguments = FactorArguments(strategy="ekfac")
        analyzer.fit_all_factors("factors", rows, per_device_batch_size=256, factor_args=arguments)
        for damping in dampings:
            analyzer.compute_pairwise_scores(
                "scores",
                "factors",
                TensorDataset(*test),
                rows,
                per_device_query_batch_size=64,
                per_device_train_batch_size=256,
                score_args=ScoreArguments(damping_factor=damping),
                overwrite_output_dir=True,
            )
            label = "chosen" if damping is None else f"{damping:g}"
            found[label] = analyzer.load_pairwise_scores("scores")["all_modules"].double()
    return found
