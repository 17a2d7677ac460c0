"""A source and a sink made of lists and an executor made of processes, each a page long, pass the suites."""

import functools
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import dualform
from conformance.executors import ExecutorConformance, executed_run, folded_run
from conformance.sinks import KeptCall, ListSink, SinkConformance
from conformance.sources import SourceConformance
from dualform.attend.memory import Memory
from dualform.engine.addresses import Calls
from dualform.engine.description import LayerEntry, ParameterEntry, RunDescription
from dualform.engine.fold import run_folds
from dualform.engine.jobs import Executor, Fold, Job, Pass, Sweep
from dualform.engine.local import LocalExecutor
from dualform.engine.plain import PlainExecutor
from dualform.engine.reading import BlockReader, pattern_ranges
from dualform.engine.reducers import one_group
from dualform.engine.source import Factors, PatternPart, PatternSource, Which
from dualform.engine.sweep import run_sweep
from dualform.identity.families import Facts
from dualform.identity.parameter_use import ParameterUse
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.reader import Run
from dualform.store.stored_rows import MemoryRows
from dualform.store.writer import DiskWriter
from helpers.loops import gradient_of

__all__ = ["executed_run", "folded_run"]  # fixtures
USES = (ParameterUse("weight", "weight", "outer"), ParameterUse("bias", "bias", "bias"))


# The toy source: a linear layer that plain gradient descent trained, as lists of keys, values and labels. -------------


class ListPart(PatternPart):
    """One step."""

    def __init__(self, step: int, keys: Tensor, values: Tensor, labels: Tensor) -> None:
        self.index, self.start, self.stop = step, step, step + 1
        self._rows, self._labels = {"keys": MemoryRows(keys, None), "values": MemoryRows(values, None)}, labels

    def calls(self, layer: str) -> Calls:
        count = len(self._labels)
        zeros = ("micro", "call", "offset", "batch_axis", "annotation_offset", "annotation_positions")
        one = {"step": self.start, "rows": count, "positions": 1, "inner": 1, "annotation_rows": count}
        numbers = one | dict.fromkeys(zeros, 0)
        return {**{name: np.array([number]) for name, number in numbers.items()}, "layout": np.array([None])}

    def rows(self, layer: str, what: str) -> MemoryRows:
        return self._rows[what]

    def annotation(self, name: str, *, keep: bool = True) -> pa.ChunkedArray:
        return pa.chunked_array([self._labels.tolist()])


class ListSource(PatternSource):
    """Steps of (keys, values, labels), a learning rate, and the parameters before and after."""

    def __init__(self, steps: list[tuple[Tensor, Tensor, Tensor]], lr: float, first: Any, last: Any) -> None:
        self._parts = [ListPart(i, *step) for i, step in enumerate(steps)]
        self._lr, self._tensors = lr, {"initial": first, "final": last}

    name, digest, initial_states = "a list of patterns", "toy", {}

    @property
    def description(self) -> RunDescription:
        d_out, d_in = self._tensors["initial"]["weight"].shape
        layers = {"": LayerEntry("Linear", d_in, d_out, USES, "keys+values", "float32")}
        parameters = {n: ParameterEntry(tuple(t.shape), "float32") for n, t in self._tensors["initial"].items()}
        return RunDescription(layers, parameters, ("SGD",), {"label": "int64"}, len(self._parts))

    def parts(self) -> Sequence[ListPart]:
        return self._parts

    def facts(self, parameter: str) -> tuple[Facts, Factors]:
        count = len(self._parts)
        numbers = {name: np.zeros(count) for name in ("momentum", "dampening", "weight_decay")}
        switches = {name: np.zeros(count, dtype=bool) for name in ("nesterov", "maximize", "buffer")}
        settings = {"lr": np.full(count, self._lr), **numbers, **switches}
        return Facts("SGD", "float32", np.arange(count), settings), np.ones((count, 1))

    def tensors(self, which: Which) -> dict[str, Tensor]:
        return self._tensors[which]


def train_list(seed: int = 0) -> tuple[ListSource, nn.Linear]:
    """Train a linear layer by hand, keeping what it was trained on."""
    torch.manual_seed(seed)
    model, lr = nn.Linear(5, 3), 0.1
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps = []
    for _ in range(7):
        keys, labels = torch.randn(6, 5), torch.randint(3, (6,))
        outputs = model(keys)
        outputs.retain_grad()
        model.zero_grad()
        nn.functional.cross_entropy(outputs, labels).backward()
        assert outputs.grad is not None
        steps.append((keys, outputs.grad.clone(), labels))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(lr * gradient_of(parameter))
    last = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return ListSource(steps, lr, first, last), model


# The toy executor: another process, and one state per part. -----------------------------------------------------------


class ProcessExecutor:
    """Runs every part of all jobs in a forked process, and merges the states that come back."""

    def run(self, source: PatternSource, jobs: Sequence[Job]) -> list[Any]:
        passes = [job for job in jobs if isinstance(job, Pass)]
        states = iter(self._states(source, passes) if passes else [])
        return [
            run_folds(source, [job])[0]
            if isinstance(job, Fold)
            else run_sweep(source, job)
            if isinstance(job, Sweep)
            else job.reducer.result(functools.reduce(job.reducer.merge, next(states), job.new_state()))
            for job in jobs
        ]

    def _states(self, source: PatternSource, jobs: Sequence[Pass[Any]]) -> list[list[Any]]:
        """Return the states of each job's parts, from another process."""
        here, there = multiprocessing.Pipe(duplex=False)

        def work() -> None:
            there.send_bytes(pickle.dumps([list(self._parts(source, job)) for job in jobs]))

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        found: list[list[Any]] = pickle.loads(here.recv_bytes())
        process.join()
        return found

    def _parts(self, source: PatternSource, job: Pass[Any]) -> Iterator[Any]:
        horizon = job.view.horizon
        reader = BlockReader(source, job.layer, horizon=horizon, values=job.needs_values, of=job.coefficients_of)
        ranges = list(pattern_ranges(source, job.layer, horizon=horizon, mask=job.view.mask, size=64))
        for part in source.parts():
            state = job.new_state()
            for wanted in ranges:
                if wanted.part is not part:
                    continue
                block = reader.read(wanted)
                measure, queries = job.measure, job.queries
                measures = torch.empty(0) if measure is None or queries is None else measure(queries, block)
                cpu = torch.device("cpu")
                groups_of = one_group(len(wanted), cpu) if job.groups is None else job.groups.of(wanted, cpu)
                state = job.reducer.add(state, block, measures, groups_of)
            yield state


# The suites, and the questions of the README --------------------------------------------------------------------------


class TestListSource(SourceConformance):
    @pytest.fixture
    def source(self) -> ListSource:
        return train_list()[0]


class TestStoredPatterns(SourceConformance):
    @pytest.fixture
    def source(self, executed_run: Run) -> Run:
        return executed_run


class TestLocalExecutor(ExecutorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], Executor]:
        return LocalExecutor


class TestProcessExecutor(ExecutorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], Executor]:
        return ProcessExecutor


class TestListSink(SinkConformance):
    @pytest.fixture
    def sink(self) -> ListSink:
        return ListSink()

    @pytest.fixture
    def kept(self) -> Callable[[ListSink], Sequence[KeptCall]]:
        return lambda sink: sink.kept


class TestDiskWriter(SinkConformance):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> DiskWriter:
        sizes: dict[str, Any] = {"shard_bytes": 600, "queue_bytes": 1 << 20}  # several shards
        options: dict[str, Any] = {"dtype": None, "resume": False, "steps": None}
        factory: dict[str, Any] = {"factory": None, "factory_arguments": {}}
        return DiskWriter(FolderBlobs(tmp_path / "run"), **sizes, **options, **factory)

    @pytest.fixture
    def kept(self) -> Callable[[DiskWriter], Sequence[KeptCall]]:
        def read(sink: DiskWriter) -> Sequence[KeptCall]:
            found, run = [], Run(sink.path)
            for part in run.parts():
                for layer in run.layers:
                    calls = part.calls(layer)
                    for i, (first, count) in enumerate(
                        zip(calls["offset"], calls["rows"] * calls["positions"], strict=True)
                    ):
                        rows = slice(int(first), int(first + count))
                        address = (int(calls["step"][i]), layer, int(calls["micro"][i]), int(calls["call"][i]))
                        keys_only = run.layers[layer].store == "keys"
                        values = None if keys_only else part.rows(layer, "values").take(rows)[0]
                        found.append(KeptCall(*address, part.rows(layer, "keys").take(rows)[0], values))
            return sorted(found, key=lambda one: (one.step, one.micro, one.layer, one.call))

        return read


@pytest.mark.parametrize("executor", [PlainExecutor, LocalExecutor, ProcessExecutor])
def test_a_list_of_patterns_answers_the_questions_of_the_readme(executor: type[Any]) -> None:
    source, model = train_list()
    memory = Memory(source, executor())
    assert memory.verify(model).passed
    inputs = torch.randn(4, 5)
    spotlight = memory.attend(model, inputs, targets=torch.tensor([0, 1, 2, 0]), quantity="margin")
    layer = spotlight[""]
    torch.testing.assert_close(layer.output(), model(inputs).detach(), rtol=1e-4, atol=1e-5)
    keys = torch.cat([part.rows("", "keys").take(slice(None))[0] for part in source.parts()])
    torch.testing.assert_close(layer.attention(), inputs @ keys.T)
    totals, best = spotlight.compute(dualform.Totals(by="label"), dualform.Top(5))
    assert totals[""].values.shape == (4, 3)
    torch.testing.assert_close(best[""].values[:, 0], (inputs @ keys.T).topk(5, dim=1).values)
    assert layer.top(5, of="contribution").values.shape == (4, 1, 5)
    assert layer.totals(by=["label", dualform.bins("step", width=3)]).values.shape[0] == 4
    assert spotlight.vote(by="label").winners[""]
    assert spotlight.effects(by="label").values.shape == (4, 3)
    assert memory.patterns("").num_rows == memory.where(label=1).patterns("").num_rows + len(
        memory.without(label=1).patterns("")
    )
    whole = {n: memory.where(label=1).shares()[n] + memory.without(label=1).shares()[n] for n in memory.shares()}
    for name, share in memory.shares().items():
        torch.testing.assert_close(whole[name], share, rtol=1e-4, atol=1e-6)
    masked = memory.without(label=2).at(step=4).apply(model)
    assert not torch.equal(masked.get_parameter("weight"), model.weight)
    assert "a list of patterns" in repr(memory)
    assert "Linear 5 -> 3" in repr(memory.info())
    with pytest.raises(dualform.DualformError, match="keeps patterns alone"):
        memory.tests()


@pytest.mark.parametrize("executor", [PlainExecutor, ProcessExecutor])
def test_a_run_answers_by_another_executor(executor: type[Any], executed_run: Run) -> None:
    queries = {"0": torch.randn(3, 40), "2": torch.randn(3, 6)}
    here, there = (dualform.open(executed_run.blobs, executor=one) for one in (executor(), None))
    for name in queries:
        one, other = here.attend(queries=queries)[name], there.attend(queries=queries)[name]
        torch.testing.assert_close(one.attention(), other.attention())
        torch.testing.assert_close(one.top(3, per="sample").values, other.top(3, per="sample").values)
        torch.testing.assert_close(
            one.totals("label", of="magnitude").values, other.totals("label", of="magnitude").values
        )
    for name, weight in here.weights().items():
        torch.testing.assert_close(weight, there.weights()[name])
