"""The hooks: catch keys in forward, values in backward, and join them when a gradient is accumulated.

A pattern is born in three moments. A forward hook notes the layer's input; a hook on the function that made the layer's
output brings the error there; and the post-accumulate hook of a parameter proves that this very backward (the same
graph task) was accumulated into it. Errors that arrive under `autograd.grad` or at frozen weights never get that proof
and are dropped. What then becomes of the accumulated patterns is the recorder's business.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

from dualform.errors import RefusedError
from dualform.identity.parameter_use import ParameterUse
from dualform.identity.unfolding import Unfolding
from dualform.recording.annotations import Binding
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.divided import OwnRows
from dualform.recording.host_clock import HostClock
from dualform.recording.layer_hooks import CallReport, Trace, disabled_in_compile, hook_layers, hookable
from dualform.recording.layers.layer_kind import forward_of
from dualform.recording.layouts import describe_layout, settle
from dualform.recording.module_hooks import HookHandle, hook_accumulation, hook_before_forward, hook_forward
from dualform.recording.pattern_copies import copy_patterns
from dualform.recording.probes import Prediction
from dualform.recording.watch import Watched, What, covered, plain_name
from dualform.torch_modes import call_without_autocast, set_grad_enabled, without_gradients


@dataclass(slots=True, eq=False)
class Call:
    """One call of a watched layer, from its forward on."""

    layer: Watched
    number: int  # in the order of forward calls
    inputs: Any  # as the layer's kind takes it
    raw: bool  # whether the input owes nothing to the parameters
    coarse: torch.dtype | None  # what autocast computed it in, where that is coarser than the parameters
    binding: Binding | None
    forward: int = 0  # which forward of the whole model it is part of


@dataclass(slots=True, eq=False)
class Arrival:
    """The errors of a call as one backward brought them; keys and values are copied when it is accumulated."""

    call: Call
    errors: list[Tensor | None]  # of each output; None where none came
    leading: Sequence[int] = ()  # the shape of the patterns
    keys: Tensor | None = None  # (T, d_in); or, with an `unfolding`, the inputs that they are patches of
    values: Tensor | None = None  # (T, d_out)
    strided: Tensor | None = None  # an only error that does not lie row by row, until its layout is settled
    layout: str | None = None  # how autograd added up an only error for a bias, where not row by row
    accumulated: bool = False
    predictions: dict[ParameterUse, Prediction] | None = None  # what patterns predict for each parameter's probe:
    predicted_calls: int = 0  # those of so many calls of its layer, of which this is the first
    place: int = 0  # which arrival of its backward it is
    backward: int | None = None  # the number of the backward that it was handed to the sink with
    unfolding: Unfolding | None = None  # how keys are taken from inputs, where these are kept in their place

    @without_gradients
    def seen(self) -> list[Tensor]:
        """Return what the call took (where a kind of layer has no single input its keys) and the errors that came."""
        layer, inputs = self.call.layer, self.call.inputs
        taken = inputs if isinstance(inputs, Tensor) else layer.kind.keys(layer.module, inputs)
        return [taken, *(error for error in self.errors if error is not None)]


class TaskArrivals:
    """What one backward (a graph task of autograd) has brought so far, by layer."""

    __slots__ = ("_by_layer", "_count", "any_strided")

    def __init__(self) -> None:
        self._by_layer: dict[int, dict[int, Arrival]] = {}  # id of a layer -> id of a call -> its arrival
        self._count = 0
        self.any_strided = False  # whether the layout of any error is to be found

    def at(self, call: Call, outputs: int) -> Arrival:
        """Return the arrival of a call with so many outputs, a new one where nothing of it has come yet."""
        layer, this = id(call.layer), id(call)
        calls = self._by_layer.get(layer)
        if calls is None:
            calls = self._by_layer[layer] = {}
        arrival = calls.get(this)
        if arrival is None:
            arrival = calls[this] = Arrival(call, [None] * outputs, place=self._count)
            self._count += 1
        return arrival

    def of(self, layers: Sequence[int]) -> list[Arrival]:
        """Return the arrivals of some layers, given by their ids, in the order in which they came."""
        if len(layers) == 1:
            return list(self._by_layer.get(layers[0], {}).values())
        found = [arrival for layer in layers for arrival in self._by_layer.get(layer, {}).values()]
        found.sort(key=_place)
        return found


def _place(arrival: Arrival) -> int:
    return arrival.place


class Listener(Protocol):
    """Who the hooks report to."""

    def before_forward(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a forward of the whole model begins, or of one of its children that is called by itself."""

    def binding_for_forward(self) -> tuple[Binding | None, int]:
        """Return the annotations that a layer's call takes, and the number of the model's forward that it is in."""

    def before_accumulation(self, name: str, parameter: nn.Parameter) -> None:
        """Note a parameter's gradient before a backward adds to it."""

    def after_accumulation(self, name: str, parameter: nn.Parameter, task: int, arrivals: Sequence[Arrival]) -> None:
        """Note that a backward was accumulated into a parameter, with the patterns that explain it."""

    def create_graph_seen(self, layer: str) -> None:
        """Note that a backward built a graph of itself."""

    def coarse_seen(self, layer: str) -> None:
        """Note that autocast computed a layer whose values cannot be computed again in its dtype."""

    def hook_failed(self, where: str, error: Exception) -> None:
        """Raise an error that a hook met, or stop recording for good."""


@dataclass(slots=True)
class Hooks:
    """The hooks of one recording; attached once, detached for good.

    The model holds them and they hold the model, but neither keeps the listener alive.
    """

    layers: Sequence[Watched]
    listener: Callable[[], Listener | None]  # a weak reference
    pool: BufferPool
    model: nn.Module | None = None  # the whole one, whose forwards are counted
    needed: Mapping[str, What] | None = None  # the rows that are copied, as `copy_patterns` takes it
    divided: Mapping[str, OwnRows] = field(default_factory=dict)  # this process's rows of divided parameters, by name
    wants_values: Callable[[str], bool] = lambda layer: True  # whether the values of a layer are wanted at this moment
    unfoldings: Mapping[str, Unfolding] = field(default_factory=dict)  # of layers whose inputs the sink takes for keys
    clock: HostClock = field(default_factory=HostClock)  # measures the time inside of the hooks
    enabled: bool = False
    calls: int = 0
    any_strided: bool = False  # whether the layout of any error was to be found so far
    arrivals: dict[int, TaskArrivals] = field(default_factory=dict)  # graph task -> what it brought
    handles: list["HookHandle | Trace"] = field(default_factory=list)
    watching: set[str] = field(default_factory=set)  # parameters with accumulation hooks
    running: list[nn.Module] = field(default_factory=list)  # the model, for each of its own forwards that runs

    def attach(self) -> None:
        """Put the hooks on."""
        self.enabled = True
        if self.model is not None:
            self._count_forwards(self.model)
        hook_layers(
            self.handles,
            self.layers,
            self._report_of,
            plain=self._forward_hook_of,
            wanted=lambda: self.enabled and _grad_enabled(),
            failed=self._composite_failed,
        )
        for name, parameter in covered(self.layers).items():
            if parameter.requires_grad and name not in self.divided:
                self._watch_parameter(name, parameter, parameter)

    def _watch_parameter(self, name: str, parameter: nn.Parameter, leaf: nn.Parameter) -> None:
        """Put the accumulation hooks on a parameter; of a divided one, on the leaf that forwards use in its place."""
        self.watching.add(name)

        users = [id(layer) for layer in self.layers if any(used is parameter for _, used in layer.parameters.values())]

        def before(listener: Listener, increment: Tensor) -> None:
            listener.before_accumulation(name, parameter)
            if not self.any_strided:
                return
            arrived = self.arrivals.get(torch._C._current_graph_task_id())
            if arrived is not None and arrived.any_strided:
                settle(arrived.of(users), parameter, increment)

        def after(listener: Listener, _: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            arrived = self.arrivals.get(task)
            mine = [] if arrived is None else arrived.of(users)
            new = [arrival for arrival in mine if not arrival.accumulated]
            if new:
                copy_patterns(new, self.pool, self.wants_values, self.needed, self.unfoldings)
            listener.after_accumulation(name, parameter, task, mine)

        where = f"Parameter {name!r}"
        both = (self._guarded(where, _in_own_dtype(hook)) for hook in (before, after))
        hook_accumulation(self.handles, leaf, *both)

    def _watch_leaf(self, name: str, parameter: nn.Parameter) -> None:
        """Put the accumulation hooks on what a forward uses in the place of a divided parameter, once."""
        rows = self.divided[name]
        leaf = rows.find_leaf()
        if leaf is not rows.leaf:
            rows.leaf = leaf
            self._watch_parameter(name, parameter, leaf)

    def _guarded(self, where: str, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that does nothing once detached, and hands its errors to the listener.

        Args:
            where: the layer or parameter that the hook is for, to name in an error.
            hook: takes the listener, then what torch calls the hook with.
        """

        def guarded(*args: Any) -> None:
            listener = self.listener() if self.enabled else None
            if listener is not None:
                begin = perf_counter()
                before = torch.is_grad_enabled()
                try:
                    hook(listener, *args)
                except Exception as error:
                    listener.hook_failed(where, error)
                finally:
                    set_grad_enabled(before)
                    self.clock.seconds += perf_counter() - begin

        # Without this mark torch warns when a tensor that has the hook is saved.
        return cast("Callable[..., None]", unserializable_hook(guarded))

    def _composite_failed(self, layer: Watched, error: Exception) -> None:
        """Take an error that was met before a call of a composite module could be followed."""
        listener = self.listener()
        if listener is not None:
            listener.hook_failed(f"Layer {layer.name!r}", error)

    def detach(self) -> None:
        """Take every hook off; those inside graphs that still live do nothing from now on.

        A composite module that is running keeps its hooks until this is called again; they only end its call.
        """
        self.enabled = False
        running = [handle for handle in self.handles if isinstance(handle, Trace) and handle.running]
        for handle in self.handles:
            if handle not in running:
                handle.remove()
        self.handles[:] = running
        self.arrivals.clear()

    def forget(self) -> None:
        """Let go of forwards and backwards that never came to their end, because something raised."""
        self.running.clear()
        running = torch._C._current_graph_task_id()
        for task in [task for task in self.arrivals if task != running]:
            del self.arrivals[task]

    def begin_backward(self, task: int) -> TaskArrivals:
        """Return what takes the arrivals of a backward that has just come to its first layer."""
        arrived = self.arrivals[task] = TaskArrivals()
        # What was not accumulated by the end of this backward never will be.
        Variable._execution_engine.queue_callback(lambda: self._end(task))
        return arrived

    def _end(self, task: int) -> None:
        self.arrivals.pop(task, None)

    def _count_forwards(self, model: nn.Module) -> None:
        """Put hooks on the whole model and its children that report where a forward begins."""
        children = dict(_callable_children(model))
        names = {id(model): "", **{id(child): plain_name(name) for name, child in children.items()}}

        def begin(listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            listener.before_forward(names[id(module)], module, args, kwargs)

        report = self._guarded("The forward pass", begin)

        running = self.running

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is model:
                if running and _calls_on_stack(model) < 2:
                    running.clear()  # torch calls no hook at the end of a forward that was interrupted (Ctrl-C)
                inside = bool(running)
                running.append(module)
            elif running:
                return
            else:
                inside = False
            # A checkpointed part runs its children again in its own backward.
            if not inside and torch._C._current_graph_task_id() == -1 and id(module) in names and _grad_enabled():
                report(module, args, kwargs)

        def after(module: nn.Module, *_: Any) -> None:
            if module is model and running:
                running.pop()

        hook_forward(self.handles, model, disabled_in_compile(after), always_call=True)
        hook_before_forward(self.handles, model, disabled_in_compile(before))
        for module in children.values():
            hook_before_forward(self.handles, module, disabled_in_compile(before), unless=running)

    def _report_of(self, layer: Watched) -> CallReport:
        """Return what takes the calls of a part of a composite module."""
        parameters = _own_parameters(layer)

        def report(inputs_of: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
            if any(output.requires_grad for output in outputs):
                self._note(layer, parameters, inputs_of, outputs)

        return report

    def _forward_hook_of(self, layer: Watched) -> Callable[..., None]:
        """Return the forward hook of a layer that is a module of its own."""
        parameters, own = _own_parameters(layer), layer.module

        def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            # A copy that copy.copy or a replica made carries this hook along, hence the identity test.
            if module is own and getattr(output, "requires_grad", True):
                self._note(layer, parameters, lambda: layer.kind.inputs(args, kwargs), (output,))

        return forward

    def _note(
        self,
        layer: Watched,
        parameters: Sequence[tuple[str, nn.Parameter, bool]],
        inputs_of: Callable[[], Any],
        outputs: Sequence[Tensor],
    ) -> None:
        """Note a call in forward, as `_guarded` calls a hook; this is called too often for one more function."""
        listener = self.listener() if self.enabled else None
        if listener is None:
            return
        begin = perf_counter()
        before = torch.is_grad_enabled()
        try:
            self._note_call(listener, layer, parameters, inputs_of, outputs)
        except Exception as error:
            listener.hook_failed(f"Layer {layer.name!r}", error)
        finally:
            set_grad_enabled(before)
            self.clock.seconds += perf_counter() - begin

    def _note_call(
        self,
        listener: Listener,
        layer: Watched,
        parameters: Sequence[tuple[str, nn.Parameter, bool]],
        inputs_of: Callable[[], Any],
        outputs: Sequence[Tensor],
    ) -> None:
        """Note a call, and wait for the errors at its outputs.

        Args:
            listener: who the hooks report to.
            layer: the layer.
            parameters: its parameters, each with its name and whether it is a bias.
            inputs_of: returns the call's input as the layer's kind takes it.
            outputs: what the call returned; some of it requires a gradient.
        """
        trained: nn.Parameter | None = None  # the first parameter that is trained
        kept = bias = False  # whether autograd keeps the layer's input; whether a bias is trained
        for name, parameter, is_bias in parameters:
            if parameter.requires_grad:
                trained = parameter if trained is None else trained
                kept = kept or not is_bias
                bias = bias or is_bias
                if name in self.divided:
                    self._watch_leaf(name, parameter)
                elif name not in self.watching:  # unfrozen since the recording began
                    self._watch_parameter(name, parameter, parameter)
        if trained is None:
            return
        first = outputs[0]
        inputs = inputs_of()
        raw = False
        coarse = first.dtype if first.dtype is not trained.dtype else None
        if isinstance(inputs, Tensor):
            if inputs.is_nested or inputs.layout is not torch.strided:
                _refuse_sparse(layer.name, inputs)
            raw = not inputs.requires_grad and layer.composite is None
            inputs = inputs.detach()
            if not kept:
                inputs = inputs.clone()  # autograd does not keep this very input, so it may be overwritten
            elif torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(inputs.device.type):
                # Autograd keeps what autocast made of the input: the input itself only where it has that dtype.
                wanted = first.dtype if inputs.is_floating_point() else inputs.dtype
                if inputs.dtype is not wanted:
                    inputs = inputs.to(wanted)
                elif coarse is None:
                    inputs = inputs.clone()
        elif coarse is not None:
            listener.coarse_seen(layer.name)
            return
        binding, forward = listener.binding_for_forward()
        call = Call(layer, self.calls, inputs, raw, coarse, binding, forward)
        self.calls += 1
        # Whether the order is to be found in which a bias's errors are added up: on the CPU and in full precision.
        ordered = bias and coarse is None and len(outputs) == 1 and not layer.kind.own_order
        for i, output in enumerate(outputs):
            if output.requires_grad:
                place = hookable(output)
                hook = _ErrorHook(self, call, i, place.output_nr, len(outputs), output.shape, ordered)
                node = place.grad_fn
                if node is None:  # a layer that returns its parameter as it is
                    # Without this mark torch warns when a tensor that has the hook is saved.
                    place.register_hook(unserializable_hook(partial(_ErrorHook.take, hook)))
                else:
                    node.register_prehook(hook)


def _in_own_dtype(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose own products autocast does not round, where a program calls backward inside of autocast."""

    def called(*args: Any) -> None:
        if torch._C._is_any_autocast_enabled():
            on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
            call_without_autocast(on, lambda: hook(*args))
        else:
            hook(*args)

    return called


def _own_parameters(layer: Watched) -> list[tuple[str, nn.Parameter, bool]]:
    """Return a layer's parameters, each with its name and whether it is a bias."""
    return [(name, used, use.parameter_map.is_bias) for use, (name, used) in layer.parameters.items()]


class _ErrorHook:
    """A hook on the function that made an output of a call, which takes the error that a backward brings there.

    It comes just before the function's own backward, when all hooks on the output itself have had the error (a hook on
    the function that is put on later comes after it); and torch puts it on faster than a hook on the output.
    """

    __slots__ = ("_call", "_hooks", "_ordered", "_output", "_outputs", "_place", "_shape")

    def __init__(
        self, hooks: Hooks, call: Call, output: int, place: int, outputs: int, shape: torch.Size, ordered: bool
    ) -> None:
        """Wait for errors.

        Args:
            hooks: the hooks of the recording.
            call: the call.
            output: which of its outputs this one is.
            place: which of the outputs of the function that made it.
            outputs: how many it has.
            shape: the output's.
            ordered: whether the order is to be found in which the errors are added up for a bias.
        """
        self._hooks = hooks
        self._call = call
        self._output = output
        self._place = place
        self._outputs = outputs
        self._shape = shape
        self._ordered = ordered

    def __call__(self, errors: tuple[Tensor | None, ...]) -> None:
        """Take the errors at all outputs of the function."""
        self.take(errors[self._place])

    def take(self, error: Tensor | None) -> None:
        """Keep an error for the accumulation that may follow it in the same backward."""
        hooks = self._hooks
        listener = hooks.listener() if hooks.enabled else None
        if listener is None or error is None:  # an error may come to another output of the same function alone
            return
        begin = perf_counter()
        call = self._call
        try:
            binding = call.binding
            if binding is not None:
                binding.arrived.add(call.forward)
            if error.requires_grad:
                listener.create_graph_seen(call.layer.name)
            error = error.detach()  # a tensor of our own: who else holds the memory can be told (`sole_ownership`)
            task = torch._C._current_graph_task_id()
            arrived = hooks.arrivals.get(task)
            if arrived is None:
                arrived = hooks.begin_backward(task)
            arrival = arrived.at(call, self._outputs)
            if self._ordered and not error.is_contiguous() and _lies_apart(error):
                arrival.strided = error
                arrived.any_strided = hooks.any_strided = True
            arrival.errors[self._output] = error if error.shape == self._shape else error.reshape(self._shape)
        except Exception as failure:
            listener.hook_failed(f"Layer {call.layer.name!r}", failure)
        finally:
            hooks.clock.seconds += perf_counter() - begin


def _lies_apart(error: Tensor) -> bool:
    """Say whether an error in the CPU's memory does not lie row by row."""
    return error.device.type == "cpu" and describe_layout(error) is not None


def _calls_on_stack(module: nn.Module) -> int:
    """Return how many calls of a module are running: one, or more where it calls itself."""
    frame, count = sys._getframe(1).f_back, 0
    while frame is not None:
        count += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def _grad_enabled() -> bool:
    return torch.is_grad_enabled()


def _refuse_sparse(layer: str, inputs: Tensor) -> NoReturn:
    """Refuse an input whose rows are not laid out in memory one beside the other."""
    kind = "nested" if inputs.is_nested else f"sparse ({inputs.layout})"
    do = "Pad it (torch.nested.to_padded_tensor)" if inputs.is_nested else "Call to_dense() on it before the layer"
    raise RefusedError(
        f"Layer {layer!r} got a {kind} input, whose rows cannot be kept as keys; expected a dense tensor. {do}, or "
        "leave the layer out of layers=[...]."
    )


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module by name; for one that cannot be called (a ModuleList) its own children."""
    for name, child in module.named_children():
        if isinstance(child, torch.jit.ScriptModule):  # takes no hooks
            continue
        if forward_of(child) is nn.Module.forward:
            yield from _callable_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
