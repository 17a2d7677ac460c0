"""Processes number new groups alike, whoever finds them first; a refused step leaves no group behind."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from dualform.errors import ResumeError
from dualform.recording.agreed_groups import AgreedGroups, StepGroups
from dualform.recording.group_labels import GroupLabels, TooManyGroupsError
from dualform.recording.world import World


class Threads:
    """A world of threads, each of which stands for a process."""

    def __init__(self, size: int) -> None:
        self._told: dict[int, Any] = {}
        self._meeting = threading.Barrier(size, timeout=10)

    def of(self, rank: int) -> World:
        """Return the world as one process sees it."""
        outer = self

        class One:
            def gather(self, value: Any) -> list[Any]:
                outer._told[rank] = value
                outer._meeting.wait()
                found = [outer._told[one] for one in sorted(outer._told)]
                outer._meeting.wait()
                return found

        return cast("World", One())


def agree(each: Sequence[AgreedGroups], present: Sequence[set[int]], rows: Sequence[int] = (1, 1)) -> list[StepGroups]:
    """Let all processes agree on a step with patterns of one layer and one grouping."""
    threads = Threads(len(each))
    with ThreadPoolExecutor(len(each)) as pool:
        futures = [
            pool.submit(one.agree, threads.of(rank), {(0, 4): present[rank]}, {(4, 0): rows[rank]})
            for rank, one in enumerate(each)
        ]
    return [future.result() for future in futures]


def two(*, most: int = 9) -> tuple[list[GroupLabels], list[AgreedGroups]]:
    labels = [GroupLabels(["label"], most=most, rest=False) for _ in range(2)]
    return labels, [AgreedGroups([one]) for one in labels]


def test_new_groups_are_numbered_in_the_order_of_ranks() -> None:
    labels, each = two()
    labels[0].see(["b", "a"])
    labels[1].see(["c", "b"])
    found = agree(each, [{0, 1}, {0}], rows=(3, 0))
    assert [one.labels for one in labels] == [["b", "a", "c"]] * 2
    assert found == [StepGroups({(0, 4): (0, 1, 2)}, {(4, 0): (3, 0)})] * 2
    labels[0].see(["d"])  # in a step that another process then refuses
    for one in each:
        one.forget_new()
    labels[1].see(["e"])
    assert agree(each, [{2}, {3}])[0].present == {(0, 4): (2, 3)}
    assert [one.labels for one in labels] == [["b", "a", "c", "e"]] * 2


def test_all_processes_hear_of_too_many_groups() -> None:
    labels, each = two(most=2)
    labels[0].see(["a", "b"])
    labels[1].see(["c"])
    with pytest.raises(TooManyGroupsError, match="'c' is one group more than the 2"):
        agree(each, [{0, 1}, {0}])


def test_a_process_that_goes_on_may_know_fewer_groups_but_no_others() -> None:
    for known, fits in ((["a"], True), (["b"], False)):
        labels, each = two()
        for one, loaded in zip(labels, (["a", "b"], known), strict=True):
            one.load(loaded)
        for agreed in each:
            agreed.load()
            agreed.forget_new()
        labels[1].see(["c"])
        if fits:
            assert agree(each, [set(), {1}])[0].present == {(0, 4): (2,)}
            assert [one.labels for one in labels] == [["a", "b", "c"]] * 2
        else:
            with pytest.raises(ResumeError, match="go on with shares of different groups"):
                agree(each, [set(), set()])
