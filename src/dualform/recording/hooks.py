"""The hooks: catch keys in forward, values in backward, and join them when a gradient is accumulated.

A pattern is born in three moments. A forward hook notes the layer's input; a tensor hook on the layer's output brings
the error there; and the post-accumulate hook of a parameter proves that this very backward (the same graph task) was
accumulated into it. Errors that arrive under `autograd.grad` or at frozen weights never get that proof and are dropped.
What then becomes of the accumulated patterns is the recorder's business.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import unserializable_hook

from dualform.errors import RefusedError
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.annotations import Binding
from dualform.recording.buffer_pool import BufferPool
from dualform.recording.layer_hooks import CallReport, Trace, disabled_in_compile, hook_layers, hookable
from dualform.recording.layers.layer_kind import forward_of
from dualform.recording.layouts import describe_layout, settle
from dualform.recording.module_hooks import HookHandle, hook_accumulation, hook_before_forward, hook_forward
from dualform.recording.probes import Prediction
from dualform.recording.watch import Watched, covered, plain_name
from dualform.threads import one_thread
from dualform.torch_modes import set_grad_enabled, without_gradients


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
    keys: Tensor | None = None  # (T, d_in)
    values: Tensor | None = None  # (T, d_out)
    strided: Tensor | None = None  # an only error that does not lie row by row, until its layout is settled
    layout: str | None = None  # how autograd added up an only error for a bias, where not row by row
    accumulated: bool = False
    predictions: dict[ParameterUse, Prediction] | None = None  # what its patterns predict for each parameter's probe

    @without_gradients
    def copy(self, pool: BufferPool) -> None:
        """Copy key and value out of the user's reach; a value only where it is kept."""
        layer = self.call.layer
        keys = layer.kind.keys(layer.module, self.call.inputs)
        self.leading = keys.shape[:-1]
        if self.call.coarse is not None and keys.is_floating_point():
            keys = keys.to(self.call.coarse)  # as the layer saw them
        self.keys = _own(
            keys.reshape(-1, layer.d_in).to(self.dtype if keys.is_floating_point() else keys.dtype),
            [self.call.inputs],
            pool,
        )
        if not layer.keys_only:
            values = layer.kind.errors(layer.module, self.call.inputs, self.errors)
            self.values = _own(values.reshape(-1, layer.d_out).to(self.dtype), self.errors, pool)
        self.accumulated = True

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype, which keys and values are kept in."""
        return next(iter(self.call.layer.parameters.values()))[1].dtype


class Listener(Protocol):
    """Who the hooks report to."""

    @property
    def forward(self) -> int:
        """The number of the forward of the whole model that is running."""

    def before_forward(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a forward of the whole model begins, or of one of its children that is called by itself."""

    def binding_for_forward(self) -> Binding | None:
        """Return the annotations that a forward call starting now takes."""

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
    enabled: bool = False
    calls: int = 0
    arrivals: dict[int, dict[int, Arrival]] = field(default_factory=dict)  # graph task -> call -> what it brought
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
            wanted=lambda: self.enabled and _grad_enabled(),
            failed=self._composite_failed,
        )
        for name, parameter in covered(self.layers).items():
            if parameter.requires_grad:
                self._watch_parameter(name, parameter)

    def _watch_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Put the accumulation hooks on a parameter."""
        self.watching.add(name)

        def arrived(task: int) -> list[Arrival]:
            return [
                arrival
                for arrival in self.arrivals.get(task, {}).values()
                if any(used is parameter for _, used in arrival.call.layer.parameters.values())
            ]

        def before(listener: Listener, increment: Tensor) -> None:
            listener.before_accumulation(name, parameter)
            task = torch._C._current_graph_task_id()
            if any(arrival.strided is not None for arrival in self.arrivals.get(task, {}).values()):
                settle(arrived(task), parameter, increment)

        def after(listener: Listener, _: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            mine = arrived(task)
            for arrival in mine:
                if not arrival.accumulated:
                    arrival.copy(self.pool)
            listener.after_accumulation(name, parameter, task, mine)

        where = f"Parameter {name!r}"
        hook_accumulation(self.handles, parameter, self._guarded(where, before), self._guarded(where, after))

    def _guarded(self, where: str, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that does nothing once detached, and hands its errors to the listener.

        Args:
            where: the layer or parameter that the hook is for, to name in an error.
            hook: takes the listener, then what torch calls the hook with.
        """

        def guarded(*args: Any) -> None:
            listener = self.listener() if self.enabled else None
            if listener is not None:
                before = torch.is_grad_enabled()
                try:
                    hook(listener, *args)
                except Exception as error:
                    listener.hook_failed(where, error)
                finally:
                    set_grad_enabled(before)

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

    def _end(self, task: int) -> None:
        self.arrivals.pop(task, None)

    def _count_forwards(self, model: nn.Module) -> None:
        """Put hooks on the whole model and its children that report where a forward begins."""
        children = dict(_callable_children(model))
        names = {id(model): "", **{id(child): plain_name(name) for name, child in children.items()}}

        def begin(listener: Listener, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            listener.before_forward(names[id(module)], module, args, kwargs)

        report = self._guarded("The forward pass", begin)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A checkpointed part runs its children again in its own backward.
            if module is model and self.running and _calls_on_stack(model) < 2:
                self.running.clear()  # torch calls no hook at the end of a forward that was interrupted (Ctrl-C)
            inside = bool(self.running) or torch._C._current_graph_task_id() != -1
            if module is model:
                self.running.append(module)
            if id(module) in names and not inside and _grad_enabled():
                report(module, args, kwargs)

        def after(module: nn.Module, *_: Any) -> None:
            if module is model and self.running:
                self.running.pop()

        hook_forward(self.handles, model, disabled_in_compile(after), always_call=True)
        for module in (model, *children.values()):
            hook_before_forward(self.handles, module, disabled_in_compile(before))

    def _report_of(self, layer: Watched) -> CallReport:
        """Return what takes the calls of a layer."""

        def note(listener: Listener, inputs_of: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
            self._note(listener, layer, inputs_of, outputs)

        return self._guarded(f"Layer {layer.name!r}", note)

    def _note(
        self, listener: Listener, layer: Watched, inputs_of: Callable[[], Any], outputs: Sequence[Tensor]
    ) -> None:
        """Note a call in forward, and wait for the errors at its outputs."""
        trained = [(name, used) for name, used in layer.parameters.values() if used.requires_grad]
        if not trained or not any(output.requires_grad for output in outputs):
            return
        for name, parameter in trained:
            if name not in self.watching:  # unfrozen since the recording began
                self._watch_parameter(name, parameter)
        inputs = inputs_of()
        raw = isinstance(inputs, Tensor) and not inputs.requires_grad and layer.composite is None
        if isinstance(inputs, Tensor):
            _check_dense(layer.name, inputs)
            inputs = inputs.detach()
            used = [p for use, (_, p) in layer.parameters.items() if not use.parameter_map.is_bias]
            if not any(p.requires_grad for p in used) or torch.is_autocast_enabled(inputs.device.type):
                inputs = inputs.clone()  # autograd does not keep this very input, so it may be overwritten
        coarse = outputs[0].dtype if outputs[0].dtype != trained[0][1].dtype else None
        if coarse is not None and not isinstance(inputs, Tensor):
            listener.coarse_seen(layer.name)
            return
        binding = listener.binding_for_forward()
        call = Call(layer, self.calls, inputs, raw, coarse, binding, listener.forward)
        self.calls += 1
        for i, output in enumerate(outputs):
            if output.requires_grad:
                hookable(output).register_hook(self._arrive(call, i, [output.shape for output in outputs]))

    def _arrive(self, call: Call, output: int, shapes: Sequence[torch.Size]) -> Callable[[Tensor | None], None]:
        def arrive(listener: Listener, error: Tensor | None) -> None:
            if error is None:  # nothing came to this output, but to another of its function
                return
            if call.binding is not None:
                call.binding.arrived.add(call.forward)
            if error.requires_grad:
                listener.create_graph_seen(call.layer.name)
            task = torch._C._current_graph_task_id()
            if task not in self.arrivals:
                self.arrivals[task] = {}
                # What was not accumulated by the end of this backward never will be.
                Variable._execution_engine.queue_callback(lambda: self._end(task))
            arrival = self.arrivals[task].setdefault(id(call), Arrival(call, [None] * len(shapes)))
            if len(shapes) == 1 and not call.layer.kind.own_order and _rows_apart(call, error):
                arrival.strided = error.detach()
            arrival.errors[output] = error.detach().reshape(shapes[output])

        return self._guarded(f"Layer {call.layer.name!r}", arrive)


def _rows_apart(call: Call, error: Tensor) -> bool:
    """Say whether a bias is trained whose order of summing is to be found: on the CPU and in full precision."""
    uses = call.layer.parameters.items()
    trained = any(use.parameter_map.is_bias and used.requires_grad for use, (_, used) in uses)
    return trained and call.coarse is None and error.device.type == "cpu" and describe_layout(error) is not None


def _own(rows: Tensor, others: Sequence[Any], pool: BufferPool) -> Tensor:
    """Return rows that share no memory with others': themselves, or a copy."""
    place = rows.untyped_storage().data_ptr()
    shared = any(isinstance(other, Tensor) and other.untyped_storage().data_ptr() == place for other in others)
    if not shared and rows.is_contiguous():
        return rows
    with one_thread(bytes_read=rows.nbytes, device=rows.device):
        return pool.copy(rows)


def _calls_on_stack(module: nn.Module) -> int:
    """Return how many calls of a module are running: one, or more where it calls itself."""
    frame, count = sys._getframe(1).f_back, 0
    while frame is not None:
        count += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def _grad_enabled() -> bool:
    return torch.is_grad_enabled()


def _check_dense(layer: str, inputs: Tensor) -> None:
    """Refuse an input whose rows are not laid out in memory one beside the other."""
    if inputs.is_nested or inputs.layout is not torch.strided:
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
