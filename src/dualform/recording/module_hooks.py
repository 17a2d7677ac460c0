"""Hooks that can always be taken off again, and forward hooks on a module that no copy and no pickle of it holds.

An interrupt (Ctrl-C) may come between a hook's registration and the moment when somebody holds the handle to remove it
by, or in the midst of torch's own registration. So a handle is made and kept first, then its hook is put on; and it is
removed by looking for the hook itself where torch keeps it.

torch keeps a module's hooks in dictionaries on the module, and copies and pickles them with it. A pickled hook of ours
would need dualform where the model is loaded. So each dictionary that holds such a hook gets a `__reduce_ex__` of its
own, which leaves those hooks out, and loses it with its last hook.

Hooks for all modules of the process (`torch.nn.modules.module.register_module_forward_hook`) would keep off the modules
too, but every call of every module then costs 2.1 µs instead of 0.8, and torch.compile warns of them and compiled
nothing of a network of five layers, where hooks on two of the layers break its graph once (torch 2.13 on a CPU).
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_REDUCE = "__reduce_ex__"
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class ModuleHook:
    """A forward hook of ours; a copy of it does nothing and holds nothing.

    Copies come to be where somebody copies a module's dictionary of hooks by hand.
    """

    def __init__(
        self, hook: Callable[..., Any] | None = None, arguments: int = 0, unless: Sequence[Any] | None = None
    ) -> None:
        """Call a hook.

        Args:
            hook: what is called; None to do nothing.
            arguments: the number of its arguments.
            unless: a list; while it has entries the hook is not called. torch.compile does not look at it.
        """
        self._hook = hook
        self._arguments = arguments
        self._unless = unless

    def __call__(self, *args: Any) -> Any:
        """Call the hook; not with fewer arguments than it takes, as torch does while another thread removes it."""
        unless = self._unless
        if unless is not None and not torch.compiler.is_dynamo_compiling() and unless:
            return None
        return self._hook(*args) if self._hook is not None and len(args) == self._arguments else None

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        return ModuleHook, ()


class HookHandle:
    """Removes one hook from where torch keeps it, however far its registration came."""

    def __init__(self, hook: Callable[..., Any], kept_in: Callable[[], Sequence[dict[int, Any] | None]]) -> None:
        """Make a handle for a hook that is about to be put on.

        Args:
            hook: the hook, an object that is put on once.
            kept_in: returns the dictionaries, by number of hook, in which torch keeps it: first that of the hooks
                themselves, then those that say how to call them.
        """
        self._hook = hook
        self._kept_in = kept_in

    def numbers(self) -> list[int]:
        """Return the numbers under which torch keeps the hook; none where it is not on."""
        hooks = self._kept_in()[0]
        return [number for number, found in list((hooks or {}).items()) if found is self._hook]

    @property
    def is_last(self) -> bool:
        """Whether no other hook comes after this one, or it is not on."""
        mine, hooks = self.numbers(), self._kept_in()[0]
        return not mine or not hooks or next(reversed(hooks)) in mine

    def remove(self) -> None:
        """Remove the hook; does nothing where that is done."""
        for number in self.numbers():
            for hooks in reversed(self._kept_in()):  # the hook itself last: an interrupted removal finds it again
                if hooks is not None:
                    hooks.pop(number, None)


class ModuleHandle(HookHandle):
    """Removes one forward hook from its module, and what left it out of copies."""

    def __init__(self, module: nn.Module, hook: "ModuleHook", dictionaries: tuple[str, ...]) -> None:
        super().__init__(hook, lambda: [getattr(module, name) for name in dictionaries])

    def hide(self) -> None:
        """Leave the hook, which is on, out of copies and pickles of the module."""
        for number in self.numbers():
            for hooks in self._kept_in():
                if hooks is not None:
                    _hide(hooks, number)

    def remove(self) -> None:
        """Remove the hook, and what left it out of copies."""
        for number in self.numbers():
            for hooks in self._kept_in():
                hiding = None if hooks is None else getattr(hooks, "__dict__", {}).get(_REDUCE)
                if isinstance(hiding, _Hiding):
                    hiding.show(number)
        super().remove()


def hook_forward(handles: list[Any], module: nn.Module, hook: Callable[..., Any], *, always_call: bool = False) -> None:
    """Call hook(module, args, kwargs, output) after each forward of a module, before the user's own hooks.

    The handle is in `handles` before the hook is on, here as in all functions that put hooks on.
    """
    ours = ModuleHook(hook, 4)
    handle = ModuleHandle(module, ours, _AFTER)
    handles.append(handle)
    module.register_forward_hook(ours, prepend=True, with_kwargs=True, always_call=always_call)
    handle.hide()


def hook_before_forward(
    handles: list[Any], module: nn.Module, hook: Callable[..., None], *, unless: Sequence[Any] | None = None
) -> None:
    """Call hook(module, args, kwargs) before each forward of a module, after the user's hooks that are there.

    Args:
        handles: takes the hook's handle.
        module: the module.
        hook: the hook.
        unless: a list; while it has entries the hook would do nothing, and is not called, which costs less.
    """
    ours = ModuleHook(hook, 3, unless)
    handle = ModuleHandle(module, ours, _BEFORE)
    handles.append(handle)
    module.register_forward_pre_hook(ours, with_kwargs=True)
    handle.hide()


def hook_accumulation(
    handles: list[Any], parameter: Tensor, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Call before(gradient) and after(parameter) when a backward adds to a parameter's gradient."""
    handles.append(HookHandle(before, lambda: [parameter._backward_hooks]))
    parameter.register_hook(before)
    handles.append(HookHandle(after, lambda: [parameter._post_accumulate_grad_hooks]))
    parameter.register_post_accumulate_grad_hook(after)


def hook_step(
    handles: list[HookHandle], optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Call before(optimizer, args, kwargs) and after(...) around each step of an optimizer."""
    handles.append(HookHandle(before, lambda: [optimizer._optimizer_step_pre_hooks]))
    optimizer.register_step_pre_hook(before)
    handles.append(HookHandle(after, lambda: [optimizer._optimizer_step_post_hooks]))
    optimizer.register_step_post_hook(after)


def remove_hooks(handles: Iterable[Any]) -> None:
    """Take hooks off."""
    for handle in handles:
        handle.remove()


@contextmanager
def temporary_hooks() -> Iterator[list[Any]]:
    """Yield a list for the handles of hooks, all of which are taken off when the context ends."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        removed = False
        try:
            remove_hooks(handles)
            removed = True
        finally:
            if not removed:
                remove_hooks(handles)  # once more: an interrupt has cut the first short


class _Hiding:
    """The `__reduce_ex__` of one dictionary of hooks, which leaves out the hidden ones."""

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks = weakref.ref(hooks)
        self.hidden: set[int] = set()

    def __call__(self, protocol: int) -> tuple[Any, ...]:
        hooks = self._hooks()
        assert hooks is not None, "a dictionary outlives its own attribute"
        left = [(number, hook) for number, hook in hooks.items() if number not in self.hidden]
        others = {name: value for name, value in vars(hooks).items() if name != _REDUCE}
        return OrderedDict, (), others or None, None, iter(left)

    def show(self, number: int) -> None:
        """Stop hiding a hook; without any, leave the dictionary as it was."""
        self.hidden.discard(number)
        hooks = self._hooks()
        if not self.hidden and hooks is not None and vars(hooks).get(_REDUCE) is self:
            del vars(hooks)[_REDUCE]


def _hide(hooks: dict[int, Any], number: int) -> None:
    """Leave a hook out of copies and pickles of its dictionary; not where that cannot be, or there is no such hook."""
    if type(hooks) is not OrderedDict or number not in hooks:
        return
    hiding = vars(hooks).setdefault(_REDUCE, _Hiding(hooks))
    if isinstance(hiding, _Hiding):
        hiding.hidden.add(number)
