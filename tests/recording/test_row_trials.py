"""Rows: annotations reach the patterns that they belong to, whatever a model does to its rows, or none at all."""

import contextlib
import gc
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.overrides import _get_current_function_mode_stack

import dualform
from dualform.errors import AnnotationError
from dualform.recording.row_evidence import row_order
from helpers.interruptions import distinct_places, interrupted
from helpers.loops import loss_of, sgd, state

B, D = 6, 5


class Rowwise(nn.Module):
    """A hidden layer, something done to its rows, and a head."""

    def __init__(self, change: Callable[[Tensor], Tensor], *, training_only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.change, self.training_only = change, training_only

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        hidden = self.change(hidden) if self.training or not self.training_only else hidden
        result: Tensor = self.head(hidden)
        return result


def batch(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*(shape or (B, D)), generator=torch.Generator().manual_seed(seed))


def samples(
    run: Path, model: nn.Module, *inputs: Any, rows: int = B, steps: int = 1, expect: str | None = None, **options: Any
) -> dict[str, list[Any]]:
    """Record steps whose rows are annotated 100, 101, ...; return each layer's column."""
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, **options) as recorder:
        for _ in range(steps):
            recorder.annotate(sample=torch.arange(100, 100 + rows), task="t")
            optimizer.zero_grad()
            with pytest.warns(UserWarning, match=expect) if expect is not None else contextlib.nullcontext():
                output = model(*inputs)
                loss_of(output[0] if isinstance(output, tuple) else output).backward()
                optimizer.step()
            expect = None
    memory = dualform.open(run)
    assert memory.verify(model).passed
    for name in memory.layers:
        assert set(memory.patterns(name)["task"].to_pylist()) == {"t"}, "constants belong to every pattern"
    tables = {name: memory.patterns(name) for name in memory.layers}
    return {
        name: table["sample"].to_pylist() if "sample" in table.column_names else [None] * table.num_rows
        for name, table in tables.items()
    }


SAMPLES = list(range(100, 100 + B))
NOTHING = [None] * B


def by_first(hidden: Tensor) -> Tensor:
    return hidden[hidden[:, 0].argsort()]


@pytest.mark.parametrize(
    "change",
    [
        by_first,
        lambda h: h.roll(1, 0),
        lambda h: h.flip(0),
        lambda h: h[[0, 1, 2, 3, 5, 4]],
    ],
    ids=["sorted", "rolled", "flipped", "two rows exchanged"],
)
def test_rows_that_are_not_those_of_the_batch_get_no_columns(run: Path, change: Callable[[Tensor], Tensor]) -> None:
    found = samples(run, Rowwise(change), batch(), expect=r"left out \(null\) in layer 'head'")
    assert found == {"body": SAMPLES, "head": NOTHING}


@pytest.mark.parametrize(
    "change",
    [lambda h: h.cumsum(0), lambda h: torch.cat([h[:3], 0 * h.detach()[3:] + 1])],
    ids=["summed up", "half of them constant"],
)
def test_rows_whose_errors_depend_on_their_order_get_no_columns(run: Path, change: Callable[[Tensor], Tensor]) -> None:
    """The keys of the first layer are the rows, but the errors there depend on which row comes first."""
    found = samples(run, Rowwise(change), batch(), expect="'body', 'head'")
    assert found == {"body": NOTHING, "head": NOTHING}


def test_rows_that_are_exchanged_in_training_only_are_found(run: Path) -> None:
    model = Rowwise(lambda h: h.flip(0), training_only=True)
    assert samples(run, model, batch(), expect="'head'")["head"] == NOTHING


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("change", [lambda h: h.flip(0), lambda h: h.roll(1, 0)], ids=["flipped", "rolled"])
def test_few_rows_that_are_exchanged(run: Path, rows: int, change: Callable[[Tensor], Tensor]) -> None:
    """A permutation alone cannot tell: a model that swaps two rows swaps them after a permutation too."""
    found = samples(run, Rowwise(change), batch(rows, D), rows=rows, expect="'head'")
    assert found == {"body": SAMPLES[:rows], "head": [None] * rows}


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 17])
def test_rows_that_stay_keep_their_columns(run: Path, rows: int) -> None:
    expected = list(range(100, 100 + rows))
    found = samples(run, Rowwise(lambda h: h.relu()), batch(rows, D), rows=rows)
    assert found == {"body": expected, "head": expected}


def test_the_order_of_a_trial_leaves_no_row_and_is_no_roll_or_flip() -> None:
    for rows in range(4, 40):
        order = row_order(rows).tolist()
        assert sorted(order) == list(range(rows))
        assert all(i != place for i, place in enumerate(order))
        power = order
        for _ in range(min(rows, 12) - 2):
            assert power != list(reversed(range(rows)))
            assert all(power != [(i + k) % rows for i in range(rows)] for k in range(rows))
            power = [order[i] for i in power]


class Positions(nn.Module):
    """A small language model: tokens (B, L), positions looked up once for all rows."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe, self.head = nn.Embedding(10, 8), nn.Embedding(length, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head((self.wte(x) + self.wpe(torch.arange(x.shape[1]))).tanh().mean(1))
        return result


@pytest.mark.parametrize("length", [5, 4])
def test_positions_belong_to_no_row_also_where_there_are_as_many(run: Path, length: int) -> None:
    x = torch.randint(0, 10, (5, length), generator=torch.Generator().manual_seed(1))
    found = samples(run, Positions(length), x, rows=5, expect=r"layer 'wpe' \(its patterns belong to no row")
    assert found["wpe"] == [None] * length
    assert found["wte"] == [100 + i for i in range(5) for _ in range(length)]
    assert found["head"] == [100, 101, 102, 103, 104]


def test_as_many_prototypes_as_rows(run: Path) -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.of_prototypes = nn.Linear(D, 4), nn.Linear(3, 4)
            self.register_buffer("prototypes", batch(B, 3, seed=9))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).tanh() @ self.of_prototypes(self.prototypes).tanh().T

    found = samples(run, Prototypes(), batch(), expect="'of_prototypes'")
    assert found == {"body": SAMPLES, "of_prototypes": NOTHING}


@pytest.mark.parametrize("length", [B, 4])
def test_attention_that_is_fed_batch_first_unsaid(run: Path, length: int) -> None:
    """nn.MultiheadAttention with batch_first=False attends over the batch then; its rows are on axis 0 all the same."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            mixed, _ = self.attention(x, x, x, need_weights=False)
            result: Tensor = self.head((x + mixed).mean(1))
            return result

    model = Attending()
    x = batch(B, length, 8)
    options: dict[str, Any] = {"batch_axis": 0} if length == B else {}
    found = samples(run, model, x, **options)
    expected = [100 + i for i in range(B) for _ in range(length)]
    assert found["attention.in_proj"] == expected
    assert found["head"] == SAMPLES


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(D, 4, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        out, hidden = self.lstm(x, hidden)
        return self.head(out), hidden


def test_a_forgotten_batch_axis_is_asked_for(run: Path) -> None:
    """Inputs (L, B, d) with L == B: the sizes fit, and every label would be wrong."""
    with pytest.raises(AnnotationError, match=r"rows of this batch are on axis 1 .* Pass batch_axis=1"):
        samples(run, Recurrent(), batch(B, B, D))


def test_a_forgotten_batch_axis_stops_no_training_that_asked_to_go_on(run: Path) -> None:
    found = samples(run, Recurrent(), batch(B, B, D), on_failure="detach", expect="Pass batch_axis=1")
    assert found == {"lstm.l0": [None] * B * B, "head": [None] * B * B}


def test_the_batch_axis_that_was_given_is_right(run: Path) -> None:
    found = samples(run, Recurrent(), batch(B, B, D), batch_axis=1)
    assert found["lstm.l0"] == SAMPLES * B
    assert found["head"] == SAMPLES * B


def test_two_axes_that_could_be_the_rows_are_asked_about(run: Path) -> None:
    with pytest.raises(AnnotationError, match=r"Axes 0 and 1 .* Pass batch_axis=0 or batch_axis=1"):
        samples(run, Rowwise(torch.tanh), batch(B, B, D))
    found = samples(run.with_name("said"), Rowwise(torch.tanh), batch(B, B, D), batch_axis=0)
    assert found["body"] == [100 + i for i in range(B) for _ in range(B)]


def test_an_axis_that_was_clear_before_stays_so(run: Path) -> None:
    """A last batch with as many rows as positions asks nothing, once the axis is known."""
    model = Rowwise(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for rows in (B, 4):
            recorder.annotate(sample=torch.arange(rows))
            optimizer.zero_grad()
            loss_of(model(batch(rows, 4, D))).backward()
            optimizer.step()
    assert dualform.open(run).patterns("head")["sample"].to_pylist()[-16:] == [i for i in range(4) for _ in range(4)]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_state_that_is_carried_on_belongs_to_the_rows(run: Path, batch_first: bool) -> None:
    hidden = (batch(1, B, 4, seed=5), batch(1, B, 4, seed=6))
    shape = (B, 3, D) if batch_first else (3, B, D)
    model = Recurrent(batch_first=batch_first)
    found = samples(run, model, batch(*shape), hidden, batch_axis=0 if batch_first else 1)
    assert found["lstm.l0"] == SAMPLES * 3


@pytest.mark.parametrize("transposed", [False, True])
def test_flattened_rows_are_found_either_way(run: Path, transposed: bool) -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(D, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            result: Tensor = self.second((hidden.transpose(0, 1) if transposed else hidden).reshape(-1, 6))
            return result

    found = samples(run, Flattened(), batch(B, 3, D))
    assert found["first"] == [100 + i for i in range(B) for _ in range(3)]
    assert found["second"] == (SAMPLES * 3 if transposed else found["first"])


def test_two_views_of_each_sample_joined(run: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.body(torch.cat([x, 2 * x]))
            return result

    assert samples(run, Views(), batch())["body"] == SAMPLES * 2


def test_the_nodes_of_a_graph(run: Path) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(D, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
            result: Tensor = neighbours @ self.head(torch.tanh(neighbours @ self.body(x)))
            return result

    neighbours = (batch(B, B, seed=8) > 0).float()
    assert samples(run, Graph(), batch(), neighbours) == {"body": SAMPLES, "head": SAMPLES}


def test_a_mask_of_as_many_positions_as_rows(run: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(D, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            weights = (hidden @ hidden.transpose(1, 2)).masked_fill(~mask, -torch.inf).softmax(-1)
            result: Tensor = self.head(weights @ hidden)
            return result

    found = samples(run, Masked(), batch(B, B, D), torch.ones(B, B, dtype=torch.bool).tril())
    assert found["body"] == found["head"] == [100 + i for i in range(B) for _ in range(B)]


def test_batch_statistics_and_dropout_do_not_disturb_a_trial(run: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(nn.functional.dropout(self.body(x), 0.5, self.training))
            return result

    found = samples(run, Noisy(), batch(16, D), rows=16)
    assert all(column == list(range(100, 116)) for column in found.values())
    assert {entry.outcome for entry in dualform.open(run).rows.values()} == {"proved"}


def test_images_and_patches(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 16, 3))
    found = samples(run, model, batch(B, 1, B, B))
    assert found["0"] == [100 + i for i in range(B) for _ in range(16)]
    assert found["3"] == SAMPLES


# When nothing can be told ---------------------------------------------------------------------------------------------


class Sampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x + 0.1 * torch.randn_like(x))
        return result


def test_a_model_that_draws_random_numbers_is_assumed(run: Path) -> None:
    found = samples(run, Sampling(), batch(), expect=r"'body' \(the model draws random numbers\).*could not be tried")
    assert found["body"] == SAMPLES
    check = dualform.open(run).rows["body"]
    assert (check.outcome, check.reason) == ("assumed", "the model draws random numbers")


def test_a_hook_of_the_users_is_not_run_for_a_trial(run: Path) -> None:
    model = Rowwise(torch.tanh)
    seen: list[int] = []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    samples(run, model, batch(), steps=2, expect="'head' has a forward hook of yours")
    assert len(seen) == 2


def test_a_model_that_is_too_large_to_copy_is_assumed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dualform.recording.model_copies"], "MAX_COPY_BYTES", 10)
    samples(run, Rowwise(torch.tanh), batch(), expect="too large to copy")


def test_a_child_that_is_called_by_itself_is_tried_as_the_model_would_be(run: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Rowwise(by_first)

    wrapper = Wrapper()
    optimizer = sgd(wrapper)
    with dualform.record(wrapper, optimizer, run) as recorder:
        recorder.annotate(sample=torch.arange(100, 106))
        with pytest.warns(UserWarning, match=r"'model\.head'"):
            output = wrapper.model(batch())
        loss_of(output).backward()
        optimizer.step()
    memory = dualform.open(run)
    assert memory.patterns("model.body")["sample"].to_pylist() == SAMPLES
    assert memory.patterns("model.head")["sample"].to_pylist() == NOTHING


def test_children_that_are_called_in_turn_are_assumed(run: Path) -> None:
    """What happens to rows between two of them nobody sees; only the first is given the batch itself."""
    model = Rowwise(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(sample=torch.arange(B))
        loss_of(model.head(model.body(batch()).flip(0))).backward()
        with pytest.warns(UserWarning, match=r"'head' \(it was not called in the trial\)"):
            optimizer.step()
    assert {name: check.outcome for name, check in dualform.open(run).rows.items()} == {
        "body": "proved",
        "head": "assumed",
    }


def test_a_trial_that_fails_says_why(run: Path) -> None:
    class Picky(Rowwise):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Picky.calls += 1
            if Picky.calls == 1:
                raise ValueError("only once")
            return super().forward(x)

    samples(run, Picky(torch.tanh), batch(), expect="ValueError: only once")


def test_no_trial_where_none_is_wanted(run: Path) -> None:
    found = samples(run, Rowwise(lambda h: h.flip(0)), batch(), check_rows=False)
    assert found["head"] == SAMPLES
    assert dualform.open(run).rows == {}


def test_rows_that_were_all_equal_are_tried_again(run: Path) -> None:
    """The first steps tell nothing of a layer whose inputs and errors are the same in every row."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(D, 4)
            self.open = False

        def forward(self, x: Tensor) -> Tensor:
            x = x if self.open else torch.ones_like(x) + 0 * x
            result: Tensor = self.body(x.flip(0))
            return result

    model = Gated()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for i in range(3):
            model.open = i > 0
            recorder.annotate(sample=torch.arange(B))
            optimizer.zero_grad()
            if i == 1:
                with pytest.warns(UserWarning, match="'body'"):
                    output = model(batch())
            else:
                output = model(batch())
            loss_of(output).backward()
            optimizer.step()
    column = dualform.open(run).patterns("body")["sample"].to_pylist()
    assert column == [*range(B), *NOTHING, *NOTHING]


# What a trial leaves alone --------------------------------------------------------------------------------------------


def test_training_is_equal_to_the_bit_and_generators_stay(run: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def train(model: nn.Module, recorder: dualform.Recorder | None, optimizer: torch.optim.Optimizer) -> list[Any]:
        for i in range(3):
            if recorder is not None:
                recorder.annotate(sample=torch.arange(8))
            optimizer.zero_grad()
            loss_of(model(batch(8, D, seed=i))).backward()
            optimizer.step()
        return [torch.rand(2).tolist(), random.random(), float(np.random.rand())]

    outcomes = []
    for recorded in (False, True):
        model = make()
        optimizer = sgd(model)
        random.seed(1)
        np.random.seed(1)
        if recorded:
            with dualform.record(model, optimizer, run) as recorder:
                drawn = train(model, recorder, optimizer)
        else:
            drawn = train(model, None, optimizer)
        outcomes.append((drawn, {**state(model), **dict(model.named_buffers())}))
    assert outcomes[0][0] == outcomes[1][0]
    for name, tensor in outcomes[0][1].items():
        assert torch.equal(tensor, outcomes[1][1][name]), name


# What the user says ---------------------------------------------------------------------------------------------------


def test_rows_that_the_user_gives(run: Path) -> None:
    model = Rowwise(by_first)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        x = batch()
        order = torch.tanh(model.body(x))[:, 0].argsort()
        recorder.annotate(sample=torch.arange(100, 106), task="t", rows={"head": order})
        loss_of(model(x)).backward()
        optimizer.step()
    memory = dualform.open(run)
    assert memory.patterns("head")["sample"].to_pylist() == (100 + order).tolist()
    assert memory.patterns("body")["sample"].to_pylist() == SAMPLES
    assert memory.patterns("head")["task"].to_pylist() == ["t"] * B


def test_rows_that_the_model_finds_out_come_after_the_forward(run: Path) -> None:
    model = Rowwise(by_first)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        recorder.annotate(sample=torch.arange(100, 106))
        output = model(batch())
        recorder.annotate(rows={"head": [5, -1, 3, 2, 1, 0]})
        loss_of(output).backward()
        optimizer.step()
    assert dualform.open(run).patterns("head")["sample"].to_pylist() == [105, None, 103, 102, 101, 100]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([0, 1], "gives 2 rows for layer 'head', which saw 6"), ([0, 1, 2, 3, 4, 6], "rows 0 to 6"), ([0.5] * 6, "float")],
)
def test_rows_that_cannot_be(run: Path, rows: Any, message: str) -> None:
    model = Rowwise(torch.tanh)
    optimizer = sgd(model)

    def step(recorder: dualform.Recorder) -> None:
        recorder.annotate(sample=torch.arange(B), rows={"head": rows})
        loss_of(model(batch())).backward()
        optimizer.step()

    with dualform.record(model, optimizer, run) as recorder, pytest.raises(AnnotationError, match=message):
        step(recorder)


def test_a_batch_that_is_checked_on_request(run: Path) -> None:
    model = Rowwise(by_first)
    with dualform.record(model, sgd(model), run) as recorder:
        found = recorder.check_rows(batch())
    assert {name: check.outcome for name, check in found.items()} == {"body": "proved", "head": "not aligned"}


def test_info_says_what_was_found(run: Path) -> None:
    samples(run, Rowwise(by_first), batch(), expect="'head'")
    memory = dualform.open(run)
    assert {name: check.outcome for name, check in memory.rows.items()} == {"body": "proved", "head": "not aligned"}
    text = repr(memory.info())
    assert "rows proved" in text
    assert "rows not aligned" in text


# Batches that are skipped ---------------------------------------------------------------------------------------------


def test_a_skipped_batchs_annotations_do_not_go_to_the_next_one(run: Path) -> None:
    model = Rowwise(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(sample=torch.arange(100, 106))
        model(batch())  # a batch that is skipped: no backward
        loss_of(model(batch(seed=4))).backward()  # and one without annotations
        with pytest.warns(UserWarning, match="had no backward"):
            optimizer.step()
        recorder.annotate(sample=torch.arange(200, 206))
        optimizer.zero_grad()
        loss_of(model(batch(seed=5))).backward()
        optimizer.step()
    assert dualform.open(run).patterns("body")["sample"].to_pylist() == [*NOTHING, *range(200, 206)]


def test_a_batch_that_is_looked_at_first_keeps_its_annotations(run: Path) -> None:
    model = Rowwise(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        x = batch()
        recorder.annotate(sample=torch.arange(100, 106))
        model(x)
        loss_of(model(x)).backward()
        optimizer.step()
    assert dualform.open(run).patterns("body")["sample"].to_pylist() == SAMPLES


def test_two_forwards_of_one_backward_share_annotations(run: Path) -> None:
    model = Rowwise(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(sample=torch.arange(100, 106))
        (loss_of(model(batch())) + loss_of(model(batch(seed=4)))).backward()
        optimizer.step()
    assert dualform.open(run).patterns("body")["sample"].to_pylist() == SAMPLES * 2


def test_a_resumed_run_keeps_the_worst_that_was_found(run: Path) -> None:
    """Patterns of the first part have no columns, whatever a trial of the second part shows."""
    model = Rowwise(by_first)
    samples(run, model, batch(), expect="'head'")
    model.change = torch.tanh
    samples(run, model, batch(), resume=True)
    assert dualform.open(run).rows["head"].outcome == "not aligned"


def test_an_interrupt_anywhere_in_a_trial_leaves_the_model_and_torch_as_they_were(run: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    recorder = dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run)
    files = (
        "recording/row_trials.py",
        "recording/model_copies.py",
        "recording/layer_hooks.py",
        "contextlib.py",
        "overrides.py",
    )
    random_state = torch.get_rng_state()

    def check() -> None:
        recorder.check_rows(torch.randn(4, 5, generator=torch.Generator()))

    check()  # the first one imports, and finds what later ones know
    places = distinct_places(check, files)
    gc.freeze()  # or every collection below would go through all that other tests have left
    for at in places:
        interrupted(check, at, files)
        gc.collect()
        assert all(parameter.requires_grad for parameter in model.parameters()), at
        assert _get_current_function_mode_stack() == [], at
        assert not every_module._global_forward_pre_hooks, at
        assert torch.equal(torch.get_rng_state(), random_state), at
        assert torch.is_grad_enabled(), at
    gc.unfreeze()
    assert len(places) > 50
