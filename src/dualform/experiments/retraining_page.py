"""The section on effects of docs/results.md, and its table, written from evaluations. No number is typed by hand."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from statistics import mean

from dualform.effects.layer_effects import FILTERING
from dualform.experiments.page import Section
from dualform.experiments.retraining import mean_and_error
from dualform.experiments.retraining_config import DATA, NETWORKS, OPTIMIZERS, RetrainingConfig
from dualform.experiments.retraining_results import Evaluation
from dualform.experiments.study_summary import Grid

OTHER = "layerwise" if FILTERING == "joint" else "joint"
"""The filter that effects do not have."""
METHOD_ROWS = {
    "effects": "effects",
    "effects, mean of several recordings": "effects, mean of *",
    f"effects, {OTHER} filter": OTHER,
    "kronfluence EK-FAC, best damping": "EK-FAC*",
    "traker TRAK, 1 network": "TRAK, 1 network,*",
    "traker TRAK, 5 networks": "TRAK, 5 networks,*",
    "traker TRAK, 10 networks": "TRAK, 10 networks,*",
    "captum TracInCP": "TracInCP*",
    "direct contributions (no filter)": "direct",
    "path contributions": "path",
    "absolute attention": "attention",
    "effects, samples shuffled": "shuffled",
    "random": "random",
    "effects, against one retraining a half": "effects, against one retraining",
    "ceiling": "ceiling",
}
"""Each row, and the pattern of its methods' names: of several, the best on average is shown."""
PEERS = tuple(label for label in METHOD_ROWS if label.split()[0] in ("kronfluence", "traker", "captum"))
NEW_ROWS = ("fashion-mnist-cnn", "aesop-lstm", "digits-residual", "wikitext-transformer")
"""The rows that nobody had looked at when the rule of the filter was written down."""

COMMAND = (
    "Made by `python benchmarks/truth.py benchmarks/truth/*.toml --page docs/results.md`, which runs what "
    "benchmarks/truth/results does not hold yet."
)
TEXT = """\
For random halves of the training samples, networks are trained again on each half alone. A method is scored by the
rank correlation, over the halves, of what it predicts for a test input's margin with what the retrained networks say
on average over their seeds (the linear datamodeling score; 1 is perfect). Effects come from one recorded training
each; the row below it averages them over several (`dualform.open_ensemble`). EK-FAC sees one trained network, TracInCP
five checkpoints of each of the recorded trainings. Of the dampings of EK-FAC, the numbers of features of TRAK and the
two test losses of TracInCP that were tried, the best by this very score is shown; effects have nothing to choose. The
ceiling is what a perfect prediction could reach, given that each half was retrained with so many seeds only; against a
single retraining of each half every score is lower, as the last row but one says. Means ± standard errors over splits;
a number without an error is of one split, and a dash stands for what was not asked. A number in parentheses was not
asked again: it is that of an earlier run of the same recipe, over all of its splits; others of peers are of split 0,
where effects are compared with them. These are small networks and small
data; nothing here says how effects do on large ones."""
DECISION = """\
Which filter effects have was decided by a rule that was written down and committed before these retrainings were made
(commit 721ac2e, `benchmarks/truth/PREREGISTRATION.md`): *joint*, where an absence is repaired by
all layers together, is adopted if the mean of the differences is above 0 over the new rows and over all, and no row
loses 0.02. Both filters are scored on the same recordings and retrainings."""


def table(found: Sequence[Evaluation]) -> Grid:
    """Return the table: a row per method, a column per evaluation."""
    found = _ordered(found)
    rows = []
    for label, pattern in METHOD_ROWS.items():
        cells = [_cell(each, label, pattern) for each in found]
        if any(cell != "-" for cell in cells):
            rows.append((label, *cells))
    columns = ("score", *(each.config.name for each in found))
    return Grid("Linear datamodeling score", columns, tuple(rows))


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
    scores = found.scores
    if names := [name for name in scores if fnmatchcase(name, pattern)]:
        return mean_and_error(scores[max(names, key=lambda name: mean(scores[name]))])
    return f"({found.earlier[label]})" if label in found.earlier else "-"


def decision(found: Sequence[Evaluation]) -> Grid:
    """Return the table by which the filter of effects was chosen, and the choice."""
    rows, new, every = [], [], []
    for each in _ordered(found):
        if "joint" not in each.scores:
            rows.append((each.config.name, "0", "-", "-", "-"))
            continue
        joint, layerwise = each.scores["joint"], each.scores["layerwise"]
        gain = mean(a - b for a, b in zip(joint, layerwise, strict=True))
        every.append(gain)
        if each.config.name in NEW_ROWS:
            new.append(gain)
        name = f"{each.config.name} (new)" if each.config.name in NEW_ROWS else each.config.name
        rows.append((name, str(each.splits), mean_and_error(joint), mean_and_error(layerwise), f"{gain:+.3f}"))
    holds = len(new) == len(NEW_ROWS) and mean(new) > 0 and mean(every) > 0 and min(every) > -0.02
    means = (("mean over the new rows", mean(new or [math.nan])), ("over all", mean(every)), ("least", min(every)))
    said = ", ".join(f"{what} {value:+.3f}" for what, value in means)
    note = f"{said}: by the rule, joint is {'adopted' if holds else 'not adopted'}."
    return Grid("Joint or layerwise", ("row", "splits run", "joint", "layerwise", "difference"), tuple(rows), note)


def section(found: Sequence[Evaluation]) -> Section:
    """Return the section on effects."""
    recipes = "\n".join(f"- {each.config.name}: {_retraining_recipe(each)}" for each in _ordered(found))
    grids = [table(found)]
    if any("joint" in each.scores for each in found):
        grids.append(decision(found))
    text = (COMMAND, *_behind(found), TEXT, DECISION)
    return Section("effects", "Do effects predict retraining?", text, grids, more=f"{recipes}\n")


def _behind(found: Sequence[Evaluation]) -> list[str]:
    """Say first where another method is ahead of effects, and which rows were not run in full."""
    said = []
    for each in _ordered(found):
        for label in PEERS:
            both = _on_the_same_splits(each, label)
            if both is not None and round(both[0], 2) >= round(both[1], 2):
                said.append(f"{each.config.name}, {label} {both[0]:.2f} to effects' {both[1]:.2f}")
    behind = f"**Behind a peer, or level:** {'; '.join(said)}." if said else "Effects are ahead of every peer asked."
    unasked = [e.config.name for e in _ordered(found) if all(_cell(e, row, METHOD_ROWS[row]) == "-" for row in PEERS)]
    short = [f"{e.config.name} {e.splits} of {e.config.splits}" for e in _ordered(found) if e.splits < e.config.splits]
    lines = [behind]
    if unasked:
        lines.append(f"**Not compared with any peer:** {', '.join(unasked)}.")
    if short:
        lines.append(f"**Splits run with both filters:** {', '.join(short)}; all of the other rows.")
    return lines


def _on_the_same_splits(found: Evaluation, label: str) -> tuple[float, float] | None:
    """Return a peer's score and that of effects, on the splits that the peer was asked about; None without both."""
    ours, names = found.scores.get("effects"), [n for n in found.scores if fnmatchcase(n, METHOD_ROWS[label])]
    if ours is None:
        return None
    if names:
        best = max((found.scores[name] for name in names), key=mean)
        return mean(best), mean(ours[: len(best)])
    return (float(found.earlier[label].split()[0]), mean(ours)) if label in found.earlier else None


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
        f"{config.recordings} recordings, of {config.splits} splits {found.splits} run again."
    )
