"""What a recording keeps of a training: patterns, shares of the weights by group, or facts of the steps alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dualform.binning import Bins, grouping_columns
from dualform.recording.live_questions import LiveQuestion
from dualform.recording.watch import Dtype, Layers


@dataclass(frozen=True, slots=True)
class Patterns:
    """Keep every key and value: all questions can be asked of them.

    Attributes:
        layers: which layers' patterns; by default those that the recording watches.
        dtype: what they are stored in, as `dualform.record` takes it.
    """

    layers: Layers = None
    dtype: Dtype = None


@dataclass(frozen=True, slots=True)
class Shares:
    """Keep, for each group of patterns, the sum of what they made of every weight: constant size, no single pattern.

    Attributes:
        by: what groups the patterns: a column, several of them, or `dualform.bins(...)`, as `totals(by=...)` takes it;
            or a list of such groupings, each given as a list or tuple, to keep several.
        at: after which steps the shares are kept, besides the last.
        groups: how many groups there may be in each grouping.
        rest: put patterns of groups beyond these into one group, instead of refusing them.
        device: where the shares are kept while training; by default where the parameters are.
        resumable: whether the run keeps what a recording needs to go on from it, about as much again as the shares;
            without it, only what `recorder.state_dict()` returned can.
        paths: questions by a name of yours, `dualform.PathQuestion(...)`: path contributions by the groups of the first
            grouping, which are found while the model trains and are `memory.paths` afterwards.
    """

    by: Any
    at: Sequence[int] = ()
    groups: int = 64
    rest: bool = False
    device: str | None = None
    resumable: bool = True
    paths: Mapping[str, LiveQuestion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"Shares(groups={self.groups}): expected at least one group.")
        wrong = [step for step in self.at if isinstance(step, bool) or not isinstance(step, int) or step < 1]
        if wrong:
            raise ValueError(f"Shares(at=...) names {wrong[0]!r}; expected numbers of steps, from 1 on.")
        names = [tuple(map(str, columns)) for columns in self.groupings]
        if len(set(names)) < len(names):
            raise ValueError("Shares(by=...) names one grouping twice.")
        if not isinstance(self.paths, Mapping):
            raise ValueError(f"Shares(paths={self.paths!r}): expected a mapping, names -> dualform.PathQuestion(...).")

    @property
    def groupings(self) -> tuple[tuple[str | Bins, ...], ...]:
        """The columns of each grouping.

        >>> Shares(by="source").groupings, Shares(by=["source", "epoch"]).groupings
        ((('source',),), (('source', 'epoch'),))
        >>> Shares(by=[["source"], ["source", "epoch"]]).groupings
        (('source',), ('source', 'epoch'))
        """
        if isinstance(self.by, list | tuple) and any(isinstance(part, list | tuple) for part in self.by):
            return tuple(grouping_columns(part) for part in self.by)
        return (grouping_columns(self.by),)


@dataclass(frozen=True, slots=True)
class Steps:
    """Keep facts and fingerprints of the steps alone: patterns come back when the training is replayed."""


Keep = Patterns | Shares | Steps


def as_keeps(keep: Keep | Sequence[Keep] | None) -> tuple[Keep, ...]:
    """Return what a recording keeps as a tuple: of one thing, of several, or by default of all patterns."""
    if keep is None:
        return (Patterns(),)
    several = tuple(keep) if isinstance(keep, Sequence) else (keep,)
    for one in several:
        if not isinstance(one, Patterns | Shares | Steps):
            raise ValueError(f"keep is {one!r}; expected Patterns(...), Shares(...) or Steps(), or several of these.")
    if not several:
        raise ValueError("keep is empty; expected Patterns(...), Shares(...) or Steps(), or several of these.")
    return several


def keeps_patterns(keep: Sequence[Keep], layer: str) -> bool:
    """Say whether a recording that keeps these things stores the patterns of a layer."""
    for one in keep:
        if isinstance(one, Patterns):
            wanted = ["*"] if one.layers is None else [one.layers] if isinstance(one.layers, str) else list(one.layers)
            if any(pattern == layer or fnmatchcase(layer, pattern) for pattern in wanted):
                return True
    return False


def divided(keep: Keep | Sequence[Keep] | None) -> tuple[Patterns | None, Shares | None]:
    """Return what is kept of patterns and of shares; without anything all patterns are kept."""
    if keep is None:
        return Patterns(), None
    kept = [keep] if isinstance(keep, Patterns | Shares | Steps) else list(keep)
    patterns = [one for one in kept if isinstance(one, Patterns)]
    shares = [one for one in kept if isinstance(one, Shares)]
    if len(patterns) + len(shares) < len(kept) or not kept or len(patterns) > 1 or len(shares) > 1:
        raise ValueError(
            f"keep is {keep!r}; expected dualform.Patterns(...), dualform.Shares(...) or a list of one of each. "
            "Several groupings are one Shares(by=[[...], [...]])."
        )
    return (patterns[0] if patterns else None), (shares[0] if shares else None)
