"""What other methods say of every training sample, for the same networks, samples and test inputs.

    kronfluence   EK-FAC influence, over a grid of dampings
    traker        TRAK, with 1, 5 and 10 networks, over a grid of features
    captum        TracInCP, over five checkpoints
    source        SOURCE, by its published formula (`source_peer.py`), over numbers of segments and dampings

A peer that is not installed is left out. Each function takes one split of an evaluation and returns label -> what is
said: how much each of the N samples is said to raise the margin of each of the M test inputs, by R networks, and what
that took.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

from benchmarks.source_peer import Checkpoint, Task, gather, score_samples
from dualform.effects.output_gradients import measure_quantity
from dualform.experiments.retraining import CHECKPOINTS, checkpoint_steps, mean_of
from dualform.experiments.retraining_config import RetrainingConfig, Split
from dualform.experiments.retraining_networks import CharacterLSTM
from dualform.experiments.retraining_results import Cost
from dualform.experiments.stacked_training import SECOND_MOMENT, initial, loss_of

DAMPINGS = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, None)  # None: kronfluence's own choice
FEATURES = (8, 16, 32, 64, 128, 256, 512)  # that TRAK projects gradients to
SEGMENTS = (1, 3, 5)  # that SOURCE cuts a training into
SOURCE_DAMPINGS = (None, 1e-6, 1e-4, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # of its form for Adam; None: the diagonal alone


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What a method says with some settings.

    Attributes:
        scores: (R, M, N) by each of R networks.
        cost: of one network's scores; of TRAK, which has one for several networks, of all of them.
    """

    scores: Tensor
    cost: Cost


class LinearLSTM(nn.Module):
    """A character LSTM written out with linear layers, which peers know; the same numbers but for rounding.

    Each layer is called once a passage: kronfluence would take the gradient of one call of several alone. So the states
    are found first, and the call on all of them adds nothing to the numbers but is where the weight gets its gradient.
    """

    def __init__(self, lstm: CharacterLSTM) -> None:
        super().__init__()
        embedding, units = lstm.lstm.input_size, lstm.lstm.hidden_size
        self.tokens = nn.Embedding(lstm.tokens.num_embeddings, embedding)
        self.from_inputs = nn.Linear(embedding, 4 * units)
        self.from_state = nn.Linear(units, 4 * units)
        self.head = nn.Linear(units, lstm.head.out_features)
        self.load_state_dict({RENAMED.get(name, name): tensor for name, tensor in lstm.state_dict().items()})

    def forward(self, tokens: Tensor) -> Tensor:  # (B, L) -> (B, L, V)
        """Return the logits of the next character at each place."""
        x = self.tokens(tokens)
        from_inputs = self.from_inputs(x)
        with torch.no_grad():
            states = self._states(from_inputs)
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
        once = self.from_state(before + 0 * x[..., :1])  # captum wants inputs with gradients
        logits: Tensor = self.head(self._states(from_inputs + once - once.detach()))
        return logits

    def _states(self, gates: Tensor) -> Tensor:  # (B, L, 4 h) -> (B, L, h)
        weight, bias = self.from_state.weight.detach(), self.from_state.bias.detach()
        h = c = torch.zeros_like(gates[:, 0, : weight.shape[1]])
        found = []
        for place in range(gates.shape[1]):
            i, f, g, o = (gates[:, place] + nn.functional.linear(h, weight, bias)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, dim=1)


RENAMED = {
    "lstm.weight_ih_l0": "from_inputs.weight",
    "lstm.bias_ih_l0": "from_inputs.bias",
    "lstm.weight_hh_l0": "from_state.weight",
    "lstm.bias_hh_l0": "from_state.bias",
}
"""Parameters of an LSTM, and their names where it is written out with linear layers."""


def known(model: nn.Module) -> nn.Module:
    """Return a network in a form whose layers peers know."""
    return LinearLSTM(model) if isinstance(model, CharacterLSTM) else model


def checkpoints_of(config: RetrainingConfig, here: Path, checkpoint: int, count: int) -> list[Checkpoint]:
    """Return the first networks of a split, as they were at a checkpoint."""
    stacked = load_file(here / f"models-{checkpoint}.safetensors")
    ends = [0, *checkpoint_steps(config)]
    found = []
    for i in range(count):
        model = initial(config, 0)
        model.load_state_dict({name: stacked[name][i] for name in model.state_dict()})
        moments = {
            RENAMED.get(name, name): stacked[SECOND_MOMENT + name][i]
            for name in model.state_dict()
            if SECOND_MOMENT + name in stacked
        }
        found.append(Checkpoint(known(model).eval(), ends[checkpoint + 1] - ends[checkpoint], moments))
    return found


def networks(config: RetrainingConfig, here: Path, checkpoint: int, count: int) -> list[nn.Module]:
    """Return the first networks of a split, as they were at a checkpoint, without anything else."""
    return [each.model for each in checkpoints_of(config, here, checkpoint, count)]


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def folder_size(folder: str) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def sample_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample, (B,); of a passage, the mean over its characters."""
    each = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).mean(dim=1)


def kronfluence(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Said]:
    """Return EK-FAC influences on minus the margin: positive where a sample raises it."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Margins(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, targets = batch
            outputs = model(inputs)
            if sample:
                with torch.no_grad():
                    said = outputs.flatten(0, -2).softmax(dim=-1)
                    targets = torch.multinomial(said, 1).reshape(targets.shape)
            return sample_losses(outputs, targets).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            inputs, targets = batch
            return -measure_quantity(model(inputs), targets, "margin").sum()

    train, test = TensorDataset(split.train, split.train_targets), TensorDataset(split.test, split.test_targets)
    found: dict[str, list[tuple[Tensor, Cost]]] = {}
    for model in networks(config, here, CHECKPOINTS - 1, config.recordings):
        task = Margins()
        kept = size_of(model.state_dict())
        arguments = FactorArguments(strategy="ekfac")
        prepared = prepare_model(model, task)
        with tempfile.TemporaryDirectory() as folder:
            start = process_time()
            analyzer = Analyzer("truth", prepared, task, cpu=True, output_dir=folder, disable_tqdm=True)
            analyzer.fit_all_factors(
                "factors", train, overwrite_output_dir=True, per_device_batch_size=256, factor_args=arguments
            )
            fitted, size = process_time() - start, kept + folder_size(folder)
            for damping in DAMPINGS:
                start = process_time()
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
                scores = analyzer.load_pairwise_scores("scores")["all_modules"].double()
                found.setdefault(label, []).append((scores, Cost(fitted + process_time() - start, size)))
    return {label: _joined(each) for label, each in found.items()}


def _joined(each: Sequence[tuple[Tensor, Cost]]) -> Said:
    """Return what several networks say, with the mean cost of one."""
    scores, costs = zip(*each, strict=True)
    seconds, size = sum(cost.seconds for cost in costs) / len(costs), sum(cost.size for cost in costs) // len(costs)
    return Said(torch.stack(scores), Cost(seconds, size))


def source(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Said]:
    """Return SOURCE's scores over some numbers of segments, under AdamW in its form for Adam too."""
    task = Task(
        sample_losses,
        lambda outputs, targets: measure_quantity(outputs, targets, "margin"),
        (split.train, split.train_targets),
        (split.test, split.test_targets),
        config.learning_rate / (1 - config.momentum if config.optimizer == "SGD" else 1.0),
    )
    dampings = SOURCE_DAMPINGS if config.optimizer == "AdamW" else ()
    found: dict[str, list[tuple[Tensor, Cost]]] = {}
    for i in range(config.recordings):
        checkpoints = [checkpoints_of(config, here, c, i + 1)[i] for c in range(CHECKPOINTS)]
        kept = sum(size_of(each.model.state_dict()) for each in checkpoints)
        moments = sum(size_of(each.second_moments) for each in checkpoints)
        start = process_time()
        gathered = [gather(task, each) for each in checkpoints]
        gathering = process_time() - start
        for segments in SEGMENTS:
            scored = score_samples(task, gathered, segments=segments, dampings=dampings)
            for variant, scores in scored.scores.items():
                label = f"SOURCE, {segments} segment{'s' if segments > 1 else ''}{variant and f', Adam, {variant}'}"
                size = kept + scored.factor_bytes + (moments if variant else 0)
                found.setdefault(label, []).append((scores, Cost(gathering + scored.seconds[variant], size)))
    return {label: _joined(each) for label, each in found.items()}


class PassageMargins:
    """TRAK's model output for passages: the mean margin of their characters."""

    @staticmethod
    def get_output(model: nn.Module, weights: Any, buffers: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the margin of one passage, ()."""
        outputs = functional_call(model, (weights, buffers), (inputs[None],))
        return measure_quantity(outputs, targets[None], "margin").sum()

    @staticmethod
    def get_out_to_loss_grad(model: nn.Module, weights: Any, buffers: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return how much the loss of each passage falls with its margin, (B, 1)."""
        inputs, targets = batch
        with torch.no_grad():
            said: Tensor = functional_call(model, (weights, buffers), (inputs,)).softmax(dim=-1)
        return 1 - said.gather(-1, targets[..., None])[..., 0].mean(dim=1, keepdim=True)


def traker(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Said]:
    """Return TRAK's scores with 1, 5 and 10 networks and several numbers of features."""
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput
    from trak.projectors import BasicProjector, ProjectionType

    class Projector(BasicProjector):
        def free_memory(self) -> None:
            """Keep the matrix: traker frees it between featurizing and scoring, and does not make it again."""

    class Passages(PassageMargins, AbstractModelOutput):
        def __init__(self) -> None:
            pass

    models = networks(config, here, CHECKPOINTS - 1, config.models)
    found = {}
    for features in (number for number in FEATURES if number < config.train):  # as many as samples fit anything
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
            start = process_time()
            asked = TRAKer(
                known(initial(config, 0)),  # one of its own: checkpoints are loaded into it
                Passages() if config.data == "text" else "image_classification",
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
            asked.finalize_features(del_grads=True)
            for i, model in enumerate(models):
                asked.start_scoring_checkpoint("tests", model.state_dict(), i, config.tests)
                asked.score((split.test, split.test_targets), num_samples=config.tests)
            seconds = (process_time() - start) / len(models)
            kept = size_of(models[0].state_dict()) + 4 * config.train * (features + 1)  # features and loss gradients
            for count in (1, 5, 10):
                if count <= len(models):
                    start = process_time()
                    scores = asked.finalize_scores("tests", model_ids=list(range(count)), allow_skip=True)  # (N, M)
                    label = f"TRAK, {count} network{'s' if count > 1 else ''}, {features} features"
                    cost = Cost(count * seconds + process_time() - start, count * kept)
                    found[label] = Said(torch.as_tensor(scores.copy()).T[None].double(), cost)
    return found


def captum(config: RetrainingConfig, split: Split, here: Path) -> dict[str, Said]:
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
    found: dict[str, list[tuple[Tensor, Cost]]] = {}
    for i in range(config.recordings):
        states = [networks(config, here, c, i + 1)[i].state_dict() for c in range(CHECKPOINTS)]
        size = sum(map(size_of, states))
        for label, asked in (("TracInCP, of the margin", Margin()), ("TracInCP, of the loss", Loss())):
            start = process_time()
            tracer = TracInCP(
                known(initial(config, 0)),
                train,
                states,
                checkpoints_load_func=load,
                loss_fn=Loss(),
                test_loss_fn=asked,
                batch_size=250,
                sample_wise_grads_per_batch=True,
            )
            scores = tracer.influence((split.test, split.test_targets)).detach().double()
            found.setdefault(label, []).append((scores, Cost(process_time() - start, size)))
    return {label: _joined(each) for label, each in found.items()}


Peer = Callable[[RetrainingConfig, Split, Path], dict[str, Said]]
PEERS: dict[str, tuple[str, Peer]] = {
    "kronfluence": ("kronfluence", kronfluence),
    "source": ("benchmarks.source_peer", source),
    "traker": ("trak", traker),
    "captum": ("captum", captum),
}
"""Each peer's module, and what asks it."""


def installed(names: Sequence[str]) -> list[str]:
    """Return those of the peers that are installed."""
    return [name for name in names if importlib.util.find_spec(PEERS[name][0]) is not None]


def costs_of(found: Mapping[str, Said]) -> dict[str, Cost]:
    """Return the cost of each method, of one network and of the mean of several."""
    costs = {}
    for label, said in found.items():
        costs[label], count = said.cost, len(said.scores)
        if count > 1:
            costs[mean_of(count, label)] = Cost(count * said.cost.seconds, count * said.cost.size)
    return costs
