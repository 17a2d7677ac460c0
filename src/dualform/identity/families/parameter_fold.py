"""The shares of one parameter, moved along with every step of its live training.

    parameter = start + sum of shares + unexplained + rounding

Each share (of one layer's patterns in one group) moves by the linear map of every step, with its own gradient. The
start moves by the same maps without a gradient, and the *whole* with the gradient that the optimizer really took. What
the shares lack of the whole is `unexplained`, and what start and whole lack of the live parameter is `rounding`: both
follow when they are asked for, and cost nothing before.

Where a map is made of numbers (SGD), steps wait, and many of them are folded at once: the values of a step's patterns
are multiplied by what the later steps made of them. A share that gets no gradient meanwhile is not touched; it
remembers by how many steps it is behind, as one 2×2 matrix.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.identity.families.optimizer_kind import Move, StepMap, StepMatrix
from dualform.identity.grouped_products import RowGroups, add_by_group
from dualform.identity.parameter_maps import BiasMap, OuterMap, ParameterMap

UseKey = tuple[int, int, int]
"""Names a use of a parameter in one grouping: the place of the grouping, of the layer, and of the layer's use."""
STANDING = StepMatrix()
MIN_SCALE = 2.0**-10
"""What weights may be divided by at the least before they are multiplied out: far from where float32 overflows."""


@dataclass(slots=True)
class GroupShare:
    """A part of a parameter, and of the optimizer's average where the part has one."""

    weight: Tensor
    average: Tensor | None = None


def multiply(weight: Tensor, average: Tensor | None, by: StepMatrix) -> None:
    """Multiply a part of the weight and of the average by a 2×2 matrix, in place."""
    old = weight.clone() if by.average[0] else None
    if by.weight[0] != 1.0:
        weight.mul_(by.weight[0])
    if average is None:
        assert old is None, "a step that makes an average of the weight needs a place for it"
        return
    if by.weight[1]:
        weight.add_(average, alpha=by.weight[1])
    if by.average[1] != 1.0:
        average.mul_(by.average[1])
    if old is not None:
        average.add_(old, alpha=by.average[0])


class ShareStack:
    """The shares of one use of a parameter, one group's above the other's, so that one kernel moves all of them.

    Attributes:
        weight: (G, ...) each group's share of the parameter; zero for a group that has had no pattern.
        average: (G, ...) each group's share of the optimizer's average; None before any step moves it.
        seen: the groups that have had a pattern.
    """

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.weight = like.new_zeros(0, *shape)
        self.average: Tensor | None = None
        self.seen: set[int] = set()
        self._behind: list[StepMatrix] = []  # the steps that each group has yet to follow
        self._is_behind = False  # whether any group has
        self._unbound: tuple[list[Tensor], list[Tensor]] | None = None  # each group's weight and average

    def see(self, groups: Sequence[int]) -> None:
        """Note that groups have a pattern, and make room for them."""
        if self.seen.issuperset(groups):
            return
        self.seen.update(groups)
        more = max(self.seen, default=-1) + 1 - len(self.weight)
        if more > 0:
            room = self.weight.new_zeros(more, *self.weight.shape[1:])
            self.weight = torch.cat([self.weight, room]) if len(self.weight) else room
            self.average = None if self.average is None else torch.cat([self.average, torch.zeros_like(room)])
            self._behind += [STANDING] * more
            self._unbound = None

    def need_average(self) -> Tensor:
        """Return the averages, which are zero before any step moves them."""
        if self.average is None:
            self.average = torch.zeros_like(self.weight)
        return self.average

    def load(self, group: int, share: GroupShare) -> None:
        """Take one group's share as an earlier recording left it."""
        self.see([group])
        self.weight[group] = share.weight
        if share.average is not None:
            self.need_average()[group] = share.average

    def parts_of(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Return one group's share of the parameter and of the average, as views."""
        return self.weight[group], None if self.average is None else self.average[group]

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights and averages as one move takes them: on a GPU each group's, for kernels of many tensors."""
        average = self.need_average()
        if not self.weight.is_cuda:
            return [self.weight], [average]
        if self._unbound is None:
            self._unbound = list(self.weight.unbind()), list(average.unbind())
        return self._unbound

    def wait(self, group: int, steps: StepMatrix) -> None:
        """Put off steps that have no gradient for a group."""
        self._behind[group] = steps.after(self._behind[group])
        self._is_behind = True

    def catch_up(self, group: int) -> None:
        """Follow the steps that were put off for a group."""
        behind, self._behind[group] = self._behind[group], STANDING
        if behind.weight != STANDING.weight or behind.average != STANDING.average:
            if behind.average[0]:
                self.need_average()
            multiply(*self.parts_of(group), behind)

    def catch_up_all(self) -> None:
        """Follow the steps that were put off for any group."""
        if self._is_behind:
            for group in range(len(self._behind)):
                self.catch_up(group)
            self._is_behind = False


@dataclass(frozen=True, slots=True, eq=False)
class UseRows:
    """The patterns of one call, as one use of a parameter takes them: one use of a layer, in one grouping.

    Attributes:
        use: names the layer's use of the parameter and the grouping.
        parameter_map: how the parameter is made of patterns.
        values: (T, d_out) as the call has them.
        keys: (T, d_in) as the call has them.
        codes: (T,) the group of each pattern, on the CPU.
        factor: what the gradient was multiplied with between backward and step.
        groups: the same groups, and how rows are sorted by them; one object for all calls of a step that have them.
    """

    use: UseKey
    parameter_map: ParameterMap
    values: Tensor
    keys: Tensor
    codes: Tensor
    factor: float
    groups: RowGroups


def bias_rounding(rows: Iterable[UseRows], shape: Sequence[int], dtype: torch.dtype) -> Tensor | float:
    """Return how far each element of a bias's gradient may be from the sum of its patterns' values, by rounding alone.

    A sum in another order is off by up to half a unit in the last place of sum |value|. Where the values are coarser
    than the dtype that shares are folded in (bfloat16), autograd rounds its sum to the dtype of the values too.

    Args:
        rows: the patterns of the step, in one grouping.
        shape: the bias's shape.
        dtype: what shares are folded in.
    """
    total: Tensor | float = 0.0
    for one in rows:
        half_unit = abs(one.factor) * torch.finfo(dtype).eps / 2
        is_coarse = torch.finfo(one.values.dtype).eps > torch.finfo(dtype).eps
        if type(one.parameter_map) is BiasMap:  # without copies of the values
            sizes = torch.linalg.vector_norm(one.values, ord=1, dim=0, dtype=dtype)
            summed = one.values.sum(dim=0, dtype=dtype) if is_coarse else None
        else:
            values = one.values.to(dtype)
            sizes = one.parameter_map.gradient(values.abs(), one.keys, shape)
            summed = one.parameter_map.gradient(values, one.keys, shape) if is_coarse else None
        found = sizes.reshape(*shape) * half_unit
        if summed is not None:
            unit = torch.finfo(one.values.dtype).eps
            found.add_(summed.reshape(*shape).abs(), alpha=abs(one.factor) * unit / 2)
        total = total + found
    return total


def bias_roundings(
    rows: Sequence[Sequence[UseRows]], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor | float]:
    """Return what `bias_rounding` does for each of several biases; for the most usual ones by a few kernels for all.

    Args:
        rows: the patterns of each bias in the step, in one grouping.
        shapes: the biases' shapes.
        dtype: what shares are folded in.
    """
    found: list[Tensor | float] = [0.0] * len(rows)
    usual: list[int] = []  # biases with the patterns of one call, each element of a value added to one of the bias
    for place, mine in enumerate(rows):
        if len(mine) == 1 and type(mine[0].parameter_map) is BiasMap:
            usual.append(place)
        else:
            found[place] = bias_rounding(mine, shapes[place], dtype)
    if not usual:
        return found
    one = [rows[place][0] for place in usual]
    sizes = [torch.linalg.vector_norm(each.values, ord=1, dim=0, dtype=dtype) for each in one]
    torch._foreach_mul_(sizes, [abs(each.factor) * torch.finfo(dtype).eps / 2 for each in one])
    is_coarse = [torch.finfo(each.values.dtype).eps > torch.finfo(dtype).eps for each in one]
    coarse = [place for place, is_it in enumerate(is_coarse) if is_it]
    if coarse:
        sums = [one[place].values.sum(dim=0, dtype=dtype) for place in coarse]
        torch._foreach_abs_(sums)
        units = [abs(one[place].factor) * torch.finfo(one[place].values.dtype).eps / 2 for place in coarse]
        torch._foreach_mul_(sums, units)
        torch._foreach_add_([sizes[place] for place in coarse], sums)
    for place, size in zip(usual, sizes, strict=True):
        found[place] = size.view(*shapes[place])
    return found


class RowScratch:
    """Memory that rows of several calls are sorted into. Folds use it again: new memory costs more than copying."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def sorted(self, what: str, parts: Sequence[Tensor], groups: RowGroups, dtype: torch.dtype) -> Tensor:
        """Return the rows of several tensors (t, d) sorted by group, (T, d); valid until the same is asked for again.

        Args:
            what: names the memory.
            parts: the rows.
            groups: the groups of all rows, one tensor's after the other's.
            dtype: what the rows are wanted in, unless they are whole numbers.
        """
        if len(parts) == 1 and groups.order is None:
            return parts[0].to(dtype) if parts[0].is_floating_point() else parts[0]
        first = parts[0]
        dtype = dtype if first.is_floating_point() else first.dtype
        size, width = sum(part.shape[0] for part in parts), first.shape[1]
        at = (what, dtype, first.device)
        if at not in self._memory or self._memory[at].numel() < size * width:
            self._memory[at] = torch.empty(size * width, dtype=dtype, device=first.device)
        found = self._memory[at][: size * width].view(size, width)
        places = groups.places_of_rows(first.device).split([part.shape[0] for part in parts])
        for place, part in zip(places, parts, strict=True):
            found.index_copy_(0, place, part.to(dtype))
        return found


@dataclass(slots=True)
class _WaitingStep:
    """A step of numbers that waits to be folded, with its patterns."""

    matrix: StepMatrix
    rows: Sequence[UseRows]


@dataclass(slots=True)
class StartPart:
    """What the steps left of the start: two numbers while they are enough, the tensors themselves afterwards.

    Attributes:
        initial: reads the parameter as it was at the start, on the CPU.
        warm: the optimizer's average at the start, on the CPU; None where there was none.
        matrix: what the steps so far made of the parameter and the average at the start, as numbers.
        moved: start and average as tensors, once a step's map was not made of numbers alone.
    """

    initial: Callable[[], Tensor]
    warm: Tensor | None
    matrix: StepMatrix = STANDING
    moved: GroupShare | None = None

    @property
    def has_average(self) -> bool:
        """Whether a part of the optimizer's average is the start's."""
        return self.warm is not None or self.matrix.average[0] != 0.0 or self.moved is not None

    def step(self, linear: StepMap, numbers: StepMatrix | None, like: Tensor) -> None:
        """Follow one step, given as a map and, where it is made of numbers, as these; `like` has dtype and device."""
        if self.moved is None:
            if numbers is not None:
                self.matrix = numbers.after(self.matrix)
                return
            if not linear.decay and not self.has_average:
                self.matrix = StepMatrix((linear.kappa * self.matrix.weight[0], 0.0), self.matrix.average)
                return
            weight, average = self.parts()
            self.moved = GroupShare(weight.to(like), average.to(like))
        assert self.moved.average is not None
        linear.follow_all([Move(linear, [self.moved.weight], [self.moved.average], [None])])

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return what is left of the start, and its part of the average, in float64."""
        if self.moved is not None:
            assert self.moved.average is not None
            return self.moved.weight.double(), self.moved.average.double()
        initial = self.initial().double()
        warm = torch.zeros_like(initial) if self.warm is None else self.warm.double()
        (a, b), (c, d) = self.matrix.weight, self.matrix.average
        return a * initial + b * warm, c * initial + d * warm


class ParameterFold:
    """The parts of one parameter on their way through its live steps.

    Attributes:
        start: what is left of the start.
        whole: what all gradients together made of the parameter, and of the average where the start has a part of it.
        stacks: by use, what its patterns made in each group.
        noise: the size that the optimizer's own coarse rounding is expected to have by now.
        divides: whether weights are kept divided by all κ so far, where a step allows it: on a GPU, whose time goes
            into passes over memory. Reading a result multiplies them out, so that later steps round otherwise.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        initial: Callable[[], Tensor],
        warm: Tensor | None,
        scratch: "RowScratch | None" = None,
    ) -> None:
        """Begin with nothing but the start.

        Args:
            shape: the parameter's.
            dtype: what shares are folded in.
            device: where they are folded.
            initial: reads the parameter as it was at the start, on the CPU.
            warm: the optimizer's average at the start, on the CPU; None where there was none.
            scratch: memory to sort rows in, which folds that are used one after the other may share.
        """
        self._scratch = RowScratch() if scratch is None else scratch
        self.shape = tuple(shape)
        self.start = StartPart(initial, warm)
        self.whole = GroupShare(torch.zeros(self.shape, dtype=dtype, device=device))
        self.stacks: dict[UseKey, ShareStack] = {}
        self.noise = 0.0
        self.divides = device.type == "cuda"
        self._scale = 1.0  # what the whole's weight and the stacks' weights are divided by
        self._waiting: list[_WaitingStep] = []

    @property
    def waiting(self) -> int:
        """The number of steps whose patterns wait to be folded."""
        return len(self._waiting)

    def keep_average(self, live: Tensor | None) -> None:
        """Follow the whole's own average from here on, given the optimizer's before the next step.

        So far all of the optimizer's average was the whole's; from the next step on the start has a part of it.
        """
        if self.whole.average is None:
            zero = torch.zeros_like(self.whole.weight)
            self.whole.average = zero if live is None or self.start.warm is not None else zero.copy_(live)

    def step(
        self, linear: StepMap, rows: Sequence[UseRows], *, gradient: Tensor, live_average: Tensor | None
    ) -> list[Move[StepMap]]:
        """Begin to follow one step, and return the moves that are left to do before the next one.

        Args:
            linear: the step's map.
            rows: the patterns whose gradients reached it.
            gradient: the gradient that the optimizer took; may be empty where its kind `takes_gradient_by_average`
                and the whole has no average of its own.
            live_average: the optimizer's average after the step, where it keeps one.
        """
        numbers = linear.matrix
        if numbers is None:
            self.fold_waiting()  # before weights are divided by this step's κ, too
        scale = None
        if self.divides and numbers is None and linear.lerp is not None and self._scale * linear.kappa > MIN_SCALE:
            scale = self._scale = self._scale * linear.kappa
        else:
            self._settle_scale()
        whole = self._move_of_whole(linear, gradient, live_average, scale)
        self.start.step(linear, numbers, self.whole.weight)
        if self.noise or linear.noise:
            self.noise = ((linear.kappa * self.noise) ** 2 + linear.noise**2) ** 0.5
        if numbers is not None:
            self._wait(numbers, rows)
            return [whole]
        return [whole, *self._moves_of_shares(linear, rows, scale)]

    def _wait(self, numbers: StepMatrix, rows: Sequence[UseRows]) -> None:
        """Let a step whose map is made of numbers wait to be folded with later ones."""
        self._waiting.append(_WaitingStep(numbers, rows))

    def _settle_scale(self) -> None:
        """Multiply the weights by what they are divided by."""
        scale, self._scale = self._scale, 1.0
        if scale != 1.0:
            for weight in (self.whole.weight, *(stack.weight for stack in self.stacks.values())):
                weight.mul_(scale)

    def _move_of_whole(
        self, linear: StepMap, gradient: Tensor, live_average: Tensor | None, scale: float | None
    ) -> Move[StepMap]:
        whole = self.whole
        if whole.average is None and live_average is not None and linear.lerp is not None:
            average = _as(live_average, whole.weight)
            return Move(linear, [whole.weight], [average], [None], averages_moved=True, scale=scale)
        taken = _as(gradient, whole.weight)
        if whole.average is not None:
            return Move(linear, [whole.weight], [whole.average], [taken], scale=scale)
        assert scale is None, "the average of a step that takes its gradient by it is at hand"
        # Without an average of the optimizer's, the step's map uses none.
        average = whole.weight if live_average is None else _as(live_average, whole.weight)
        return Move(linear, [whole.weight], [average], [taken], averages_moved=True)

    def _moves_of_shares(self, linear: StepMap, rows: Sequence[UseRows], scale: float | None) -> list[Move[StepMap]]:
        """Return the moves of every share in a step whose map is made of matrices; `scale` as in `Move`."""
        by_use = self._rows_by_use(rows)
        lerp, moves = linear.lerp, []
        for use, stack in self.stacks.items():
            stack.catch_up_all()
            average = stack.need_average() if linear.moves_average else stack.average
            mine = by_use.get(use, ())
            if lerp is not None and average is not None:
                self._add_gradients(average, use, mine, keep=lerp[0], take=lerp[1])
                weights, averages = stack.tensors()
                nothing = [None] * len(weights)
                moves.append(Move(linear, weights, averages, nothing, averages_moved=True, scale=scale))
            else:
                gradient = torch.zeros_like(stack.weight) if use in by_use else None
                if gradient is not None:
                    self._add_gradients(gradient, use, mine, keep=1.0, take=1.0)
                moves.append(Move(linear, [stack.weight], [stack.weight if average is None else average], [gradient]))
        return moves

    def _rows_by_use(self, rows: Sequence[UseRows]) -> dict[UseKey, list[UseRows]]:
        """Return a step's patterns by use, and note their groups."""
        by_use: dict[UseKey, list[UseRows]] = {}
        for one in rows:
            by_use.setdefault(one.use, []).append(one)
            self.stack(one.use).see(one.groups.present)
        return by_use

    def _add_gradients(self, total: Tensor, use: UseKey, rows: Sequence[UseRows], *, keep: float, take: float) -> None:
        """Replace totals by group by `keep` times themselves plus `take` times the gradients of patterns of one use."""
        if not rows:
            total.mul_(keep)
        for place, one in enumerate(rows):
            add_by_group(
                total,
                one.parameter_map,
                one.values,
                one.keys,
                one.groups,
                keep=1.0 if place else keep,
                take=take * one.factor,
            )

    def stack(self, use: UseKey) -> ShareStack:
        """Return the shares of a use, of which there are none before its first pattern."""
        if use not in self.stacks:
            self.stacks[use] = ShareStack(self.shape, self.whole.weight)
        return self.stacks[use]

    def fold_waiting(self) -> None:
        """Fold the steps that wait: all their patterns in one product for each use and group."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._settle_scale()
        carried: list[tuple[float, float]] = []  # what W and m have of the gradient of each step by now
        later = STANDING
        for one in reversed(waiting):
            carried.append(later.after(StepMatrix((0, 0), (0, 0), one.matrix.gradient)).gradient)
            later = later.after(one.matrix)
        by_use: dict[UseKey, list[tuple[UseRows, tuple[float, float]]]] = {}
        for step, factors in zip(waiting, reversed(carried), strict=True):
            for rows in step.rows:
                by_use.setdefault(rows.use, []).append((rows, factors))
        moves_average = any(one.matrix.gradient[1] for one in waiting)
        behind = StepMatrix(later.weight, later.average)
        for use, parts in by_use.items():
            self._fold_use(use, parts, behind, moves_average=moves_average)
        for use, stack in self.stacks.items():
            present = {group for rows, _ in by_use.get(use, ()) for group in rows.groups.present}
            for group in stack.seen - present:
                stack.wait(group, behind)

    def _fold_use(
        self,
        use: UseKey,
        parts: Sequence[tuple[UseRows, tuple[float, float]]],
        behind: StepMatrix,
        *,
        moves_average: bool,
    ) -> None:
        """Add the patterns of one use in several steps to its shares.

        Args:
            use: the use.
            parts: its patterns, with what weight and average have by now of the gradient of their step.
            behind: what these steps do to a share.
            moves_average: whether the average takes anything of the gradients.
        """
        dtype, count = self.whole.weight.dtype, 2 if moves_average else 1
        groups = RowGroups.of_codes(torch.cat([rows.codes for rows, _ in parts]))
        numbers = torch.tensor([[rows.factor * number for number in of[:count]] for rows, of in parts], dtype=dtype)
        lengths = torch.tensor([rows.codes.shape[0] for rows, _ in parts])
        parameter_map, stack = parts[0][0].parameter_map, self.stack(use)
        stack.see(groups.present)
        if moves_average or behind.average[0]:
            stack.need_average()
        for group in groups.present:
            stack.catch_up(group)
        device = parts[0][0].values.device
        if type(parameter_map) is BiasMap and device == self.whole.weight.device:
            self._fold_bias(stack, [rows.values for rows, _ in parts], groups, numbers, lengths, behind)
            return
        values = self._scratch.sorted("values", [rows.values for rows, _ in parts], groups, dtype)
        keys = self._scratch.sorted("keys", [rows.keys for rows, _ in parts], groups, dtype)
        factors = groups.sort(numbers.repeat_interleave(lengths, dim=0).to(device))  # (T, 2)
        for group, part in zip(groups.present, groups.slices, strict=True):
            scaled = [values[part] * factors[part, place, None] for place in range(count)]
            _multiply_and_add(*stack.parts_of(group), behind, scaled, keys[part], parameter_map, self.shape)

    def _fold_bias(
        self,
        stack: ShareStack,
        values: Sequence[Tensor],
        groups: RowGroups,
        numbers: Tensor,
        lengths: Tensor,
        behind: StepMatrix,
    ) -> None:
        """Add the patterns of a bias in several steps to its shares: by one product for each step.

        Args:
            stack: the shares.
            values: (t, d_out) of each step.
            groups: the groups of all rows, one step's after the other's.
            numbers: (steps, 1 or 2) what weight and average have by now of the gradient of each step.
            lengths: (steps,) how many rows each step has.
            behind: what these steps do to a share.
        """
        like = stack.weight
        members = groups.members_as_they_lie(values[0].device, like.dtype).split(lengths.tolist(), dim=1)
        sums = torch.stack([mine @ rows.to(like.dtype) for mine, rows in zip(members, values, strict=True)])
        found = torch.einsum("sk,sgd->kgd", numbers.to(sums.device), sums)
        for place, group in enumerate(groups.present):
            weight, average = stack.parts_of(group)
            multiply(weight, average, behind)
            for tensor, more in zip((weight, average), found[:, place], strict=False):
                assert tensor is not None, "the average has its place before anything is added to it"
                tensor.add_(more.view(tensor.shape))

    def parts(self) -> Iterable[tuple[UseKey, int, GroupShare]]:
        """Yield every share with its use and group, moved up to the last step."""
        self.fold_waiting()
        self._settle_scale()
        for use, stack in self.stacks.items():
            stack.catch_up_all()
            for group in sorted(stack.seen):
                yield use, group, GroupShare(*stack.parts_of(group))

    def rest(self, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is left of the start, what is unexplained, and rounding, in float64, given the live parameter."""
        self._settle_scale()
        start = self.start.parts()[0]
        whole = self.whole.weight.double()
        explained = torch.zeros_like(whole)
        for (grouping, _, _), _, share in self.parts():
            if not grouping:  # each grouping has every pattern once
                explained += share.weight
        return start, whole - explained, live.to(whole) - start.to(whole) - whole


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the dtype and on the device of another; itself where it is so, faster than `Tensor.to`."""
    return tensor if tensor.dtype == like.dtype and tensor.device == like.device else tensor.to(like)


def _multiply_and_add(
    weight: Tensor,
    average: Tensor | None,
    by: StepMatrix,
    values: Sequence[Tensor],
    keys: Tensor,
    parameter_map: ParameterMap,
    shape: Sequence[int],
) -> None:
    """Multiply a share by a 2×2 matrix and add the gradients of scaled values, of the weight's and of the average's."""
    plain = type(parameter_map) is OuterMap and not by.average[0] and keys.device == weight.device
    if not plain:
        multiply(weight, average, by)
        for tensor, scaled in zip((weight, average), values, strict=False):
            assert tensor is not None, "the average has its place before anything is added to it"
            tensor.add_(parameter_map.gradient(scaled, keys, shape).reshape(tensor.shape).to(tensor.device))
        return
    betas = (by.weight[0], by.average[1])
    if average is not None and by.weight[1]:
        if by.weight[0] != 1.0:
            weight.mul_(by.weight[0])
        weight.add_(average, alpha=by.weight[1])
        betas = (1.0, by.average[1])
    for tensor, scaled, beta in zip((weight, average), values, betas, strict=False):
        assert tensor is not None, "the average has its place before anything is added to it"
        tensor.view(len(tensor), -1).addmm_(scaled.t(), keys, beta=beta)
    if len(values) == 1 and average is not None:
        average.mul_(by.average[1])
