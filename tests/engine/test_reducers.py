"""Reducers against dense sums, whatever the chunks, whatever the order, whatever the tree of merges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.reducers import (
    FLOAT32_SUM_KEYS,
    Best,
    BestMembers,
    Everything,
    GroupPlaces,
    GroupShares,
    GroupSums,
    KeySums,
    Outputs,
    Reducer,
    sum_chunks_by_group,
)
from dualform.identity.parameter_use import ParameterUse
from dualform.identity.products import attend, scale

WEIGHT, BIAS = ParameterUse("weight", "fc.weight", "outer"), ParameterUse("bias", "fc.bias", "bias")


@dataclass
class Patterns:
    """All patterns of a made-up layer, with what is dense about them."""

    queries: Tensor  # (Q, d_in)
    keys: Tensor  # (T, d_in)
    values: Tensor  # (T, d_out)
    weight: Tensor  # (T,)
    bias: Tensor  # (T,)
    codes: Tensor  # (T,)
    groups: int

    @property
    def scores(self) -> Tensor:
        return attend(self.queries, self.keys)

    def feed(self, reducer: Reducer[Any, Any], state: Any, members: Tensor, *, contributions: bool) -> Any:
        """Give a reducer some patterns as one block."""
        block = Block(
            patterns=members.numpy(),
            keys=self.keys[members],
            values=self.values[members],
            coefficients={WEIGHT: self.weight[members], BIAS: self.bias[members]},
        )
        scores = attend(self.queries, block.keys)
        if contributions:
            scores = scale(scores, self.weight[members], self.bias[members])
        return reducer.add(state, block, scores, self.codes[members])


@st.composite
def patterns(draw: st.DrawFn) -> Patterns:
    seed = draw(st.integers(0, 2**16))
    total, groups = draw(st.integers(1, 24)), draw(st.sampled_from([1, 2, 5, 70]))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        # Small integers tie often, and their sums are exact in any order.
        return torch.randint(-3, 4, shape, generator=generator).double()

    return Patterns(
        queries=random(3, 4),
        keys=random(total, 4),
        values=random(total, 2),
        weight=random(total),
        bias=random(total),
        codes=torch.randint(0, groups, (total,), generator=generator),
        groups=groups,
    )


KINDS: dict[str, tuple[Callable[[Patterns], Reducer[Any, Any]], bool]] = {
    "sums": (lambda p: GroupSums(p.groups), False),
    "best": (lambda p: Best(p.groups, 4), False),
    "worst": (lambda p: Best(p.groups, 4, largest=False), False),
    "best members": (
        lambda p: BestMembers(2, 3, torch.arange(p.groups) % 3 - 1, torch.arange(p.groups) + 100),
        False,
    ),
    "everything": (lambda p: Everything(), False),
    "outputs": (lambda p: Outputs(p.groups, 2), True),
    "key sums": (lambda p: KeySums(p.groups, 4), False),
    "places": (lambda p: GroupPlaces(p.groups), False),
    "shares": (lambda p: GroupShares(p.groups, {WEIGHT: (2, 4), BIAS: (2,)}), False),
}


def comparable(result: Any, kind: str) -> list[Tensor]:
    """Return what has to be the same; of the best, only the scores, because ties may go to any of the tied."""
    parts = list(result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result])
    return parts[:1] if kind in ("best", "worst", "best members") else parts


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(all_patterns=patterns(), data=st.data())
def test_any_split_and_any_tree_of_merges_gives_the_same(
    kind: str, all_patterns: Patterns, data: st.DataObject
) -> None:
    make, contributions = KINDS[kind]
    total = len(all_patterns.keys)
    reducer = make(all_patterns)

    def new() -> Any:
        return reducer.new(all_patterns.queries)

    at_once = all_patterns.feed(reducer, new(), torch.arange(total), contributions=contributions)
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=5))) if total > 1 else []
    pieces = [torch.arange(a, b) for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    states: list[Any] = []
    for piece in data.draw(st.permutations(pieces)):
        if not states or not data.draw(st.booleans()):
            states.append(new())
        states[-1] = all_patterns.feed(reducer, states[-1], piece, contributions=contributions)
    if data.draw(st.booleans()):
        states.append(new())  # a part of the pass that saw no patterns
    while len(states) > 1:
        i = data.draw(st.integers(0, len(states) - 2))
        states[i : i + 2] = [reducer.merge(states[i], states[i + 1])]
    found, expected = reducer.result(states[0]), reducer.result(at_once)
    for one, other in zip(comparable(found, kind), comparable(expected, kind), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@settings(max_examples=40)
@given(all_patterns=patterns())
def test_results_are_the_dense_ones(all_patterns: Patterns) -> None:
    p = all_patterns
    everyone = torch.arange(len(p.keys))
    found = {}
    for kind, (make, contributions) in KINDS.items():
        reducer = make(p)
        state = p.feed(reducer, reducer.new(p.queries), everyone, contributions=contributions)
        found[kind] = reducer.result(state)
        again = reducer.result(state)
        for first, second in zip(comparable(found[kind], kind), comparable(again, kind), strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)  # a result may be asked for twice
    torch.testing.assert_close(found["everything"], p.scores, rtol=0, atol=0)
    for group in range(p.groups):
        members = p.codes == group
        mine = p.scores[:, members]
        torch.testing.assert_close(found["sums"][:, group], mine.sum(dim=1), rtol=0, atol=0)
        torch.testing.assert_close(found["key sums"][group], p.keys[members].sum(dim=0), rtol=0, atol=0)
        shares = found["shares"]
        share = (p.values[members] * p.weight[members, None]).T @ p.keys[members]
        torch.testing.assert_close(shares[WEIGHT][group], share, rtol=0, atol=0)
        torch.testing.assert_close(shares[BIAS][group], p.bias[members] @ p.values[members], rtol=0, atol=0)
        multiplied = scale(mine, p.weight[members], p.bias[members])
        torch.testing.assert_close(found["outputs"][:, group], multiplied @ p.values[members], rtol=0, atol=0)
        for kind, largest in (("best", True), ("worst", False)):
            scores, numbers = found[kind]
            order = mine.sort(dim=1, descending=largest).values[:, :4]
            count = order.shape[1]
            torch.testing.assert_close(scores[:, group, :count], order, rtol=0, atol=0)
            assert bool((numbers[:, group, count:] == -1).all())
            for query in range(3):
                chosen = numbers[query, group, :count]
                assert len(set(chosen.tolist())) == count, "no pattern twice"
                assert bool((p.codes[chosen] == group).all())
                torch.testing.assert_close(p.scores[query, chosen], scores[query, group, :count], rtol=0, atol=0)


@settings(max_examples=40)
@given(all_patterns=patterns())
def test_places_are_sums_and_best_scores_by_group(all_patterns: Patterns) -> None:
    p = all_patterns
    reducer = GroupPlaces(p.groups)
    found = reducer.new(p.queries)
    for part in torch.arange(len(p.keys)).split(7):
        found = p.feed(reducer, found, part, contributions=False)
    for group in range(p.groups):
        members = (p.codes == group).nonzero()[:, 0]
        mine = p.scores[:, members]
        torch.testing.assert_close(found.sums[:, group], mine.sum(dim=1), rtol=0, atol=0)
        assert int(found.counts[group]) == len(members)
        best = mine.amax(dim=1) if len(members) else torch.full((3,), -torch.inf)
        torch.testing.assert_close(found.best[:, group].double(), best.double(), rtol=0, atol=0)


def test_best_members_are_ranked_and_those_of_no_group_left_out() -> None:
    scores = torch.tensor([[1.0, 1.0, 3.0, 100.0, -5.0]])
    members = torch.tensor([0, 0, 1, 2, 3])  # members 0 and 1 compete in group 0, member 3 in group 1, 2 nowhere
    reducer = BestMembers(2, 3, torch.tensor([0, 0, -1, 1]), torch.tensor([10, 11, 12, 13]))
    state = reducer.add(reducer.new(scores), Block(np.arange(5), torch.zeros(5, 1)), scores, members)
    found, numbers = reducer.result(state)
    assert found.tolist() == [[[3.0, 2.0, -torch.inf], [-5.0, -torch.inf, -torch.inf]]]
    assert numbers.tolist() == [[[11, 10, -1], [13, -1, -1]]]


def test_keys_that_are_summed_in_one_product_have_the_sums_of_single_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3 * FLOAT32_SUM_KEYS, 5, generator=generator)
    groups_of = torch.randint(4, (len(keys),), generator=generator)
    expected = torch.zeros(4, 5, dtype=torch.float64).index_add_(0, groups_of, keys.double())
    torch.testing.assert_close(sum_chunks_by_group(keys, groups_of, 4), expected, rtol=1e-5, atol=1e-4)
