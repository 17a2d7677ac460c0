"""Processes that run out of batches at different times: `with Join([model, recorder]):` of torch.distributed.

A process without batches takes no more steps, and the others go on. DistributedDataParallel has it add zeros wherever
the others reduce gradients. Here it adds zeros to what recorders tell each other, on a thread of its own, until no
process has batches left: before every exchange the others say how many numbers come. After a step they tell its facts,
so that every process has recorded every step, and process 0 logs the facts of all of them.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor, nn

from dualform.errors import RefusedError
from dualform.recording.recorded_optimizers import RecordedOptimizer
from dualform.recording.sinks import AgreeingSink, ParameterFacts, Sink, WholeStepSink
from dualform.recording.world import World

T = TypeVar("T")
TakeStep = Callable[[Sequence[ParameterFacts], Mapping[str, Tensor]], None]
"""Takes the facts of a step that others have made, and a sample of each parameter after it."""
REMEDY = (
    "Take the recorder along: with torch.distributed.algorithms.join.Join([model, recorder]); or give every process "
    "the same number of batches (torch.utils.data.DistributedSampler does)."
)

_ended: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""A wrapper -> how it joined last time, which has ended: torch leaves it with the wrapper."""


class UnevenWorld:
    """Processes of which some may have no batches left.

    Attributes:
        uneven: whether exchanges are announced, because a process may take part in them with zeros.
    """

    def __init__(self, world: World) -> None:
        self.uneven = False
        self._world = world
        self._shadows = 0  # how many processes took part with zeros in the last exchange

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._world.rank

    @property
    def size(self) -> int:
        """The number of processes, those without batches included."""
        return self._world.size

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes; those without batches add zeros."""
        if self.uneven:
            self._meet(tensor.numel(), tells=False)
        return self._world.sum(tensor)

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set in any process; not where exchanges are announced."""
        return self._world.any(flag)

    def gather(self, value: T) -> list[T]:
        """Return the value of every process; not where exchanges are announced."""
        return self._world.gather(value)

    def exchange(self, outgoing: Tensor, sizes: Sequence[int], incoming: Sequence[int]) -> Sequence[Tensor]:
        """Return what every process sends to this one; not where exchanges are announced."""
        return self._world.exchange(outgoing, sizes, incoming)

    def barrier(self) -> None:
        """Return when every process has come here, or is not expected to any more."""
        self._world.barrier()

    def tell(self, facts: Sequence[ParameterFacts], samples: Mapping[str, Tensor]) -> None:
        """Tell the processes without batches, if there are any, of a step that the others have made."""
        if self.uneven and self._shadows:
            self._meet(0, tells=True)
            self._world.gather((facts, {name: sample.cpu() for name, sample in samples.items()}))

    def shadow(self, take: TakeStep) -> None:
        """Add zeros to the exchanges of the others until no process has batches left; `take` gets every step."""
        while True:
            count, shadows, telling = self._world.sum(torch.tensor([0, 1, 0])).tolist()
            if shadows == self.size:
                return
            if telling:
                told: Sequence[Any] = self._world.gather(None)
                take(*next(one for one in told if one is not None))
            else:
                self._world.sum(torch.zeros(count // (self.size - shadows), dtype=torch.float64))

    def _meet(self, count: int, *, tells: bool) -> None:
        """Announce an exchange of some numbers, or of a step."""
        self._shadows = int(self._world.sum(torch.tensor([count, 0, int(tells)]))[1])


class JoinHook:
    """What `Join` calls in a process that has no batches left, and at the end in all of them."""

    def __init__(self, world: UnevenWorld, take: TakeStep, end: Callable[[], None]) -> None:
        """Prepare the end of a process's batches.

        Args:
            world: the processes.
            take: takes a step that other processes have made.
            end: is called when no process has any.
        """
        self._world = world
        self._take = take
        self._end = end
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def main_hook(self) -> None:
        """Begin to add zeros to the exchanges of the others; called again and again while they have batches."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._shadow, name="dualform-join", daemon=True)
            self._thread.start()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Go on together with the other processes."""
        if self._thread is None:
            self._shadow()
        else:
            self._thread.join()
        self._world.uneven = False
        if self._failure is not None:
            raise self._failure
        self._end()

    def _shadow(self) -> None:
        try:
            self._world.shadow(self._take)
        except BaseException as error:  # raised on the thread that trains
            self._failure = error


def state_digest(optimizers: Sequence[RecordedOptimizer], parameters: Mapping[str, Tensor]) -> int:
    """Return a checksum of all bits of parameters and of the optimizers' state, in 32 bits."""
    digest = xxhash.xxh32()
    for name, parameter in parameters.items():
        digest.update(name.encode())
        _add(digest, parameter)
    for owned in optimizers:
        for name, parameter in owned.parameters.items():
            for entry, value in sorted(owned.optimizer.state.get(parameter, {}).items()):
                digest.update(f"{name} {entry}".encode())
                _add(digest, value)
    return int(digest.intdigest())


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())


def begin_join(world: World, config: Any) -> None:
    """Announce exchanges from now on, where `Join` is enabled; refuse a recorder that it names first."""
    if config.enable and config.is_first_joinable:
        raise RefusedError("Join names the recorder first. Name the model first: Join([model, recorder]).")
    assert isinstance(world, UnevenWorld), "other worlds have no hook"
    world.uneven = config.enable


def note_ended(model: nn.Module) -> None:
    """Note that the join of a wrapper has ended, of which torch leaves no sign."""
    _ended[model] = getattr(model, "_join_config", None)


def refuse_moved(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> RefusedError | None:
    """Return the refusal of a recording whose parameters after a join are not those after its last step, if so."""
    moved = [name for name, sample in before.items() if not torch.equal(sample, now[name].cpu())]
    if not moved:
        return None
    return RefusedError(
        f"Parameter {moved[0]!r} is not as the last step left it when all processes had joined: something other than "
        "the recorded optimizer moved it. Let the optimizer that was handed to record() make every update."
    )


def refuse_stale_state() -> RefusedError:
    """Return the refusal of a step whose processes have different states of their optimizers."""
    return RefusedError(
        "The optimizers' state or the parameters are not the same in all processes. After join() they are not: a "
        "process that had no batches left took no steps, and its momentum or moments stayed behind, which torch does "
        "not bring over. Load the optimizer's state of the process that went on longest into all others after the "
        "join, use an optimizer without state, or give every process the same number of batches."
    )


def refuse_to_join(world: World, sink: Sink, optimizers: int, *, recording: bool, detaches: bool) -> UnevenWorld:
    """Return the processes of a recording, or refuse to record where some of them may run out of batches.

    Args:
        world: the processes.
        sink: takes the recording.
        optimizers: how many optimizers are recorded.
        recording: whether the recording has begun.
        detaches: whether a failure ends the recording and not the training.
    """
    if not isinstance(world, UnevenWorld):
        raise RefusedError(
            "Join([model, recorder]) needs a recorder of the DistributedDataParallel model itself. Hand the wrapped "
            "model to record()."
        )
    if not recording:
        raise RefusedError(
            "Join([model, recorder]) has a recorder that does not record. Open Join inside of `with "
            "dualform.record(...) as recorder:`."
        )
    if detaches:
        raise RefusedError(
            'Join([model, recorder]) has a recorder with on_failure="detach": a process without batches would wait for '
            "a recording that has ended. Leave on_failure out."
        )
    if optimizers > 1:  # a step that waits for another one would be told of while DDP waits for this process, in vain
        raise RefusedError(
            f"Join([model, recorder]) has a recorder of {optimizers} optimizers: where one of them does not take every "
            "step, a process would run out of batches in the middle of a step. Use one optimizer, with several groups "
            "of parameters; or give every process the same number of batches while you record."
        )
    if isinstance(sink, AgreeingSink) or (isinstance(sink, WholeStepSink) and sink.needs_whole_steps()):
        raise RefusedError(
            "Join([model, recorder]) has a recorder that keeps shares or steps: a process without batches has no steps "
            "of its own to fold or to prove. Keep patterns, or give every process the same number of batches."
        )
    return world


def refuse_join(model: nn.Module, known: Any) -> None:
    """Refuse a step inside of `model.join()` that the recorder does not take part in: the others would wait for it.

    Args:
        model: the model with its wrapper.
        known: how the wrapper joins where the recorder takes part.
    """
    config = getattr(model, "_join_config", None)
    if getattr(config, "enable", False) and config is not known and config is not _ended.get(model):
        raise RefusedError(
            "This step is inside of DistributedDataParallel.join(), where processes may run out of batches, and the "
            f"recorder takes no part in it. {REMEDY} Where the join had ended before the recording began, which torch "
            "does not tell: make Join([model], enable=False) once, in every process, before you record."
        )
