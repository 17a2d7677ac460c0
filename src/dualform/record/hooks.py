"""The hooks: catch keys in forward, values in backward, and join them when a gradient is accumulated.

A pattern is born in three moments. A forward hook notes the layer's input; a tensor hook on the layer's output brings
the error there; and the post-accumulate hook of a parameter proves that this very backward (the same graph task) was
accumulated into it. Errors that arrive under `autograd.grad` or at frozen weights never get that proof and are dropped.
What then becomes of the accumulated patterns is the recorder's business.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from dualform.forms import form
from dualform.record.annotations import Binding
from dualform.record.layers import Report
from dualform.record.layouts import describe, settle
from dualform.record.probes import Prediction
from dualform.record.spares import Spares
from dualform.record.watch import Watched, covered
from dualform.threads import one_thread


@dataclass(slots=True, eq=False)
class Call:
    """One call of a watched layer, from its forward on."""

    layer: Watched
    number: int  # in the order of forward calls
    inputs: Any  # as the layer's kind takes it
    raw: bool  # whether the input owes nothing to the parameters
    coarse: torch.dtype | None  # what autocast computed it in, where that is coarser than the parameters
    binding: Binding | None


@dataclass(slots=True, eq=False)
class Arrival:
    """The errors of a call as one backward brought them; keys and values are copied when it is accumulated."""

    call: Call
    errors: list[Tensor | None]  # of each output; nothing where none came
    leading: Sequence[int] = ()  # the shape of the patterns
    keys: Tensor | None = None  # (T, d_in)
    values: Tensor | None = None  # (T, d_out)
    strided: Tensor | None = None  # an only error that does not lie row by row, until its layout is settled
    layout: str | None = None  # how autograd added up an only error for a bias, where not row by row
    accumulated: bool = False
    predictions: dict[str, Prediction] | None = None  # what its patterns predict for each parameter's probe, by role

    @torch.no_grad()
    def copy(self, spares: Spares) -> None:
        """Copy key and value out of the user's reach; a value only where it is kept."""
        layer = self.call.layer
        keys = layer.kind.keys(layer.module, self.call.inputs)
        self.leading = keys.shape[:-1]
        if self.call.coarse is not None and keys.is_floating_point():
            keys = keys.to(self.call.coarse)  # as the layer saw them
        self.keys = _own(
            keys.reshape(-1, layer.d_in).to(self.dtype if keys.is_floating_point() else keys.dtype),
            [self.call.inputs],
            spares,
        )
        if not layer.keys_only:
            values = layer.kind.errors(layer.module, self.call.inputs, self.errors)
            self.values = _own(values.reshape(-1, layer.d_out).to(self.dtype), self.errors, spares)
        self.accumulated = True

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype, which keys and values are kept in."""
        return next(iter(self.call.layer.parameters.values()))[1].dtype


class Listener(Protocol):
    """Who the hooks report to."""

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


@dataclass(slots=True)
class Hooks:
    """The hooks of one recording; attached once, detached for good."""

    layers: Sequence[Watched]
    listener: Listener
    spares: Spares
    enabled: bool = False
    calls: int = 0
    arrivals: dict[int, dict[int, Arrival]] = field(default_factory=dict)  # graph task -> call -> what it brought
    handles: list[RemovableHandle] = field(default_factory=list)
    watching: set[str] = field(default_factory=set)  # parameters with accumulation hooks

    def attach(self) -> None:
        """Put the hooks on."""
        self.enabled = True
        composites: dict[int, list[Watched]] = {}
        for layer in self.layers:
            if layer.composite is not None:
                composites.setdefault(id(layer.module), []).append(layer)
                continue
            hook = _Hook(_disabled_in_compile(self._forward_hook(layer)))
            self.handles.append(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        for parts in composites.values():
            self.handles.extend(trace(parts, self._report(parts), wanted=lambda: self.enabled and _grad_enabled()))
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

        def before(increment: Tensor) -> None:
            if self.enabled:
                self.listener.before_accumulation(name, parameter)
                task = torch._C._current_graph_task_id()
                if any(arrival.strided is not None for arrival in self.arrivals.get(task, {}).values()):
                    settle(arrived(task), parameter, increment)

        def after(_: Tensor) -> None:
            if self.enabled:
                task = torch._C._current_graph_task_id()
                mine = arrived(task)
                for arrival in mine:
                    if not arrival.accumulated:
                        arrival.copy(self.spares)
                self.listener.after_accumulation(name, parameter, task, mine)

        self.handles.append(parameter.register_hook(before))
        self.handles.append(parameter.register_post_accumulate_grad_hook(after))

    def detach(self) -> None:
        """Take every hook off; those inside graphs that still live do nothing from now on."""
        self.enabled = False
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.arrivals.clear()

    def forget(self) -> None:
        """Let go of what backwards brought that never came to their end, because something raised."""
        running = torch._C._current_graph_task_id()
        for task in [task for task in self.arrivals if task != running]:
            del self.arrivals[task]

    def _end(self, task: int) -> None:
        self.arrivals.pop(task, None)

    def _forward_hook(self, layer: Watched) -> Callable[..., None]:
        def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            # A copy that copy.copy or a replica made carries this hook along, hence the identity test.
            if self.enabled and module is layer.module:
                self._note(layer, lambda: layer.kind.inputs(args, kwargs), [output])

        return forward

    def _report(self, parts: Sequence[Watched]) -> Report:
        """Return what takes the calls of a composite module's parts."""
        watched = {layer.part: layer for layer in parts}

        def report(part: str, inputs: Any, outputs: Sequence[Tensor]) -> None:
            if self.enabled and part in watched:
                self._note(watched[part], lambda: inputs, outputs)

        return report

    def _note(self, layer: Watched, inputs_of: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
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
            inputs = inputs.detach()
            used = [p for role, (_, p) in layer.parameters.items() if not form(role).constant_key or role == "rows"]
            if not any(p.requires_grad for p in used) or torch.is_autocast_enabled(inputs.device.type):
                inputs = inputs.clone()  # autograd does not keep this very input, so it may be overwritten
        coarse = outputs[0].dtype if outputs[0].dtype != trained[0][1].dtype else None
        if coarse is not None and not isinstance(inputs, Tensor):
            self.listener.coarse_seen(layer.name)
            return
        call = Call(layer, self.calls, inputs, raw, coarse, self.listener.binding_for_forward())
        self.calls += 1
        for i, output in enumerate(outputs):
            if output.requires_grad:
                _hookable(output).register_hook(self._arrive(call, i, [output.shape for output in outputs]))

    def _arrive(self, call: Call, output: int, shapes: Sequence[torch.Size]) -> Callable[[Tensor | None], None]:
        def arrive(error: Tensor | None) -> None:
            if not self.enabled or error is None:  # nothing came to this output, but to another of its function
                return
            if error.requires_grad:
                self.listener.create_graph_seen(call.layer.name)
            task = torch._C._current_graph_task_id()
            if task not in self.arrivals:
                self.arrivals[task] = {}
                # What was not accumulated by the end of this backward never will be.
                Variable._execution_engine.queue_callback(lambda: self._end(task))
            arrival = self.arrivals[task].setdefault(id(call), Arrival(call, [None] * len(shapes)))
            if len(shapes) == 1 and not call.layer.kind.own_order and _rows_apart(call, error):
                arrival.strided = error.detach()
            arrival.errors[output] = error.detach().reshape(shapes[output])

        return arrive


class _Hook:
    """A forward hook that stays behind: a copied or pickled model gets one that does nothing and holds nothing."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if self._hook is not None:
            self._hook(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def _rows_apart(call: Call, error: Tensor) -> bool:
    """Say whether a bias is trained whose order of summing is to be found: on the CPU and in full precision."""
    trained = any(role.startswith("bias") and used.requires_grad for role, (_, used) in call.layer.parameters.items())
    return trained and call.coarse is None and error.device.type == "cpu" and describe(error) is not None


def _own(rows: Tensor, others: Sequence[Any], spares: Spares) -> Tensor:
    """Return rows that share no memory with others': themselves, or a copy."""
    place = rows.untyped_storage().data_ptr()
    shared = any(isinstance(other, Tensor) and other.untyped_storage().data_ptr() == place for other in others)
    if not shared and rows.is_contiguous():
        return rows
    with one_thread(bytes_read=rows.nbytes, device=rows.device):
        return spares.copy(rows)


def _hookable(output: Tensor) -> Tensor:
    """Return the tensor whose hook is sure to fire.

    With a bias and an input of other than two axes `F.linear` returns a view, and an in-place operation on a view moves
    its place in the graph: a hook on it never fires. A hook on the base does, and sees the same elements.
    """
    base = output._base if output._is_view() else None
    return base if base is not None and base.numel() == output.numel() else output


def _disabled_in_compile(hook: Callable[..., None]) -> Callable[..., None]:
    # Importing the compiler takes seconds; where nobody has, nothing is compiled.
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _grad_enabled() -> bool:
    return torch.is_grad_enabled()


def trace(
    parts: Sequence[Watched], report: Report, *, wanted: Callable[[], bool] = lambda: True
) -> list[RemovableHandle]:
    """Put hooks on a composite module that follow the parts of each call where they are wanted."""
    module, composite = parts[0].module, parts[0].composite
    assert composite is not None, "only composite modules are traced"
    entered: list[TorchFunctionMode | None] = []

    def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if called is not module:
            return
        mode = composite.trace(module, args, kwargs, _disabled_in_compile(report)) if wanted() else None
        entered.append(mode)
        if mode is not None:
            mode.__enter__()

    def leave(called: nn.Module, *_: Any) -> None:
        if called is module and entered and (mode := entered.pop()) is not None:
            mode.__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(_Hook(_disabled_in_compile(enter)), with_kwargs=True),
        module.register_forward_hook(_Hook(_disabled_in_compile(leave)), prepend=True, always_call=True),
    ]


@contextmanager
def capture(modules: Mapping[str, Watched]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the keys of every call of the given layers while the context lasts."""
    captured: dict[str, list[Tensor]] = {name: [] for name in modules}
    handles = []
    composites: dict[int, dict[str, tuple[str, Watched]]] = {}
    for name, layer in modules.items():
        if layer.composite is not None:
            composites.setdefault(id(layer.module), {})[layer.part] = (name, layer)
            continue

        def hook(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            name: str = name,
            layer: Watched = layer,
        ) -> None:
            if module is layer.module:
                inputs = layer.kind.inputs(args, kwargs).detach()
                captured[name].append(layer.kind.keys(module, inputs).clone())

        handles.append(layer.module.register_forward_pre_hook(hook, with_kwargs=True))
    for parts in composites.values():

        def report(part: str, inputs: Any, _: Sequence[Tensor], parts: dict[str, Any] = parts) -> None:
            if part in parts:
                name, layer = parts[part]
                captured[name].append(layer.kind.keys(layer.module, inputs).clone())

        handles.extend(trace([layer for _, layer in parts.values()], report))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would hand nested tensors to the layers, or none
    try:
        yield captured
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
