"""What other libraries say of every training sample, for the same networks, samples and test inputs.

    kronfluence   EK-FAC influence, over a grid of dampings
    traker        TRAK, with 1, 5 and 10 networks, over a grid of features
    captum        TracInCP, over five checkpoints

A peer that is not installed is left out. Each function takes one split of an evaluation and returns label -> (R, M, N):
how much each of the N samples is said to raise the margin of each of the M test inputs, by R networks.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dualform.effects.output_gradients import measure_quantity
from dualform.experiments.retraining import CHECKPOINTS
from dualform.experiments.retraining_config import RetrainingConfig, Split
from dualform.experiments.stacked_training import initial, loss_of

DAMPINGS = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, None)  # None: kronfluence's own choice
FEATURES = (8, 16, 32, 64, 128, 256, 512)  # that TRAK projects gradients to


def networks(config: RetrainingConfig, here: Path, checkpoint: int, count: int) -> list[nn.Module]:
    """Return the first networks of a split, as they were at a checkpoint."""
    stacked = load_file(here / f"models-{checkpoint}.safetensors")
    found = []
    for i in range(count):
        model = initial(config, 0)
        model.load_state_dict({name: tensor[i] for name, tensor in stacked.items()})
        found.append(model.eval())
    return found


def kronfluence(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Tensor]:
    """Return EK-FAC influences on minus the margin: positive where a sample raises it."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Margins(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, targets = batch
            outputs = model(inputs)
            flat = outputs.flatten(0, -2)
            wanted = targets.flatten()
            if sample:
                with torch.no_grad():
                    wanted = torch.multinomial(flat.softmax(dim=-1), 1).flatten()
            loss = nn.functional.cross_entropy(flat, wanted, reduction="sum")
            return loss / (targets[0].numel() if targets.dim() > 1 else 1)  # a mean over a passage's characters

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            inputs, targets = batch
            return -measure_quantity(model(inputs), targets, "margin").sum()

    train, test = TensorDataset(split.train, split.train_targets), TensorDataset(split.test, split.test_targets)
    found: dict[str, list[Tensor]] = {}
    for model in networks(config, here, CHECKPOINTS - 1, 1):
        task = Margins()
        prepared = prepare_model(model, task)
        with tempfile.TemporaryDirectory() as folder:
            analyzer = Analyzer("truth", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
            size = {"per_device_batch_size": 256, "factor_args": FactorArguments(strategy="ekfac")}
            analyzer.fit_all_factors("factors", train, overwrite_output_dir=True, **size)
            for damping in DAMPINGS:
                analyzer.compute_pairwise_scores(
                    "scores",
                    "factors",
                    test,
                    train,
                    per_device_query_batch_size=64,
                    per_device_train_batch_size=256,
                    score_args=ScoreArguments(damping_factor=damping),
                    overwrite_output_dir=True,
                )
                label = f"EK-FAC, damping {'chosen' if damping is None else f'{damping:g}'}"
                found.setdefault(label, []).append(analyzer.load_pairwise_scores("scores")["all_modules"].double())
    return {label: torch.stack(each) for label, each in found.items()}


def traker(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Tensor]:
    """Return TRAK's scores with 1, 5 and 10 networks and several numbers of features; images only."""
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    if config.data == "text":
        return {}

    class Projector(BasicProjector):
        def free_memory(self) -> None:
            """Keep the matrix: traker frees it between featurizing and scoring, and does not make it again."""

    models = networks(config, here, CHECKPOINTS - 1, config.models)
    found = {}
    for features in FEATURES:
        projector = Projector(
            grad_dim=sum(parameter.numel() for parameter in models[0].parameters()),
            proj_dim=features,
            seed=0,
            proj_type=ProjectionType.rademacher,
            device=torch.device("cpu"),
            dtype=torch.float32,
            block_size=features,
        )
        with tempfile.TemporaryDirectory() as folder:
            asked = TRAKer(
                initial(config, 0),  # one of its own: checkpoints are loaded into it
                "image_classification",
                config.train,
                save_dir=folder,
                device="cpu",
                projector=projector,
                proj_dim=None,
                use_half_precision=False,
                logging_level=40,
            )
            for i, model in enumerate(models):
                asked.load_checkpoint(model.state_dict(), model_id=i)
                for rows in torch.arange(config.train).split(250):
                    asked.featurize((split.train[rows], split.train_targets[rows]), num_samples=len(rows))
            asked.finalize_features()
            for i, model in enumerate(models):
                asked.start_scoring_checkpoint("tests", model.state_dict(), i, config.tests)
                asked.score((split.test, split.test_targets), num_samples=config.tests)
            for count in (1, 5, 10):
                if count <= len(models):
                    scores = asked.finalize_scores("tests", model_ids=list(range(count)), allow_skip=True)  # (N, M)
                    label = f"TRAK, {count} network{'s' if count > 1 else ''}, {features} features"
                    found[label] = torch.as_tensor(scores.copy()).T[None].double()
    return found


def captum(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Tensor]:
    """Return TracInCP's influences over the checkpoints, on the margin and on the loss."""
    from captum.influence import TracInCP

    class Loss(nn.Module):
        reduction = "sum"

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            terms = targets[0].numel() if targets.dim() > 1 else 1
            return loss_of(outputs, targets) * targets.numel() / terms

    class Margin(nn.Module):
        reduction = "sum"

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -measure_quantity(outputs, targets, "margin").sum()

    def load(model: nn.Module, state: Any) -> float:
        model.load_state_dict(state)
        return config.learning_rate

    train = TensorDataset(split.train, split.train_targets)
    found: dict[str, list[Tensor]] = {}
    for i in range(config.recordings):
        states = [networks(config, here, c, i + 1)[i].state_dict() for c in range(CHECKPOINTS)]
        for label, asked in (("TracInCP, of the margin", Margin()), ("TracInCP, of the loss", Loss())):
            tracer = TracInCP(
                initial(config, 0),
                train,
                states,
                checkpoints_load_func=load,
                loss_fn=Loss(),
                test_loss_fn=asked,
                batch_size=250,
                sample_wise_grads_per_batch=True,
            )
            found.setdefault(label, []).append(tracer.influence((split.test, split.test_targets)).detach().double())
    return {label: torch.stack(each) for label, each in found.items()}


Peer = Callable[[RetrainingConfig, Split, Path], dict[str, Tensor]]
PEERS: dict[str, tuple[str, Peer]] = {
    "kronfluence": ("kronfluence", kronfluence),
    "traker": ("trak", traker),
    "captum": ("captum", captum),
}
"""Each peer's module, and what asks it."""


def installed(names: Sequence[str]) -> list[str]:
    """Return those of the peers that are installed."""
    return [name for name in names if importlib.util.find_spec(PEERS[name][0]) is not None]
