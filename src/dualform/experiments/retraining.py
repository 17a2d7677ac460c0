"""Do effects predict retraining? The linear datamodeling score, against networks that were really retrained.

For each of K random halves of the training samples, networks are trained on that half alone, with several seeds. What a
method says of the half is the sum of its scores over the half's samples; what happened is the mean margin over the
seeds. The score is the rank correlation of the two over the halves, for each test input, and then the mean over inputs.
Seeds of attribution and of retraining never meet. Everything is kept in a folder as it comes, so that an interrupted
evaluation goes on where it stopped.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from time import process_time

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dualform
from dualform.attend.groups import Grouping
from dualform.effects.layer_effects import FILTERING, Filtering, LayerEffects
from dualform.engine.block import Block
from dualform.engine.jobs import Pass
from dualform.engine.measures import PatternMeasure
from dualform.engine.reducers import GroupSums
from dualform.errors import DataError
from dualform.experiments.retraining_config import RetrainingConfig, Split, make_split
from dualform.experiments.retraining_results import Cost, load_costs, store_costs
from dualform.experiments.stacked_training import measure_stack, train_plain, train_recorded, train_stack
from dualform.progress import bar

RETRAINING, ATTRIBUTION = 10_000, 20_000  # the first seeds of retrained and of attributed networks
MOST_ATTENTIONS = (
    10_000_000_000  # of queries to patterns; where a network has more, the control of attention is left out
)
CHECKPOINTS = 5  # kept on the way, for methods that want them
OURS = ("effects", "joint", "layerwise", "direct", "attention", "path")
FILTERED: dict[str, Filtering] = {"joint": "joint", "layerwise": "layerwise", "direct": "none"}
"""Scores that are effects with some filter."""
PLAIN_TRAINING, RECORDED_TRAINING = "a training, not recorded", "the same, recorded"
"""What stands among the costs beside the methods."""


def evaluate_effects(
    config: RetrainingConfig,
    folder: Path,
    *,
    splits: Sequence[int] | None = None,
    device: str = "cpu",
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Retrain, record and score every split that the folder does not hold yet.

    Args:
        config: what to evaluate.
        folder: where everything is kept.
        splits: the numbers of the splits to run, from 0 on; by default all of the configuration.
        device: where to retrain; recording and scoring are done on the CPU.
        tell: takes a line about each part that is done.
    """
    numbers = range(config.splits) if splits is None else splits
    if unknown := sorted(set(numbers) - set(range(config.splits))):
        raise DataError(
            f"{config.name} has no split {', '.join(map(str, unknown))}; its splits are {', '.join(_named(config))}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _keep_config(config, folder)
    for number in numbers:
        split, here = make_split(config, number), folder / f"split-{number}"
        here.mkdir(exist_ok=True)
        for seed in range(config.seeds):
            if not (path := here / f"retrained-{seed}.safetensors").is_file():
                margins = _retrain(config, split, number, seed, device)
                _save_scores(path, {"margins": margins})
                tell(f"{config.name}: split {number}, retrained {config.subsets} halves with seed {seed}")
        if not (here / f"models-{CHECKPOINTS - 1}.safetensors").is_file():
            _train_models(config, split, number, here, device)
            tell(f"{config.name}: split {number}, trained {config.models} networks on all samples")
        for recording in range(config.recordings):
            if not (path := here / f"ours-{recording}.safetensors").is_file():
                found, costs = _score_samples(config, split, number, recording, here / "recording")
                store_costs(here / f"ours-{recording}.json", costs)
                _save_scores(path, found)
                tell(f"{config.name}: split {number}, effects of recording {recording}")


def _named(config: RetrainingConfig) -> list[str]:
    return [str(number) for number in range(config.splits)]


def _keep_config(config: RetrainingConfig, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(config), indent=1) + "\n"
    path = folder / "config.json"
    if path.is_file() and path.read_text() != text:
        raise DataError(f"{folder} holds another evaluation than {config.name}. Give it a folder of its own.")
    path.write_text(text)


def _save_scores(path: Path, tensors: Mapping[str, Tensor]) -> None:
    beside = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside)
    beside.replace(path)


def _retrain(config: RetrainingConfig, split: Split, number: int, seed: int, device: str) -> Tensor:
    """Return the margin of every test input after training on each half, (K, M)."""
    first = RETRAINING + (number * config.seeds + seed) * config.subsets
    seeds = range(first, first + config.subsets)
    stacked, _ = train_stack(config, split.train, split.train_targets, split.halves, seeds, device=device)
    return measure_stack(config, stacked, split.test, split.test_targets)


def attribution_seeds(config: RetrainingConfig, number: int) -> range:
    """Return the seeds of the networks that are trained on all samples of a split."""
    first = ATTRIBUTION + number * 1000
    return range(first, first + max(config.models, config.recordings))


def checkpoint_steps(config: RetrainingConfig) -> list[int]:
    """Return the steps after which checkpoints are kept."""
    steps = config.epochs * (config.train // min(config.batch, config.train))
    return [math.ceil(steps * (i + 1) / CHECKPOINTS) for i in range(CHECKPOINTS)]


def _train_models(config: RetrainingConfig, split: Split, number: int, here: Path, device: str) -> None:
    """Train the networks that peers attribute with, and keep them and some checkpoints on their way."""
    seeds = attribution_seeds(config, number)
    rows, keep = torch.arange(config.train).expand(len(seeds), -1), checkpoint_steps(config)
    _, checkpoints = train_stack(config, split.train, split.train_targets, rows, seeds, keep=keep, device=device)
    for i, state in enumerate(checkpoints):
        _save_scores(here / f"models-{i}.safetensors", state)


def _score_samples(
    config: RetrainingConfig, split: Split, number: int, recording: int, run: Path
) -> tuple[dict[str, Tensor], dict[str, Cost]]:
    """Record one training, and return the score of every sample by each of our methods, (M, N) each, and the costs."""
    if run.exists():
        shutil.rmtree(run)
    seed = attribution_seeds(config, number)[recording]
    watch = _Watch()
    with watch(PLAIN_TRAINING):
        train_plain(config, split.train, split.train_targets, seed)
    with watch(RECORDED_TRAINING):
        model = train_recorded(config, split.train, split.train_targets, run, seed)
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    with watch("attending"):
        memory = dualform.open(run)
        spotlight = memory.attend(model, split.test, targets=split.test_targets, quantity="margin")
    found = {name: torch.zeros(config.tests, config.train, dtype=torch.float64) for name in (*FILTERED, "attention")}
    if config.path:
        with watch("path"):
            whole = spotlight.path_contributions(per="sample")
        found["path"] = torch.zeros_like(found["direct"])
        found["path"].index_add_(1, torch.tensor(whole.groups), whole.values)
    measured = sum(len(layer) * layer.count() for layer in spotlight.layers.values())
    cheap = measured <= MOST_ATTENTIONS
    with bar("scoring", total=len(spotlight.layers)) as advance:
        for name, layer in spotlight.layers.items():
            advance(1)
            if name in spotlight.outside():
                continue
            source, grouping = layer._require_asked(), layer._group("sample")
            samples = torch.tensor(grouping.labels)
            for score_name, filtering in FILTERED.items():
                filtered = dataclasses.replace(source, filtering=filtering)
                with watch(score_name):
                    found[score_name].index_add_(1, samples, filtered.totals(grouping))
            if cheap:
                with watch("attention"):
                    found["attention"].index_add_(1, samples, _magnitudes(source, grouping))
    shutil.rmtree(run)
    trained = watch.seconds.pop(PLAIN_TRAINING), watch.seconds.pop(RECORDED_TRAINING)
    asked = watch.seconds.pop("attending")
    costs = {name: Cost(asked + seconds, size) for name, seconds in watch.seconds.items() if name != "layerwise"}
    costs["effects"] = costs.pop(FILTERING)  # the filter that is asked first; others find its moments made
    costs[PLAIN_TRAINING], costs[RECORDED_TRAINING] = Cost(trained[0], 0), Cost(trained[1], size)
    return {name: scored for name, scored in found.items() if cheap or name != "attention"}, costs


class _Watch:
    """Adds up the seconds of a processor that each of several things takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Add what passes meanwhile."""
        start = process_time()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + process_time() - start


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _MagnitudeOfInputs:
    """The absolute attention of each input to each pattern, summed over the input's queries."""

    inputs: int
    of: Tensor  # (Q,) each query's input
    needs_values: bool = False

    def __call__(self, queries: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """Return the sums, (inputs, n)."""
        each = PatternMeasure("magnitude")(queries, block, out)
        return each.new_zeros(self.inputs, each.shape[1]).index_add_(0, self.of, each)


def _magnitudes(source: LayerEffects, grouping: Grouping) -> Tensor:
    """Return the absolute attention of each input's queries to each sample, (M, G)."""
    job = Pass(
        layer=source.layer,
        view=source.table,
        reducer=GroupSums(len(grouping.labels)),
        like=source.queries,
        queries=source.queries,
        measure=_MagnitudeOfInputs(len(source), source.gradients.of),
        rows=len(source),
        groups=grouping,
    )
    return source.table.answer(job)


# Scores -------------------------------------------------------------------------------------------------------------


def finished_splits(config: RetrainingConfig, folder: Path) -> list[int]:
    """Return the splits of an evaluation whose retrainings and recordings are all done."""
    needed = [f"retrained-{seed}.safetensors" for seed in range(config.seeds)]
    needed += [f"ours-{recording}.safetensors" for recording in range(config.recordings)]
    return [
        number
        for number in range(config.splits)
        if all((folder / f"split-{number}" / name).is_file() for name in needed)
    ]


def scores(config: RetrainingConfig, folder: Path) -> dict[str, dict[int, float]]:
    """Return method -> number of a finished split of the folder -> score: ours, peers', controls, ceiling."""
    found: dict[str, dict[int, float]] = {}
    for number in finished_splits(config, folder):
        keep = partial(_keep_score, found, number)
        here = folder / f"split-{number}"
        split = make_split(config, number)
        margins = torch.stack(
            [load_file(here / f"retrained-{seed}.safetensors")["margins"].double() for seed in range(config.seeds)]
        )
        members = torch.zeros(config.subsets, config.train, dtype=torch.float64)
        members.scatter_(1, split.halves, 1.0)
        actual = margins.mean(dim=0)  # (K, M)
        ours = [load_file(here / f"ours-{i}.safetensors") for i in range(config.recordings)]
        ours = [{**one, "effects": one[FILTERING]} for one in ours]
        for name in (name for name in OURS if all(name in one for one in ours)):
            each = [score(one[name], members, actual) for one in ours]
            keep(name, mean(each))
            together = torch.stack([one[name] for one in ours]).mean(dim=0)
            keep(f"{name}, mean of {len(ours)}", score(together, members, actual))
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(config.tests, config.train, generator=generator, dtype=torch.float64)
        keep("random", score(noise, members, actual))
        shuffled = ours[0]["effects"][:, torch.randperm(config.train, generator=generator)]
        keep("shuffled", score(shuffled, members, actual))
        keep("ceiling", ceiling(margins))
        single = [score(ours[0]["effects"], members, margins[seed]) for seed in range(config.seeds)]
        keep("effects, against one retraining", mean(single))
        for path in sorted(here.glob("peer-*.safetensors")):
            for name, networks in load_file(path).items():
                keep(name, mean(score(one.double(), members, actual) for one in networks))
                if len(networks) > 1:
                    averaged = score(networks.double().mean(dim=0), members, actual)
                    keep(mean_of(len(networks), name), averaged)
    return found


def _keep_score(found: dict[str, dict[int, float]], number: int, name: str, value: float) -> None:
    found.setdefault(name, {})[number] = value


def mean_of(networks: int, name: str) -> str:
    """Name the mean of what a peer's method says of several networks."""
    return f"mean of {networks} networks: {name}"


def costs(config: RetrainingConfig, folder: Path) -> dict[str, Cost]:
    """Return what each method took in the first finished split: of one network, and of several."""
    found: dict[str, Cost] = {}
    for number in finished_splits(config, folder)[:1]:
        here = folder / f"split-{number}"
        each = [load_costs(path) for path in sorted(here.glob("ours-*.json"))]
        for name in each[0] if each else ():
            several = [one[name] for one in each]
            if name in (PLAIN_TRAINING, RECORDED_TRAINING):  # the first of a process is slow to start
                found[name] = min(several, key=lambda cost: cost.seconds)
                continue
            found[name] = Cost(mean(cost.seconds for cost in several), round(mean(cost.size for cost in several)))
            found[f"{name}, mean of {len(each)}"] = _sum(several)
        for path in sorted(here.glob("peer-*.json")):
            found |= load_costs(path)
    return found


def _sum(several: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.seconds for cost in several), sum(cost.size for cost in several))


def score(attribution: Tensor, members: Tensor, actual: Tensor) -> float:
    """Return the linear datamodeling score.

    Args:
        attribution: (M, N) what each sample did for each test input.
        members: (K, N) 1 where a sample is in a half.
        actual: (K, M) the margins that retraining gave.
    """
    return float(correlate(members @ attribution.T, actual).mean())


def ceiling(margins: Tensor) -> float:
    """Return the highest score that a perfect prediction could have, given so many seeds; margins are (R, K, M).

    The means of two halves of the seeds correlate by r; the mean of all has a reliability of 2 r / (1 + r), and the
    expected margin correlates with it by the root of that.
    """
    half = len(margins) // 2
    agreement = float(correlate(margins[:half].mean(dim=0), margins[half : 2 * half].mean(dim=0)).mean())
    return math.sqrt(max(2 * agreement / (1 + agreement), 0.0))


def correlate(a: Tensor, b: Tensor) -> Tensor:
    """Return the rank correlation over the rows of (K, M), for each column.

    >>> correlate(torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([[0.1], [0.2], [0.3]]))
    tensor([1.], dtype=torch.float64)
    """
    ranks = [_ranks(each.double()) for each in (a, b)]
    x, y = (each - each.mean(dim=0) for each in ranks)
    norms = (x.square().sum(dim=0) * y.square().sum(dim=0)).sqrt()
    return torch.where(norms > 0, (x * y).sum(dim=0) / norms.clamp(min=1e-300), 0.0)


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each entry in its column; ties share their mean rank."""
    below = (values[None] < values[:, None]).sum(dim=1)
    same = (values[None] == values[:, None]).sum(dim=1)
    return below + (same.double() - 1) / 2


def mean_and_error(values: Sequence[float]) -> str:
    """Return mean ± standard error.

    >>> mean_and_error([0.5, 0.6])
    '0.55 ± 0.05'
    """
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ± {stdev(values) / math.sqrt(len(values)):.2f}"
