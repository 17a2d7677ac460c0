"""What every `Sink` must be: it keeps the patterns of every step, and nothing else, and leaves a training as it is.

And what the recorder promises to every sink: `PromisedSink` stands between the two and checks each call.
"""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dualform.recording.annotations import Binding, bind
from dualform.recording.media import Files
from dualform.recording.recorder import Recorder
from dualform.recording.sinks import CallRecord, PreparedStep, Sink, Start, StepFacts
from helpers.loops import batches, loss_of, mlp, sgd, state, train


class KeptCall(NamedTuple):
    """The patterns of one call of a step, as a sink has kept them."""

    step: int
    layer: str
    micro: int
    call: int
    keys: Tensor
    values: Tensor | None


class ListSink:
    """The toy: keeps the patterns of every step in a list."""

    def __init__(self) -> None:
        self.kept: list[KeptCall] = []
        self._pending: dict[int, CallRecord] = {}  # by number

    def open(self, start: Start) -> int:
        return 0

    def updates(self) -> Mapping[str, int]:
        return {}

    def check(self, binding: Binding) -> None: ...

    def call(self, record: CallRecord) -> None:
        self._pending[record.number] = record

    def before_step(self, prepared: PreparedStep) -> None: ...

    def step(self, facts: StepFacts) -> None:
        for call in facts.calls:
            record = self._pending[call.number]
            keys, values = call.keys_of(record), record.values
            self.kept.append(KeptCall(facts.step, record.layer, call.micro, call.call, keys, values))

    def discard(self, backwards: Sequence[int]) -> None:
        self._pending = {n: record for n, record in self._pending.items() if record.backward not in backwards}

    def state(self) -> Mapping[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def attach(self, files: Files) -> None: ...

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None: ...

    def close(self, final: Mapping[str, Tensor]) -> None:
        self._pending.clear()

    def close_without_final(self, reason: str) -> None:
        self._pending.clear()

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        return None

    def abandon(self) -> None:
        self._pending.clear()


class PromisedSink:
    """Hands everything on to a sink, checks what the recorder promises, and keeps copies of the steps' patterns."""

    dtype = None

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.expected: list[KeptCall] = []
        self.prepared = 0
        self._records: dict[int, tuple[CallRecord, Tensor, Tensor | None]] = {}  # calls that are pending, with copies
        self._discarded: set[int] = set()
        self._step = 0
        self._last: PreparedStep | None = None
        self._ended = False

    def open(self, start: Start) -> int:
        self._step = self.sink.open(start)
        return self._step

    def updates(self) -> Mapping[str, int]:
        return self.sink.updates()

    def check(self, binding: Binding) -> None:
        self.sink.check(binding)

    def call(self, record: CallRecord) -> None:
        assert not self._ended
        assert record.number not in self._records, "each call has a number of its own"
        assert record.backward not in self._discarded, "a backward that is discarded accumulates nothing more"
        copies = record.keys.clone(), None if record.values is None else record.values.clone()
        self._records[record.number] = (record, *copies)
        self.sink.call(record)

    def before_step(self, prepared: PreparedStep) -> None:
        assert prepared.step == self._step
        assert all(call.number in self._records for call in prepared.calls)
        self.prepared += 1
        self._last = prepared
        self.sink.before_step(prepared)

    def step(self, facts: StepFacts) -> None:
        assert not self._ended
        assert facts.step == self._step
        assert self._last is not None, "every step is prepared"
        assert {call.number for call in facts.calls} == {call.number for call in self._last.calls}
        assert {fact.parameter for fact in self._last.facts} <= {fact.parameter for fact in facts.facts}
        for call in facts.calls:
            record, keys, values = self._records[call.number]  # it was handed over, and is not discarded
            assert torch.equal(record.keys, keys), "nobody writes to what was handed over"
            assert len(keys) == call.rows * call.positions
            self.expected.append(KeptCall(facts.step, record.layer, call.micro, call.call, keys, values))
        self._step, self._last = self._step + 1, None
        self.sink.step(facts)

    def discard(self, backwards: Sequence[int]) -> None:
        assert not self._ended
        assert not self._discarded & set(backwards), "a backward is discarded once"
        self._discarded |= set(backwards)
        self._records = {n: one for n, one in self._records.items() if one[0].backward not in self._discarded}
        self.sink.discard(backwards)

    @property
    def pending(self) -> int:
        """How many calls may still reach a step."""
        return len(self._records)

    def state(self) -> Mapping[str, Any]:
        return self.sink.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sink.load_state(state)

    def attach(self, files: Files) -> None:
        self.sink.attach(files)

    def flush(self, snapshot: Callable[[], dict[str, Tensor]]) -> None:
        self.sink.flush(snapshot)

    def close(self, final: Mapping[str, Tensor]) -> None:
        self._ended = True
        self.sink.close(final)

    def close_without_final(self, reason: str) -> None:
        self._ended = True
        self.sink.close_without_final(reason)

    def find_step(self, parameters: Mapping[str, Tensor]) -> int | None:
        return self.sink.find_step(parameters)

    def abandon(self) -> None:
        self._ended = True
        self.sink.abandon()


Optimizers = list[torch.optim.Optimizer]


def in_parts(model: nn.Sequential, optimizers: Optimizers, x: Tensor) -> None:
    """Accumulate two backwards into one step."""
    for part in x.split(2):
        loss_of(model(part)).backward()
    for optimizer in optimizers:
        optimizer.step()


def cleared(model: nn.Sequential, optimizers: Optimizers, x: Tensor) -> None:
    """Clear a backward without a step, then make one."""
    loss_of(model(x + 1)).backward()
    model.zero_grad()
    loss_of(model(x)).backward()
    for optimizer in optimizers:
        optimizer.step()


def by_turns(model: nn.Sequential, optimizers: Optimizers, x: Tensor) -> None:
    """Let the last optimizer step only where the first number of a batch is large, with what it has accumulated."""
    loss_of(model(x)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    if x[0, 0] > 0.3:
        optimizers[-1].step()
        optimizers[-1].zero_grad()


def with_closure(model: nn.Sequential, optimizers: Optimizers, x: Tensor) -> None:
    """Hand the loss to the optimizers as a closure."""

    def closure() -> float:
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return float(loss.detach())

    for optimizer in optimizers:
        optimizer.step(closure)


def failing(model: nn.Sequential, optimizers: Optimizers, x: Tensor) -> None:
    """Let an optimizer fail once in its step, after the recorder has prepared it."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    loss_of(model(x)).backward()
    for optimizer in optimizers:
        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        handle.remove()
        optimizer.step()


def plain(model: nn.Sequential, optimizers: Optimizers, x: Tensor) -> None:
    """One backward, one step of every optimizer."""
    loss_of(model(x)).backward()
    for optimizer in optimizers:
        optimizer.step()


Loop = Callable[[nn.Sequential, Optimizers, Tensor], None]
LOOPS: dict[str, tuple[Loop, bool]] = {  # and whether the layers are divided among two optimizers
    "plain": (plain, False),
    "two backwards": (in_parts, False),
    "a backward that is cleared": (cleared, False),
    "a closure": (with_closure, False),
    "a step that fails": (failing, False),
    "two optimizers": (plain, True),
    "two optimizers by turns": (by_turns, True),
}


def optimizers_of(model: nn.Sequential, *, divided: bool) -> Optimizers:
    """Return one optimizer for all parameters, or one for the weights and one for the biases."""
    if not divided:
        return [torch.optim.SGD(model.parameters(), lr=0.05)]
    weights, biases = ([model.get_parameter(f"{i}.{name}") for i in (0, 2)] for name in ("weight", "bias"))
    return [torch.optim.SGD(weights, lr=0.05), torch.optim.SGD(biases, lr=0.1)]


def run_loop(model: nn.Sequential, optimizers: Optimizers, loop: Loop, steps: int = 6) -> None:
    """Train in one of the loops."""
    for x in batches(steps):
        if loop is not by_turns:
            model.zero_grad()
        loop(model, optimizers, x)


class SinkConformance:
    """Derive, and give two fixtures: `sink`, a new one, and `kept`, which returns what a closed one has kept."""

    @pytest.mark.parametrize("case", LOOPS)
    def test_every_step_is_kept_with_its_patterns_and_nothing_else(
        self, sink: Sink, kept: Callable[[Sink], Sequence[KeptCall]], case: str
    ) -> None:
        loop, divided = LOOPS[case]
        other, model = mlp(), mlp()
        run_loop(other, optimizers_of(other, divided=divided), loop)
        promised, optimizers = PromisedSink(sink), optimizers_of(model, divided=divided)
        with Recorder(model, optimizers, promised) as recorder:
            run_loop(model, optimizers, loop)
            if loop is not by_turns:
                assert promised.pending == 0
        torch.testing.assert_close(state(model), state(other), rtol=0, atol=0)
        assert promised.prepared >= recorder.step > 0
        found = kept(sink)
        assert [one[:4] for one in found] == [one[:4] for one in promised.expected]
        for one, expected in zip(found, promised.expected, strict=True):
            assert torch.equal(one.keys, expected.keys)
            assert one.values is not None
            assert expected.values is not None
            assert torch.equal(one.values, expected.values)

    def test_steps_inside_a_backward_share_their_patterns(
        self, sink: Sink, kept: Callable[[Sink], Sequence[KeptCall]]
    ) -> None:
        model = mlp()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        promised = PromisedSink(sink)
        with Recorder(model, list(optimizers.values()), promised):
            handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
            for x in batches(4):
                loss_of(model(x)).backward()
            for handle in handles:
                handle.remove()
        found = kept(sink)
        assert [one[:4] for one in found] == [one[:4] for one in promised.expected]
        assert all(torch.equal(one.keys, two.keys) for one, two in zip(found, promised.expected, strict=True))

    def test_a_backward_goes_on_after_a_step_inside_it_while_others_wait(
        self, sink: Sink, kept: Callable[[Sink], Sequence[KeptCall]]
    ) -> None:
        """The last layer steps inside of each backward, the first one after every second backward."""
        model = mlp()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}
        first, last = list(model[0].parameters()), list(model[2].parameters())

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        promised = PromisedSink(sink)
        with Recorder(model, list(optimizers.values()), promised):
            handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in last]
            for i, x in enumerate(batches(6)):
                loss_of(model(x)).backward()
                for parameter in first if i % 2 else ():
                    step(parameter)
            for handle in handles:
                handle.remove()
        found = kept(sink)
        assert [one[:4] for one in found] == [one[:4] for one in promised.expected]
        assert {one.micro for one in found} == {0, 1}

    def test_keys_alone(self, sink: Sink, kept: Callable[[Sink], Sequence[KeptCall]]) -> None:
        model = mlp()
        optimizer, promised = sgd(model), PromisedSink(sink)
        with Recorder(model, optimizer, promised, layers={"0": "keys", "2": "keys+values"}):
            train(model, optimizer, batches(3))
        assert [(one.layer, one.values is None) for one in kept(sink)] == [("0", True), ("2", False)] * 3

    def test_what_is_not_finite_and_has_no_effect_is_kept_as_zero(
        self, sink: Sink, kept: Callable[[Sink], Sequence[KeptCall]]
    ) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(model, optimizer, sink):
            model(torch.tensor([[torch.inf, 1.0]])).sum().backward()
            weight = model.get_parameter("0.weight")
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        (found,) = kept(sink)
        assert torch.equal(found.keys, torch.tensor([[0.0, 1.0]]))

    def test_patterns_of_a_backward_that_is_discarded_are_let_go_of(
        self, sink: Sink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the sink and by the recorder: what is left is of the last backward, which may still reach a step."""
        handed_over: list[weakref.ref[Tensor]] = []
        take = sink.call

        def call(record: CallRecord) -> None:
            handed_over.append(weakref.ref(record.keys))
            take(record)

        monkeypatch.setattr(sink, "call", call)
        model, promised = mlp(), PromisedSink(sink)
        with Recorder(model, sgd(model), promised):
            for x in batches(20):
                model.zero_grad()
                loss_of(model(x)).backward()
                assert promised.pending == 2
            gc.collect()
            assert len(handed_over) == 40
            assert sum(keys() is not None for keys in handed_over) == 2
        assert promised.expected == []

    def test_columns_and_files_are_taken(self, sink: Sink) -> None:
        model = mlp()
        optimizer = sgd(model)
        with Recorder(model, optimizer, sink) as recorder:
            recorder.media(labels=["one", "two"])
            for x in batches(2):
                recorder.annotate(label=[0, 1, 1, 0])
                train(model, optimizer, [x])
            recorder.flush()
            sink.check(bind({"label": [1, 0, 0, 1]}))

    def test_an_end_may_come_at_any_time_and_twice(self, sink: Sink) -> None:
        model = mlp()
        optimizer = sgd(model)
        recorder = Recorder(model, optimizer, sink).start()
        train(model, optimizer, batches(2))
        loss_of(model(batches(1)[0])).backward()  # is part of no step
        recorder.close()
        sink.abandon()
        sink.abandon()

    def test_the_parameters_at_the_end_may_be_those_of_no_step(
        self, sink: Sink, kept: Callable[[Sink], Sequence[KeptCall]]
    ) -> None:
        model = mlp()
        optimizer = sgd(model)
        recorder = Recorder(model, optimizer, sink).start()
        train(model, optimizer, batches(2))
        model.get_parameter("0.weight").data.add_(1.0)
        with pytest.warns(UserWarning, match="weights at closing are not those"):
            recorder.close()
        assert {one.step for one in kept(sink)} == {0, 1}
