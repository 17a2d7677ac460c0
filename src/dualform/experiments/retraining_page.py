"""The section on effects of docs/results.md, and its table, written from evaluations. No number is typed by hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import mean, stdev

from dualform.effects.layer_effects import FILTERING
from dualform.experiments.page import Section
from dualform.experiments.retraining import PLAIN_TRAINING, RECORDED_TRAINING, mean_and_error
from dualform.experiments.retraining_config import DATA, NETWORKS, OPTIMIZERS, RetrainingConfig
from dualform.experiments.retraining_results import Cost, Evaluation
from dualform.experiments.study_summary import Grid
from dualform.recording.estimate import size_text

OTHER = "layerwise" if FILTERING == "joint" else "joint"
"""The filter that effects do not have."""
EKFAC = "kronfluence EK-FAC, best damping"
METHOD_ROWS = {
    "effects": "effects",
    "effects, mean of several recordings": "effects, mean of *",
    f"effects, {OTHER} filter": OTHER,
    EKFAC: "EK-FAC*",
    "kronfluence EK-FAC, mean of as many networks": "mean of * networks: EK-FAC*",
    "SOURCE, by its formula": "SOURCE*",
    "SOURCE, mean of as many networks": "mean of * networks: SOURCE*",
    "traker TRAK, 1 network": "TRAK, 1 network,*",
    "traker TRAK, 5 networks": "TRAK, 5 networks,*",
    "traker TRAK, 10 networks": "TRAK, 10 networks,*",
    "captum TracInCP": "TracInCP*",
    "captum TracInCP, mean of as many networks": "mean of * networks: TracInCP*",
    "direct contributions (no filter)": "direct",
    "path contributions": "path",
    "absolute attention": "attention",
    "effects, samples shuffled": "shuffled",
    "random": "random",
    "effects, against one retraining a half": "effects, against one retraining",
    "ceiling": "ceiling",
}
"""Each row, and the pattern of its methods' names: of several, the best on average is shown."""
PEERS = tuple(label for label in METHOD_ROWS if label.startswith(("kronfluence", "SOURCE", "traker", "captum")))
NEW_ROWS = ("fashion-mnist-cnn", "aesop-lstm", "digits-residual", "wikitext-transformer")
"""The rows that nobody had looked at when the rule of the filter was written down."""

COMMAND = (
    "Made by `python -m benchmarks.truth benchmarks/truth/*.toml --page docs/results.md`, which runs what its folder "
    "does not hold yet."
)
TEXT = """\
For random halves of the training samples, networks are trained again on each half alone. A method is scored by the rank
correlation, over the halves, of what it predicts for a test input's margin with what the retrained networks say on
average over their seeds (the linear datamodeling score; 1 is perfect). Effects come from one recorded training each;
the row below it averages them over several (`dualform.open_ensemble`). EK-FAC sees the networks of the same trainings,
one at a time, and SOURCE and TracInCP five checkpoints of each; their means are over as many networks as effects' are.
Of the settings of a peer that were tried (of EK-FAC the dampings, of SOURCE the segments and, under AdamW, its
preconditioned form with dampings, of TRAK the numbers of features, of TracInCP two test losses), the best by this very
score is shown; effects have nothing to choose. The ceiling is what a perfect prediction could reach, given that each
half was retrained with so many seeds only; against a single retraining of each half every score is lower, as the last
row but one says. Means ± standard errors over splits; a number without an error is of one split, and a dash stands for
what was not asked. Above, effects are compared with each peer on the splits that both were asked about; there the error
is that of the mean of the differences split by split, and of two or three splits such an error is itself a rough one.
These are small networks and small data; nothing here says how effects do on large ones."""
EARLIER = """\
A number in parentheses was not asked again: it is that of an earlier run of the same recipe, over all of its splits."""
HOW_PEERS_RUN = """\
SOURCE is Bae et al. 2024, "Training Data Attribution via Approximate Unrolled Differentiation", written from its
formulas (`benchmarks/source_peer.py`): bergson, which has it, asks for checkpoints of Hugging Face's causal language
models, and so for none of these networks. kronfluence, captum and SOURCE see linear layers and convolutions, and the
LSTM, which they do not know, written out with linear layers; TRAK sees all parameters, and of a passage the mean margin
of its characters. Absolute attention was left out where it costs more than everything else."""
COSTS = """\
Seconds of a processor (one thread, one run, on a machine that others used too) to score all samples for all test inputs
of a split, and bytes that are kept of the training for it: recordings of effects, the network and its factors of
EK-FAC, checkpoints and factors of SOURCE, networks and features of TRAK, checkpoints of TracInCP. Trainings are not
counted; the last two rows have them."""
DECISION = """\
Which filter effects have was decided by a rule that was written down and committed before these retrainings were made
(commit 721ac2e, `benchmarks/truth/PREREGISTRATION.md`): *joint*, where an absence is repaired by
all layers together, is adopted if the mean of the differences is above 0 over the new rows and over all, and no row
loses 0.02. Both filters are scored on the same recordings and retrainings."""


def table(found: Sequence[Evaluation]) -> Grid:
    """Return the table: a row per method, a column per evaluation, and the range of what the method takes."""
    found = _ordered(found)
    rows = []
    costs = any(each.costs for each in found)
    for label, pattern in METHOD_ROWS.items():
        cells = [_cell(each, label, pattern) for each in found]
        if any(cell != "-" for cell in cells):
            rows.append((label, *cells, *(_cost_range(found, pattern) if costs else ())))
    columns = ("score", *(each.config.name for each in found), *(("seconds", "bytes") if costs else ()))
    return Grid("Linear datamodeling score", columns, tuple(rows))


def cost_table(found: Sequence[Evaluation]) -> Grid:
    """Return what each method takes: a row per method, a column per evaluation."""
    found = _ordered(found)
    rows = []
    for label, pattern in (*METHOD_ROWS.items(), (PLAIN_TRAINING, PLAIN_TRAINING), (RECORDED_TRAINING,) * 2):
        costs = [_cost(each, pattern) for each in found]
        if any(costs):
            rows.append((label, *("-" if cost is None else _cost_text(cost) for cost in costs)))
    return Grid("What a method takes", ("seconds, bytes", *(each.config.name for each in found)), tuple(rows), COSTS)


def _cost(found: Evaluation, pattern: str) -> Cost | None:
    """Return what the best method of a row took, or, of those without a score, the first."""
    shown = _best(found, pattern)
    return found.costs.get(pattern if shown is None else shown)


def _cost_text(cost: Cost) -> str:
    seconds = f"{_digits(cost.seconds)} s"
    return f"{seconds}, {size_text(cost.size)}" if cost.size else seconds


def _digits(number: float) -> str:
    """Return a number with two digits, or all before the point."""
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


def _cost_range(found: Sequence[Evaluation], pattern: str) -> tuple[str, str]:
    """Return the least and the most seconds and bytes of a row over all evaluations."""
    costs = [cost for each in found if (cost := _cost(each, pattern)) is not None]
    if not costs:
        return "", ""
    seconds, sizes = [_digits(cost.seconds) for cost in _ends(costs, "seconds")], _ends(costs, "size")
    return " to ".join(seconds), " to ".join(size_text(cost.size) for cost in sizes)


def _ends(costs: Sequence[Cost], by: str) -> list[Cost]:
    """Return the least and the largest cost, or the only one."""
    ordered = sorted(costs, key=lambda cost: getattr(cost, by))
    return ordered if len(ordered) == 1 else [ordered[0], ordered[-1]]


def _ordered(found: Sequence[Evaluation]) -> list[Evaluation]:
    def key(each: Evaluation) -> tuple[int, ...]:
        config = each.config
        return (
            DATA.index(config.data),
            list(NETWORKS).index(config.network),
            config.blocks,
            OPTIMIZERS.index(config.optimizer),
            config.epochs,
        )

    return sorted(found, key=key)


def _cell(found: Evaluation, label: str, pattern: str) -> str:
    """Return the best score among the methods whose names match a pattern."""
    shown = _best(found, pattern)
    if shown is not None:
        return mean_and_error(list(found.scores[shown].values()))
    return f"({found.earlier[label]})" if label in found.earlier else "-"


def _best(found: Evaluation, pattern: str) -> str | None:
    """Return the name of the method that a pattern matches and that is best on average, of those asked most often.

    A mean over fewer splits is no better or worse than one over more: its splits may be the easier ones.
    """
    names = [name for name in found.scores if fnmatchcase(name, pattern)]
    return max(names, key=lambda name: (len(found.scores[name]), mean(found.scores[name].values())), default=None)


def decision(found: Sequence[Evaluation]) -> Grid:
    """Return the table by which the filter of effects was chosen, and the choice."""
    rows, new, every = [], [], []
    for each in _ordered(found):
        joint, layerwise = each.scores.get("joint", {}), each.scores.get("layerwise", {})
        if not (both := sorted(set(joint) & set(layerwise))):
            rows.append((each.config.name, "0", "-", "-", "-"))
            continue
        gain = mean(joint[number] - layerwise[number] for number in both)
        every.append(gain)
        if each.config.name in NEW_ROWS:
            new.append(gain)
        name = f"{each.config.name} (new)" if each.config.name in NEW_ROWS else each.config.name
        joint_said, layerwise_said = (mean_and_error([one[number] for number in both]) for one in (joint, layerwise))
        rows.append((name, str(len(both)), joint_said, layerwise_said, f"{gain:+.3f}"))
    holds = len(new) == len(NEW_ROWS) and mean(new) > 0 and mean(every) > 0 and min(every) > -0.02
    means = (("mean over the new rows", mean(new or [math.nan])), ("over all", mean(every)), ("least", min(every)))
    said = ", ".join(f"{what} {value:+.3f}" for what, value in means)
    note = f"{said}: by the rule, joint is {'adopted' if holds else 'not adopted'}."
    return Grid("Joint or layerwise", ("row", "splits run", "joint", "layerwise", "difference"), tuple(rows), note)


def section(found: Sequence[Evaluation]) -> Section:
    """Return the section on effects."""
    recipes = "\n".join(f"- {each.config.name}: {_retraining_recipe(each)}" for each in _ordered(found))
    grids = [table(found)]
    if any(each.costs for each in found):
        grids.append(cost_table(found))
    if any("joint" in each.scores for each in found):
        grids.append(decision(found))
    earlier = (EARLIER,) if any(cell.startswith("(") for row in grids[0].rows for cell in row) else ()
    text = (COMMAND, *_behind(found), TEXT, *earlier, HOW_PEERS_RUN, DECISION)
    return Section("effects", "Do effects predict retraining?", text, grids, more=f"{recipes}\n")


def _behind(found: Sequence[Evaluation]) -> list[str]:
    """Say first where another method is ahead of effects, and which rows were not run in full."""
    pairs = [(each.config.name, pair) for each in _ordered(found) for pair in _comparisons(each)]
    said = [f"{row}, {pair.text()}" for row, pair in pairs if pair.is_behind()]
    level = [f"{row}, {pair.text()}" for row, pair in pairs if pair.is_level()]
    none = "Effects are on average behind no peer asked." if level else "Effects are ahead of every peer asked."
    behind = f"**Behind a peer on average:** {'; '.join(said)}." if said else none
    unasked = [e.config.name for e in _ordered(found) if all(_cell(e, row, METHOD_ROWS[row]) == "-" for row in PEERS)]
    lines = [behind]
    if level:
        lines.append(
            f"**Level with a peer, to two digits or within the standard error of the difference:** {'; '.join(level)}."
        )
    costs = [(_cost(each, "effects"), _cost(each, METHOD_ROWS[EKFAC])) for each in _ordered(found)]
    measured = [(ours, theirs) for ours, theirs in costs if ours is not None and theirs is not None]
    if measured:
        sizes, seconds = ([getattr(a, of) / getattr(b, of) for a, b in measured] for of in ("size", "seconds"))
        lines.append(
            f"**What effects cost beside EK-FAC, where both were measured:** {_digits(min(sizes))} to "
            f"{_digits(max(sizes))} times the bytes, and {_digits(min(seconds))} to {_digits(max(seconds))} times the "
            "seconds, once the training is recorded."
        )
    if unasked:
        lines.append(f"**Not compared with any peer:** {', '.join(unasked)}.")
    dashes = {row: [e.config.name for e in _ordered(found) if _cell(e, row, METHOD_ROWS[row]) == "-"] for row in PEERS}
    dashes = {row: names for row, names in dashes.items() if 0 < len(names) < len(found)}
    if dashes:
        said = [f"{row} on {', '.join(names)}" for row, names in dashes.items()]
        lines.append(f"**Not asked for want of time, and a dash in the table:** {'; '.join(said)}.")
    run = {e.config.name: (len(e.splits), e.config.splits) for e in _ordered(found)}
    if short := [f"{name} {done} of {planned}" for name, (done, planned) in run.items() if done < planned]:
        lines.append(f"**Splits run with both filters:** {', '.join(short)}; all of the other rows.")
    fewer = {row: [e.config.name for e in _ordered(found) if _asked_less(e, METHOD_ROWS[row])] for row in PEERS}
    if any(fewer.values()):
        said = [f"{row} on {', '.join(names)}" for row, names in fewer.items() if names]
        lines.append(f"**Asked about fewer splits than effects:** {'; '.join(said)}.")
    return lines


def _asked_less(found: Evaluation, pattern: str) -> bool:
    """Whether the method that is shown of a pattern lacks splits that effects have."""
    shown = _best(found, pattern)
    return shown is not None and bool(set(found.scores.get("effects", {})) - set(found.scores[shown]))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A peer's score beside that of effects.

    Attributes:
        label: the peer's row of the table.
        theirs: the peer's mean over the splits that both were asked about.
        ours: the mean of effects over the same splits.
        error: the standard error of the mean difference over those splits; None of one split, and of an earlier run.
    """

    label: str
    theirs: float
    ours: float
    error: float | None = None

    @property
    def lead(self) -> float:
        """By how much effects are ahead."""
        return self.ours - self.theirs

    def is_behind(self) -> bool:
        """Whether the peer's mean is the larger, as far as scores are kept (four digits)."""
        return round(self.lead, 4) < 0

    def is_level(self) -> bool:
        """Whether effects are not behind, but ahead by too little to show in two digits or beside the error."""
        return not self.is_behind() and (round(self.ours, 2) == round(self.theirs, 2) or self.is_within_error())

    def is_within_error(self) -> bool:
        """Whether the difference is no larger than its standard error."""
        return self.error is not None and abs(self.lead) <= self.error

    def text(self) -> str:
        """Return both scores, and the difference with its error."""
        said = f"{self.label} {self.theirs:.2f} to {self.ours:.2f} of effects"
        if self.error is None:
            return said
        side, within = "ahead" if self.lead > 0 else "behind", ", within its error" if self.is_within_error() else ""
        return f"{said} ({side} by {abs(self.lead):.3f} ± {self.error:.3f}{within})"


def _comparisons(found: Evaluation) -> list[Comparison]:
    return [pair for label in PEERS if (pair := _on_the_same_splits(found, label)) is not None]


def _on_the_same_splits(found: Evaluation, label: str) -> Comparison | None:
    """Compare a peer with effects on the splits that both were asked about; None without any.

    A mean over several networks is compared with the mean over several recordings.
    """
    several = "mean of as many" in label
    ours = found.scores.get(_best(found, METHOD_ROWS["effects, mean of several recordings"]) or "") if several else None
    ours = found.scores.get("effects") if ours is None else ours
    if not ours:
        return None
    shown = _best(found, METHOD_ROWS[label])
    if shown is None:
        earlier = found.earlier.get(label)
        return None if earlier is None else Comparison(label, float(earlier.split()[0]), mean(ours.values()))
    theirs = found.scores[shown]
    if not (both := sorted(set(ours) & set(theirs))):
        return None
    differences = [ours[number] - theirs[number] for number in both]
    error = stdev(differences) / math.sqrt(len(both)) if len(both) > 1 else None
    return Comparison(label, mean(theirs[number] for number in both), mean(ours[number] for number in both), error)


def _network(config: RetrainingConfig) -> str:
    widths = ", ".join(map(str, config.hidden))
    return {
        "mlp": f"an MLP with hidden units {widths}",
        "cnn": f"a CNN, two convolutions and two linear layers of {widths} outputs",
        "residual": f"a residual MLP of {config.blocks} blocks, width {widths}",
        "transformer": f"a character Transformer of {config.blocks} blocks, width {widths}",
        "lstm": f"a character LSTM, embedding and units {widths}",
    }[config.network]


def _retraining_recipe(found: Evaluation) -> str:
    config = found.config
    return (
        f"{config.train:,} samples of {config.text or config.data}, {_network(config)}; "
        f"{config.epochs} epochs of {config.optimizer}, learning rate {config.learning_rate:g}"
        f"{f', momentum {config.momentum:g}' if config.optimizer == 'SGD' else ''}, batches of "
        f"{config.batch}; {config.subsets} halves with {config.seeds} seeds each, {config.tests} test inputs, "
        f"{config.recordings} recordings; of {config.splits} splits, numbers "
        f"{', '.join(map(str, found.splits))} were run."
    )
