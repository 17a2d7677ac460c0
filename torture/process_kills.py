"""SIGKILL of one or of all of the processes that record a training together: nothing published is lost.

Two processes train a small network over gloo, with DistributedDataParallel or fully_shard, and publish often. At a
random moment one of them is killed, or both. Then the run must hold every step that both had published before, rebuild
the weights of its last step, and go on from a checkpoint; after the last kill it must come to its end with all steps,
each once.
"""

import copy
import datetime
import functools
import multiprocessing
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dualform
from dualform.errors import DualformError, RunNotFoundError
from dualform.store.reader import Run
from torture.outcome import Outcome

FULL, SHORT = 40, 2  # kills, half of them of one process and half of all
SIZE = 2  # processes
ROWS = 4  # of each process in a step
STEPS = 24
CHAIN = 4  # kills of one recording, at most
PATIENCE_SECONDS = 30.0  # that a process may take after the other was killed, and to come to its end
LATE_SECONDS = 5.0  # beyond the patience of torch.distributed, on a busy machine
POLL_SECONDS = 0.02  # between two looks at how many steps are published
EARLY_PART = 0.2  # of the kills come at a random time from the start of the processes
EARLY_SECONDS = 0.5
FLUSHED = 4  # shares are published after so many steps

PRELOADED = (dualform.record, dualform.open)
"""Names whose modules are imported when they are first asked for: here once, and not in each process."""
Victims = Literal["one", "all"]


@dataclass(frozen=True)
class JointTraining:
    """A training of two processes, by name; what is kept of it, and what each step left of it without recording."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    divided: bool = False  # whether each process has some rows of the weights

    @property
    def keeps_shares(self) -> bool:
        """Whether shares are kept, which go on from published ones only."""
        return isinstance(self.options.get("keep"), dualform.Shares)

    @property
    def keeps_steps(self) -> bool:
        """Whether steps are kept, which are asked by a replay in as many processes, and recorded anew after a kill."""
        return isinstance(self.options.get("keep"), dualform.Steps)


TRAININGS = (
    JointTraining("patterns", {"shard_bytes": 700}),
    JointTraining("shares", {"shard_bytes": 700, "keep": dualform.Shares(by="label")}),
    JointTraining("divided", {"shard_bytes": 700}, divided=True),
    JointTraining("steps", {"keep": dualform.Steps()}),
    JointTraining("divided steps", {"keep": dualform.Steps()}, divided=True),
)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a process's inputs and labels of a step."""
    generator = torch.Generator().manual_seed(SIZE * step + rank)
    return torch.randn(ROWS, 5, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def _child(folder: Path, rank: int, work: Any, answers: Any) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    os.chdir(folder)  # where a recording leaves its mark
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/group",
            rank=rank,
            world_size=SIZE,
            timeout=datetime.timedelta(seconds=PATIENCE_SECONDS),
        )
        torch.save(work(rank), folder / f"answer{rank}")
        answers.send("")
    except BaseException:
        answers.send(traceback.format_exc())
    finally:
        os._exit(0)


def network() -> nn.Module:
    """Return the network that is trained."""
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def take_steps(
    training: JointTraining, path: Path | None, first: int, at: Sequence[Any], rank: int
) -> list[dict[str, Any]]:
    """Train from a checkpoint to the end, recorded unless there is no path; return what each step left."""

    def recording(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        assert path is not None
        recorder = dualform.record(model, optimizer, path, resume=not training.keeps_steps, **training.options).start()
        assert recorder.step == first, f"resumed at step {recorder.step}, not {first}"
        Path(f"recording{rank}").touch()
        return recorder

    return train(training, None if path is None else recording, first, at, rank)


def train(training: JointTraining, recording: Any, first: int, at: Sequence[Any], rank: int) -> list[dict[str, Any]]:
    """Train from a checkpoint to the end, as `take_steps` does, with what `recording` returns, if it is there."""
    torch.manual_seed(0)
    plain = network()
    if at:
        plain.load_state_dict(at[first]["model"])
    if training.divided:
        fully_shard(plain, mesh=init_device_mesh("cpu", (SIZE,)))
    model = plain if training.divided else DistributedDataParallel(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    if at:
        state = copy.deepcopy(at[first]["optimizer"])
        set_optimizer_state_dict(plain, optimizer, state, options=StateDictOptions(full_state_dict=True))
    found = [checkpoint(plain, optimizer)] if recording is None else []
    recorder = None if recording is None else recording(model, optimizer)
    for step in range(first, STEPS):
        inputs, labels = batch(step, rank)
        if recorder is not None:
            recorder.annotate(label=labels, at=step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if recorder is None:
            found.append(checkpoint(plain, optimizer))
        elif (training.keeps_shares or training.keeps_steps) and step % FLUSHED == FLUSHED - 1:
            recorder.flush()
    if recorder is not None:
        recorder.close()
    return found


def replay(training: JointTraining, path: Path, at: Sequence[Any], expected: Any, rank: int) -> bool:
    """Run the training of a run again, and say whether it has the expected weights, after so many steps as it holds."""

    def again(recording: Any) -> None:
        def started(*arguments: Any) -> Any:
            return recording(*arguments).start()

        train(training, started, 0, at, rank)

    return bool(dualform.open(path, train=again).verify(expected).passed)


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of a model's parameters and of its optimizer's state, with the rows of all processes."""
    state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return dict(zip(("model", "optimizer"), copy.deepcopy(state), strict=True))


def run(folder: Path, *, short: bool, seed: int, count: int | None = None) -> Outcome:
    """Kill so many times (`count`), and examine what was left."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    campaign = _Campaign(folder, random.Random(seed), count or (SHORT if short else FULL))
    campaign.run()
    campaign.outcome.seconds = time.monotonic() - begin
    return campaign.outcome


def record_in_two_processes(path: Path, options: dict[str, Any]) -> nn.Module:
    """Record the training to its end, in a run at a path; return the trained network."""
    meeting = path.with_name(f"{path.name} meeting")
    meeting.mkdir(parents=True)
    campaign = _Campaign(meeting, random.Random(0), 0)
    answers, processes = campaign._start(functools.partial(take_steps, JointTraining(path.name, options), path, 0, []))
    campaign._end(answers, processes)
    shutil.rmtree(meeting)
    model = network()
    model.load_state_dict(dualform.open(path).weights())
    return model


class _Campaign:
    """One run of the campaign."""

    def __init__(self, folder: Path, chance: random.Random, total: int) -> None:
        self.folder = folder
        self.chance = chance
        self.total = total
        self.started = 0  # pairs of processes
        self.counts = {
            "SIGKILLs of one of two processes": 0,
            "SIGKILLs of both processes": 0,
            "processes that outlived the other by an error": 0,
            "processes that still waited for the other to begin": 0,
            "runs brought to their end": 0,
            "steps that were published before a kill and there after it": 0,
            "replays of what a kill left, or of the whole": 0,
        }
        self.outcome = Outcome("process_kills", counts=self.counts)

    def run(self) -> None:
        """Kill in chains until there are enough kills of both kinds."""
        checkpoints = {}
        for divided in (False, True):
            training = next(one for one in TRAININGS if one.divided == divided)
            answers, processes = self._start(functools.partial(take_steps, training, None, 0, []))
            checkpoints[divided] = self._end(answers, processes)
        chains = 0
        while sum(list(self.counts.values())[:2]) < self.total:
            training = TRAININGS[chains % len(TRAININGS)]
            chains += 1
            try:
                self._chain(training, self.folder / f"run{chains}", checkpoints[training.divided])
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                self.outcome.failures.append(
                    f"{training.name}, chain {chains}: {type(error).__name__}: {error} ({last.name}:{last.lineno})"
                )

    def _chain(self, training: JointTraining, path: Path, at: Sequence[dict[str, Any]]) -> None:
        """Kill one recording and resume it, again and again, and let it come to its end at last."""
        first = 0
        kills = min(self.chance.randint(1, CHAIN), self.total - sum(list(self.counts.values())[:2]))
        for _ in range(kills):
            victims: Victims = "one" if self.counts["SIGKILLs of one of two processes"] * 2 < self.total else "all"
            if not self._kill(training, path, first, at, victims):
                break
            first = self.chance.choice(self._examine(training, path, at))
            if training.keeps_steps:
                shutil.rmtree(path, ignore_errors=True)  # what was published could be asked; all is recorded anew
        else:
            answers, processes = self._start(functools.partial(take_steps, training, path, first, at))
            self._end(answers, processes)
        self._examine_end(training, path, at)

    def _start(self, work: Any) -> tuple[list[Any], list[Any]]:
        """Start the processes; return where their answers come from, and the processes."""
        self.started += 1
        meeting = self.folder / f"meeting{self.started}"
        meeting.mkdir()
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(SIZE)]
        processes = [context.Process(target=_child, args=(meeting, rank, work, pipes[rank][1])) for rank in range(SIZE)]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that the end of a process is noticed
        return [receiver for receiver, _ in pipes], processes

    def _end(self, answers: Sequence[Any], processes: Sequence[Any]) -> Any:
        """Wait for the processes that were started last, which nobody kills; return the first one's answer."""
        found = []
        for rank, receiver in enumerate(answers):
            if not receiver.poll(PATIENCE_SECONDS):
                for process in processes:
                    _kill(process)
                raise AssertionError(f"process {rank} did not come to its end")
            found.append(receiver.recv())
        for process in processes:
            process.join()
        if failures := [answer for answer in found if answer]:
            raise AssertionError(failures[0])
        return torch.load(self.folder / f"meeting{self.started}" / "answer0")

    def _kill(
        self, training: JointTraining, path: Path, first: int, at: Sequence[dict[str, Any]], victims: Victims
    ) -> bool:
        """Record from a checkpoint on, and kill at a random moment; say whether anybody was still there to kill."""
        before = _published(path)
        answers, processes = self._start(functools.partial(take_steps, training, path, first, at))
        published = self._wait_for_a_moment(path, first, processes)
        chosen = processes if victims == "all" else [processes[self.chance.randrange(SIZE)]]
        killed = [process.is_alive() and _kill(process) for process in chosen]
        for receiver, process in zip(answers, processes, strict=True):
            if process in chosen:
                process.join()
                continue
            if receiver.poll(PATIENCE_SECONDS + LATE_SECONDS):
                if receiver.recv():
                    self.counts["processes that outlived the other by an error"] += 1
            elif (self.folder / f"meeting{self.started}" / f"recording{processes.index(process)}").exists():
                _kill(process)
                raise AssertionError("a process that recorded still waits for the one that was killed")
            else:  # torch.distributed and the recorder wait for minutes for a process that has not come yet
                self.counts["processes that still waited for the other to begin"] += 1
                _kill(process)
            process.join()
        if not any(killed):
            return False
        self.counts["SIGKILLs of both processes" if victims == "all" else "SIGKILLs of one of two processes"] += 1
        after = _published(path)
        dropped = published <= before and after >= first  # a recording that is resumed drops later steps
        if after < published and not dropped:
            raise AssertionError(f"{published} steps were published before the kill, and {after} after it")
        self.counts["steps that were published before a kill and there after it"] += max(0, published - first)
        return True

    def _wait_for_a_moment(self, path: Path, first: int, processes: Sequence[Any]) -> int:
        """Wait until a random step is published, or for a random time at the beginning; return how many are."""
        wanted = self.chance.randrange(first, STEPS + 1)
        if wanted == first or self.chance.random() < EARLY_PART:
            time.sleep(self.chance.uniform(0.0, EARLY_SECONDS))
            return _published(path)
        end = time.monotonic() + PATIENCE_SECONDS
        while _published(path) < wanted and time.monotonic() < end and all(one.is_alive() for one in processes):
            time.sleep(POLL_SECONDS)
        time.sleep(self.chance.uniform(0.0, POLL_SECONDS))
        return _published(path)

    def _examine(self, training: JointTraining, path: Path, at: Sequence[dict[str, Any]]) -> list[int]:
        """Compare a run with the training; return the steps that it can be resumed at."""
        try:
            run = Run(path)
        except RunNotFoundError:
            return [0]  # killed before there was a run
        if training.keeps_shares:
            kept = run.kept_shares
            assert kept is not None
            states = [set(one.published.shares.states) for one in (run, *run.others) if one and one.published.shares]
            steps = [step for step in kept.horizons if len(states) == SIZE and all(step in one for one in states)]
            for step in kept.horizons:
                assert dualform.open(path).at(step=step).verify(at[step]["model"]).passed
            return steps[-1:] or [0]
        assert run.count("0") == run.steps * SIZE * ROWS, "a step has other patterns than were trained on"
        if run.steps:
            assert self._verifies(training, path, at, run.steps)
        return [0] if training.keeps_steps else list(range(run.steps + 1))

    def _verifies(self, training: JointTraining, path: Path, at: Sequence[dict[str, Any]], steps: int) -> bool:
        """Say whether the weights of a run are those of the training after so many steps."""
        expected = at[steps]["model"]
        if not training.keeps_steps:
            return bool(dualform.open(path).verify(expected).passed)
        found: bool = self._end(*self._start(functools.partial(replay, training, path, at, expected)))
        self.counts["replays of what a kill left, or of the whole"] += 1
        return found

    def _examine_end(self, training: JointTraining, path: Path, at: Sequence[dict[str, Any]]) -> None:
        """Compare a run that came to its end with the training."""
        run = Run(path)
        assert (run.steps, run.description.closed) == (STEPS, True), f"{run.steps} steps at the end"
        memory = dualform.open(path)
        assert training.keeps_steps or memory.verify().passed
        assert self._verifies(training, path, at, STEPS)
        for step in range(STEPS) if run.layers["0"].store != "shares" else ():
            labels = memory.where(step=step).patterns("0", columns=["label"])["label"].to_pylist()
            assert labels == [label for rank in range(SIZE) for label in batch(step, rank)[1].tolist()]
        self.counts["runs brought to their end"] += 1


def _published(path: Path) -> int:
    """Return how many steps of a run are published; 0 where there is none."""
    try:
        return Run(path).steps
    except (DualformError, OSError):
        return 0


def _kill(process: Any) -> bool:
    """Kill a process; say whether it was there."""
    if not process.is_alive():
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return True
