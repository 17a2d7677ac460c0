"""Forward hooks on a module that no copy and no pickle of the module holds.

torch keeps a module's hooks in dictionaries on the module, and copies and pickles them with it. A pickled hook of ours
would need dualform where the model is loaded. So each dictionary that holds such a hook gets a `__reduce_ex__` of its
own, which leaves those hooks out, and loses it with its last hook.

Hooks for all modules of the process (`torch.nn.modules.module.register_module_forward_hook`) would keep off the modules
too, but every call of every module then costs 2.1 µs instead of 0.8, and torch.compile warns of them and compiled
nothing of a network of five layers, where hooks on two of the layers break its graph once (torch 2.13 on a CPU).
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_REDUCE = "__reduce_ex__"
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class ModuleHook:
    """A forward hook of ours; a copy of it does nothing and holds nothing.

    Copies come to be where somebody copies a module's dictionary of hooks by hand.
    """

    def __init__(self, hook: Callable[..., None] | None = None, arguments: int = 0) -> None:
        self._hook = hook
        self._arguments = arguments

    def __call__(self, *args: Any) -> None:
        """Call the hook; not with fewer arguments than it takes, as torch does while another thread removes it."""
        if self._hook is not None and len(args) == self._arguments:
            self._hook(*args)

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        return ModuleHook, ()


class ModuleHandle:
    """Removes one hook from its module."""

    def __init__(self, module: nn.Module, handle: RemovableHandle, dictionaries: tuple[str, ...]) -> None:
        self._handle = handle
        self._hidden_in: list[_Hiding] = []
        try:
            for name in dictionaries:
                if (hiding := _hide(getattr(module, name), handle.id)) is not None:
                    self._hidden_in.append(hiding)
        except BaseException:  # an interrupt: nobody will have this handle to remove the hook by
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the hook, and what left it out of copies."""
        self._handle.remove()
        for hiding in self._hidden_in:
            hiding.show(self._handle.id)
        self._hidden_in.clear()


def hook_forward(module: nn.Module, hook: Callable[..., None], *, always_call: bool = False) -> ModuleHandle:
    """Call hook(module, args, kwargs, output) after each forward of a module, before the user's own hooks."""
    handle = module.register_forward_hook(ModuleHook(hook, 4), prepend=True, with_kwargs=True, always_call=always_call)
    return ModuleHandle(module, handle, _AFTER)


def hook_before_forward(module: nn.Module, hook: Callable[..., None]) -> ModuleHandle:
    """Call hook(module, args, kwargs) before each forward of a module, after the user's hooks that are there."""
    return ModuleHandle(module, module.register_forward_pre_hook(ModuleHook(hook, 3), with_kwargs=True), _BEFORE)


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
        try:
            remove_hooks(handles)
        finally:
            remove_hooks(handles)  # once more: an interrupt may have cut the first short


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


def _hide(hooks: dict[int, Any], number: int) -> _Hiding | None:
    """Leave a hook out of copies and pickles of its dictionary; None where that cannot be, or there is no such hook."""
    if type(hooks) is not OrderedDict or number not in hooks:
        return None
    hiding = vars(hooks).setdefault(_REDUCE, _Hiding(hooks))
    if not isinstance(hiding, _Hiding):
        return None
    hiding.hidden.add(number)
    return hiding
