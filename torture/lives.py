"""One life of a program with dualform, interrupted at a chosen stage, and everything that must hold afterwards.

Runs in a process of its own, which `torture.interrupts` starts and watches.
"""

import contextlib
import faulthandler
import gc
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack

import dualform
from torture.trainings import TRAININGS, Checkpoint, Training, answers, checkpoint, examine, kept_shares

with contextlib.suppress(ImportError):
    import pandas  # noqa: F401 (pyarrow imports it with its first table)

RECORDING = ("enter", "annotate", "forward", "backward", "step", "attach", "flush", "close")
READING = ("open", "attend", "totals", "verify", "apply", "add tests")
STEPS = 6  # that a recording here takes, at most
WAIT_SECONDS = 30.0  # for threads that publish in the background
OURS = str(Path(dualform.__file__).parent)
NAMES = ("momentum", "several optimizers", "keys only", "pools", "shares", "shares under Adam", "steps")
FEW = ("several optimizers", "shares")  # where time is short


@dataclass
class Aim:
    """Where the next interrupt is to come."""

    stage: str
    step: int  # in which step of a recording, for stages that come in each
    delay: float  # seconds after the stage begins
    again: float | None = None  # seconds after the first interrupt at which a second one comes
    sender: Connection | None = None  # asks another process for a SIGINT, instead of a timer


@dataclass
class Trigger:
    """Raises KeyboardInterrupt in the main thread when a signal comes, if a life is going on."""

    armed: int = 0  # interrupts that may still be raised
    raised: int = 0
    second: float | None = None
    stage: str = ""  # that is going on
    seconds: dict[str, float] = field(default_factory=dict)  # how long each stage takes, at most
    _began: float = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.armed:
            self.armed -= 1
            self.raised += 1
            if self.armed and self.second is not None:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, self.second))
            raise KeyboardInterrupt

    def begin(self, stage: str, step: int, aim: Aim | None) -> None:
        """Note that a stage begins, and let the interrupt come if it is aimed there."""
        now = time.perf_counter()
        if self.stage and aim is None:
            self.seconds[self.stage] = max(self.seconds.get(self.stage, 0.0), now - self._began)
        self.stage, self._began = stage, now
        if aim is not None and stage == aim.stage and step in (-1, aim.step):
            if aim.sender is not None:
                aim.sender.send(("shoot", aim.delay))
            else:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, aim.delay))


def record(
    training: Training, model: nn.Module, optimizers: Sequence[Optimizer], path: Path, trigger: Trigger, aim: Aim | None
) -> None:
    """Record a few steps, in stages."""
    trigger.begin("enter", -1, aim)
    with dualform.record(model, optimizers, path, **training.options) as recorder:
        for step in range(STEPS):
            trigger.begin("annotate", step, aim)
            recorder.annotate(**training.columns(step))
            inputs, labels = training.batch(step)
            trigger.begin("forward", step, aim)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            trigger.begin("backward", step, aim)
            loss.backward()
            trigger.begin("step", step, aim)
            for optimizer in optimizers:
                optimizer.step()
            if step == 1:
                trigger.begin("attach", -1, aim)
                recorder.tests(inputs)
            if step == 3:
                trigger.begin("flush", -1, aim)
                recorder.flush()
        trigger.begin("close", -1, aim)
    trigger.begin("", -1, aim)


def read(training: Training, model: nn.Module, path: Path, trigger: Trigger, aim: Aim | None) -> None:
    """Ask questions of a run, in stages; sums go into its cache."""
    inputs = torch.stack([training.sample(number) for number in range(3)])
    trigger.begin("open", -1, aim)
    memory = training.open(path)
    trigger.begin("attend", -1, aim)
    spotlight = memory.attend(model, inputs, targets=torch.zeros(3, dtype=torch.int64), other_model=True)
    trigger.begin("totals", -1, aim)
    spotlight["0"].totals(by="label")
    if training.exact:
        spotlight["2"].totals(by="label", of="contribution")
        if not isinstance(training.keep, dualform.Shares):
            spotlight.effects(by="label")
    trigger.begin("verify", -1, aim)
    memory.verify()
    if training.exact:
        trigger.begin("apply", -1, aim)
        memory.where(label=1).apply(model)
    trigger.begin("add tests", -1, aim)
    memory.add_tests(inputs)
    trigger.begin("", -1, aim)


def live(
    connection: Connection, folder: Path, names: Sequence[str], seed: int, count: int, stacks: Path, cores: int
) -> None:
    """Interrupt this process so many times, in trainings of these names; send (stage, kind, failures) of each."""
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(cores)
        warnings.simplefilter("ignore")
        sys.unraisablehook = lambda _: None  # an interrupt in a finalizer is dropped by the interpreter
        life = _Life(folder, names, random.Random(seed), connection)
        done = 0
        while done < count:
            connection.send(("alive",))
            found = life.interrupt()
            if found is not None:
                connection.send(("interrupted", *found))
                done += 1
        connection.send(("end",))


class _Life:
    """The lives of one process."""

    def __init__(self, folder: Path, names: Sequence[str], chance: random.Random, connection: Connection) -> None:
        self.folder, self.names, self.chance, self.connection = folder, names, chance, connection
        self.trigger = Trigger()
        signal.signal(signal.SIGALRM, self.trigger)
        signal.signal(signal.SIGINT, self.trigger)
        self.checkpoints = {name: TRAININGS[name].checkpoints() for name in names}
        self.number = 0
        self.torchs_own = False  # whether the last interrupt made torch's own code leave grad mode off
        self.seconds: dict[str, dict[str, float]] = {}
        for name in names:
            for _ in range(2):  # the first one imports what the second one does not
                self.trigger.seconds = self.seconds[name] = {}
                path = self.folder / f"whole {name}"
                shutil.rmtree(path, ignore_errors=True)
                model, optimizers = TRAININGS[name].at(self.checkpoints[name][0])
                record(TRAININGS[name], model, optimizers, path, self.trigger, None)
                read(TRAININGS[name], model, path, self.trigger, None)

    def interrupt(self) -> tuple[str, str, list[str]] | None:
        """Live once and be interrupted in any stage; see `interrupt_at`."""
        return self.interrupt_at(self.chance.choice((*RECORDING, *READING)))

    def interrupt_at(self, stage: str) -> tuple[str, str, list[str]] | None:
        """Live once and be interrupted; return the stage, the kind of interrupt and what is wrong, if one came."""
        name = self.chance.choice([name for name in self.names if stage in self.seconds[name]])
        training, checkpoints = TRAININGS[name], self.checkpoints[name]
        aim = Aim(stage, self.chance.randrange(STEPS), self.chance.random() * self.seconds[name][stage])
        kind = "by timer"
        if stage in RECORDING and self.chance.random() < 0.3:
            aim.again, kind = self.chance.random() * 2 * self.seconds[name]["close"], "twice"
        elif self.chance.random() < 0.25:
            aim.sender, kind = self.connection, "by SIGINT"
        self.number += 1
        path = self.folder / f"run{self.number}"
        reading = stage in READING
        if reading:
            shutil.copytree(self.folder / f"whole {name}", path)
            shutil.rmtree(path / "cache", ignore_errors=True)
        model, optimizers = training.at(checkpoints[STEPS if reading else 0])
        before = modes()
        trigger = self.trigger
        trigger.armed, trigger.raised, trigger.second = (2 if aim.again is not None else 1), 0, aim.again
        owner = "nobody"
        where = ""
        wrong: list[str] = []
        try:
            try:
                if reading:
                    read(training, model, path, trigger, aim)
                else:
                    record(training, model, optimizers, path, trigger, aim)
            finally:
                trigger.armed = 0
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:
            owner, where = raised_in(error.__traceback__)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            if trigger.raised and "get_tensor(" in (last.line or ""):
                kind += ", turned into another exception by safetensors"
            else:
                wrong.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        if aim.sender is not None:
            aim.sender.send(("landed",))
        stage = trigger.stage or stage
        trigger.stage = ""
        if not trigger.raised:
            shutil.rmtree(path, ignore_errors=True)
            return None
        kind = kind if trigger.raised > 1 else kind.replace("twice", "by timer")
        wrong += self._wrong(training, model, optimizers, path, before, owner)
        shutil.rmtree(path, ignore_errors=True)
        if self.torchs_own:
            kind += ", grad mode lost by torch"
        text = f"{name}, {stage} {kind} at {where}"
        return stage, kind, [f"{text}: {one}" for one in wrong]

    def _wrong(
        self,
        training: Training,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        path: Path,
        before: dict[str, Any],
        owner: str,
    ) -> list[str]:
        """Return everything that is not as it must be after an interrupt."""
        wrong = []
        checkpoints = self.checkpoints[training.name]
        gc.collect()
        end = time.monotonic() + WAIT_SECONDS
        while (left := threads()) and time.monotonic() < end:
            time.sleep(0.005)
        if left:
            wrong.append(f"threads are left: {left}")
        now = modes()
        self.torchs_own = now["grad"] != before["grad"] and owner == "torch"
        if self.torchs_own:
            now["grad"] = before["grad"]
        torch._C._set_grad_enabled(True)
        if now != before:
            wrong.append(f"modes were {before} and are {now}")
        if any(not module.training for module in model.modules()):
            wrong.append("modules are left in evaluation mode")
        if hooks := leftovers(model, optimizers):
            wrong.append(f"hooks are left: {hooks}")
        if not all(parameter.requires_grad for parameter in model.parameters()):
            wrong.append("parameters are left frozen")
        with _noted(wrong, "training on"):
            # The same model object is trained on without recording, from the start.
            model.load_state_dict(checkpoints[0].parameters)
            fresh = training.optimizers(model)
            for optimizer, at in zip(optimizers, fresh, strict=True):
                optimizer.load_state_dict(at.state_dict())
            for step in range(2):
                training.take(model, optimizers, step)
            assert_bits(checkpoint(model, optimizers), checkpoints[2])
        published = 0
        if (path / "manifest.json").exists():
            with _noted(wrong, "opening"):
                if ends_in_half_a_step(path):
                    published = examine_half_a_step(training, path, checkpoints)
                else:
                    published = examine(training, path, checkpoints)
        with _noted(wrong, "resuming"):
            if anew := training.keep == dualform.Steps():  # which are recorded in one go
                shutil.rmtree(path, ignore_errors=True)
                published = 0
            model, optimizers = training.at(checkpoints[published])
            options = {**training.options, "shard_bytes": 5000}
            recorder = dualform.record(model, optimizers, path, resume=not anew, **options)
            if (state := checkpoints[published].recorder) is not None:
                recorder.load_state_dict(state)
            with recorder:
                assert recorder.step == published, f"resumed at {recorder.step}, not {published}"
                for step in range(published, training.steps):
                    recorder.annotate(**training.columns(step))
                    training.take(model, optimizers, step)
            assert_bits(checkpoint(model, optimizers), checkpoints[-1])
            examine(training, path, checkpoints, ended=True)
            if self.chance.random() < 0.1:
                answers(training, path)
        return wrong


def ends_in_half_a_step(path: Path) -> bool:
    """Say whether only some of several optimizers made the last step: an interrupt came between them."""
    memory = dualform.open(path)
    facts = memory.steps()
    last = (
        [
            updated
            for step, updated in zip(facts["step"].to_pylist(), facts["updated"].to_pylist(), strict=True)
            if step == memory.step - 1
        ]
        if memory.step
        else []
    )
    return len(set(last)) > 1


def examine_half_a_step(training: Training, path: Path, checkpoints: Sequence[Checkpoint]) -> int:
    """Check a run whose last step only some of several optimizers made; return the number of whole steps."""
    memory = training.open(path)
    whole = memory.step - 1
    if not isinstance(training.keep, dualform.Shares) or whole in kept_shares(memory).horizons:
        assert memory.at(step=whole).verify(checkpoints[whole].parameters).passed
    assert not memory.info().closed or memory.verify().passed, "the end is not that of the half step"
    return whole


@contextlib.contextmanager
def _noted(wrong: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        wrong.append(f"{what}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")


def assert_bits(found: Checkpoint, expected: Checkpoint) -> None:
    """Check that parameters are the same to the bit."""
    for name, tensor in expected.parameters.items():
        assert torch.equal(found.parameters[name], tensor), f"{name} is not the same to the bit"


def modes() -> dict[str, Any]:
    """Return the modes of torch that an interrupt may leave changed."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "function modes": len(_get_current_function_mode_stack()),
        "threads": torch.get_num_threads(),
    }


def threads() -> list[str]:
    """Return the names of the threads of ours that write or publish.

    An interrupt within `Thread.start` can leave a thread in Python's list that was never begun, and has no number.
    """
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("dualform-")]
    return [thread.name for thread in ours if thread.ident is not None]


def leftovers(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the hooks that hang on a model, its parameters and its optimizers."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.{kind}" for kind, hooks in vars(module).items() if "_hooks" in kind and hooks]
    for name, parameter in model.named_parameters():
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        found += [f"{name}.{kind}" for kind in kinds if getattr(parameter, kind)]
    for optimizer in optimizers:
        found += [kind for kind, hooks in vars(optimizer).items() if kind.startswith("_optimizer_") and hooks]
    return found


def raised_in(trace: TracebackType | None) -> tuple[str, str]:
    """Return whose functions an interrupt came in, "dualform" if any is ours, else "torch"; and the innermost two."""
    frames = traceback.extract_tb(trace)
    ours = any(frame.filename.startswith(OURS) for frame in frames)
    interrupted = [frame for frame in frames if frame.name != "__call__" or "lives" not in frame.filename]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in interrupted[-2:]]
    return ("dualform" if ours else "torch"), " < ".join(reversed(places))
