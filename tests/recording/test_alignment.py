"""Alignment: what one batch shows of a layer's rows is not believed of batches that could show something else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dualform
from dualform.recording.alignment import MAX_SHAPES, Alignment
from dualform.recording.annotations import bind
from dualform.recording.row_trials import _Trial, check_rows, still_holds
from dualform.recording.watch import watch
from helpers.loops import batches, gradient_of, loss_of, mlp, sgd

D = 5


class Model(nn.Module):
    """A hidden layer, something done to its rows as a second input asks for it, and a head."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(D, 4), nn.Linear(4, 3)
        self.change = change

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        result: Tensor = self.head(self.change(torch.tanh(self.body(x)), *more))
        return result


def batch(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(recorder: dualform.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Any) -> None:
    """Take one step, whose rows are annotated 0, 1, ..."""
    recorder.annotate(sample=torch.arange(len(inputs[0])))
    optimizer.zero_grad()
    loss_of(model(*inputs)).backward()
    optimizer.step()


def column(run: Path, layer: str, step: int) -> list[int | None]:
    table = dualform.open(run).patterns(layer)
    return [n for n, s in zip(table["sample"].to_pylist(), table["step"].to_pylist(), strict=True) if s == step]


def test_pairs_of_four_rows_that_are_exchanged(run: Path) -> None:
    """A cycle of four rows commutes with an exchange of pairs of rows, whichever cycle it is."""
    for i, pairs in enumerate([[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]):
        model = Model(lambda h, pairs=pairs: h[pairs])
        optimizer = sgd(model)
        with (
            dualform.record(model, optimizer, run / str(i)) as recorder,
            pytest.warns(UserWarning, match="'head'"),
        ):
            train(recorder, model, optimizer, batch(4, D))
        assert column(run / str(i), "body", 0) == [0, 1, 2, 3]
        assert column(run / str(i), "head", 0) == [None] * 4


def test_equal_lengths_do_not_show_that_rows_are_sorted_by_them(run: Path) -> None:
    model = Model(lambda h, lengths: h[lengths.argsort(stable=True)])
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(recorder, model, optimizer, batch(6, D), torch.full((6,), 9))
        train(recorder, model, optimizer, batch(6, D), torch.full((6,), 8))
        with pytest.warns(UserWarning, match=r"'head'.*rows=\{'head': rows\}"):
            train(recorder, model, optimizer, batch(6, D), torch.tensor([4, 1, 6, 2, 5, 3]))
    assert [column(run, "head", step) for step in (0, 1)] == [list(range(6))] * 2
    assert column(run, "head", 2) == [None] * 6
    assert column(run, "body", 2) == list(range(6))


def test_a_full_mask_does_not_show_which_positions_another_one_picks(run: Path) -> None:
    model = Model(lambda h, mask: h[mask])
    optimizer = sgd(model)
    full = torch.ones(3, 4, dtype=torch.bool)
    other = full.clone()
    other[0, 1:] = False  # nine positions are left, which three rows could have three each of
    with dualform.record(model, optimizer, run) as recorder:
        train(recorder, model, optimizer, batch(3, 4, D), full)
        with pytest.warns(UserWarning, match="'head'"):
            train(recorder, model, optimizer, batch(3, 4, D), other)
    assert column(run, "head", 0) == [n for n in range(3) for _ in range(4)]
    assert column(run, "head", 1) == [None] * 9


def test_flattened_rows_are_only_where_a_trial_saw_as_many_of_them(run: Path) -> None:
    """Each row of the first batch has two positions that are picked; of the second one has none, the other three."""
    model = Model(lambda h, mask: h[mask])
    optimizer = sgd(model)
    even = torch.tensor([[0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1]]).bool()
    uneven = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1]]).bool()
    with dualform.record(model, optimizer, run) as recorder:
        train(recorder, model, optimizer, batch(3, 7, D), even)
        train(recorder, model, optimizer, batch(3, 7, D), even)
        with pytest.warns(UserWarning, match="'head' .its input has another shape than in the trial"):
            train(recorder, model, optimizer, batch(3, 7, D), uneven)
    assert column(run, "head", 0) == [0, 0, 1, 1, 2, 2]
    assert column(run, "head", 2) == [None] * 9


def test_a_model_that_begins_to_sort_is_found_when_the_steps_have_doubled(run: Path) -> None:
    model = Model(lambda h: h)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for _ in range(3):
            train(recorder, model, optimizer, batch(6, D))
        model.change = lambda h: h.flip(0)
        with pytest.warns(UserWarning, match="'head'"):
            train(recorder, model, optimizer, batch(6, D))
    assert column(run, "head", 3) == [None] * 6


def many_rows(run: Path, change: Callable[..., Tensor], rows: int = 32, **other: Any) -> tuple[list[int], list[int]]:
    """Train four steps, the last with another change of rows; return the rows of all forwards, and of the last step."""
    seen: list[int] = []

    def plain(hidden: Tensor, *_: Tensor) -> Tensor:
        seen.append(len(hidden))
        return hidden

    def later(hidden: Tensor, *more: Tensor) -> Tensor:
        seen.append(len(hidden))
        return change(hidden, *more)

    model = Model(plain)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(4):
            model.change = later if step == 3 else plain
            before = len(seen)
            train(recorder, model, optimizer, batch(rows, D), *other.get("more", ()))
    return seen, seen[before:]


def test_a_few_rows_are_tried_again_where_a_whole_batch_was_clear(run: Path) -> None:
    seen, last = many_rows(run, lambda h: h)
    assert seen == [32, 32, 32, 8, 8, 32, 32, 8, 8, 32]  # plain and permuted, and the training's own
    assert last == [8, 8, 32]


class Counting(nn.Module):
    """Makes its rows larger with each of its own calls, which it counts in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * hidden


def test_a_copy_that_a_run_wrote_to_is_not_run_again_for_the_permuted_rows() -> None:
    model = nn.Sequential(nn.Linear(D, D), Counting(), nn.Linear(D, 2))
    layers = watch(model, None)
    inputs = batch(32, D)
    known = check_rows(model, layers, (inputs,), {}, rows=32, axis=0)
    assert {check.outcome for check in known.values()} == {"proved"}
    assert still_holds(known, model, layers, (inputs,), {}, rows=32, axis=0)
    assert float(model.get_buffer("1.calls")) == 1


def test_a_model_that_begins_to_sort_many_rows_is_found_by_a_few_of_them(run: Path) -> None:
    with pytest.warns(UserWarning, match="'head'"):
        _, last = many_rows(run, lambda h: h.flip(0))
    assert last == [8, 8, *[32] * (len(last) - 2)], "a few rows, then the whole batch, then the training's own"
    assert column(run, "head", 3) == [None] * 32
    assert column(run, "head", 2) == column(run, "body", 3) == list(range(32))


def test_lengths_that_the_few_rows_do_not_show_are_tried_on_the_whole_batch(run: Path) -> None:
    lengths = torch.full((32,), 9)
    lengths[1] = 2  # not among the few rows
    with pytest.warns(UserWarning, match="'head'"):
        many_rows(run, lambda h, lengths: h[lengths.argsort(stable=True)], more=[lengths])
    assert column(run, "head", 3) == [None] * 32


def test_a_whole_batch_is_tried_again_after_seven_doublings() -> None:
    model = Model(lambda h: h)
    alignment = Alignment(model, watch(model, None), None, enabled=True)
    tried = []
    for step in (0, 1, 63, 127, 255, (1 << 14) - 1):
        seen: list[int] = []
        model.change = lambda h, seen=seen: [seen.append(len(h)), h][1]
        binding = bind({"sample": torch.arange(32)})
        alignment.before_forward(binding, ("", model), (batch(32, D),), {}, step=step)
        tried.append(set(seen))
        assert binding.checks["head"].outcome == "proved"
    assert tried == [{32}, {8}, {8}, {32}, {8}, {32}]


@pytest.mark.filterwarnings("ignore:1 trained parameters")
def test_a_call_whose_rows_were_all_equal_is_tried_again_though_another_call_was_clear(run: Path) -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(D, 4)
            self.prototypes = nn.Parameter(torch.zeros(6, D))  # as many as rows

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x) @ self.body(self.prototypes).T)

    model = Prototypes()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(recorder, model, optimizer, batch(6, D))
        with pytest.warns(UserWarning, match="in one of 2 calls its patterns belong to no row"):
            train(recorder, model, optimizer, batch(6, D))
    assert column(run, "body", 1) == [None] * 12


def test_a_layer_that_is_called_on_flattened_rows_of_two_sizes(run: Path) -> None:
    class Crops(Model):
        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            return torch.cat([self.head(hidden.flatten(0, 1)), self.head(hidden[:, :2].flatten(0, 1))])

    model = Crops(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(recorder, model, optimizer, batch(3, 4, D))
    assert column(run, "head", 0) == [n for n in range(3) for _ in range(4)] + [n for n in range(3) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:2 trained parameters")
def test_a_copy_that_would_call_the_models_own_layers_does_not_train_them(run: Path) -> None:
    ends = []
    for recorded in (False, True):
        torch.manual_seed(0)
        body, norm, head = nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        model = nn.Sequential(body, norm, head)

        def forward(x: Tensor, layers: tuple[nn.Module, ...] = (body, norm, head)) -> Any:
            return layers[2](layers[1](layers[0](x)))

        model.forward = forward  # type: ignore[method-assign]
        optimizer = sgd(model)
        if recorded:
            with (
                dualform.record(model, optimizer, run) as recorder,
                pytest.warns(UserWarning, match="calls layers of the model itself"),
            ):
                train(recorder, model, optimizer, batch(6, D))
        else:
            loss_of(model(batch(6, D))).backward()
            optimizer.step()
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


@pytest.mark.filterwarnings("ignore:1 trained parameters")
def test_a_copy_that_would_use_the_models_own_parameter_gives_it_no_gradient(run: Path) -> None:
    ends = []
    for recorded in (False, True):
        scale = nn.Parameter(torch.ones(4))
        model = Model(lambda h, scale=scale: h * scale)
        model.scale = scale
        optimizer = sgd(model)
        if recorded:
            with dualform.record(model, optimizer, run) as recorder:
                train(recorder, model, optimizer, batch(6, D))
        else:
            loss_of(model(batch(6, D))).backward()
            optimizer.step()
        ends.append(scale.detach().clone())
    assert torch.equal(*ends)


def test_few_trials_where_every_batch_has_another_shape(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []
    plain = _Trial.find

    def find(self: _Trial, axes: Any, rows: int) -> Any:
        trials.append(rows)
        return plain(self, axes, rows)

    monkeypatch.setattr(_Trial, "find", find)
    model = Model(lambda h: h.flatten(0, 1))
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for length in range(4, 40):
            train(recorder, model, optimizer, batch(3, length, D))
    assert MAX_SHAPES <= len(trials) <= MAX_SHAPES + 12
    assert column(run, "head", 35) == [n for n in range(3) for _ in range(39)], "the flattened rows are still found"


def test_a_generator_that_the_model_shares_with_its_copy_stays(run: Path) -> None:
    shared = torch.Generator()
    gradients = []
    for recorded in (False, True):
        shared.manual_seed(4)
        model = Model(lambda h: h + torch.randn(h.shape, generator=shared))
        optimizer = sgd(model)
        if recorded:
            with dualform.record(model, optimizer, run) as recorder, pytest.warns(UserWarning, match="'head'"):
                train(recorder, model, optimizer, batch(6, D))
        else:
            loss_of(model(batch(6, D))).backward()
        gradients.append(gradient_of(model.body.weight))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("everywhere", [False, True], ids=["backward", "global"])
def test_no_other_hook_of_the_users_is_run_for_a_trial(run: Path, everywhere: bool) -> None:
    model = Model(torch.tanh)
    optimizer = sgd(model)
    seen: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.append(module)

    if everywhere:
        handle = nn.modules.module.register_module_forward_hook(note)
    else:
        handle = model.head.register_full_backward_hook(note)
    try:
        with (
            dualform.record(model, optimizer, run) as recorder,
            pytest.warns(UserWarning, match="hook of yours on all" if everywhere else "'head' has a backward hook"),
        ):
            train(recorder, model, optimizer, batch(6, D))
    finally:
        handle.remove()
    assert seen == ([model.body, model.head, model] if everywhere else [model.head])


def test_two_equal_rows_that_are_treated_otherwise_stop_no_training(run: Path) -> None:
    """Two rows are told apart by putting one in both places, in which case this model calls its layer once more."""

    class Careful(Model):
        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            hidden = self.body(x)
            hidden = hidden + self.body(0 * x) if torch.equal(x[0], x[1]) else hidden
            result: Tensor = self.head(hidden)
            return result

    model = Careful(torch.tanh)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        train(recorder, model, optimizer, batch(2, D))
    assert column(run, "head", 0) == [0, 1]


@pytest.mark.filterwarnings("ignore:annotate")
def test_forwards_are_counted_on_after_one_was_interrupted(run: Path) -> None:
    stop: list[bool] = []

    def change(hidden: Tensor) -> Tensor:
        if stop:
            raise KeyboardInterrupt
        return hidden

    model = Model(change)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        stop.append(True)
        with pytest.raises(KeyboardInterrupt):
            model(batch(6, D))
        stop.clear()
        train(recorder, model, optimizer, batch(6, D))
        assert recorder._steps.annotator.forward == 2
    assert {check.outcome for check in dualform.open(run).rows.values()} == {"proved"}


def test_a_model_that_is_checkpointed_as_a_whole_is_annotated(run: Path) -> None:
    """Checkpointing counts the tensors that its forward saves; the trial of rows in it must add none."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run) as recorder:
        for x in batches(3):
            recorder.annotate(sample=torch.arange(len(x)))
            optimizer.zero_grad()
            loss_of(checkpoint(model, x.requires_grad_(), use_reentrant=False)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    assert set(memory.patterns("0")["sample"].to_pylist()) == set(range(len(x)))


@pytest.mark.filterwarnings("ignore:Whether the rows of layer", "ignore:annotate", "ignore:2 trained parameters")
def test_activations_called_one_by_one_count_as_a_forward(run: Path) -> None:
    """Of a batch that is skipped, the annotations do not go to the next, also where no recorded part is a child."""
    inner = nn.Linear(D, D)
    body = nn.Sequential(inner)  # has a forward of its own, which is not called
    model = nn.ModuleDict({"squash": nn.Tanh(), "body": body, "head": nn.Linear(D, 2)})
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run, layers=["body.0"]) as recorder:
        for number, x in enumerate(batches(4)):
            if number != 2:
                recorder.annotate(sample=torch.arange(len(x)) + 100 * number)
            loss = loss_of(model["head"](inner(model["squash"](x))))
            if number != 1:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    found = set(dualform.open(run).patterns("body.0")["sample"].to_pylist())
    assert None in found
    assert not {sample for sample in found if sample is not None and 100 <= sample < 300}
