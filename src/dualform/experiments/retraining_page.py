"""The section on effects of docs/results.md, and its table, written from evaluations. No number is typed by hand."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from statistics import mean

from dualform.experiments.page import Section
from dualform.experiments.retraining import mean_and_error
from dualform.experiments.retraining_config import DATA, OPTIMIZERS, RetrainingConfig
from dualform.experiments.study_summary import Grid

Found = Mapping[RetrainingConfig, Mapping[str, list[float]]]

METHOD_ROWS = {
    "effects": "effects",
    "effects, mean of several recordings": "effects, mean of *",
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

COMMAND = "Made by `python benchmarks/truth.py benchmarks/truth/*.toml --page docs/results.md`."
TEXT = """\
For random halves of the training samples, networks are trained again on each half alone. A method is scored by the
rank correlation, over the halves, of what it predicts for a test input's margin with what the retrained networks say
on average over their seeds (the linear datamodeling score; 1 is perfect). Effects come from one recorded training
each; the row below it averages them over several. EK-FAC sees one trained network, TracInCP five checkpoints of each
of the recorded trainings. Of the dampings of EK-FAC, the numbers of features of TRAK and the two test losses of
TracInCP that were tried, the best by this very score is shown; effects have nothing to choose. But the recipes of
training were fixed after a few trial runs on digits that showed the score of effects and not yet those of the peers.
The ceiling is what a perfect prediction could reach, given that each half was retrained with so many seeds only;
against a single retraining of each half every score is lower, as the last row but one says. Means ± standard errors
over splits; a number without an error is of one split, and a dash stands for what was not asked. These are small
networks and small data; nothing here says how effects do on large ones."""


def table(found: Found) -> Grid:
    """Return the table: a row per method, a column per evaluation."""
    found = {config: found[config] for config in _ordered(found)}
    rows = []
    for label, pattern in METHOD_ROWS.items():
        cells = [_cell(scores, pattern) for scores in found.values()]
        if any(cell != "-" for cell in cells):
            rows.append((label, *cells))
    columns = ("score", *(config.name for config in found))
    return Grid("Linear datamodeling score", columns, tuple(rows))


def _ordered(found: Found) -> list[RetrainingConfig]:
    return sorted(found, key=lambda c: (DATA.index(c.data), OPTIMIZERS.index(c.optimizer), c.epochs))


def _cell(scores: Mapping[str, list[float]], pattern: str) -> str:
    """Return the best score among the methods whose names match a pattern."""
    names = [name for name in scores if fnmatchcase(name, pattern)]
    return mean_and_error(scores[max(names, key=lambda name: mean(scores[name]))]) if names else "-"


def section(found: Found) -> Section:
    """Return the section on effects."""
    recipes = "\n".join(f"- {config.name}: {_retraining_recipe(config)}" for config in _ordered(found))
    return Section("effects", "Do effects predict retraining?", (COMMAND, TEXT), [table(found)], more=f"{recipes}\n")


def _retraining_recipe(config: RetrainingConfig) -> str:
    network = "a character Transformer, width" if config.data == "text" else "an MLP with hidden units"
    return (
        f"{config.train:,} samples of {config.text or config.data}, {network} {', '.join(map(str, config.hidden))}; "
        f"{config.epochs} epochs of {config.optimizer}, learning rate {config.learning_rate:g}"
        f"{f', momentum {config.momentum:g}' if config.optimizer == 'SGD' else ''}, batches of "
        f"{config.batch}; {config.subsets} halves with {config.seeds} seeds each, {config.tests} test inputs, "
        f"{config.recordings} recordings, {config.splits} splits."
    )
