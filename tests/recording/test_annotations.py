"""Annotations: shapes, types, which patterns they reach, and what is said when they do not fit."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import AnnotationError
from dualform.recording.annotations import RESERVED, bind
from helpers.loops import batches, loss_of, mlp, sgd


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Do one step; the gradients of the step before are there until now."""
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def recorded(
    run: Path, *annotations: dict[str, Any], shape: tuple[int, ...] = (4, 5), **options: Any
) -> dualform.Memory:
    """Record one step per annotation (an empty one means none) and open the memory."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, **options) as recorder:
        for columns, x in zip(annotations, batches(len(annotations), *shape), strict=True):
            if columns:
                recorder.annotate(**columns)
            step(model, optimizer, x)
    return dualform.open(run)


def column(memory: dualform.Memory, name: str, layer: str = "0") -> list[Any]:
    return memory.patterns(layer).to_pydict()[name]


# What is accepted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([3, 1, 4, 1], [3, 1, 4, 1]),
        ((3, 1, 4, 1), [3, 1, 4, 1]),
        (torch.tensor([3, 1, 4, 1]), [3, 1, 4, 1]),
        (torch.tensor([3, 1, 4, 1], dtype=torch.uint8), [3, 1, 4, 1]),
        (torch.tensor([0.5, 1.5, -2.0, 3.0], requires_grad=True), [0.5, 1.5, -2.0, 3.0]),
        (torch.tensor([0.5, 1.5, -2.0, 3.0], dtype=torch.bfloat16), [0.5, 1.5, -2.0, 3.0]),
        (np.array([0.5, 1.5, -2.0, 3.0], dtype=np.float32), [0.5, 1.5, -2.0, 3.0]),
        (torch.tensor([True, False, True, True]), [True, False, True, True]),
        (["a", "bb", "", "größer"], ["a", "bb", "", "größer"]),
        (np.array(["a", "bb", "", "größer"], dtype=object), ["a", "bb", "", "größer"]),
        ("mnist", ["mnist"] * 4),
        (7, [7] * 4),
        (torch.tensor(7), [7] * 4),
        (0.5, [0.5] * 4),
        (True, [True] * 4),
        (2**62, [2**62] * 4),
        (np.str_("a"), ["a"] * 4),
        (np.float32(0.5), [0.5] * 4),
    ],
    ids=repr,
)
def test_columns_of_every_type(run: Path, value: Any, expected: list[Any]) -> None:
    memory = recorded(run, {"it": value})
    for layer in memory.layers:
        assert column(memory, "it", layer) == expected


def test_columns_per_position_spread_over_rows_and_columns_per_row_over_positions(run: Path) -> None:
    tokens = [["a", "b", "c"], ["d", "e", "f"]]
    memory = recorded(run, {"token": tokens, "document": [7, 8], "task": "read"}, shape=(2, 3, 5))
    assert column(memory, "token") == list("abcdef")
    assert column(memory, "document") == [7, 7, 7, 8, 8, 8]
    assert column(memory, "task") == ["read"] * 6
    assert column(memory, "row") == [0, 0, 0, 1, 1, 1]
    assert column(memory, "position") == [0, 1, 2, 0, 1, 2]


def test_the_second_axis_may_be_the_batch(run: Path) -> None:
    """Inputs (L, B, d) = (3, 2, 5), annotations (B,) and (B, L) as ever."""
    tokens = [["a", "b", "c"], ["d", "e", "f"]]
    memory = recorded(run, {"token": tokens, "document": [7, 8]}, shape=(3, 2, 5), batch_axis=1)
    assert column(memory, "row") == [0, 1, 0, 1, 0, 1]
    assert column(memory, "position") == [0, 0, 1, 1, 2, 2]
    assert column(memory, "token") == list("adbecf")
    assert column(memory, "document") == [7, 8, 7, 8, 7, 8]


def test_the_middle_axis_may_be_the_batch(run: Path) -> None:
    """Inputs (H, B, W, d): positions run over H and W."""
    memory = recorded(run, {"image": [7, 8, 9]}, shape=(2, 3, 2, 5), batch_axis=1)
    assert column(memory, "image") == [7, 7, 8, 8, 9, 9] * 2
    assert column(memory, "position") == [0, 1] * 3 + [2, 3] * 3


class Flattened(nn.Module):
    """The first layer sees (B, L, d), the second the batch flattened to (B · L, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).reshape(-1, 6))


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_flattened_batches_keep_their_positions(run: Path, batch_axis: int) -> None:
    model = Flattened()
    optimizer = sgd(model)
    tokens = np.array([["a", "b", "c"], ["d", "e", "f"]])
    shape = (2, 3, 5) if batch_axis == 0 else (3, 2, 5)
    with dualform.record(model, optimizer, run, batch_axis=batch_axis) as recorder:
        recorder.annotate(token=tokens, document=[7, 8])
        step(model, optimizer, batches(1, *shape)[0])
    memory = dualform.open(run)
    order = tokens if batch_axis == 0 else tokens.T
    assert column(memory, "token", "first") == order.reshape(-1).tolist()
    assert column(memory, "token", "second") == order.reshape(-1).tolist()
    assert column(memory, "document", "second") == column(memory, "document", "first")


def test_a_single_example_without_a_batch_axis(run: Path) -> None:
    memory = recorded(run, {"label": [3]}, {"label": 4}, shape=(5,))
    assert column(memory, "label") == [3, 4]


def test_columns_that_appear_later_and_go(run: Path) -> None:
    memory = recorded(run, {"a": 1}, {}, {"a": 2, "b": [1, 2, 3, 4]}, {"b": 0.5})
    assert column(memory, "a") == [1] * 4 + [None] * 4 + [2] * 4 + [None] * 4
    assert column(memory, "b") == [None] * 8 + [1, 2, 3, 4] + [0.5] * 4
    assert memory.columns[-2:] == ("a", "b")


def test_a_large_batch_is_annotated_in_order(run: Path) -> None:
    labels = torch.randperm(500)
    memory = recorded(run, {"label": labels}, {"label": labels.flip(0)}, shape=(500, 5), shard_bytes=1)
    assert column(memory, "label") == [*labels.tolist(), *labels.flip(0).tolist()]


def test_the_users_arrays_may_change_afterwards(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    labels, names = torch.zeros(4, dtype=torch.int64), np.array([""] * 4, dtype="U1")
    flags, ratios = torch.zeros(4, dtype=torch.bool), np.zeros(4)
    with dualform.record(model, optimizer, run) as recorder:
        for i, x in enumerate(batches(3)):
            labels.fill_(i)
            names[:] = ["a", "b", "c", "d"]
            flags.fill_(False)
            ratios.fill(0)
            recorder.annotate(label=labels, name=names, flag=flags, ratio=ratios)
            labels.fill_(99)
            names[:] = "z"
            flags.fill_(True)
            ratios.fill(99)
            step(model, optimizer, x)
    memory = dualform.open(run)
    assert column(memory, "label") == [0] * 4 + [1] * 4 + [2] * 4
    assert column(memory, "name") == list("abcd") * 3
    assert column(memory, "flag") == [False] * 12
    assert column(memory, "ratio") == [0.0] * 12


def test_empty_batches(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for labels in ([1, 2], [], [3]):
            recorder.annotate(label=torch.tensor(labels, dtype=torch.int64), name=[str(n) for n in labels], task="x")
            optimizer.zero_grad()
            model(torch.randn(len(labels), 5)).square().sum().backward()
            optimizer.step()
    memory = dualform.open(run)
    assert column(memory, "label") == [1, 2, 3]
    assert column(memory, "name") == ["1", "2", "3"]
    assert column(memory, "task") == ["x"] * 3


# Which patterns they reach --------------------------------------------------------------------------------------------


def test_an_annotation_ends_with_its_backward(run: Path) -> None:
    memory = recorded(run, {"label": [1, 2, 3, 4]}, {}, {"label": [5, 6, 7, 8]}, {})
    assert column(memory, "label") == [1, 2, 3, 4, *[None] * 4, 5, 6, 7, 8, *[None] * 4]


def test_an_annotation_waits_for_a_forward_that_trains(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for i, x in enumerate(batches(3)):
            recorder.annotate(label=i)
            with torch.no_grad():
                model(x)
            torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
            step(model, optimizer, x)
    assert column(dualform.open(run), "label") == [0] * 4 + [1] * 4 + [2] * 4


def test_each_backward_of_a_step_has_its_own(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for x in batches(2):
            optimizer.zero_grad()
            for i, part in enumerate(x.split([1, 3])):
                recorder.annotate(label=[10 * i + n for n in range(len(part))], micro_name=f"m{i}")
                loss_of(model(part)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert column(memory, "label") == [0, 10, 11, 12] * 2
    assert column(memory, "micro_name", "2") == ["m0", "m1", "m1", "m1"] * 2


def test_each_forward_of_a_backward_has_its_own(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        x = batches(1)[0]
        losses = []
        for name in ("anchor", "positive"):
            recorder.annotate(role=name)
            losses.append(loss_of(model(x)))
        (losses[0] + losses[1]).backward()
        optimizer.step()
    assert column(dualform.open(run), "role") == ["anchor"] * 4 + ["positive"] * 4


def test_annotations_before_one_forward_add_up(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(label=1, old=True)
        recorder.annotate(label=2)
        step(model, optimizer, batches(1)[0])
        recorder.annotate(label=3)
        step(model, optimizer, batches(1)[0])
    assert column(dualform.open(run), "label") == [2] * 4 + [3] * 4
    assert column(dualform.open(run), "old") == [True] * 4 + [None] * 4


def test_an_annotation_after_its_forward_is_warned_of(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        loss = loss_of(model(batches(1)[0]))
        with pytest.warns(UserWarning, match="before the forward"):
            recorder.annotate(label=1)
        loss.backward()
        optimizer.step()


def test_a_recorder_that_was_not_entered_says_so(run: Path) -> None:
    model = mlp()
    with pytest.raises(AnnotationError, match="with statement"):
        dualform.record(model, sgd(model), run).annotate(label=1)


def test_a_pooled_layer_keeps_the_columns_that_fit_it(run: Path) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.body(x).tanh().mean(1))
            return result

    model = Pooled()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(label=[7, 8], task="t", token=[[1, 2, 3], [4, 5, 6]])
        loss_of(model(torch.randn(2, 3, 5))).backward()
        with pytest.warns(UserWarning, match=r"column 'token' has shape \(2, 3\), but layer 'head' saw 2 rows"):
            optimizer.step()
    memory = dualform.open(run)
    assert memory.patterns("head").select(["label", "task", "token"]).to_pydict() == {
        "label": [7, 8],
        "task": ["t", "t"],
        "token": [None, None],
    }
    assert memory.patterns("body")["token"].to_pylist() == [1, 2, 3, 4, 5, 6]
    assert memory.patterns("body")["label"].to_pylist() == [7, 7, 7, 8, 8, 8]
    assert memory.without(label=7).patterns("head").num_rows == 1


# What does not fit ----------------------------------------------------------------------------------------------------


def test_columns_of_different_lengths_are_named(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        with pytest.raises(AnnotationError, match=r"Column 'b' has length 3, but column 'a' has length 4"):
            recorder.annotate(a=[1, 2, 3, 4], b=[1, 2, 3])
        with pytest.raises(AnnotationError, match=r"Column 'b' has 3 positions, but column 'a' has 2"):
            recorder.annotate(a=[[1, 2]], b=[[1, 2, 3]])
        with pytest.raises(AnnotationError, match=r"Column 'b' has length 0, but column 'a' has length 2"):
            recorder.annotate(a=[1, 2], b=np.zeros(0))
        step(model, optimizer, batches(1)[0])  # without annotations
    assert dualform.open(run).columns[-1] == "position"


@pytest.mark.parametrize(
    ("columns", "shape", "message"),
    [
        ({"label": [1, 2, 3]}, (4, 5), r"column 'label' has shape \(3,\), but layer '0' saw 4 rows"),
        ({"label": np.zeros(0, dtype=int)}, (4, 5), r"column 'label' has shape \(0,\), but layer '0' saw 4 rows"),
        ({"t": [[1, 2]] * 4, "n": 1}, (4, 3, 5), r"column 't' has shape \(4, 2\), but layer '0' saw 4 rows of 3 pos"),
        ({"label": [1, 2, 3]}, (4, 3, 5), r"column 'label' has shape \(3,\), but layer '0' saw 4 rows of 3 positions"),
    ],
    ids=["rows", "none", "positions", "other axis"],
)
def test_a_batch_of_another_length_is_named_at_the_step(
    run: Path, columns: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    """It is the user's mistake, not a failure of the recording; the same step can be taken again without it."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        inputs = batches(4, *shape)
        recorder.annotate(fine=1)
        step(model, optimizer, inputs[0])
        recorder.annotate(**columns)
        optimizer.zero_grad()
        loss_of(model(inputs[1])).backward()
        with pytest.raises(AnnotationError, match=message):
            optimizer.step()
        optimizer.step()
        recorder.annotate(fine=2)
        step(model, optimizer, inputs[2])
        recorder.annotate(**columns)
        with pytest.raises(AnnotationError, match=message):
            step(model, optimizer, inputs[3])
        optimizer.zero_grad()  # or without the batch
        recorder.annotate(fine=3)
        step(model, optimizer, inputs[3])
    memory = dualform.open(run)
    rows = torch.Size(shape[:-1]).numel()
    assert column(memory, "fine") == [1] * rows + [None] * rows + [2] * rows + [3] * rows
    assert memory.verify(model).passed


class Pooled(nn.Module):
    """The first layer sees every position, the last one a row per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.every = nn.Linear(5, 6)
        self.pooled = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(torch.tanh(self.every(x)).mean(dim=1))


def test_a_layer_that_fits_no_annotation_gets_nulls_and_a_warning(run: Path) -> None:
    model = Pooled()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for i, x in enumerate(batches(3, 2, 3, 5)):
            recorder.annotate(token=[["a", "b", "c"], ["d", "e", "f"]])
            if i == 0:
                with pytest.warns(UserWarning, match=r"'token' has shape \(2, 3\), but layer 'pooled' saw 2 rows"):
                    step(model, optimizer, x)
            else:  # once is enough
                step(model, optimizer, x)
    memory = dualform.open(run)
    assert column(memory, "token", "every") == list("abcdef") * 3
    assert column(memory, "token", "pooled") == [None] * 6
    assert memory.verify(model).passed


class TwiceVarying(nn.Module):
    """A body that sees every position, and two heads that see one row per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(torch.tanh(self.body(x)).mean(dim=1))))
        return result


def test_layers_that_fit_no_annotation_are_named_in_one_warning_at_the_users_line(run: Path) -> None:
    """Sequences of another length in each batch, as padding makes them, are no news."""
    model = TwiceVarying()
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with dualform.record(model, optimizer, run) as recorder:
            for length in (3, 4, 5):
                recorder.annotate(sample=[7, 8], token=torch.arange(2 * length).view(2, length))
                step(model, optimizer, batches(1, 2, length, 5)[0])
    assert [warning.filename for warning in caught] == [__file__]
    assert "'first' saw 2 rows; column 'token' has shape (2, 3), but layer 'second'" in str(caught[0].message)
    assert column(dualform.open(run), "sample", "second") == [7, 8] * 3


class Blocks(nn.Module):
    """Blocks in a ModuleList, which a training loop calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(2))


def test_a_skipped_batch_of_a_block_keeps_its_annotations_to_itself(run: Path) -> None:
    """A block of a ModuleList runs on an annotated batch without a backward, then trains on another batch."""
    model = Blocks()
    optimizer = sgd(model)
    block = model.blocks[0]
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(sample=[1, 2, 3, 4])
        block(batches(1)[0])
        with pytest.warns(UserWarning, match="a forward pass that had no backward"):
            step(block, optimizer, batches(1, seed=2)[0])
        recorder.annotate(sample=[5, 6, 7, 8])
        step(block, optimizer, batches(1, seed=3)[0])
    memory = dualform.open(run)
    assert column(memory, "sample", "blocks.0.0") == [None] * 4 + [5, 6, 7, 8]
    assert memory.rows["blocks.0.0"].outcome == "proved"


def test_flattened_layers_take_annotations_per_row(run: Path) -> None:
    model = Flattened()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        recorder.annotate(document=[7, 8])
        step(model, optimizer, batches(1, 2, 3, 5)[0])
    memory = dualform.open(run)
    assert column(memory, "document", "first") == [7, 7, 7, 8, 8, 8]
    assert column(memory, "document", "second") == [7, 7, 7, 8, 8, 8]
    assert column(memory, "row", "second") == [0, 0, 0, 1, 1, 1]


def test_flattened_layers_whose_rows_are_not_tried_take_none(run: Path) -> None:
    model = Flattened()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, check_rows=False) as recorder:
        recorder.annotate(document=[7, 8])
        with pytest.warns(UserWarning, match=r"'document' has shape \(2,\), but layer 'second' saw 6 rows"):
            step(model, optimizer, batches(1, 2, 3, 5)[0])
    assert column(dualform.open(run), "document", "second") == [None] * 6


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names(name: str) -> None:
    with pytest.raises(AnnotationError, match=f"'{name}' is a column that every pattern has already"):
        bind({name: [1]})


@pytest.mark.parametrize(
    "value", [[1, "a"], ["a", None], [None, 1], {"a": 1}, [1 + 2j], [[1], [1, 2]], [2**63]], ids=repr
)
def test_types_that_are_not_understood(value: Any) -> None:
    with pytest.raises(AnnotationError, match="'it'"):
        bind({"it": value})


@pytest.mark.parametrize("make", [list, np.array, lambda v: np.array(v, dtype=object), lambda v: v[0]], ids=range(4))
@pytest.mark.parametrize("text", ["a\0b", "\0", "caf\udce9"], ids=["inside", "alone", "surrogate"])
def test_strings_that_would_become_others_or_none(make: Any, text: str) -> None:
    if make is np.array and text == "\0":
        pytest.skip("numpy itself has made an empty string of it")
    with pytest.raises(AnnotationError, match="'it' holds"):
        bind({"it": make([text, "a"])})


def test_too_many_axes() -> None:
    with pytest.raises(AnnotationError, match=r"'it' has shape \(2, 3, 4\); expected"):
        bind({"it": torch.zeros(2, 3, 4)})
    with pytest.raises(AnnotationError, match=r"'it' has shape \(2, 0\)"):
        bind({"it": torch.zeros(2, 0)})


def test_nothing_to_annotate() -> None:
    with pytest.raises(AnnotationError, match="at least one column"):
        bind({})


@pytest.mark.parametrize(("before", "now"), [(1, "a"), ("a", 1), (0.5, "a"), (True, 1), (1, True)], ids=repr)
def test_a_column_keeps_its_type(run: Path, before: Any, now: Any) -> None:
    """Found at once, before the step: afterwards the step could not be undone."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        inputs = batches(3)
        recorder.annotate(it=before)
        step(model, optimizer, inputs[0])
        with pytest.raises(AnnotationError, match=r"Column 'it' held \w+ so far and now holds \w+"):
            recorder.annotate(it=now)
        step(model, optimizer, inputs[1])
        recorder.annotate(it=before)
        step(model, optimizer, inputs[2])
    memory = dualform.open(run)
    assert column(memory, "it") == [before] * 4 + [None] * 4 + [before] * 4
    assert memory.verify(model).passed


def test_two_backwards_of_a_step_agree_on_types(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        x = batches(1)[0]
        recorder.annotate(it=1)
        loss_of(model(x)).backward()
        with pytest.raises(AnnotationError, match="Column 'it' held int64"):
            recorder.annotate(it="a")
        loss_of(model(x)).backward()
        optimizer.step()
    memory = dualform.open(run)
    assert column(memory, "it") == [1] * 4 + [None] * 4
    assert memory.verify(model).passed


def test_integers_may_become_floats(run: Path) -> None:
    memory = recorded(run, {"it": 1}, {"it": 0.5}, {"it": 2}, shard_bytes=1)
    assert column(memory, "it") == [1.0] * 4 + [0.5] * 4 + [2.0] * 4
