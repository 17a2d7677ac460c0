"""Rows: find out which row of the batch each pattern of a layer belongs to, by permuting a batch.

Annotations come per row of the batch. A layer's own rows need not be those rows: a position table sees positions, a
table of prototypes sees prototypes, and a model may sort, roll, flatten or join rows. Shapes cannot tell; a trial can.
It runs a copy of the model forward and backward on a batch, and again on the same batch with its rows permuted, with
dropout off and a loss that is a sum over rows. A layer whose keys and values move as the rows do has those rows, and
on that axis. Nothing here touches the model that is trained, or the generators of random numbers.
"""

import copy
import dataclasses
import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from dualform.recording.generators import untouched_generators
from dualform.recording.layer_hooks import catch_calls
from dualform.recording.rowcheck import Placement, RowCheck
from dualform.recording.watch import Watched, find_candidates
from dualform.torch_modes import (
    call_without_autocast,
    end_function_modes,
    function_modes,
    with_gradients,
    without_gradients,
)

MAX_COPY_BYTES = 2 << 30  # parameters and buffers of a model that is copied for a trial
FEW_ROWS = 3  # batches in which a permutation without fixed points may commute with what the model does to its rows
RETRIED_ROWS = 8  # of a batch, in a trial that asks whether an earlier one still holds
SAME = 0.05  # how far a row may be from where it should be, relative to how far the permutation moved it
ROUNDING = 64  # units in the last place of a tensor's largest element that rounding may move its elements by
FLAT = 50  # times the rounding: rows that differ by less count as equal


class Untried(Exception):
    """A trial could not be made; the message says why."""


def check_rows(
    model: nn.Module,
    layers: Sequence[Watched],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rows: int,
    axis: int,
    prefix: str = "",
    plainly: bool = False,
) -> dict[str, RowCheck]:
    """Find out which layers have the rows of a batch, by trials on a copy of the model.

    Args:
        model: the model that is trained; it stays as it is.
        layers: the layers to look at.
        args: the arguments of its forward.
        kwargs: its keyword arguments.
        rows: how many rows the batch has.
        axis: which axis of the inputs holds them.
        prefix: the name of the model in the one whose layers these are, where it is a child of that.
        plainly: whether to permute that axis of every input that has so many rows there, and try no other way.
    """
    layers = [layer for layer in layers if not prefix or f"{layer.name}.".startswith(f"{prefix}.")]
    names = [layer.name for layer in layers]
    if rows < 2:
        return dict.fromkeys(names, RowCheck("assumed", "a batch of one row cannot be permuted", undecided=True))
    try:
        ways = list(_ways(args, kwargs, rows, axis, plainly=plainly))
        best = _best(_Trial(model, prefix, layers, args, kwargs), ways, rows)
        if not plainly and not _is_clear(best):
            # A difference that float64 does not show is rounding; most models can be run in it.
            with suppress(Untried):
                again = _best(_Trial(model, prefix, layers, args, kwargs, double=True), ways, rows)
                best = again if _proofs(again) > _proofs(best) else best
    except Untried as error:
        return dict.fromkeys(names, RowCheck("assumed", str(error)))
    return best


def still_holds(
    known: Mapping[str, RowCheck],
    model: nn.Module,
    layers: Sequence[Watched],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    rows: int,
    axis: int,
    prefix: str = "",
) -> bool:
    """Say whether a trial on a few rows of a batch finds the same of every layer as an earlier one on a whole batch.

    It looks at keys only, which needs no backward. Where it finds anything else, or the few keys cannot tell, a trial
    on the whole batch has to.

    Args:
        known: what the earlier trial found of each layer.
        model: as in `check_rows`, as are the others.
        layers: the layers to look at.
        args: the arguments of the model's forward.
        kwargs: its keyword arguments.
        rows: how many rows the batch has.
        axis: which axis of the inputs holds them.
        prefix: the name of the model in the one whose layers these are, where it is a child of that.
    """
    if rows < 2 * RETRIED_ROWS:
        return False
    layers = [layer for layer in layers if layer.name in known]
    chosen = torch.linspace(0, rows - 1, RETRIED_ROWS).long()
    batch = (tuple(args), dict(kwargs))
    with suppress(Untried):
        for axes in _ways(args, kwargs, rows, axis, plainly=False):
            few = _permuted(batch, axes, chosen)
            if not _tells_as_much(input_tensors(args, kwargs), input_tensors(*few), axes):
                return False
            with suppress(Untried):
                found = _Trial(model, prefix, layers, *few, keys_only=True).find(axes, RETRIED_ROWS)
                if all(_is_same(known[name], check) for name, check in found.items()):
                    return True
    return False


def _tells_as_much(whole: Sequence[Tensor], few: Sequence[Tensor], axes: "Axes") -> bool:
    """Say whether lengths, masks and the like that differ from row to row of a batch also do among its few rows."""
    for batch, part, where in zip(whole, few, axes, strict=True):
        for axis in where if not batch.is_floating_point() or batch.dim() == 1 else ():
            if _all_equal(part, axis) and not _all_equal(batch, axis):
                return False
    return True


def _all_equal(tensor: Tensor, axis: int) -> bool:
    return bool((tensor == tensor.narrow(axis, 0, 1)).all())


def _is_same(before: RowCheck, now: RowCheck) -> bool:
    same = before.outcome == now.outcome and before.placement == now.placement
    return same and (not now.undecided or before.reason == now.reason == UNCALLED)


def _best(trial: "_Trial", ways: Sequence["Axes"], rows: int) -> dict[str, RowCheck]:
    """Return what the way of permuting shows that proves most layers, or the first that leaves none unclear."""
    best: dict[str, RowCheck] | None = None
    for axes in ways:
        found = trial.find(axes, rows)
        if best is None or _proofs(found) > _proofs(best):
            best = found
        if _is_clear(found):
            break
    assert best is not None, "there is at least one way to permute a batch"
    return best


def _is_clear(found: Mapping[str, RowCheck]) -> bool:
    """Say whether every layer either has the batch's rows or belongs to none of them."""
    return all(check.outcome != "not aligned" or check.reason == NO_ROW for check in found.values())


NO_ROW = "its patterns belong to no row of the batch"
UNCALLED = "it was not called in the trial"
EXCHANGED = "the model exchanges rows before it"


def input_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return every tensor among a forward's arguments, nested ones included."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]]
    return list(_tensors((tuple(args), dict(kwargs))))


def other_axes(args: Sequence[Any], kwargs: Mapping[str, Any], *, rows: int, axis: int) -> list[int]:
    """Return the other axes, up to the third, that could hold the rows by their size alone."""
    tensors = input_tensors(args, kwargs)
    shapes = [tensor.shape for tensor in tensors if tensor.dim() > axis and tensor.shape[axis] == rows]
    return sorted({i for shape in shapes for i, size in enumerate(shape[:3]) if size == rows and i != axis})


def _proofs(found: Mapping[str, RowCheck]) -> int:
    return sum(check.outcome == "proved" for check in found.values())


Axes = list[tuple[int, ...]]
"""Which axes of each input tensor to permute, in the order of `input_tensors`."""


def _ways(args: Sequence[Any], kwargs: Mapping[str, Any], rows: int, axis: int, *, plainly: bool) -> Iterator[Axes]:
    """Yield ways to permute the rows of all input tensors, the likeliest first.

    A tensor whose size on the batch axis is the number of rows may still be none of the batch (a mask of (L, L)
    positions), one that has its rows elsewhere may be (the state of a recurrent layer), and one may have them twice
    (a graph's neighbours).
    """
    tensors = input_tensors(args, kwargs)
    sized = [tuple(i for i, size in enumerate(tensor.shape) if size == rows) for tensor in tensors]
    plain: Axes = [(axis,) if axis in found else () for found in sized]
    if not any(plain):
        raise Untried(f"no input of the model has {rows} rows on axis {axis}")
    first = next(i for i, found in enumerate(plain) if found)
    wide: Axes = [p or (found if len(found) == 1 else ()) for p, found in zip(plain, sized, strict=True)]
    twice: Axes = [p if i == first else found for i, (p, found) in enumerate(zip(plain, sized, strict=True))]
    alone: Axes = [p if i == first else () for i, p in enumerate(plain)]
    tried: list[Axes] = []
    for way in (plain,) if plainly else (wide, twice, plain, alone):
        if way not in tried:
            tried.append(way)
            yield way


class _Trial:
    """Runs of a copy of the model on one batch, permuted in several ways."""

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        layers: Sequence[Watched],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        double: bool = False,
        keys_only: bool = False,
    ) -> None:
        self._double = double
        self._keys_only = keys_only  # whether to run no backward, and look at no values
        self._prefix = prefix
        _check_permutable(args, kwargs)
        self._model = getattr(model, "_orig_mod", model)  # as it was before torch.compile
        self._layers = layers
        self._batch = (tuple(args), dict(kwargs))
        _check_copyable(self._model)
        self._plain = self._run(self._batch)

    def find(self, axes: Axes, rows: int) -> dict[str, RowCheck]:
        """Return what permuting these axes of the input tensors says of each layer."""
        order = _order(rows)
        moved = self._run(_permuted(self._batch, axes, order))
        found = {}
        for layer in self._layers:
            before, after = self._plain[layer.name], moved[layer.name]
            if not before:
                found[layer.name] = RowCheck("assumed", UNCALLED, undecided=True)
            elif len(before) != len(after):
                found[layer.name] = RowCheck("not aligned", "it is called another number of times when rows move")
            else:
                found[layer.name] = _all([_judge(*pair, order) for pair in zip(before, after, strict=True)])
        if rows <= FEW_ROWS and _proofs(found):
            self._look_closer(found, axes, rows)
        elif rows == FEW_ROWS + 1 and _proofs(found):
            self._roll(found, axes, rows)
        return found

    def _roll(self, found: dict[str, RowCheck], axes: Axes, rows: int) -> None:
        """Permute a batch of four rows in a second way, since each way commutes with some exchange of pairs of rows.

        Only a model that leaves all rows where they are commutes with both.
        """
        order = torch.arange(rows).roll(1)
        moved = self._run(_permuted(self._batch, axes, order))
        for name, check in found.items():
            if check.outcome == "proved" and not _all_move_as(self._plain[name], moved[name], check, order):
                found[name] = RowCheck("not aligned", EXCHANGED)

    def _look_closer(self, found: dict[str, RowCheck], axes: Axes, rows: int) -> None:
        """Tell rows that are where they were from rows that the model exchanged: put one row in another's place.

        A model that swaps the two rows of a batch swaps them after a permutation too, and moves as the rows do.
        """
        taken = torch.tensor([1, 1, 2][:rows])
        moved = self._run(_permuted(self._batch, axes, taken))
        for name, check in found.items():
            if check.outcome != "proved" or check.placement is None:
                continue
            fits = []
            for places in itertools.permutations(range(rows)):  # row i of the layer is row places[i] of the batch
                expected = torch.tensor([places.index(int(taken[place])) for place in places])
                if _all_move_as(self._plain[name], moved[name], check, expected):
                    fits.append(places)
            if fits and fits[0] != tuple(range(rows)):
                found[name] = RowCheck("not aligned", EXCHANGED)
            elif not fits:
                reason = f"a batch of {rows} rows is too small to tell, since its rows depend on each other"
                found[name] = RowCheck("assumed", reason, undecided=True)

    def _run(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, list["_Seen"]]:
        """Return the keys and values of every call of each layer, from one forward and backward of a fresh copy.

        With `keys_only` there is no backward, and there are no values.
        """
        try:
            with untouched_generators() as moved, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # In float32 where the model has less: rows that move must differ by more than rounding.
                model = copy.deepcopy(self._model)
                if self._double:
                    model = model.double()
                elif any(p.dtype in _COARSE for p in model.parameters()):
                    model = model.float()
                cloned = _cloned_double if self._double else _cloned
                seen = self._catch(model, _mapped(batch, cloned))
                if moved():
                    raise Untried("the model draws random numbers")
        except Untried:
            raise
        except Exception as error:
            text = str(error).strip().splitlines()
            raise Untried(f"the trial raised {type(error).__name__}{': ' + text[0] if text else ''}") from error
        return seen

    def _catch(self, model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, list["_Seen"]]:
        candidates = {".".join(filter(None, (self._prefix, name))): c for name, c in find_candidates(model).items()}
        watched = {
            layer.name: dataclasses.replace(layer, module=found.module, kind=found.kind)
            for layer in self._layers
            if (found := candidates.get(layer.name)) is not None
        }
        for module in model.modules():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                module.dropout = 0.0
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")

        mode, depth = _NoDropout(), function_modes()

        @(without_gradients if self._keys_only else with_gradients)
        def compute() -> None:
            try:
                with mode, _not_called(self._model), _frozen(self._model):
                    args, kwargs = batch
                    outputs = model(*args, **kwargs)
                    # Into the gradients of the copy, which goes; what a closure of the model refers to is no copy, and
                    # frozen.
                    if not self._keys_only:
                        _summed(outputs).backward()
            finally:
                try:
                    mode.put_back()
                    end_function_modes(depth)
                finally:
                    mode.put_back()
                    end_function_modes(depth)

        with catch_calls(watched) as calls:
            call_without_autocast([device], compute)
        return {
            layer.name: [
                _Seen(call.leading, call.keys().detach(), call.values(call.keys()) if call.reached else None)
                for call in calls.get(layer.name, ())
            ]
            for layer in self._layers
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """The patterns of one call of a layer in a trial."""

    leading: tuple[int, ...]
    keys: Tensor  # (..., d_in)
    values: Tensor | None  # (n, d_out); nothing where the backward did not come


class _NoDropout(TorchFunctionMode):
    """Lets every function of torch through but dropout, which gives back its input.

    Generators of the model's own that functions draw from are put back when the mode ends: a copy of the model may
    share them with the model.
    """

    NAMES = frozenset(
        f"{kind}dropout{dims}{place}"
        for kind in ("", "alpha_", "feature_", "feature_alpha_")
        for dims in ("", "1d", "2d", "3d")
        for place in ("", "_")
    )

    def __init__(self) -> None:
        super().__init__()
        self.ended = False
        self._generators: list[tuple[torch.Generator, Tensor]] = []  # each with its state before the trial

    def put_back(self) -> None:
        """Give the model's own generators the state that they had, and do nothing any more.

        torch takes a mode off while it handles a function, and where an interrupt comes then puts it back when the
        exception is dropped: after the trial.
        """
        self.ended = True
        for generator, state in self._generators:
            generator.set_state(state)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function without its dropout."""
        kwargs = kwargs or {}
        if self.ended:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and all(generator is not known for known, _ in self._generators):
            self._generators.append((generator, generator.get_state()))
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, dict(kwargs)
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _judge(before: _Seen, after: _Seen, order: Tensor) -> RowCheck:
    """Say whether one call's patterns moved as the rows of the batch did, and on which axis."""
    if before.leading != after.leading:
        return RowCheck("not aligned", "its input has another shape when rows move")
    places = _placements(before.leading, len(order))
    fitting = [place for place in places if _moves_as(before, after, place, order)]
    if len(fitting) == 1:
        return RowCheck("proved", f"rows are {fitting[0]}", fitting[0], shapes=frozenset([before.leading]))
    if fitting:
        return RowCheck("not aligned", f"rows could be {' or '.join(map(str, fitting))}")
    if not (_unchanged(before.keys, after.keys) and _unchanged(before.values, after.values)):
        return RowCheck("not aligned", "its rows are not those of the batch: sorted, rolled, joined or mixed")
    if any(_states(before, after, place, order) == {"equal"} for place in places):
        return RowCheck("assumed", "all its rows were equal", undecided=True)
    return RowCheck("not aligned", NO_ROW)


def _all(checks: Sequence[RowCheck]) -> RowCheck:
    """Return what holds for all calls of a layer in one forward; undecided where it is so for any of them."""
    decided = [check for check in checks if not check.undecided] or checks
    if len(set(decided)) == 1:
        shapes = frozenset[tuple[int, ...]]().union(*(check.shapes for check in decided))
        return dataclasses.replace(decided[0], shapes=shapes, undecided=any(check.undecided for check in checks))
    for outcome in ("not aligned", "assumed"):
        for check in checks:
            if check.outcome == outcome:
                return RowCheck(check.outcome, f"in one of {len(checks)} calls {check.reason}")
    return RowCheck("not aligned", "its calls have their rows in different places")


def _placements(leading: Sequence[int], rows: int) -> list[Placement]:
    """Return every place in which leading axes could hold so many rows."""
    found = []
    for axis, size in enumerate(leading):
        if size == rows:
            found.append(Placement(len(leading), axis))
        elif size > rows and size % rows == 0:
            found.append(Placement(len(leading), axis, "rows first"))
            found.append(Placement(len(leading), axis, "rows last"))
    return found


def _moves_as(before: _Seen, after: _Seen, place: Placement, order: Tensor) -> bool:
    """Say whether keys and values moved as the rows: one of them, and the other too unless all its rows are equal."""
    states = _states(before, after, place, order)
    return "moved" in states and states <= {"moved", "equal"}


def _all_move_as(before: Sequence[_Seen], after: Sequence[_Seen], check: RowCheck, order: Tensor) -> bool:
    """Say whether all calls of a layer whose rows are proved moved as ordered; other calls than before did not."""
    if check.placement is None or [call.leading for call in before] != [call.leading for call in after]:
        return False
    return all(_moves_as(*pair, check.placement, order) for pair in zip(before, after, strict=True))


def _states(before: _Seen, after: _Seen, place: Placement, order: Tensor) -> set[str]:
    pairs = [(before.keys, after.keys)]
    if before.values is not None and after.values is not None:
        pairs.append((before.values, after.values))
    elif before.values is not None or after.values is not None:
        return {"other"}
    view = place.view(before.leading, len(order))
    assert view is not None, "placements are made for these leading axes"
    shape, axis = view
    return {_state(a.reshape(*shape, -1).movedim(axis, 0), b.reshape(*shape, -1).movedim(axis, 0), order)
            for a, b in pairs}  # fmt: skip


def _state(before: Tensor, after: Tensor, order: Tensor) -> Literal["moved", "equal", "other"]:
    """Say whether rows (B, ...) moved as ordered, are all equal, or did something else."""
    before, after = before.flatten(1), after.flatten(1)
    if not before.numel():
        return "equal"
    rounding = _rounding(before)
    before, after = before.double(), after.double()
    expected = before[order.to(before.device)]
    distance = (expected - before).norm(dim=1)  # (B,)
    error = (after - expected).norm(dim=1)
    if not bool(torch.isfinite(error).all()):
        return "other"
    limit = torch.maximum(SAME * distance, torch.full_like(distance, rounding))
    if float(distance.max()) <= FLAT * rounding:
        return "equal" if float(error.max()) <= FLAT * rounding else "other"
    return "moved" if bool((error <= limit).all()) else "other"


def _unchanged(before: Tensor | None, after: Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    if before.shape != after.shape:
        return False
    difference = float((after.double() - before.double()).norm())
    return difference <= 1e-3 * float(before.double().norm())


def _rounding(rows: Tensor) -> float:
    """Return how far rounding may move a row (B, d), as a norm; nothing rounds whole numbers."""
    if not rows.is_floating_point():
        return 0.0
    largest = float(rows.abs().max())
    return ROUNDING * torch.finfo(rows.dtype).eps * largest * math.sqrt(rows.shape[1])


def _order(rows: int) -> Tensor:
    """Return a fixed permutation that is one cycle, so that no row stays, and no power of which is a roll or a flip.

    What a model does to its rows in a fixed way (a roll, a flip) must not commute with the permutation. With three
    rows and fewer that cannot be had.
    """
    generator = random.Random(2022)
    plain = {tuple((i + shift) % rows for i in range(rows)) for shift in range(rows)} | {tuple(reversed(range(rows)))}
    while True:
        cycle = list(range(rows))
        for i in range(rows - 1, 0, -1):  # Sattolo's shuffle gives one cycle
            j = generator.randrange(i)
            cycle[i], cycle[j] = cycle[j], cycle[i]
        if rows <= FEW_ROWS:
            return torch.tensor(cycle)
        power = tuple(cycle)
        commutes = False
        for _ in range(min(rows, 12) - 2):
            commutes = commutes or power in plain
            power = tuple(cycle[i] for i in power)
        if not commutes:
            return torch.tensor(cycle)


def _unfreeze(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Let no gradient reach the model's own parameters, which a copy of it may refer to through a closure."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        try:
            _unfreeze(trained)
        finally:
            _unfreeze(trained)  # once more: an interrupt may have cut the first short


def _check_permutable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `Untried` where inputs are no plain tensors, so that not all of their rows could be permuted."""
    for part in itertools.chain(*map(_leaves, args), *map(_leaves, kwargs.values())):
        if isinstance(part, PackedSequence) or (
            isinstance(part, Tensor) and (part.is_nested or part.layout != torch.strided)
        ):
            raise Untried("an input is packed, nested or sparse")
        if not isinstance(part, Tensor | int | float | complex | str | None | torch.dtype | torch.device):
            raise Untried(f"an input is a {type(part).__name__}, whose rows cannot be permuted")
        if isinstance(part, str) and part not in kwargs.values() and part not in args:
            raise Untried("an input holds strings, whose rows cannot be permuted")


def _check_copyable(model: nn.Module) -> None:
    """Raise `Untried` where a model is too large to copy, or running it once more would do more than compute."""
    size = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))
    if size > MAX_COPY_BYTES:
        raise Untried(f"the model is too large to copy ({size / 1e9:.1f} GB)")
    devices = {parameter.device for parameter in model.parameters()}
    for device in devices:
        if device.type == "cuda" and 4 * size > torch.cuda.mem_get_info(device)[0]:
            raise Untried("the GPU has no room for a copy of the model")
    for name, module in model.named_modules():
        for kind, which in _HOOKS:
            if any(not _is_harmless(hook) for hook in getattr(module, which).values()):
                raise Untried(
                    f"module {name or 'itself'!r} has a {kind} hook of yours, which a trial would run as well"
                )
    if any(not _is_harmless(hook) for _, which in _HOOKS for hook in getattr(every_module, f"_global{which}").values()):
        raise Untried("there is a hook of yours on all modules, which a trial would run as well")


_HOOKS = (
    ("forward", "_forward_hooks"),
    ("forward", "_forward_pre_hooks"),
    ("backward", "_backward_hooks"),
    ("backward", "_backward_pre_hooks"),
)


def _is_harmless(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith(("dualform.", "torch.", "transformers.", "peft."))


@contextmanager
def _not_called(model: nn.Module) -> Iterator[None]:
    """Raise `Untried` where any module of this model is called, and compile nothing, while the context lasts.

    A copy of a model calls the model's own layers where a function that it holds refers to them: `model.forward =
    lambda x: head(body(x))`.
    """
    mine = {id(module) for module in model.modules()}

    def refuse(module: nn.Module, _: Any) -> None:
        if id(module) in mine:
            raise Untried("a copy of the model calls layers of the model itself, which a function refers to")

    compiling = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    hooks = every_module._global_forward_pre_hooks

    def remove_all() -> None:
        for number in [number for number, hook in hooks.items() if hook is refuse]:
            del hooks[number]

    try:
        every_module.register_module_forward_pre_hook(refuse)
        with compiling:
            yield
    finally:
        try:
            remove_all()
        finally:
            remove_all()  # once more: an interrupt may have cut the first short


def _summed(outputs: Any) -> Tensor:
    """Return a number that is a sum over all elements of a model's outputs, so that no row is singled out."""
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type | Mapping):
        outputs = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
    found = [t for t in _tensors(outputs) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise Untried("the model's outputs hold no tensor with a gradient")
    return torch.stack([(t * t / 2 + t / 3).sum() for t in found]).sum()


def _permuted(batch: Any, axes: Axes, order: Tensor) -> Any:
    """Return a batch whose tensors have these axes permuted, in the order in which `_tensors` yields them."""
    remaining = iter(axes)

    def permute(tensor: Tensor) -> Tensor:
        for axis in next(remaining):
            tensor = tensor.index_select(axis, order.to(tensor.device))
        return tensor

    return _mapped(batch, permute)


_COARSE = (torch.float16, torch.bfloat16)


def _cloned_double(tensor: Tensor) -> Tensor:
    wide = tensor.double() if tensor.is_floating_point() else tensor
    return wide.detach().clone().requires_grad_(tensor.requires_grad)


def _cloned(tensor: Tensor) -> Tensor:
    tensor = tensor.float() if tensor.dtype in _COARSE else tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with every tensor changed; what is no tensor, mapping, list or tuple stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _mapped(part, change) for key, part in value.items()}
        return changed if type(value) is dict else _like(value, changed)
    if isinstance(value, tuple | list):
        parts = [_mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _like(value: Any, changed: dict[Any, Any]) -> Any:
    other = copy.copy(value)
    for key, part in changed.items():
        other[key] = part
    return other


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested value, in the order in which `_mapped` visits them."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor | PackedSequence):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
