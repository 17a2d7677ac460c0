"""Groups that are numbered alike in all processes, where each process folds its rows of the shares of all of them.

A process finds the groups of its own patterns, and numbers new ones as they come. Before a step the processes tell each
other their new groups, which then get numbers in the order of ranks, and which groups each layer's patterns have.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualform.errors import ResumeError
from dualform.recording.group_labels import GroupLabels, label_mark
from dualform.recording.world import World

Place = tuple[int, int]
"""The place of a grouping, and that of a layer."""
Present = Mapping[Place, Iterable[int]]
LayerPlace = tuple[int, int]
"""The place of a layer, and the number of a backward in a step."""


@dataclass(frozen=True, slots=True)
class StepGroups:
    """What all processes know of a step.

    Attributes:
        present: the groups that a layer's patterns have in any process, ascending.
        rows: how many patterns of a layer and a backward each process has.
    """

    present: Mapping[Place, tuple[int, ...]]
    rows: Mapping[LayerPlace, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Told:
    """What a process tells the others."""

    new: list[list[Any]]  # by grouping: groups that it has found since the processes agreed last
    present: dict[Place, list[int]]  # as it numbers them
    rows: dict[LayerPlace, int]  # how many patterns it has
    loaded: list[list[Any]]  # by grouping: groups of an earlier recording; nothing once they were agreed on


class AgreedGroups:
    """The groups that all processes know of."""

    def __init__(self, groupings: Sequence[GroupLabels]) -> None:
        self._groupings = groupings
        self._known = [0] * len(groupings)  # how many groups of each are numbered alike in all processes
        self._loaded: list[list[Any]] = []  # groups of an earlier recording, until they were agreed on

    def load(self) -> None:
        """Take the groups that there are as those of an earlier recording."""
        self._loaded = [list(labels.labels) for labels in self._groupings]

    def forget_new(self) -> None:
        """Forget the groups that this process alone found, in a step that was refused before it was agreed on."""
        for place, (labels, known) in enumerate(zip(self._groupings, self._known, strict=True)):
            labels.load(labels.labels[:known] if not self._loaded else self._loaded[place])

    def agree(self, world: World, present: Present, rows: Mapping[LayerPlace, int]) -> StepGroups:
        """Return what all processes know of a step; every process has to come here.

        Args:
            world: the processes.
            present: the groups of each layer's patterns in this process, as it numbers groups so far; its numbers
                change where others came first.
            rows: how many patterns of a layer and a backward this process has.

        Raises:
            TooManyGroupsError: all processes together have more groups than are kept; raised in each of them.
        """
        new = [labels.labels[known:] for labels, known in zip(self._groupings, self._known, strict=True)]
        numbers: dict[Place, list[int]] = {place: sorted(set(codes)) for place, codes in present.items()}
        everybody = world.gather(_Told(new, numbers, dict(rows), self._loaded))
        _check_loaded([one.loaded for one in everybody])
        self._loaded = []
        places: list[list[dict[int, int]]] = []  # by process and grouping: number of a new group there -> agreed number
        for labels, known in zip(self._groupings, self._known, strict=True):
            labels.load(labels.labels[:known])
        for one in everybody:
            places.append([])
            for labels, known, added in zip(self._groupings, self._known, one.new, strict=True):
                labels.see(added)
                marks = {label_mark(label): place for place, label in enumerate(labels.labels)}
                places[-1].append({known + i: marks[label_mark(label)] for i, label in enumerate(added)})
        found: dict[Place, set[int]] = {}
        for numbered, one in zip(places, everybody, strict=True):
            for place, codes in one.present.items():
                found.setdefault(place, set()).update(numbered[place[0]].get(code, code) for code in codes)
        self._known = [len(labels.labels) for labels in self._groupings]
        layers = sorted({place for one in everybody for place in one.rows})
        return StepGroups(
            {place: tuple(sorted(codes)) for place, codes in sorted(found.items())},
            {place: tuple(one.rows.get(place, 0) for one in everybody) for place in layers},
        )


def _check_loaded(everybody: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Refuse, in every process, to go on with shares whose groups the processes number differently.

    A process may have published shares once more than another before both were killed, so one may know more groups.
    """
    for of_each in zip(*everybody, strict=True):
        marks = [[label_mark(label) for label in labels] for labels in of_each]
        longest = max(marks, key=len)
        if any(labels != longest[: len(labels)] for labels in marks):
            raise ResumeError(
                "The processes go on with shares of different groups. Give each process the state of its own recorder "
                "from the same checkpoint."
            )
