"""A copy of a model that is run once more for a trial, so that nothing of the model itself is touched.

Raises `Untried` where a model cannot be copied, or where running the copy would do more than compute.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.overrides import TorchFunctionMode

from dualform.recording.buffer_pool import BufferPool

MAX_COPY_BYTES = 2 << 30  # parameters and buffers of a model that is copied for a trial

MAX_KEPT_BYTES = 32 << 20  # of a model's parameters, whose copies keep their memory between trials


class Untried(Exception):
    """A trial could not be made; the message says why."""


class NoDropout(TorchFunctionMode):
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


def copied_parameters(model: nn.Module, memory: BufferPool) -> dict[int, Any]:
    """Return copies of a small model's large parameters, by the originals' ids, in memory that is used again.

    Memory that is new to the process costs more than copying into it. What a large model would keep of it is not worth
    that, so its parameters are left to whoever copies the modules.
    """
    plain = [
        p
        for p in model.parameters()
        if type(p) is nn.Parameter and type(p.data) is Tensor and p.layout is torch.strided and p.is_contiguous()
    ]
    if sum(parameter.nbytes for parameter in plain) > MAX_KEPT_BYTES:
        return {}
    return {
        id(parameter): nn.Parameter(memory.copy(parameter.detach()), requires_grad=parameter.requires_grad)
        for parameter in plain
    }


def _unfreeze(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let no gradient reach the model's own parameters, which a copy of it may refer to through a closure."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        thawed = False
        try:
            _unfreeze(trained)
            thawed = True
        finally:
            if not thawed:
                _unfreeze(trained)  # once more: an interrupt has cut the first short


def check_copyable(model: nn.Module) -> None:
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
def not_called(model: nn.Module) -> Iterator[None]:
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
