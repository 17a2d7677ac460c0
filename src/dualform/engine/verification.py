"""Proof on every run: do its patterns rebuild the weights?

A parameter passes when `‖rebuilt − live‖ <= tolerance · ‖change‖ + 4 · eps · sqrt(S) · ‖live‖`: the first term is the
rounding of the patterns' products, the second that of S additions to the live weight itself, which dominates where the
change is tiny. Patterns stored as float16 carry a third, their own rounding, 2⁻¹⁰ · sqrt(sum_t (c_t ‖e_t‖ ‖x_t‖)²),
which dominates where large contributions cancel. Of patterns stored as int8 that term is four times the standard
deviation that their random rounding gives the parameter, measured from the patterns themselves.

A parameter that does not pass is replayed once more, to see what of its error is rounding that this bound leaves out
(docs/math.md, "What rounding may do"): gradients that are nothing but rounding, and steps that are all rounded to the
same side. It passes when the rest of the error, element by element, is within the bound.

An optimizer that rounds more coarsely than the parameter's dtype (Muon) leaves a third term, rounding, and then
`rebuilt = start + shares + rounding`. Rounding absorbs whatever the linear maps of the steps do not say, so its size is
part of the proof: `‖start + shares − live‖` may be 5e-2 · ‖change‖ and four times what bfloat16 does at random.

A run that keeps shares keeps two such terms, `unexplained` and `rounding`, so that its sum is complete whatever the
training did, and completeness proves nothing. It passes only where each of the two is within the bound that the error
of a pattern memory must keep, widened for biases by what rounding of their gradients explains of `unexplained`;
otherwise the verdict is how much of the change the shares explain, `1 − ‖unexplained + rounding‖² / ‖change‖²`. A run
that was made from checkpoints has patterns and keeps `unexplained` too; its verdict is found in the same way.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualform.engine.block import Block
from dualform.engine.coverage import Coverage, coverage
from dualform.engine.description import LayerEntry
from dualform.engine.doubt import fold_doubts
from dualform.engine.jobs import Executor, Pass, WholeView
from dualform.engine.rebuild import ParameterParts, coefficient_noise, parts
from dualform.engine.reducers import Sums
from dualform.engine.source import PatternSource
from dualform.engine.stored_calls import storage_variance
from dualform.identity.families import find_optimizer_kind
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.estimate import size_text

REBUILD_TOLERANCE = {"int8": 2e-3, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}
"""What may be lost relative to the change, by the dtype that the patterns are stored in."""


MAX_FLOAT16_LOSS = 2.0**-10
"""What float16 loses of a pattern at most, relative to it: its key and its value are rounded by 2⁻¹¹ each."""

MAX_INT8_DEVIATIONS = 4
"""How many standard deviations of its patterns' random rounding a parameter may be off."""

MAX_INT8_ERROR = 0.25
"""How much the random rounding of int8 patterns may excuse under an optimizer without coefficients, of the change."""

MAX_ROUNDING = 5e-2
"""How far start and shares alone may be from a parameter whose optimizer rounds coarsely, relative to the change."""


FINE_PART_OF_COARSE = 2**-10
"""How large float32's rounding of gradients may come out of an optimizer that rounds in bfloat16, as a part of that.

Both go through the same maps, which may enlarge them. The unit of float32 is 2⁻¹⁶ of bfloat16's; the rest is room for
sums over many rows.
"""

MAX_DOUBTS = 4
"""How many standard deviations an element may be off because training rounded its gradients in another way."""

MAX_DOUBT_NORMS = 2.5
"""How many times the norm of those standard deviations a whole parameter may be off for that reason.

Rounding at random leaves about that norm, so this allows for some bad luck, and not for an edit of every element.
"""


@dataclass(frozen=True, slots=True)
class RoundingCheck:
    """How much of a parameter is its optimizer's own rounding.

    Attributes:
        size: ‖rounding‖.
        error: ‖start + shares − live‖, without the rounding.
        bound: what that error may be.
        replay: ‖replayed − live‖, 0.0 where torch's own steps on the rebuilt gradients are equal to the bit.
        repeatable: whether they should be: the same machine, whole patterns, and gradients that were not rescaled.
    """

    size: float
    error: float
    bound: float
    replay: float
    repeatable: bool

    @property
    def passed(self) -> bool:
        """Whether start and shares are near enough, and the replay is equal where it should be."""
        return self.error <= self.bound and (self.replay == 0.0 or not self.repeatable)


@dataclass(frozen=True, slots=True)
class RestCheck:
    """How much of a parameter is no pattern's, in a run that keeps shares or was made from checkpoints.

    Attributes:
        unexplained: ‖unexplained‖, what those parts of the gradients made that no pattern explains.
        rounding: ‖rounding‖, what the steps did beyond their linear maps.
        size: ‖unexplained + rounding‖.
        unexplained_bound: what the first may be.
        rounding_bound: what the second may be.
    """

    unexplained: float
    rounding: float
    size: float
    unexplained_bound: float
    rounding_bound: float

    @property
    def passed(self) -> bool:
        """Whether both are what a pattern memory could leave as rounding."""
        return self.unexplained <= self.unexplained_bound and self.rounding <= self.rounding_bound


@dataclass(frozen=True, slots=True)
class ParameterCheck:
    """How well one parameter is rebuilt."""

    parameter: str
    error: float  # ‖rebuilt − live‖
    change: float  # ‖live − initial‖
    bound: float
    rounding: RoundingCheck | None = None  # where the optimizer rounds more coarsely than the parameter's dtype
    noise: float = 0.0  # what gradients that autocast rounded may have moved beyond their patterns
    rest: RestCheck | None = None  # in a run that keeps shares, or was made from checkpoints

    @property
    def relative(self) -> float:
        """The error relative to the change (0 where nothing changed and nothing is wrong)."""
        return relative(self.error, self.change)

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound, which is none where it is infinite, and the rounding is no more."""
        rounded = self.rounding is None or self.rounding.passed
        return self.complete and rounded and (self.rest is None or self.rest.passed)

    @property
    def complete(self) -> bool:
        """Whether all parts together are the live parameter."""
        return self.error <= self.bound < math.inf


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """What is stored of one layer, and how well its parameters are rebuilt (nothing to rebuild for keys only)."""

    layer: str
    patterns: int
    bytes: int
    parameters: tuple[ParameterCheck, ...]

    @property
    def error(self) -> float | None:
        """The error relative to the change, over weight and bias together; nothing for keys only.

        A bias is one more column of the weight, whose key is 1.
        """
        return self._relative_to_change([check.error for check in self.parameters])

    @property
    def bound(self) -> float | None:
        """What the error may be relative to the change, over weight and bias together; nothing for keys only.

        Each parameter has a bound of its own, and the layer passes only where each is kept.
        """
        return self._relative_to_change([check.bound for check in self.parameters])

    def _relative_to_change(self, sizes: Sequence[float]) -> float | None:
        """Return sizes, one per parameter, relative to the parameters' change, all together; None for keys only."""
        if not self.parameters:
            return None
        return relative(math.hypot(*sizes), math.hypot(*(check.change for check in self.parameters)))

    @property
    def rounding(self) -> float | None:
        """The size of the rounding term relative to the change, over all parameters that have one; nothing for none."""
        rounded = [(c.rounding.size, c.change) for c in self.parameters if c.rounding is not None]
        rounded += [(c.rest.rounding, c.change) for c in self.parameters if c.rest is not None]
        return relative(*(math.hypot(*parts) for parts in zip(*rounded, strict=True))) if rounded else None

    @property
    def unexplained(self) -> float | None:
        """The size of what no pattern explains relative to the change; nothing where patterns were recorded."""
        found = [(c.rest.unexplained, c.change) for c in self.parameters if c.rest is not None]
        return relative(*(math.hypot(*parts) for parts in zip(*found, strict=True))) if found else None

    @property
    def explained(self) -> float | None:
        """How much of the change is explained, 0 to 1; nothing where patterns were recorded."""
        return explained_part(self.parameters)

    @property
    def replayed(self) -> bool | None:
        """Whether the replay of those parameters is equal to the bit; nothing where there are none."""
        rounded = [c.rounding for c in self.parameters if c.rounding is not None]
        return all(check.replay == 0.0 for check in rounded) if rounded else None

    @property
    def passed(self) -> bool:
        """Whether every parameter passed."""
        return all(check.passed for check in self.parameters)

    @property
    def result(self) -> str:
        """The outcome in words: passed, failed, or how much of the change the shares explain."""
        if self.passed:
            return "passed"
        if self.explained is None or not all(check.complete for check in self.parameters):
            return "FAILED"
        return f"explains {percent_text(self.explained)}"


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `Memory.verify`: files whole, weights rebuilt or not."""

    step: int
    files: int
    layers: tuple[LayerCheck, ...]
    coverage: Coverage
    hint: str = ""  # why it failed and what to do, where that is known

    @property
    def passed(self) -> bool:
        """Whether every recorded layer passed; `uncovered` says what no recorded layer covers."""
        return all(layer.passed for layer in self.layers)

    @property
    def explained(self) -> float | None:
        """How much of the change the shares explain, 0 to 1, where that is all that keeps the run from passing."""
        checks = [check for layer in self.layers for check in layer.parameters]
        if self.passed or any(not check.passed and (check.rest is None or not check.complete) for check in checks):
            return None
        return explained_part(list({check.parameter: check for check in checks}.values()))

    @property
    def uncovered(self) -> Mapping[str, int]:
        """The trained parameters that no recorded layer covers, with their number of elements."""
        return self.coverage.uncovered

    @property
    def uncovered_share(self) -> float:
        """The share of the trained elements that no recorded layer covers, 0 to 1."""
        return self.coverage.uncovered_share

    @property
    def verdict(self) -> str:
        """The outcome in words, with its limits."""
        if not self.passed:
            return "FAILED" if self.explained is None else f"explains {percent_text(self.explained)} of the change"
        if not any(layer.parameters for layer in self.layers) and self.coverage.recorded:
            return "files whole; nothing to compare: keys only"
        if not self.step and not any(layer.patterns for layer in self.layers):
            return "files whole; nothing to rebuild: no steps"
        return self.coverage.passed_text

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        width = max([len(layer.layer) for layer in self.layers] + [5])
        extra = [name for name in EXTRA if any(_extra_cell(layer, name) for layer in self.layers)]
        more = "".join(f"  {name:>{EXTRA[name]}}" for name in extra)
        lines = [
            f"{'layer':<{width}}  {'patterns':>10}  {'stored':>9}  {'relative error':>14}  {'bound':>9}{more}  result"
        ]
        for layer in self.layers:
            error = "keys only" if layer.error is None else f"{layer.error:.1e}"
            bound = "-" if layer.bound is None or math.isinf(layer.bound) else f"{layer.bound:.1e}"
            row = f"{layer.layer:<{width}}  {layer.patterns:>10,}  {size_text(layer.bytes):>9}  {error:>14}  {bound:>9}"
            row += "".join(f"  {_extra_cell(layer, name):>{EXTRA[name]}}" for name in extra)
            lines.append(f"{row}  {layer.result}")
        failed = {check.parameter: check for layer in self.layers for check in layer.parameters if not check.passed}
        lines += [_failure_text(check) for check in failed.values()]
        coarse = sum(check.noise > 0 for layer in self.layers for check in layer.parameters)
        if coarse:
            lines.append(f"gradients of {coarse} parameters were rounded by autocast: rebuilt to that rounding")
        if self.uncovered:
            lines.append(str(self.coverage))
        lines.append(f"after {self.step} steps, {self.files} files: {self.verdict}")
        return "\n".join([*lines, self.hint] if self.hint else lines)


EXTRA = {"unexplained": 11, "rounding": 8, "replay": 7}
"""Columns of a verification that not every run has, with their widths."""


def _extra_cell(layer: LayerCheck, name: str) -> str:
    """Return a layer's cell in a column that not every run has."""
    if name == "replay":
        return {None: "", True: "equal", False: "differs"}[layer.replayed]
    size = layer.unexplained if name == "unexplained" else layer.rounding
    return "" if size is None else f"{size:.1e}"


def explained_part(checks: Sequence[ParameterCheck]) -> float | None:
    """Return how much of the change of some parameters their shares explain, 0 to 1; nothing where none keeps shares.

    1 − ‖rest‖² / ‖change‖², over all of them together.
    """
    kept = [(check.rest.size, check.change) for check in checks if check.rest is not None]
    if not kept:
        return None
    rest, change = (math.hypot(*sizes) for sizes in zip(*kept, strict=True))
    return max(0.0, 1.0 - relative(rest, change) ** 2)


def percent_text(part: float) -> str:
    """Return a part of the whole in percent, with as many digits as it takes to tell it from the whole.

    >>> percent_text(0.93125), percent_text(0.999997), percent_text(1.0)
    ('93.1 %', '99.9997 %', '100 %')
    """
    if part >= 1.0:
        return "100 %"
    digits = max(1, math.ceil(-math.log10(100 * (1.0 - part))))
    scale = 10**digits
    return f"{math.floor(100 * part * scale + 1e-6) / scale:.{digits}f} %"


def _failure_text(check: ParameterCheck) -> str:
    """Say how far a parameter that did not pass is from its bound."""
    if check.rest is not None and check.complete:
        rest = check.rest
        return (
            f"{check.parameter!r}: {rest.unexplained:.1e} is no pattern's, at most {rest.unexplained_bound:.1e} is "
            f"rounding; {rest.rounding:.1e} is beyond the steps' maps, at most {rest.rounding_bound:.1e} is rounding"
        )
    if check.error > check.bound or check.rounding is None:
        return f"{check.parameter!r} is off by {check.error:.1e}; at most {check.bound:.1e} is rounding"
    if check.rounding.error > check.rounding.bound:
        return (
            f"{check.parameter!r} is off by {check.rounding.error:.1e} before its optimizer's rounding is added; "
            f"at most {check.rounding.bound:.1e} is rounding"
        )
    return f"{check.parameter!r}: the replayed steps differ by {check.rounding.replay:.1e}, and should be equal"


def relative(error: float, change: float) -> float:
    """Return an error relative to a change."""
    return error / change if change else (math.inf if error else 0.0)


def compare(
    run: PatternSource,
    rebuilt: Mapping[str, ParameterParts],
    live: Mapping[str, Tensor],
    executor: Executor,
    *,
    horizon: int,
) -> dict[str, ParameterCheck]:
    """Compare rebuilt parameters with live ones, by the bound above."""
    checks = {}
    noise = _storage_noise(run, executor, horizon=horizon)
    coarse = {name: entry.dtype for entry in _coarse_layers(run).values() for name in entry.parameters.values()}
    for name, found in rebuilt.items():
        now = live[name].detach().cpu().double()
        change = float((now - run.initial[name].double()).norm())
        dtype = run.description.parameters[name].dtype
        eps = torch.finfo(getattr(torch, dtype)).eps / 2
        tolerance = REBUILD_TOLERANCE[coarse.get(name, dtype)]
        bound = tolerance * change + 4 * eps * math.sqrt(max(horizon, 1)) * float(now.norm()) + noise.get(name, 0.0)
        error = float((found.whole - now).norm())
        bound += 4 * found.noise
        rounding = found.rounding
        rest = _checkpoint_rest(run.unexplained(name, horizon), bound)
        if rounding is None:
            checks[name] = ParameterCheck(name, error, change, bound, noise=found.noise, rest=rest)
            continue
        if coarse.get(name) == "int8":  # its orthogonalisation makes as much of small directions as of large ones
            bound += MAX_INT8_ERROR * change
        chance = 4 * rounding.expected
        check = RoundingCheck(
            size=float(rounding.term.norm()),
            error=float((found.whole - rounding.term - now).norm()),
            bound=MAX_ROUNDING * change + bound + chance,
            replay=float((rounding.parameter.double() - now + (0.0 if found.rest is None else found.rest)).norm()),
            repeatable=rounding.repeatable and rest is None,  # checkpoints are not where the steps lead
        )
        bound = bound if rounding.repeatable else bound + chance  # rounded otherwise, at random
        checks[name] = ParameterCheck(name, error, change, bound, check, rest=rest)
    by_norm = {name for name, dtype in coarse.items() if dtype == "int8"}
    return _excused(run, rebuilt, live, checks, executor, horizon=horizon, by_norm=by_norm)


def _checkpoint_rest(unexplained: Tensor | None, bound: float) -> RestCheck | None:
    """Return the check of what no pattern explains between checkpoints; None where the training was recorded."""
    if unexplained is None:
        return None
    size = float(unexplained.norm())
    return RestCheck(unexplained=size, rounding=0.0, size=size, unexplained_bound=bound, rounding_bound=bound)


def _excused(
    run: PatternSource,
    rebuilt: Mapping[str, ParameterParts],
    live: Mapping[str, Tensor],
    checks: Mapping[str, ParameterCheck],
    executor: Executor,
    *,
    horizon: int,
    by_norm: Collection[str],
) -> dict[str, ParameterCheck]:
    """Widen the bounds of parameters that are outside theirs, by what rounding explains of their error.

    Element by element, so that one that is nothing but rounding does not hide another. Finding out takes one more
    replay, of those parameters alone. Where the rest of the error is outside the bound, so is the error afterwards.

    The parameters `by_norm` have patterns in int8. What their rounding may do is known on average, and not for an
    element whose small keys or values were all stored as zeros; so their error is compared as a whole, and no more of
    it is excused than leaves the patterns a proof.
    """
    found = dict(checks)
    outside = [name for name, check in checks.items() if not check.error <= check.bound]
    for name, doubt in executor.run(run, [fold_doubts(run, outside, horizon=horizon)])[0].items():
        check, whole, now = checks[name], rebuilt[name].whole, live[name].detach().cpu().double()
        apart = doubt.apart(whole, now)
        excuse = apart if name in by_norm else apart.minimum(MAX_DOUBTS * doubt.spread)
        most = MAX_DOUBT_NORMS * float(doubt.spread.norm())
        if name in by_norm:
            most = min(most, MAX_INT8_ERROR * check.change)
        unexplained = _left_over(apart, excuse, most)
        if unexplained <= check.bound:
            explained = most + float(doubt.drift(whole).abs().norm())
        else:
            explained = check.error - unexplained
        found[name] = dataclasses.replace(check, bound=check.bound + explained)
    return found


def _left_over(apart: Tensor, excuse: Tensor, most: float) -> float:
    """Return the norm of what is left of an error, element by element, once rounding is taken off.

    Rounding at random leaves about its spread all together: an edit of every element is more than that.

    Args:
        apart: the absolute error of each element.
        excuse: what rounding may be of each.
        most: what rounding may be of all together.
    """
    excuse = excuse * min(1.0, most / max(float(excuse.norm()), 1e-300))
    return float((apart - excuse).norm())


@dataclass(frozen=True, slots=True)
class PatternPower(Sums):
    """The sum over patterns of |coefficient · value ⊗ key|², for each use of a parameter by a layer, (uses,)."""

    uses: tuple[ParameterUse, ...]

    def new(self, like: Tensor) -> Tensor:
        """Return zeros, (uses,)."""
        return torch.zeros(len(self.uses), dtype=torch.float64, device=like.device)

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add the power of a block's patterns."""
        assert block.values is not None, "this pass reads values"
        of_values = block.values.square().sum(dim=1)  # (n,)
        of_keys = block.keys.double().square().sum(dim=1)
        for i, use in enumerate(self.uses):
            if use in block.coefficients:
                squares = of_values * of_keys if use.parameter_map.multiplies_keys else of_values
                state[i] += (block.coefficients[use].square() * squares).sum()
        return state


@dataclass(frozen=True, slots=True)
class RoundingPower(PatternPower):
    """The variance that the random rounding of int8 patterns gives a parameter, all elements together, (uses,).

    Attributes:
        key_dtype: in which the keys are stored; those that many patterns share are float16.
    """

    key_dtype: torch.dtype

    def add(self, state: Tensor, block: Block, measures: Tensor, groups_of: Tensor) -> Tensor:
        """Add the variance of a block's patterns: (e + δe)(x + δx)ᵀ − e xᵀ, where e and x are what is stored."""
        assert block.values is not None, "this pass reads values"
        of_values = block.values.square().sum(dim=1)  # (n,)
        values_lost = storage_variance(block.values, torch.int8).sum(dim=1)
        is_number = block.keys.is_floating_point()  # and not a place, which is stored as it is
        of_keys = block.keys.square().sum(dim=1) if is_number else torch.ones_like(of_values)
        keys_lost = storage_variance(block.keys, self.key_dtype).sum(dim=1) if is_number else torch.zeros_like(of_keys)
        for i, use in enumerate(self.uses):
            if use in block.coefficients:
                lost = values_lost
                if use.parameter_map.multiplies_keys:
                    lost = of_values * keys_lost + values_lost * of_keys
                state[i] += (block.coefficients[use].square() * lost).sum()
        return state


def _coarse_layers(run: PatternSource) -> dict[str, LayerEntry]:
    """Return the layers with values whose patterns are stored in a coarser dtype than any that is trained."""
    return {n: e for n, e in run.layers.items() if e.dtype in ("float16", "int8") and e.store == "keys+values"}


def _storage_noise(run: PatternSource, executor: Executor, *, horizon: int) -> dict[str, float]:
    """Return the third term of the bound, for the parameters whose patterns are stored as float16 or int8."""
    coarse = _coarse_layers(run)
    view, like = WholeView(run, horizon), torch.empty(0, dtype=torch.float64)
    reducers = {name: _rounding_reducer(run, name, entry) for name, entry in coarse.items()}
    jobs = [Pass(name, view, reducer, like, values=True) for name, reducer in reducers.items()]
    squares: dict[str, float] = {}
    for entry, found in zip(coarse.values(), executor.run(run, jobs), strict=True):
        for use, one in zip(entry.uses, found.tolist(), strict=True):
            term = (MAX_FLOAT16_LOSS if entry.dtype == "float16" else MAX_INT8_DEVIATIONS) ** 2 * one
            squares[use.parameter] = squares.get(use.parameter, 0.0) + term
    return {name: math.sqrt(total) for name, total in squares.items()}


def _rounding_reducer(run: PatternSource, layer: str, entry: LayerEntry) -> PatternPower:
    """Return the reducer that measures how much the rounding of a layer's stored patterns may do."""
    if entry.dtype == "float16":
        return PatternPower(entry.uses)
    stored = [part.rows(layer, "keys").dtype for part in run.parts() if part.count(layer)]
    return RoundingPower(entry.uses, stored[0] if stored else torch.int8)


def verify(run: PatternSource, live: Mapping[str, Tensor], executor: Executor, *, horizon: int) -> Verification:
    """Check the files, rebuild every parameter after `horizon` steps, and compare with the live ones."""
    files = 0 if run.run_files is None else run.run_files.check()
    rebuilt = parts(run, WholeView(run, horizon), executor)
    checks = compare(run, rebuilt, live, executor, horizon=horizon) | compare_shares(run, live, horizon=horizon)
    return Verification(horizon, files, tuple(by_layer(run, checks).values()), coverage(run))


def compare_shares(run: PatternSource, live: Mapping[str, Tensor], *, horizon: int) -> dict[str, ParameterCheck]:
    """Compare the parameters that a run keeps shares of with live ones, and their rest with a pattern memory's bounds.

    What no pattern explains and what rounding did are two terms of the kept sum. Each may be as large as the error of
    a pattern memory may be: a parameter that is not float32 or float64, which no pattern memory takes, has the bound
    of one that is float32. Every grouping has to sum to the parameter: the one that is furthest from it counts.
    """
    return {
        name: max(
            (_compare_grouping(run, name, by, live[name], horizon) for by in run.require_shares().groupings),
            key=lambda check: (not check.passed, check.error),
        )
        for name in run.shared_parameters()
    }


def _compare_grouping(run: PatternSource, name: str, by: tuple[str, ...], live: Tensor, horizon: int) -> ParameterCheck:
    """Compare one parameter with the sum of its shares by one grouping."""
    kept = run.require_shares()
    found = kept.shares(name, by, horizon=horizon)
    now = live.detach().cpu().double()
    change = float((now - run.initial[name].double()).norm())
    dtype = run.description.parameters[name].dtype
    exact = dtype if dtype in ("float32", "float64") else "float32"
    eps = torch.finfo(getattr(torch, exact)).eps / 2
    bound = REBUILD_TOLERANCE[exact] * change + 4 * eps * math.sqrt(max(horizon, 1)) * float(now.norm())
    unexplained, rounding = found.unexplained.cpu().double(), found.rounding.cpu().double()
    whole = found.start.cpu().double() + found.shares.cpu().double().sum(dim=0) + unexplained + rounding
    noise = 0.0 if run.is_replayed(name) else coefficient_noise(run, name, horizon)
    chance = 4 * kept.expected_noise(name, horizon=horizon) if rounds_coarsely(run, name) else 0.0
    coarse = MAX_ROUNDING * change + chance if rounds_coarsely(run, name) else 0.0
    fine = bound + 4 * noise + FINE_PART_OF_COARSE * chance
    spread, apart = kept.gradient_spread(name, horizon=horizon), whole - now
    # The rest is what the first grouping leaves; sums over the groups of another one are rounded in another way.
    again = 0.0 if by == kept.groupings[0] else _share_excuse(apart, spread, bound)
    rest = RestCheck(
        unexplained=float(unexplained.norm()),
        rounding=float(rounding.norm()),
        size=float((unexplained + rounding).norm()),
        unexplained_bound=fine + _share_excuse(unexplained, spread, fine),
        rounding_bound=bound + coarse,
    )
    return ParameterCheck(name, float(apart.norm()), change, bound + again, noise=noise, rest=rest)


def _share_excuse(rest: Tensor, spread: Tensor | None, bound: float) -> float:
    """Return by how much a bound on what is left of a sum is widened, by what rounding of gradients explains of it.

    As for a memory of patterns: element by element, and only where what is then left is within the bound.
    """
    apart = rest.abs()
    size = float(apart.norm())
    if spread is None or size <= bound:
        return 0.0
    most = MAX_DOUBT_NORMS * float(spread.norm())
    left = _left_over(apart, apart.minimum(MAX_DOUBTS * spread), most)
    return most if left <= bound else size - left


def rounds_coarsely(run: PatternSource, parameter: str) -> bool:
    """Say whether a parameter's optimizer rounds more coarsely than the parameter's dtype."""
    kind = find_optimizer_kind(run.facts(parameter)[0].optimizer)
    return kind is not None and kind.rounds


def by_layer(run: PatternSource, checks: Mapping[str, ParameterCheck]) -> dict[str, LayerCheck]:
    """Put the checks of parameters together by layer."""
    layers = {}
    for name, entry in run.layers.items():
        mine = tuple(checks[p] for p in entry.parameters.values() if p in checks)
        layers[name] = LayerCheck(name, run.seen(name), stored_bytes(run, name), mine)
    return layers


def stored_bytes(run: PatternSource, layer: str) -> int:
    """Return the bytes of a layer's keys and values, or of its shares, on disk."""
    if run.layer(layer).store == "shares":
        return run.require_shares().stored_bytes(layer)
    return sum(part.stored_bytes(layer) for part in run.parts())
