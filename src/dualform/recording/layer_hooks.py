"""Hooks that report every call of a model's layers: what recording, queries, effects and trials of rows share.

A forward hook on its module sees a plain layer's call. The layers inside a composite module (recurrent, attention) are
followed by a trace of the module's call. What training accumulates is noted in `dualform.recording.hooks`; the contexts
here are for passes that ask something of a model and train nothing.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from dualform.recording.layers import Report
from dualform.recording.module_hooks import HookHandle, hook_before_forward, hook_forward, temporary_hooks
from dualform.recording.watch import Watched


class CallReport(Protocol):
    """Takes one call of a layer, as soon as its outputs are there."""

    def __call__(self, inputs_of: Callable[[], Any], outputs: Sequence[Tensor], /) -> None:
        """Take a call: a function that returns its input as the layer's kind takes it, and its outputs."""


def hook_layers(
    handles: list[Any],
    layers: Iterable[Watched],
    report_of: Callable[[Watched], CallReport],
    *,
    plain: Callable[[Watched], Callable[..., None]] | None = None,
    wanted: Callable[[], bool] = lambda: True,
    failed: Callable[[Watched, Exception], None] | None = None,
) -> None:
    """Put hooks on layers that report each call.

    Args:
        handles: takes each hook's handle as soon as the hook is on, so that an interrupt leaves none behind.
        layers: the layers.
        report_of: returns what takes the calls of a layer.
        plain: returns the forward hook of a layer that is a module of its own, hook(module, args, kwargs, output); by
            default one that reports to `report_of`.
        wanted: says before a call of a composite module whether to follow it.
        failed: takes an error that was met before a composite module's call could be followed; by default it is raised.
    """
    composites: dict[int, list[Watched]] = {}
    for layer in layers:
        if layer.composite is not None:
            composites.setdefault(id(layer.module), []).append(layer)
        else:
            hook = _forward_hook(layer, report_of(layer)) if plain is None else plain(layer)
            hook_forward(handles, layer.module, disabled_in_compile(hook))
    for parts in composites.values():
        trace = Trace(parts, _report_of_parts(parts, report_of), wanted, failed)
        handles.append(trace)
        trace.put_on()


def _forward_hook(layer: Watched, report: CallReport) -> Callable[..., None]:
    def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        # A copy that copy.copy or a replica made carries this hook along, hence the identity test.
        if module is layer.module:
            report(lambda: layer.kind.inputs(args, kwargs), [output])

    return forward


def _report_of_parts(parts: Sequence[Watched], report_of: Callable[[Watched], CallReport]) -> Report:
    """Return what takes the calls of a composite module's parts."""
    reports = {layer.part: report_of(layer) for layer in parts}

    def report(part: str, inputs_of: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
        if part in reports:
            reports[part](inputs_of, outputs)

    return report


class Trace:
    """Hooks on a composite module that follow the parts of each call."""

    def __init__(
        self,
        parts: Sequence[Watched],
        report: Report,
        wanted: Callable[[], bool],
        failed: Callable[[Watched, Exception], None] | None,
    ) -> None:
        """Make the hooks, which are not on yet.

        Args:
            parts: the watched layers of one module.
            report: takes each part's call.
            wanted: says before a call whether to follow it.
            failed: takes an error that was met before a call could be followed; by default it is raised.
        """
        assert parts[0].composite is not None, "only composite modules are traced"
        self._first = parts[0]
        self._module, self._composite = parts[0].module, parts[0].composite
        self._report, self._wanted, self._failed = report, wanted, failed
        self._entered: list[TorchFunctionMode | None] = []
        self._handles: list[HookHandle] = []

    def put_on(self) -> None:
        """Put the hooks on."""
        hook_before_forward(self._handles, self._module, disabled_in_compile(self._enter))
        hook_forward(self._handles, self._module, disabled_in_compile(self._leave), always_call=True)

    @property
    def running(self) -> bool:
        """Whether a call of the module has begun and, as far as its hooks know, not ended."""
        return bool(self._entered)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_lost_calls()

    def _enter(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if called is not self._module:
            return
        self._end_lost_calls()
        mode = None
        if self._wanted():
            try:
                mode = self._composite.trace(self._module, args, kwargs, disabled_in_compile(self._report))
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(self._first, error)
        self._entered.append(mode)
        if mode is not None:
            mode.__enter__()

    def _leave(self, called: nn.Module, *_: Any) -> None:
        if called is self._module and self._entered and (mode := self._entered.pop()) is not None:
            mode.__exit__(None, None, None)

    def _end_lost_calls(self) -> None:
        """End the calls whose end no hook was told of: torch calls none after an interrupt (Ctrl-C) in a forward."""
        while self._entered:
            mode = self._entered.pop()
            if mode is not None and any(mode is top for top in _get_current_function_mode_stack()[-1:]):
                mode.__exit__(None, None, None)


def hookable(output: Tensor) -> Tensor:
    """Return the tensor whose hook is sure to fire.

    With a bias and an input of other than two axes `F.linear` returns a view, and an in-place operation on a view moves
    its place in the graph: a hook on it never fires. A hook on the base does, and sees the same elements.
    """
    base = output._base if output._is_view() else None
    return base if base is not None and base.numel() == output.numel() else output


def disabled_in_compile(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile leaves alone.

    Importing the compiler takes seconds; where nobody has, nothing is compiled. Where somebody has, `torch.optim` for
    one, the compiler's own wrapper takes longer than a small hook, so it is used inside compiled programs only: where
    the compiler reads this function, or runs what it could not compile.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    wrapped: Callable[..., None] = torch.compiler.disable(hook)
    compiler = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if compiler is None:  # another version of torch
        return wrapped

    def called(*args: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or compiler() is not None:
            wrapped(*args)
        else:
            hook(*args)

    return called


@contextmanager
def _hooked(layers: Iterable[Watched], report_of: Callable[[Watched], CallReport]) -> Iterator[None]:
    """Report each call of layers that the calling thread makes while the context lasts.

    Other threads may ask the same model at the same time, and have hooks of their own on it.
    """
    thread = threading.get_ident()

    def report_here(layer: Watched) -> CallReport:
        report = report_of(layer)

        def of_this_thread(inputs_of: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
            if threading.get_ident() == thread:
                report(inputs_of, outputs)

        return of_this_thread

    asking = object()
    try:
        with temporary_hooks() as handles:
            hook_layers(handles, layers, report_here, wanted=lambda: threading.get_ident() == thread)
            _fast_path.switch_off(asking)  # it would hand nested tensors to the layers, or none
            yield
    finally:
        try:
            _fast_path.switch_back(asking)
        finally:
            _fast_path.switch_back(asking)  # once more: an interrupt may have cut the first short


class _FastPath:
    """The process's switch of attention's fast path: off while anybody asks, then as it was before the first."""

    def __init__(self) -> None:
        self._asking: set[object] = set()
        self._before = True
        self._lock = threading.Lock()

    def switch_off(self, asking: object) -> None:
        """Switch the fast path off, until this one switches it back."""
        with self._lock:
            if not self._asking:
                self._before = torch.backends.mha.get_fastpath_enabled()
            self._asking.add(asking)
            torch.backends.mha.set_fastpath_enabled(False)

    def switch_back(self, asking: object) -> None:
        """Put the fast path back, if nobody else wants it off; does nothing where that is done."""
        with self._lock:
            if asking in self._asking:
                if len(self._asking) == 1:
                    torch.backends.mha.set_fastpath_enabled(self._before)
                self._asking.discard(asking)  # last: an interrupt before this lets the next call do it all


_fast_path = _FastPath()


@contextmanager
def catch_keys(layers: Mapping[str, Watched]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the keys (..., d_in) of every call of layers while the context lasts."""
    caught: dict[str, list[Tensor]] = {name: [] for name in layers}
    names = {id(layer): name for name, layer in layers.items()}

    def report_of(layer: Watched) -> CallReport:
        def report(inputs_of: Callable[[], Any], _: Sequence[Tensor]) -> None:
            inputs = inputs_of()
            inputs = inputs.detach() if isinstance(inputs, Tensor) else inputs
            caught[names[id(layer)]].append(layer.kind.keys(layer.module, inputs).clone())

        return report

    with _hooked(layers.values(), report_of):
        yield caught


@dataclass(slots=True, eq=False)
class CaughtCall:
    """One call of a layer, with the errors that a backward brought to its outputs."""

    layer: Watched
    inputs: Any
    leading: tuple[int, ...]  # the shape of its patterns
    errors: list[Tensor | None]  # at each output; None where none came

    @property
    def reached(self) -> bool:
        """Whether the backward pass came to any output of this call."""
        return any(error is not None for error in self.errors)

    def keys(self) -> Tensor:
        """Return the keys, (..., d_in)."""
        return self.layer.kind.keys(self.layer.module, self.inputs)

    def values(self, like: Tensor) -> Tensor:
        """Return the gradients at its outputs, (n, d_out); zeros where the backward pass did not come."""
        if not self.reached:
            return like.new_zeros(math.prod(self.leading), self.layer.d_out)
        kind = self.layer.kind
        return kind.errors(self.layer.module, self.inputs, self.errors).detach().reshape(-1, self.layer.d_out)


@contextmanager
def catch_calls(
    layers: Mapping[str, Watched], edges: list[GradientEdge] | None = None
) -> Iterator[dict[str, list[CaughtCall]]]:
    """Collect every call of layers while the context lasts; errors arrive at a call when a backward comes to it.

    Args:
        layers: the layers, by name.
        edges: takes the places in the graph to which a backward has to come for that; they hold on to the graph.
    """
    caught: dict[str, list[CaughtCall]] = {name: [] for name in layers}
    names = {id(layer): name for name, layer in layers.items()}

    def report_of(layer: Watched) -> CallReport:
        def report(inputs_of: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
            inputs = inputs_of()
            if layer.composite is None:
                inputs = inputs.detach().clone()
            leading = layer.kind.leading(layer.module, inputs)
            call = CaughtCall(layer, inputs, leading, [None] * len(outputs))
            caught[names[id(layer)]].append(call)
            for i, output in enumerate(outputs):
                if output.requires_grad:
                    place = hookable(output)
                    place.register_hook(_arrive(call, i, output.shape))
                    if edges is not None:
                        edges.append(get_gradient_edge(place))

        return report

    with _hooked(layers.values(), report_of):
        yield caught


def _arrive(call: CaughtCall, output: int, shape: torch.Size) -> Callable[[Tensor | None], None]:
    """Return a tensor hook that keeps the error at an output of a call."""

    def arrive(error: Tensor | None) -> None:
        if error is not None:
            call.errors[output] = error.detach().reshape(shape)

    return arrive
