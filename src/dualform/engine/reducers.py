"""What a pass adds up: one small class per question.

A reducer is settings only. Its state is plain tensors, so that it can travel between processes: `new` makes the state
of no patterns, `add` takes a block of patterns in, `merge` joins the states of two sets of patterns, of which the first
comes earlier in the run, and `result` makes the answer. `merge` is associative, so a pass may be split anywhere.
Shapes: Q rows of measures (a row per query), n patterns of a block, G groups.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.identity.parameter_maps import ParameterMap
from dualform.identity.parameter_use import ParameterUse

S = TypeVar("S")
R = TypeVar("R")
FEW_GROUPS = 64  # up to so many groups are summed by a product with a matrix of members
FLOAT32_SUM_KEYS = 1024  # keys at most that are summed in their own dtype before float64 takes over
FLOAT32_SUM_MEASURES = 1 << 19  # measures of a query at most that are summed in their own dtype


def member_matrix(groups_of: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return which pattern is in which group, as ones in a matrix, (n, G)."""
    found = torch.zeros(groups, len(groups_of), dtype=dtype, device=groups_of.device)
    return found.scatter_(0, groups_of[None], 1).T  # products with this layout are twice as fast


def one_group(count: int, device: torch.device) -> Tensor:
    """Return the groups of patterns that are all in group 0, (n,)."""
    return _zero(device).expand(count)


def is_one_group(groups_of: Tensor) -> bool:
    """Say whether groups are those of `one_group`, without a look at a number, which a GPU would be waited for."""
    return groups_of.stride() == (0,) and groups_of.data_ptr() == _zero(groups_of.device).data_ptr()


@functools.cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


class Reducer(ABC, Generic[S, R]):
    """Adds up measures of patterns: settings, and functions from state to state."""

    needs_all_threads = False
    """Whether adding a block is one product large enough for all threads, so that blocks come one after the other."""

    @property
    def is_small(self) -> bool:
        """Whether a state is small beside a block: an executor may then reduce blocks apart and merge their states."""
        return False

    @abstractmethod
    def new(self, like: Tensor) -> S:
        """Return the state of no patterns; `like` has a row for each row of measures, and says where to compute."""

    @abstractmethod
    def add(self, state: S, block: Block, measures: Tensor, groups_of: Tensor) -> S:
        """Take in a block, its patterns' measures (Q, n) and groups (n,); the given state may be used up."""

    @abstractmethod
    def merge(self, first: S, second: S) -> S:
        """Return the state of both sets of patterns; the given states may be used up."""

    @abstractmethod
    def result(self, state: S) -> R:
        """Return the answer."""


class Sums(Reducer[Tensor, Tensor]):
    """A reducer whose state is one float64 tensor of sums, which is also its answer."""

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """Add the sums."""
        return first.add_(second)

    def result(self, state: Tensor) -> Tensor:
        """Return the sums."""
        return state


@dataclass(frozen=True, slots=True)
class GroupSums(Sums):
    """The sum of measures per group, (Q, G)."""

    groups: int

    @property
    def is_small(self) -> bool:
        """Whether groups are few."""
        return self.groups <= FEW_GROUPS

    def new(self, like: Tensor) -> Tensor:
        """Return zeros, (Q, G)."""
        return torch.zeros(len(like), self.groups, dtype=torch.float64, device=like.device)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add a block's measures by group."""
        if self.groups > FEW_GROUPS:
            return state.index_add_(1, groups_of, measures.double())
        for part, of in zip(
            measures.split(FLOAT32_SUM_MEASURES, dim=1), groups_of.split(FLOAT32_SUM_MEASURES), strict=True
        ):
            state += (member_matrix(of, self.groups, part.dtype).T @ part.T).T
        return state


class PlaceState(NamedTuple):
    """Per group (a place in a text) and query: the sum of measures and the best one; and the number of patterns."""

    sums: Tensor  # (Q, G) float64
    best: Tensor  # (Q, G) float32
    counts: Tensor  # (G,)


@dataclass(frozen=True, slots=True)
class GroupPlaces(Reducer[PlaceState, PlaceState]):
    """The sum and the best of measures per group, for groups by the million."""

    groups: int

    def new(self, like: Tensor) -> PlaceState:
        """Return sums and counts of 0 and no best."""
        shape = (len(like), self.groups)
        return PlaceState(
            torch.zeros(shape, dtype=torch.float64, device=like.device),
            torch.full(shape, -torch.inf, device=like.device),
            torch.zeros(self.groups, dtype=torch.int64, device=like.device),
        )

    def add(self, state: PlaceState, block: Block, measures: Tensor, groups_of: Tensor) -> PlaceState:
        """Add a block's measures, and let them compete, by group."""
        state.sums.index_add_(1, groups_of, measures.double())
        state.best.scatter_reduce_(1, groups_of.expand_as(measures), measures.float(), "amax")
        state.counts.index_add_(0, groups_of, torch.ones_like(groups_of))
        return state

    def merge(self, first: PlaceState, second: PlaceState) -> PlaceState:
        """Add the sums, and keep the better of the best."""
        return PlaceState(
            first.sums + second.sums, torch.maximum(first.best, second.best), first.counts + second.counts
        )

    def result(self, state: PlaceState) -> PlaceState:
        """Return sums, best and counts."""
        return state


class MeasureState(NamedTuple):
    """Measures and the patterns that they belong to, in pieces."""

    patterns: tuple[Tensor, ...]  # (n,) each
    measures: tuple[Tensor, ...]  # (Q, n) each
    like: Tensor


@dataclass(frozen=True, slots=True)
class Everything(Reducer[MeasureState, Tensor]):
    """Every measure in the order of patterns, (Q, T): for small memories and few queries."""

    def new(self, like: Tensor) -> MeasureState:
        """Return no measures."""
        return MeasureState((), (), like)

    def add(self, state: MeasureState, block: Block, measures: Tensor, groups_of: Tensor) -> MeasureState:
        """Keep a block's measures."""
        return MeasureState((*state.patterns, block.pattern_ids), (*state.measures, measures.clone()), state.like)

    def merge(self, first: MeasureState, second: MeasureState) -> MeasureState:
        """Keep both."""
        return MeasureState(first.patterns + second.patterns, first.measures + second.measures, first.like)

    def result(self, state: MeasureState) -> Tensor:
        """Return the measures in the order of patterns."""
        if not state.patterns:
            return torch.zeros(len(state.like), 0)
        order = torch.cat(state.patterns).argsort()
        return torch.cat(state.measures, dim=1)[:, order]


@dataclass(frozen=True, slots=True)
class Outputs(Sums):
    """The sum of contributions per group, (Q, G, d_out); a measure is the number that multiplies a pattern's value."""

    groups: int
    width: int  # d_out
    needs_all_threads = True

    def new(self, like: Tensor) -> Tensor:
        """Return zeros, (Q, G, d_out)."""
        return torch.zeros(len(like), self.groups, self.width, dtype=torch.float64, device=like.device)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add a block's contributions by group."""
        assert block.values is not None, "contributions need values"
        for group, members in each_group(groups_of):
            state[:, group] += measures[:, members] @ block.values[members]
        return state


@dataclass(frozen=True, slots=True)
class KeySums(Sums):
    """The sum of keys per group, (G, d_in): a signed total is its product with a query."""

    groups: int
    width: int  # d_in

    @property
    def is_small(self) -> bool:
        """Whether groups are few."""
        return self.groups <= FEW_GROUPS

    def new(self, like: Tensor) -> Tensor:
        """Return zeros, (G, d_in)."""
        return torch.zeros(self.groups, self.width, dtype=torch.float64, device=like.device)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Sum a block's keys by group, a few at a time: a float32 sum of few is as exact as its terms."""
        if self.groups > FEW_GROUPS:
            return state.index_add_(0, groups_of, block.keys.double())
        keys = block.keys
        if keys.device.type != "cpu":  # the same sums by few kernels
            whole = len(keys) // FLOAT32_SUM_KEYS * FLOAT32_SUM_KEYS
            if whole > FLOAT32_SUM_KEYS:
                state += sum_chunks_by_group(keys[:whole], groups_of[:whole], self.groups)
                keys, groups_of = keys[whole:], groups_of[whole:]
        for some, of in zip(keys.split(FLOAT32_SUM_KEYS), groups_of.split(FLOAT32_SUM_KEYS), strict=True):
            if len(some):
                state += member_matrix(of, self.groups, some.dtype).T @ some
        return state


def sum_chunks_by_group(keys: Tensor, groups_of: Tensor, groups: int) -> Tensor:
    """Return the sum of keys (n, d_in) per group, (G, d_in) in float64; n is a multiple of `FLOAT32_SUM_KEYS`.

    The keys of a chunk are summed in their own dtype, and the chunks in float64.
    """
    chunks = keys.unflatten(0, (-1, FLOAT32_SUM_KEYS))  # (c, m, d_in)
    numbers = torch.arange(groups, device=keys.device)
    members = (groups_of.unflatten(0, (-1, 1, FLOAT32_SUM_KEYS)) == numbers[None, :, None]).to(keys.dtype)  # (c, G, m)
    return torch.bmm(members, chunks).double().sum(dim=0)


@dataclass(frozen=True, slots=True)
class GroupShares(Reducer[dict[ParameterUse, Tensor], dict[ParameterUse, Tensor]]):
    """Each group's share of each of a layer's parameters, by use, (G, *shape) in float64."""

    groups: int
    shapes: Mapping[ParameterUse, Sequence[int]]  # by use
    needs_all_threads = True

    def new(self, like: Tensor) -> dict[ParameterUse, Tensor]:
        """Return zeros."""
        return {
            use: torch.zeros(self.groups, *shape, dtype=torch.float64, device=like.device)
            for use, shape in self.shapes.items()
        }

    def add(
        self, state: dict[ParameterUse, Tensor], block: Block, measures: Tensor, groups_of: Tensor
    ) -> dict[ParameterUse, Tensor]:
        """Add a block's gradients, times their coefficients, by group."""
        assert block.values is not None, "shares need values"
        for group, members in each_group(groups_of):
            values, keys = block.values[members], block.keys[members]
            for use, coefficients in block.coefficients.items():
                share, parameter_map = state[use][group], use.parameter_map
                scaled = scaled_values(values, coefficients[members], parameter_map)
                share += parameter_map.gradient(scaled, keys, share.shape)
        return state

    def merge(
        self, first: dict[ParameterUse, Tensor], second: dict[ParameterUse, Tensor]
    ) -> dict[ParameterUse, Tensor]:
        """Add the shares."""
        return {use: first[use].add_(share) for use, share in second.items()}

    def result(self, state: dict[ParameterUse, Tensor]) -> dict[ParameterUse, Tensor]:
        """Return the shares by use."""
        return state


def scaled_values(values: Tensor, coefficients: Tensor, parameter_map: ParameterMap) -> Tensor:
    """Return values (T, d_out) times coefficients (T,); a bias's in float64, since they nearly cancel in its sum."""
    if parameter_map.is_bias:
        values, coefficients = values.double(), coefficients.double()
    return values * coefficients[:, None]


class BestState(NamedTuple):
    """The best measures per query and group, best first, and their patterns, -1 where there are fewer."""

    measures: Tensor  # (Q, G, k) float64
    patterns: Tensor  # (Q, G, k)


@dataclass(frozen=True, slots=True)
class Best(Reducer[BestState, BestState]):
    """The k best measures per query and group and their patterns; of equal ones the earlier patterns."""

    groups: int
    k: int
    largest: bool = True

    @property
    def worst(self) -> float:
        """The measure of nothing, which every pattern beats."""
        return -torch.inf if self.largest else torch.inf

    def new(self, like: Tensor) -> BestState:
        """Return no patterns."""
        shape = (len(like), self.groups, self.k)
        return BestState(
            torch.full(shape, self.worst, dtype=torch.float64, device=like.device),
            torch.full(shape, -1, dtype=torch.int64, device=like.device),
        )

    def add(self, state: BestState, block: Block, measures: Tensor, groups_of: Tensor) -> BestState:
        """Let a block's patterns compete by group."""
        for group, members in each_group(groups_of):
            self.compete(state, group, measures[:, members].double(), block.pattern_ids[members])
        return state

    def compete(self, state: BestState, group: int, measures: Tensor, patterns: Tensor) -> None:
        """Let later patterns, (n,) or (Q, n), with measures (Q, n) compete with the best of a group."""
        every = torch.cat([state.measures[:, group], measures], dim=1)
        named = torch.cat([state.patterns[:, group], patterns.expand(len(measures), -1)], dim=1)
        best, places = self.order(every, self.k)
        state.measures[:, group] = best
        state.patterns[:, group] = named.gather(1, places)

    def order(self, measures: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the best of each row (Q, n) and their places, best first; of equal ones the first (on a CPU)."""
        if measures.device.type != "cpu":
            best = measures.topk(count, dim=1, largest=self.largest)
            return best.values, best.indices
        ordered = measures.sort(dim=1, descending=self.largest, stable=True)
        return ordered.values[:, :count], ordered.indices[:, :count]

    def merge(self, first: BestState, second: BestState) -> BestState:
        """Let the best of later patterns compete with the best of earlier ones."""
        for group in range(self.groups):
            self.compete(first, group, second.measures[:, group], second.patterns[:, group])
        return first

    def result(self, state: BestState) -> BestState:
        """Return the measures, best first, and their patterns."""
        return state


@dataclass(frozen=True, slots=True, eq=False)
class BestMembers(Reducer[Tensor, BestState]):
    """The k best members of each group, where a member's measure is the sum over its patterns.

    Patterns come with their member, a number, for a group.
    """

    groups: int
    k: int
    group_of: Tensor  # (M,) each member's group; -1 for a member that does not compete
    stands_for: Tensor  # (M,) the pattern that each member is known by
    largest: bool = True

    @property
    def sums(self) -> GroupSums:
        """The reducer that sums by member."""
        return GroupSums(len(self.group_of))

    @property
    def is_small(self) -> bool:
        """Whether members are few."""
        return self.sums.is_small

    def new(self, like: Tensor) -> Tensor:
        """Return zeros, (Q, M)."""
        return self.sums.new(like)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add a block's measures by member."""
        return self.sums.add(state, block, measures, groups_of)

    def merge(self, first: Tensor, second: Tensor) -> Tensor:
        """Add the sums."""
        return self.sums.merge(first, second)

    def result(self, state: Tensor) -> BestState:
        """Return the best sums, best first, and the patterns that stand for their members."""
        ranking = Best(self.groups, self.k, self.largest)
        best = ranking.new(state)
        for group in range(self.groups):
            members = (self.group_of == group).nonzero()[:, 0]
            ranking.compete(best, group, state[:, members], self.stands_for[members])
        return best


def joined(results: Sequence[Any]) -> Any:
    """Return the results of several blocks of queries as one: tensors, or tuples of tensors, one after the other."""
    if isinstance(results[0], tuple):
        made = (torch.cat(parts) for parts in zip(*results, strict=True))
        return type(results[0])(*made)
    return torch.cat(list(results))


def each_group(groups_of: Tensor) -> "list[tuple[int, Tensor | slice]]":
    """Return each group that patterns (n,) are in, with its members' places."""
    if is_one_group(groups_of):
        return [(0, slice(None))]
    groups, counts = groups_of.unique(return_counts=True)
    if len(groups) == 1:
        return [(int(groups[0]), slice(None))]
    return list(zip(groups.tolist(), groups_of.argsort(stable=True).split(counts.tolist()), strict=True))
