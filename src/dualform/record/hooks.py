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
from torch.utils.hooks import RemovableHandle

from dualform.record.annotations import Binding
from dualform.record.watch import Watched, covered


@dataclass(slots=True, eq=False)
class Call:
    """One call of a watched layer, from its forward on."""

    layer: Watched
    number: int  # in the order of forward calls
    inputs: Tensor
    binding: Binding | None


@dataclass(slots=True, eq=False)
class Arrival:
    """The error of a call as one backward brought it; keys and values are copied when it is accumulated."""

    call: Call
    error: Tensor
    leading: Sequence[int] = ()  # the shape of the patterns
    keys: Tensor | None = None  # (T, d_in)
    values: Tensor | None = None  # (T, d_out)
    accumulated: bool = False

    def copy(self) -> None:
        """Copy key and value out of the user's reach."""
        layer = self.call.layer
        keys = layer.kind.keys(layer.module, self.call.inputs)
        self.leading = keys.shape[:-1]
        self.keys = keys.reshape(-1, layer.d_in).clone()
        self.values = layer.kind.values(layer.module, self.call.inputs, self.error).reshape(-1, layer.d_out).clone()
        self.accumulated = True


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


@dataclass(slots=True)
class Hooks:
    """The hooks of one recording; attached once, detached for good."""

    layers: Sequence[Watched]
    listener: Listener
    enabled: bool = False
    calls: int = 0
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)  # graph task -> what it brought
    handles: list[RemovableHandle] = field(default_factory=list)
    watching: set[str] = field(default_factory=set)  # parameters with accumulation hooks

    def attach(self) -> None:
        """Put the hooks on."""
        self.enabled = True
        for layer in self.layers:
            hook = _Hook(_disabled_in_compile(self._forward_hook(layer)))
            self.handles.append(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        for name, parameter in covered(self.layers).items():
            if parameter.requires_grad:
                self._watch_parameter(name, parameter)

    def _watch_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Put the accumulation hooks on a parameter."""
        self.watching.add(name)

        def before(_: Tensor) -> None:
            if self.enabled:
                self.listener.before_accumulation(name, parameter)

        def after(_: Tensor) -> None:
            if self.enabled:
                task = torch._C._current_graph_task_id()
                mine = [
                    arrival
                    for arrival in self.arrivals.get(task, ())
                    if any(used is parameter for _, used in arrival.call.layer.parameters.values())
                ]
                for arrival in mine:
                    if not arrival.accumulated:
                        arrival.copy()
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
            if not self.enabled or module is not layer.module or not output.requires_grad:
                return
            trained = [(name, used) for name, used in layer.parameters.values() if used.requires_grad]
            for name, parameter in trained:
                if name not in self.watching:  # unfrozen since the recording began
                    self._watch_parameter(name, parameter)
            if not trained:
                return
            inputs = layer.kind.inputs(args, kwargs).detach()
            kept = any(used.requires_grad for role, (_, used) in layer.parameters.items() if role != "bias")
            if not kept or torch.is_autocast_enabled(inputs.device.type):
                inputs = inputs.clone()  # autograd does not keep this very input, so it may be overwritten
            call = Call(layer, self.calls, inputs, self.listener.binding_for_forward())
            self.calls += 1

            def arrive(error: Tensor) -> None:
                if not self.enabled:
                    return
                if error.requires_grad:
                    self.listener.create_graph_seen(layer.name)
                task = torch._C._current_graph_task_id()
                if task not in self.arrivals:
                    self.arrivals[task] = []
                    # What was not accumulated by the end of this backward never will be.
                    Variable._execution_engine.queue_callback(lambda: self._end(task))
                self.arrivals[task].append(Arrival(call, error.detach()))

            _hookable(output).register_hook(arrive)

        return forward


class _Hook:
    """A forward hook that stays behind: a copied or pickled model gets one that does nothing and holds nothing."""

    def __init__(self, hook: Callable[..., None] | None = None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if self._hook is not None:
            self._hook(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


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


@contextmanager
def capture(modules: Mapping[str, Watched]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the keys of every call of the given layers while the context lasts."""
    captured: dict[str, list[Tensor]] = {name: [] for name in modules}
    handles = []
    for name, layer in modules.items():

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
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
