"""Shares by group while a model trains: the steps and their patterns become each group's part of every parameter.

Runs on the training thread, on the parameters' device or, if asked, in the CPU's memory. Nothing here knows of files:
the result is tensors by name and the groups' labels, which a sink keeps, and which can be loaded again to go on.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualform.binning import Bins
from dualform.errors import RefusedError
from dualform.identity.families import optimizer_kinds
from dualform.identity.families.divided_fold import DividedFold, StepUse
from dualform.identity.families.optimizer_kind import (
    Move,
    OptimizerKind,
    ReplayedStep,
    StepMatrix,
    follow_together,
    require_optimizer_kind,
)
from dualform.identity.families.parameter_fold import (
    GroupShare,
    ParameterFold,
    RowScratch,
    UseKey,
    UseRows,
)
from dualform.identity.grouped_products import RowGroups
from dualform.recording.agreed_groups import AgreedGroups, StepGroups
from dualform.recording.agreement import JointWork
from dualform.recording.bias_doubts import BiasDoubts, BiasPlace
from dualform.recording.estimate import size_text
from dualform.recording.group_labels import ADDRESS_COLUMNS, GroupLabels, TooManyGroupsError
from dualform.recording.keep import Shares
from dualform.recording.key_sums import KeySums
from dualform.recording.row_exchange import make_exchanges
from dualform.recording.share_bytes import ShareBytes, fold_dtype, free_bytes, path_bytes, share_bytes
from dualform.recording.sinks import (
    CallRecord,
    LayerStart,
    LiveParameter,
    ParameterFacts,
    PreparedStep,
    Start,
    StepCall,
    StepFacts,
)
from dualform.recording.states_after import StatesAfter
from dualform.recording.world import World
from dualform.torch_modes import call_without_autocast, without_gradients

MAX_WAITING_STEPS = 16
"""Steps of SGD that wait to be folded at once: a share is read and written once in so many steps."""
MAX_MOVED_BYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
"""Bytes of shares that are moved together, by the device's type: a CPU finds more than these no longer in its cache."""
MAX_READ_BYTES = {"cuda": 256 << 20, "cpu": 1 << 18}
"""Bytes of parameters whose steps are read together, by the device's type; as above."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of patterns that may wait for it."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """What a step needs of a parameter as it was just before."""

    kind: OptimizerKind[Any]
    settings: Mapping[str, Any]  # decoded; one object for all parameters that have the same
    live: LiveParameter
    gradient: Tensor  # without elements where only its dtype is needed
    before: Mapping[str, Any]  # state entries that the step overwrites


@dataclass(frozen=True, slots=True)
class FoldState:
    """Shares after a step, as tensors by name (docs/format.md says which) and labels.

    Attributes:
        step: how many steps were folded.
        labels: the groups of each grouping.
        shares: what a reader needs: shares, unexplained, rounding, start, sums of keys.
        resume: what the fold needs beyond the shares to go on.
    """

    step: int
    labels: tuple[tuple[Any, ...], ...]
    shares: Mapping[str, Tensor]
    resume: Mapping[str, Tensor]


class ShareFold:
    """The shares of one training on their way through its steps.

    Attributes:
        steps: how many steps were folded, those of a resumed run included.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.steps = 0
        self.groupings = tuple(
            GroupLabels(columns, most=shares.groups, rest=shares.rest) for columns in shares.groupings
        )
        self._layers: dict[str, tuple[int, LayerStart]] = {}
        self._folds: dict[str, ParameterFold] = {}
        self._doubts = BiasDoubts({})
        self._places: dict[str, int] = {}  # of each parameter with shares, among all covered ones
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._devices: dict[str, torch.device] = {}
        self._key_sums = KeySums()
        self._captured: dict[str, _Captured] = {}
        self._after: StatesAfter | None = None  # of a late step
        self._records: dict[int, CallRecord] = {}
        self._codes: dict[tuple[int, ...], tuple[Tensor, RowGroups]] = {}  # of the step that comes next
        self._by_address = any(
            (column.column if isinstance(column, Bins) else column) in ADDRESS_COLUMNS
            for grouping in self.groupings
            for column in grouping.columns
        )
        self._waiting_bytes = 0
        self._scratch = RowScratch()
        self._batch_last = False
        self._several = False
        self._rank = 0  # of this process
        self._whole_shapes: dict[str, tuple[int, ...]] = {}  # of parameters of which this process has rows
        self._agreed = AgreedGroups(self.groupings)
        self._step_groups = StepGroups({}, {})  # of the step that comes next, in all processes
        self._step_calls: tuple[int, list[StepCall]] = (0, [])  # the number of the step that comes next, and its calls
        self._work: JointWork | None = None  # with those that have rows of the parameters
        self._warm: Callable[[], Mapping[str, Mapping[str, Tensor]]] = dict
        self._initial: Callable[[str], Tensor] = lambda name: torch.empty(0)

    # The beginning ------------------------------------------------------------------------------------------------

    def open(
        self,
        start: Start,
        initial: Callable[[str], Tensor],
        states: Callable[[], Mapping[str, Mapping[str, Tensor]]],
    ) -> None:
        """Begin to fold.

        Args:
            start: what the recording starts from.
            initial: reads a parameter as it was at the start of the run.
            states: reads the optimizers' state that was warm at the start of the run: parameter -> entry -> tensor.
        """
        self._layers = {name: (place, layer) for place, (name, layer) in enumerate(start.layers.items())}
        for _, layer in self._layers.values():
            if not layer.keys_only:
                for use in layer.uses:
                    tensor = start.parameters[use.parameter]
                    divided = start.divided.get(use.parameter)
                    self._shapes[use.parameter] = tuple(tensor.shape)
                    if divided is not None:
                        self._whole_shapes[use.parameter] = divided.shape
                    self._dtypes[use.parameter] = fold_dtype(tensor.dtype)
                    there = start.devices.get(use.parameter, tensor.device)
                    self._devices[use.parameter] = (
                        there if self._shares.device is None else torch.device(self._shares.device)
                    )
        self._places = {name: place for place, name in enumerate(start.parameters) if name in self._shapes}
        others = {
            use.parameter
            for _, layer in self._layers.values()
            for use in layer.uses
            if layer.keys_only or not use.parameter_map.is_bias
        }
        self._doubts = BiasDoubts(
            {
                name: BiasPlace(shape, self._whole_shapes.get(name), self._dtypes[name], self._devices[name])
                for name, shape in self._shapes.items()
                if name not in others
            }
        )
        self._batch_last = start.batch_axis > 0
        self._several = len(start.optimizers) > 1
        self._rank = start.rank
        self._initial, self._warm = initial, states

    def require_memory(self, averages: Mapping[str, int]) -> None:
        """Raise `RefusedError` where the parameters' device has too little memory for the groups that may come."""
        device = next(iter(self._devices.values()), torch.device("cpu"))
        groups = self._shares.groups * len(self.groupings)
        need, free = self.bytes(averages, groups=groups), free_bytes(device)
        asked = path_bytes(self._share_sizes(), self._shares)
        if free is not None and need.device + asked > free:
            each = need.per_group + asked // groups
            fits = max(0, (free - (need.device - groups * need.per_group)) // max(each, 1))
            raise RefusedError(
                f"Shares of {groups} groups take {size_text(need.device + asked)} on {device}, which has "
                f"{size_text(free)} free: room for {fits} groups. Record with Shares(groups=...) that fits, fewer "
                f'layers, or Shares(device="cpu").'
            )

    def bytes(self, averages: Mapping[str, int], *, groups: int) -> ShareBytes:
        """Return the bytes that shares take, given for each parameter how many averages its optimizer keeps."""
        uses: dict[str, list[str]] = {}
        for name, (_, layer) in self._layers.items():
            if not layer.keys_only:
                for use in layer.uses:
                    uses.setdefault(use.parameter, []).append(name)
        return share_bytes(uses, self._share_sizes(), averages, groups=groups)

    def _whole_bytes(self, name: str) -> int:
        """Return the bytes of a share of a parameter with the rows of all processes."""
        shape = self._whole_shapes.get(name, self._shapes[name])
        return torch.Size(shape).numel() * self._dtypes[name].itemsize

    def _share_sizes(self) -> dict[str, int]:
        """Return the bytes of one share of each parameter."""
        return {name: torch.Size(shape).numel() * self._dtypes[name].itemsize for name, shape in self._shapes.items()}

    # A step -------------------------------------------------------------------------------------------------------

    @property
    def divided(self) -> bool:
        """Whether each process folds the shares of its own rows."""
        return bool(self._whole_shapes)

    def call(self, record: CallRecord) -> None:
        """Take the patterns of a call that was just accumulated."""
        if record.values is not None:
            self._records[record.number] = record.without_first()

    def discard(self, backwards: Sequence[int]) -> None:
        """Let go of the patterns of some backwards."""
        gone = set(backwards)
        self._records = {number: one for number, one in self._records.items() if one.backward not in gone}

    @without_gradients
    def before_step(self, prepared: PreparedStep, *, late: bool = False) -> None:
        """Find the groups of a step's patterns, and keep what the step is about to overwrite.

        Args:
            prepared: the step.
            late: whether it is folded only when the next step is about to be made, so that its gradients are gone.
        """
        self._codes = {}
        self._after = None
        if self.divided:
            self._agreed.forget_new()
        self._step_calls = prepared.step, [call for call in prepared.calls if call.number in self._records]
        for call in self._step_calls[1]:
            for place in range(len(self.groupings)):
                self._codes_of(prepared.step, call, place)
        kinds: dict[int, tuple[OptimizerKind[Any], Mapping[str, Any]]] = {}  # by the settings' id
        for fact in prepared.facts:
            if fact.updated and fact.parameter in self._shapes:
                if id(fact.settings) not in kinds:
                    kind = require_optimizer_kind(fact.optimizer)
                    kinds[id(fact.settings)] = kind, kind.decode(fact.settings)
                live, of = prepared.live[fact.parameter], kinds[id(fact.settings)]
                self._captured[fact.parameter] = self._capture(fact.parameter, *of, live, late=late)

    def agree(self, world: World) -> None:
        """Number the groups of a step as all processes do that have rows of the parameters; each comes here."""
        if not self.divided:
            return
        self._work = self._work or JointWork(world)
        step, calls = self._step_calls
        mine: dict[tuple[int, int], set[int]] = {}
        rows: dict[tuple[int, int], int] = {}
        for call in calls:
            record = self._records[call.number]
            place, _ = self._layers[record.layer]
            rows[place, call.micro] = rows.get((place, call.micro), 0) + len(record.keys)
            for grouping in range(len(self.groupings)):
                mine.setdefault((grouping, place), set()).update(self._codes_of(step, call, grouping)[1].present)
        try:
            self._step_groups = self._agreed.agree(world, mine, rows)
        except TooManyGroupsError as error:
            raise self._too_many(error) from error
        self._codes = {}  # numbered otherwise where other processes had new groups

    def stepped(self) -> None:
        """Keep the optimizer's state as a late step left it."""
        self._after = StatesAfter({name: captured.live for name, captured in self._captured.items()})

    def _capture(
        self, name: str, kind: OptimizerKind[Any], settings: Mapping[str, Any], live: LiveParameter, *, late: bool
    ) -> _Captured:
        state, fold = live.state, self._fold(name, kind)
        if fold.start.warm is not None or kind.decays_gradient(settings):
            fold.keep_average(state.get(kind.average) if kind.average else None)
        gradient = live.parameter.grad
        assert gradient is not None, "a parameter that is updated has a gradient"
        gradient = gradient.detach()
        if fold.whole.average is None and kind.takes_gradient_by_average(settings):
            gradient = gradient.new_empty(0)  # the optimizer's own average has all that is needed of it
        elif live.scale != 1.0:
            gradient = gradient / live.scale
        elif late or kind.overwrites_gradient(settings) or self._several:
            gradient = gradient.clone()
        before = {name: state[name].clone() for name in kind.overwrites_state if name in state}
        return _Captured(kind, settings, live, gradient, before)

    def _fold(self, name: str, kind: OptimizerKind[Any]) -> ParameterFold:
        """Return the fold of a parameter, which begins with its first step."""
        if name not in self._folds:
            warm = self._warm().get(name, {}).get(kind.average or "")
            self._folds[name] = self._new_fold(name, warm)
        return self._folds[name]

    def _new_fold(self, name: str, warm: Tensor | None) -> ParameterFold:
        settings: dict[str, Any] = {
            "dtype": self._dtypes[name],
            "device": self._devices[name],
            "initial": lambda: self._initial(name),
            "warm": warm,
            "scratch": self._scratch,
        }
        if (whole := self._whole_shapes.get(name)) is not None:
            return DividedFold(self._shapes[name], whole=whole, rank=self._rank, **settings)
        return ParameterFold(self._shapes[name], **settings)

    def _codes_of(self, step: int, call: StepCall, grouping: int) -> tuple[Tensor, RowGroups]:
        """Return the group of each pattern of a call, found once for all calls of the same rows and columns."""
        labels = self.groupings[grouping]
        address = (call.micro, call.call) if self._by_address else ()
        at = (grouping, id(call.binding), call.rows, call.positions, call.inner, *address)
        if at not in self._codes:
            try:
                codes = torch.from_numpy(labels.codes(step, call, batch_last=self._batch_last))
                self._codes[at] = codes, RowGroups.of_codes(codes)
            except TooManyGroupsError as error:
                raise self._too_many(error) from error
        return self._codes[at]

    def _too_many(self, error: TooManyGroupsError) -> RefusedError:
        more = size_text(self.bytes(dict.fromkeys(self._shapes, 1), groups=1).per_group)
        return RefusedError(
            f"{error}. Each group takes up to {more} of memory. Record with Shares(groups=...) that are more, "
            "with coarser groups (dualform.bins), or with rest=True, which puts later groups into one."
        )

    def together(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for `step` and what comes before it, which fails in all processes if it fails in one."""
        return contextlib.nullcontext() if self._work is None else self._work

    @without_gradients
    def step(self, facts: StepFacts) -> None:
        """Fold a step that was taken, inside of `together`."""
        calls = [(call, self._records[call.number]) for call in facts.calls if call.number in self._records]
        device = next((record.keys.device.type for _, record in calls), "cpu")
        call_without_autocast([device], lambda: self._step(facts, calls))
        self._captured.clear()
        self._codes, self._after = {}, None
        self.steps = facts.step + 1

    def _step(self, facts: StepFacts, calls: Sequence[tuple[StepCall, CallRecord]]) -> None:
        updated = [fact for fact in facts.facts if fact.updated and fact.parameter in self._captured]
        states = self._after or StatesAfter({one.parameter: self._captured[one.parameter].live for one in updated})
        after = states.read()
        rows = self._rows(facts, calls)
        told = self._told_of_uses(facts) if self.divided else {}
        moves: list[Move[Any]] = []
        moved: list[ParameterFold] = []
        size = 0  # bytes of their shares
        for fact, kind, taken, linear in self._read_steps(updated, after):
            name = fact.parameter
            live_average = taken.after.get(kind.average) if kind.average else None
            self._doubts.note(name, kind, linear, taken.settings)
            fold = self._folds[name]
            if isinstance(fold, DividedFold):
                fold.uses = told.get(name, {})
            more = fold.step(linear, rows.get(name, ()), gradient=taken.gradient, live_average=live_average)
            moves += more
            moved.append(fold)
            if isinstance(fold, DividedFold):
                size += fold.moved_bytes
            else:
                size += sum(one.nbytes for move in more for one in move.shares)
            if size > MAX_MOVED_BYTES.get(self._devices[name].type, 0):
                self._move(moved, moves)
                moves, moved, size = [], [], 0
        self._move(moved, moves)
        self._doubts.follow(rows, self._work)
        waiting = any(fold.waiting >= MAX_WAITING_STEPS for fold in self._folds.values())
        if any(fold.waiting for fold in self._folds.values()):
            self._waiting_bytes += sum(record.nbytes for _, record in calls)
        if waiting or self._waiting_bytes > MAX_WAITING_BYTES:
            self.fold_waiting()

    def _told_of_uses(self, facts: StepFacts) -> dict[str, dict[UseKey, StepUse]]:
        """Return for each divided parameter what all processes have of each use of it in the step."""
        found: dict[str, dict[UseKey, StepUse]] = {}
        factors = {fact.parameter: fact.factors for fact in facts.facts if fact.updated}
        layers = dict(self._layers.values())
        told = self._step_groups
        for (grouping, place), groups in told.present.items():
            for number, use in enumerate(layers[place].uses):
                taken = [
                    rows
                    for (layer, micro), rows in told.rows.items()
                    if layer == place and use.parameter in factors and factors[use.parameter][micro] != 0.0
                ]
                if taken:
                    counts = tuple(sum(column) for column in zip(*taken, strict=True))
                    at = found.setdefault(use.parameter, {})
                    at[grouping, place, number] = StepUse(use.parameter_map, groups, counts)
        return found

    def _move(self, folds: Sequence[ParameterFold], moves: Sequence[Move[Any]]) -> None:
        """Let shares follow their step, after the exchanges that they wait for."""
        if self._work is not None:
            divided = [fold for fold in folds if isinstance(fold, DividedFold)]
            make_exchanges(self._work, [one for fold in divided for one in fold.exchanges])
            for fold in divided:
                fold.exchanges = []
        follow_together(moves)

    def _read_steps(
        self, updated: Sequence[ParameterFacts], after: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[ParameterFacts, OptimizerKind[Any], ReplayedStep, Any]]:
        """Yield each parameter's step with its linear map; maps of several parameters are read at once."""
        waiting: list[tuple[ParameterFacts, OptimizerKind[Any], ReplayedStep]] = []
        size = 0
        for fact in updated:
            name = fact.parameter
            captured, device = self._captured[name], self._devices[name]
            before, state, gradient, parameter = (
                captured.before,
                after[name],
                captured.gradient,
                captured.live.parameter,
            )
            if parameter.device != device:
                before, state, gradient = _moved(before, device), _moved(state, device), gradient.to(device)
            taken = ReplayedStep(captured.settings, gradient, before, state, self._dtypes[name])
            waiting.append((fact, captured.kind, taken))
            size += self._whole_bytes(name)  # so that all processes read the same parameters together
            if size > MAX_READ_BYTES.get(device.type, 0):
                yield from _read_together(waiting)
                waiting, size = [], 0
        yield from _read_together(waiting)

    def fold_waiting(self) -> None:
        """Fold the steps whose patterns wait to be folded at once."""
        for fold in self._folds.values():
            fold.fold_waiting()
        self._waiting_bytes = 0

    def _rows(self, facts: StepFacts, calls: Sequence[tuple[StepCall, CallRecord]]) -> dict[str, list[UseRows]]:
        """Return the patterns of a step by parameter, and add their keys to the sums of keys."""
        self._key_sums.find_negative()
        factors = {fact.parameter: fact.factors for fact in facts.facts if fact.updated}
        found: dict[str, list[UseRows]] = {}
        for call, record in calls:
            place, layer = self._layers[record.layer]
            values, keys = record.values, call.keys_of(record)
            assert values is not None, "calls without values are not taken"
            for grouping in range(len(self.groupings)):
                codes, groups = self._codes_of(facts.step, call, grouping)
                known = len(self.groupings[grouping].labels)
                self._key_sums.count(grouping, record.layer, layer, groups, known, keys)
                for number, use in enumerate(layer.uses):
                    factor = factors[use.parameter][call.micro] if use.parameter in factors else 0.0
                    if factor != 0.0 and len(codes):
                        found.setdefault(use.parameter, []).append(
                            UseRows((grouping, place, number), use.parameter_map, values, keys, codes, factor, groups)
                        )
        self._key_sums.add()
        return found

    # The result ---------------------------------------------------------------------------------------------------

    @property
    def labels(self) -> tuple[tuple[Any, ...], ...]:
        """The groups of each grouping so far."""
        return tuple(tuple(grouping.labels) for grouping in self.groupings)

    def result(self, live: Mapping[str, Tensor] | None) -> FoldState:
        """Return the shares as they are now, on the CPU; without live parameters only what is needed to go on.

        The tensors may share memory with the fold: they are to be written or copied before the next step.
        """
        self.fold_waiting()
        shares: dict[str, Tensor] = {}
        for name, place in self._places.items():
            fold = self._folds.get(name)
            if fold is None:
                continue  # no step has touched it
            shares[f"noise.{place}"] = torch.tensor(fold.noise, dtype=torch.float64)
            if spread := self._doubts.tensors(name):
                shares[f"spread.{place}"] = spread["size"]
            if live is None:
                continue
            start, unexplained, rounding = fold.rest(live[name])
            if fold.start.moved is None and fold.start.warm is None:
                shares[f"start_number.{place}"] = torch.tensor(fold.start.matrix.weight[0], dtype=torch.float64)
            else:
                shares[f"start.{place}"] = start.to(self._dtypes[name])
            shares[f"unexplained.{place}"] = unexplained.to(self._dtypes[name])
            shares[f"rounding.{place}"] = rounding.to(self._dtypes[name])
        for use, group, share in self._all_shares():
            shares[_numbered("share", *use, group)] = share.weight
        shares |= self._key_sums.result(self._layer_places(), [len(one.labels) for one in self.groupings])
        return FoldState(self.steps, self.labels, _on_cpu(shares), _on_cpu(self._for_resuming()))

    @without_gradients
    def shares_now(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the shares of the first grouping as they are, and the rest: see `SharesNow.shares`.

        Args:
            live: the covered parameters after the last step that was folded.
        """
        self.fold_waiting()
        groups = len(self.groupings[0].labels)
        found: dict[str, Tensor] = {}
        for name, shape in self._shapes.items():
            parts = torch.zeros(groups + 2, *shape, dtype=self._dtypes[name], device=self._devices[name])
            whole, fold = live[name].to(parts.device, torch.float64), self._folds.get(name)
            if fold is None:  # no step has touched it
                parts[-2] = whole
            else:
                for (grouping, _, _), group, share in fold.parts():
                    if not grouping:
                        parts[group] += share.weight
                parts[-2] = fold.start.parts()[0]
                parts[-1] = whole - parts[:-1].sum(0, dtype=torch.float64)
            found[name] = parts
        return found

    def _all_shares(self) -> list[tuple[tuple[int, int, int], int, GroupShare]]:
        return [part for fold in self._folds.values() for part in fold.parts()]

    def _for_resuming(self) -> dict[str, Tensor]:
        """Return what the fold needs beyond the shares to go on from here."""
        found: dict[str, Tensor] = {}
        for use, group, share in self._all_shares():
            if share.average is not None:
                found[_numbered("average", *use, group)] = share.average
        for name, place in self._places.items():
            fold = self._folds.get(name)
            if fold is None:
                continue
            found[f"whole.{place}"] = fold.whole.weight
            for entry, tensor in self._doubts.tensors(name).items():
                if entry != "size":
                    found[f"spread_{entry}.{place}"] = tensor
            if fold.whole.average is not None:
                found[f"whole_average.{place}"] = fold.whole.average
            matrix = fold.start.matrix
            found[f"start_matrix.{place}"] = torch.tensor([matrix.weight, matrix.average], dtype=torch.float64)
            if fold.start.moved is not None and fold.start.moved.average is not None:
                found[f"start_weight.{place}"] = fold.start.moved.weight
                found[f"start_average.{place}"] = fold.start.moved.average
        return found

    @without_gradients
    def load(self, state: FoldState) -> None:
        """Go on from an earlier state, which `result` gave."""
        self.steps = state.step
        for labels, known in zip(self.groupings, state.labels, strict=True):
            labels.load(known)
        self._agreed.load()
        for name, place in self._places.items():
            if f"whole.{place}" in state.resume:
                self._folds[name] = self._loaded_fold(name, place, state)
            if f"spread.{place}" in state.shares:
                prefix, suffix = "spread_", f".{place}"
                entries = {
                    key.removeprefix(prefix).removesuffix(suffix): tensor.clone()
                    for key, tensor in state.resume.items()
                    if key.startswith(prefix) and key.endswith(suffix)
                }
                self._doubts.load(name, {"size": state.shares[f"spread.{place}"].clone(), **entries})
        self._key_sums.load(state.shares, self._layer_places(), len(self.groupings))

    def _layer_places(self) -> dict[str, int]:
        return {name: place for name, (place, _) in self._layers.items()}

    def _loaded_fold(self, name: str, place: int, state: FoldState) -> ParameterFold:
        """Return the fold of a parameter as it was."""
        warm = self._warm().get(name, {})
        average = next((entry for entry in warm if entry in AVERAGES), None)
        fold = self._new_fold(name, None if average is None else warm[average])

        def part(tensor: str, of_average: str) -> GroupShare:
            weight = state.shares[tensor] if tensor in state.shares else state.resume[tensor]
            found = state.resume.get(of_average)
            like = fold.whole.weight
            return GroupShare(weight.to(like, copy=True), None if found is None else found.to(like, copy=True))

        fold.whole = part(f"whole.{place}", f"whole_average.{place}")
        rows = state.resume[f"start_matrix.{place}"].tolist()
        fold.start.matrix = StepMatrix((rows[0][0], rows[0][1]), (rows[1][0], rows[1][1]))
        if f"start_weight.{place}" in state.resume:
            fold.start.moved = part(f"start_weight.{place}", f"start_average.{place}")
        fold.noise = float(state.shares[f"noise.{place}"])
        for key, layer in self._layers.values():
            for number, use in enumerate(layer.uses):
                for grouping, labels in enumerate(state.labels) if use.parameter == name else ():
                    at = (grouping, key, number)
                    for group in range(len(labels)):
                        if _numbered("share", *at, group) in state.shares:
                            share = part(_numbered("share", *at, group), _numbered("average", *at, group))
                            fold.stack(at).load(group, share)
        return fold


AVERAGES = frozenset(kind.average for kind in optimizer_kinds().values() if kind.average)
"""The names that optimizers have for the average that is part of a linear step."""


def _numbered(what: str, *places: int) -> str:
    return ".".join([what, *map(str, places)])


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a state on a device; numbers stay on the CPU."""
    return {
        name: entry.to(device) if isinstance(entry, Tensor) and entry.device != device and entry.dim() else entry
        for name, entry in state.items()
    }


def _read_together(
    steps: Sequence[tuple[ParameterFacts, OptimizerKind[Any], ReplayedStep]],
) -> Iterator[tuple[ParameterFacts, OptimizerKind[Any], ReplayedStep, Any]]:
    """Yield steps with their linear maps; steps of one optimizer are read together."""
    for kind in {id(kind): kind for _, kind, _ in steps}.values():
        mine = [one for one in steps if one[1] is kind]
        linears = kind.read_together([taken for _, _, taken in mine])
        for (fact, _, taken), linear in zip(mine, linears, strict=True):
            yield fact, kind, taken, linear
