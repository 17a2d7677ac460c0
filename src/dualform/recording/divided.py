"""Parameters that `fully_shard` divides by rows among processes, as one process has them: its own rows.

Between steps such a parameter is a `DTensor` that holds this process's rows; while a forward or backward runs, the
module has another parameter in its place, with all rows, to which autograd adds this process's own gradient. After the
backward that gradient is reduced over all processes, and each keeps its rows of the sum in the first parameter.

What is read of such a parameter comes from here. Nothing is exchanged between processes in this file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dualform.errors import RefusedError
from dualform.identity.row_division import own_rows
from dualform.recording.sharded_modules import is_divided, is_sharded_module, own_part
from dualform.recording.sinks import SAMPLE, LiveParameter
from dualform.recording.watch import plain_name


class OwnRows(nn.Parameter):
    """This process's rows of a divided parameter, in the memory in which its optimizer moves them.

    Attributes:
        divided: the parameter as the optimizer has it, a `DTensor`.
        whole: the shape of the whole parameter.
        first: the number of the first of these rows.
        leaf: the parameter with all rows that a forward uses; None before the first forward.
    """

    divided: nn.Parameter
    whole: torch.Size
    first: int
    leaf: nn.Parameter | None
    _place: tuple[dict[str, Any], str]
    _state: Any

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """These rows of the gradient that all processes have made together; None where there is none."""
        gradient = self.divided.grad
        return None if gradient is None else own_part(gradient)

    @property
    def own_gradient(self) -> Tensor | None:
        """This process's own gradient, with all rows, as far as it was not reduced; None where there is none."""
        gradient = None if self.leaf is None else self.leaf.grad
        waiting = self._waiting()
        if waiting is not None:
            gradient = waiting if gradient is None else waiting + gradient
        return None if gradient is None else gradient.to(self.dtype)

    def _waiting(self) -> Tensor | None:
        """Return what earlier backwards added to the gradient, where `fully_shard` keeps it in another dtype."""
        found: Tensor | None = getattr(self._state, "unsharded_accumulated_grad", None)
        return found

    def find_leaf(self) -> nn.Parameter:
        """Return the parameter with all rows that the forward that runs now uses."""
        holder, key = self._place
        found = holder[key]
        if found is self.divided or found.shape != self.whole or found.device != self.device:
            raise RefusedError(
                f"A forward uses a divided parameter ({key!r}, {tuple(self.whole)}) as {type(found).__name__} on "
                f"{found.device}; expected one with all rows on {self.device}. Call the module itself, whose hooks "
                "gather its rows, and leave out offload_policy."
            )
        return cast("nn.Parameter", found)

    def follow(self) -> None:
        """Go on with the memory in which the rows are now: `fully_shard` may have moved them in its first forward."""
        rows = own_part(self.divided)
        if rows.data_ptr() != self.data_ptr() or rows.shape != self.shape:
            self.data = rows

    @property
    def sample_count(self) -> int:
        """The number of elements of the sample of the whole parameter."""
        return -(-self.whole.numel() // self._sample_step)

    @property
    def _sample_step(self) -> int:
        return max(1, self.whole.numel() // SAMPLE)

    def whole_sample(self) -> tuple[int, Tensor]:
        """Return this process's part of the sample of the whole parameter, and the place of its first element there."""
        width, step = self.whole[1:].numel(), self._sample_step
        begin = self.first * width
        place = -(-begin // step)
        return place, self.detach().reshape(-1)[place * step - begin :: step]


class LiveRows(LiveParameter):
    """This process's rows of a divided parameter, as its optimizer holds them: gradient and state have these rows."""

    __slots__ = ()

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of these rows, as it is now."""
        rows = cast("OwnRows", self.parameter)
        state = self.optimizer.state.get(rows.divided, {})
        return {name: own_part(entry) if isinstance(entry, Tensor) else entry for name, entry in state.items()}


def _own_rows(divided: nn.Parameter, place: tuple[dict[str, Any], str], state: Any) -> OwnRows:
    rows = torch.Tensor._make_subclass(OwnRows, own_part(divided), divided.requires_grad)
    rows.divided, rows.whole, rows.leaf = divided, divided.shape, None
    rows._place, rows._state = place, state
    mesh = cast("Any", divided).device_mesh
    rows.first = own_rows(divided.shape[0], mesh.get_local_rank(), mesh.size()).start
    return rows


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter with the rows of all processes."""
    return parameter.whole if isinstance(parameter, OwnRows) else parameter.shape


def accumulated_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient to which this process's backwards have added, with all rows; None where there is none."""
    return parameter.own_gradient if isinstance(parameter, OwnRows) else parameter.grad


def find_own_rows(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, OwnRows]:
    """Return this process's rows of those parameters that are divided, by name."""
    places = {
        id(parameter): (module._parameters, key)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    states = {id(state.sharded_param): state for state in _sharding_states(model)}
    return {
        name: _own_rows(parameter, places[id(parameter)], states.get(id(parameter)))
        for name, parameter in parameters.items()
        if is_divided(parameter)
    }


def localized(parameters: Mapping[str, nn.Parameter], own: Mapping[str, OwnRows]) -> dict[str, nn.Parameter]:
    """Return parameters, with this process's rows in the place of those that are divided."""
    return {name: own.get(name, parameter) for name, parameter in parameters.items()}


def _sharding_states(model: nn.Module) -> Iterator[Any]:
    """Yield what `fully_shard` keeps of each divided parameter; nothing in a version of torch that keeps it elsewhere.

    It is asked for what nothing public tells: gradients that wait in another dtype, and the policy of mixed precision.
    """
    for group in _sharding_groups(model):
        yield from getattr(group, "fsdp_params", ())


def _sharding_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if is_sharded_module(module):
            state = getattr(module, "_get_fsdp_state", lambda: None)()
            groups = getattr(state, "_fsdp_param_groups", None)
            groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
            yield from (group for group in groups if group is not None)


def reduces_coarsely(model: nn.Module) -> bool:
    """Say whether a policy of mixed precision may round the gradients that are reduced."""
    for group in _sharding_groups(model):
        policy = getattr(group, "mp_policy", None)
        for dtype in (getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)):
            if dtype in (torch.float16, torch.bfloat16):
                return True
    return False


def refuse_divided(model: nn.Module) -> None:
    """Refuse by name parameters that are divided in any other way than by rows, by `fully_shard`, among all processes.

    Raises:
        RefusedError: a parameter is divided by columns, along several axes of processes (HSDP, tensor parallelism), or
            by something else than `fully_shard` (FSDP's first version, DeepSpeed).
    """
    inside: set[int] = set()
    for module in model.modules():
        if is_sharded_module(module):
            inside.update(id(parameter) for parameter in module.parameters())
    meshes: list[Any] = []
    for path, parameter in model.named_parameters():
        if (owner := _other_division(parameter)) is not None:
            raise RefusedError(
                f"Parameter {plain_name(path)!r} is divided by {owner}, which is not supported: a process has some "
                "elements of it, not whole rows. Divide the model by torch.distributed.fsdp.fully_shard, or train it "
                "with DistributedDataParallel."
            )
        if not is_divided(parameter):
            continue
        placed = cast("Any", parameter)
        problem = ""
        if id(parameter) not in inside:
            problem = "is a DTensor that fully_shard did not make (tensor parallelism)"
        elif placed.device_mesh.ndim != 1:
            problem = f"is divided along {placed.device_mesh.ndim} axes of processes (HSDP, tensor parallelism)"
        elif not placed.placements[0].is_shard(0):
            problem = f"is divided as {placed.placements[0]}, not by rows"
        elif meshes and placed.device_mesh != meshes[0]:
            problem = "is divided among other processes than the rest of the model"
        if problem:
            raise RefusedError(
                f"Parameter {plain_name(path)!r} {problem}; that is not supported. Divide the model by rows among all "
                "processes, fully_shard(model, mesh=...) with a mesh of one axis and no shard_placement_fn, or train "
                "it with DistributedDataParallel."
            )
        meshes.append(placed.device_mesh)


def _other_division(parameter: nn.Parameter) -> str | None:
    """Name the library that has divided a parameter's elements and left a plain parameter in its place; else None.

    A training may hand over the inner module, whose parameters alone tell that something around it divides them.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        return "FullyShardedDataParallel (FSDP's first version)"
    return "DeepSpeed ZeRO" if hasattr(parameter, "ds_id") else None


def group_of(model: nn.Module) -> Any:
    """Return the group of the processes among which a model is divided; None where it is not."""
    for parameter in model.parameters():
        if is_divided(parameter):
            return cast("Any", parameter).device_mesh.get_group()
    return None
