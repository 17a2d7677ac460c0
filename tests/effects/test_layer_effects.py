"""Effects against the dense reference, the fast form against the filter, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.attend.memory import Memory
from dualform.effects import layer_effects, moments
from dualform.effects.cautions import regime_cautions, size_cautions, step_cautions
from dualform.effects.filter import Side, factorise, make_filter, remaining, whole_side
from dualform.effects.layer_effects import Filtering
from dualform.effects.losses import Losses
from dualform.effects.moments import Extended, MomentSum, TraceSums, largest_eigenvectors
from dualform.engine.block import Block
from dualform.engine.reducers import Reducer
from dualform.errors import KeysOnlyError, QueryError
from helpers.dense_effects import asked_of, dense_effects, kernel_size, train_densely
from helpers.paired import Pair
from helpers.small import batch, network

STEPS, ROWS = 9, 6
EXACT: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-11}


def record(path: Path, *, adam: bool, **options: Any) -> tuple[Memory, nn.Sequential, nn.Sequential]:
    """Record a training; return the memory, the trained model, and the model at the start."""
    model, start = network(dtype=torch.float64), network(dtype=torch.float64)
    if adam:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=0.02)
    with dualform.record(model, optimizer, path, **options) as recorder:
        for step in range(STEPS):
            inputs, labels = batch(step, dtype=torch.float64, rows=ROWS)
            recorder.annotate(sample=torch.arange(ROWS) + step % 3 * ROWS, label=labels)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return dualform.open(path), model, start


def questions() -> tuple[Tensor, Tensor]:
    return batch(500, dtype=torch.float64, rows=4)


@pytest.mark.parametrize("quantity", ["margin", "loss"])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
def test_effects_are_the_dense_formulas(run: Path, monkeypatch: pytest.MonkeyPatch, adam: bool, quantity: Any) -> None:
    memory, model, start = record(run, adam=adam, shard_bytes=900)
    chosen = {"lr": 0.02, "weight_decay": 0.1} if adam else {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.02}
    batches = [batch(step, dtype=torch.float64, rows=ROWS) for step in range(STEPS)]
    trained, steps = train_densely(start, batches, adam=adam, **chosen)
    for recorded_one, dense_one in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(recorded_one, dense_one, **EXACT)
    inputs, labels = questions()
    spot = memory.attend(model, inputs, targets=labels, quantity=quantity)
    asked = asked_of(trained, inputs, labels, quantity)
    for layer in ("0", "2"):
        kappa = sum(kernel_size(steps[name], steps["2"]) for name in steps) / kernel_size(steps[layer], steps["2"])
        expected = dense_effects(steps[layer], steps["2"], asked[layer], kappa=kappa)
        torch.testing.assert_close(spot[layer].effects(per="pattern").values, expected, **EXACT)
        by_sample = torch.zeros(len(inputs), 3 * ROWS, dtype=torch.float64)
        by_sample.index_add_(1, torch.arange(STEPS * ROWS) % (3 * ROWS), expected)
        found = spot[layer].effects()
        assert found.groups == tuple(range(3 * ROWS))
        torch.testing.assert_close(found.values, by_sample, **EXACT)
        with monkeypatch.context() as patch:
            patch.setattr(
                layer_effects, "MAX_EFFECT_SHARES_BYTES", 0
            )  # by a pass over the patterns, with the fast form
            size = float(expected.norm())
            streamed = spot[layer].effects(per="pattern").values
            assert float((streamed - expected).norm()) < 1e-3 * size
            assert float((spot[layer].effects().values - by_sample).norm()) < 1e-3 * float(by_sample.norm())
        best = spot[layer].top(3, of="effect")
        torch.testing.assert_close(best.values[:, 0], expected.topk(3, dim=1).values, rtol=1e-3, atol=1e-3 * size)
        worst = spot[layer].top(2, of="effect", per="sample", largest=False)
        torch.testing.assert_close(
            worst.values[:, 0], by_sample.topk(2, dim=1, largest=False).values, rtol=1e-3, atol=1e-3 * size
        )


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
def test_filters_of_each_layer_and_of_all_together_are_the_dense_formulas(run: Path, adam: bool) -> None:
    memory, model, start = record(run, adam=adam)
    chosen = {"lr": 0.02, "weight_decay": 0.1} if adam else {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.02}
    batches = [batch(step, dtype=torch.float64, rows=ROWS) for step in range(STEPS)]
    trained, steps = train_densely(start, batches, adam=adam, **chosen)
    inputs, labels = questions()
    spot = memory.attend(model, inputs, targets=labels)
    asked = asked_of(trained, inputs, labels, "margin")
    sizes = {layer: kernel_size(steps[layer], steps["2"]) for layer in ("0", "2")}
    for layer, size in sizes.items():
        source, patterns = spot[layer]._require_asked(), spot[layer]._group("pattern")
        kappa = sum(sizes.values()) / size
        assert kappa > 1.1
        both: tuple[tuple[Filtering, float], ...] = (("joint", kappa), ("layerwise", 1.0))
        for filtering, strength in both:
            found = dataclasses.replace(source, filtering=filtering).totals(patterns)
            expected = dense_effects(steps[layer], steps["2"], asked[layer], kappa=strength)
            torch.testing.assert_close(found, expected, **EXACT)


def test_layers_add_up_and_views_keep_the_filter(run: Path) -> None:
    memory, model, _ = record(run, adam=False)
    inputs, labels = questions()

    def ask(view: Memory) -> Any:
        return view.attend(model, inputs, targets=labels, other_model=True)

    whole = ask(memory)
    both = whole.effects(by="label")
    torch.testing.assert_close(both.values, sum(whole[n].effects(by="label").values for n in ("0", "2")), **EXACT)
    assert both.layers == ("0", "2")
    assert "prediction of retraining, not a share of the output" in repr(both)
    assert "prediction of retraining" in repr(whole["0"].top(1, of="effect"))
    assert "prediction of retraining" in repr(whole["0"].totals(by="label", of="effect"))
    kept, left = ask(memory.where("row < 2")).effects(by="label"), ask(memory.without("row < 2")).effects(by="label")
    torch.testing.assert_close(kept.values + left.values, both.values, **EXACT)
    earlier = ask(memory.at(step=5)).effects(by="label")
    assert not torch.allclose(earlier.values, both.values)
    assert both.top(1).groups == (both.groups[int(both.values.amax(dim=0).argmax())],)
    assert both.to_arrow().column_names == ["query", "label", "effect", "spread"]


def test_moments_do_not_depend_on_shards(tmp_path: Path) -> None:
    found = []
    for name, size in (("one", 1 << 20), ("many", 400)):
        memory, model, _ = record(tmp_path / name, adam=False, shard_bytes=size)
        inputs, labels = questions()
        found.append((len(memory._run.parts()), memory.attend(model, inputs, targets=labels).effects().values))
    assert found[0][0] == 1 < found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], **EXACT)


@given(st.data())
@settings(max_examples=25)
def test_moments_merge_in_any_order(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    count = data.draw(st.integers(1, 20))
    keys, values = (torch.randn(count, d, generator=generator, dtype=torch.float64) for d in (4, 3))
    on_keys, on_values = (torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    extend, columns = Extended(weight=True, biases=0), torch.randn(3, 2, generator=generator, dtype=torch.float64)
    of_keys, of_values = (keys * on_keys[:, None]).T @ keys, (values * on_values[:, None]).T @ values
    reducers: list[tuple[Reducer[Tensor, Tensor], Tensor]] = [
        (MomentSum("keys", on_keys, extend, 4), of_keys),
        (MomentSum("values", on_values, extend, 3), of_values),
        (MomentSum("values", on_values, extend, 3, columns), of_values @ columns),
        (TraceSums(on_keys, on_values, extend), torch.stack([of_keys.trace(), of_values.trace()])),
    ]
    for reducer, expected in reducers:
        parts = []
        for number in range(4):
            mine = part_of == number
            block = Block(np.flatnonzero(mine.numpy()), keys[mine], values[mine])
            parts.append(reducer.add(reducer.new(keys), block, keys[:0], part_of[mine]))
        one, two, three, four = data.draw(st.permutations(parts))
        found = reducer.result(reducer.merge(reducer.merge(one, two), reducer.merge(three, four)))
        torch.testing.assert_close(found, expected, **EXACT)


@given(
    d_in=st.integers(1, 9),
    d_out=st.integers(1, 7),
    rank=st.integers(1, 9),
    time=st.floats(1e-3, 1e4),
    decay=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_the_fast_form_is_the_filter(d_in: int, d_out: int, rank: int, time: float, decay: float, seed: int) -> None:
    """With all ranks it is equal; with the tolerance it is off by that, where keys and values are."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, e = draw(rank, d_in) * 10 ** draw(rank, 1), draw(rank, d_out) * 10 ** draw(rank, 1)  # of rank 1 and more
    a, g = x.T @ x / rank, e.T @ e / rank
    query, gradient = draw(3, d_in), draw(3, d_out)
    made = make_filter(whole_side(a), whole_side(g), time, decay, tolerance=0.0)
    a_values, u_a = torch.linalg.eigh(a)
    g_values, u_g = torch.linalg.eigh(g)
    whole = remaining(time * torch.outer(g_values.clamp(min=0), a_values.clamp(min=0)) + decay)
    dense = u_g @ (whole * torch.einsum("qo,qi->qoi", gradient @ u_g, query @ u_a)) @ u_a.T
    expected = torch.einsum("to,qoi,ti->qt", e, dense, x)
    values, keys = made.turn(gradient, query)
    fast = torch.einsum("rqo,to,rqi,ti->qt", values, e, keys, x)
    size = float(e.norm() * gradient.norm() * x.norm() * query.norm())  # of what is filtered
    torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-9 * size)
    torch.testing.assert_close(made.apply(torch.einsum("qo,qi->qoi", gradient, query)), dense, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wide", ["keys", "values", "both"])
def test_directions_that_are_not_told_apart_share_one_eigenvalue(wide: str) -> None:
    """The filter of a wide side is that of the moment whose other eigenvalues are all their mean."""
    generator = torch.Generator().manual_seed(3)
    sides, dense = [], []
    for name, d, k in (("keys", 9, 4), ("values", 7, 3)):
        basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
        moment = torch.cat([torch.logspace(1, -1, k, dtype=torch.float64), torch.full((d - k,), 0.02).double()])
        cut = wide in (name, "both")
        sides.append(Side(basis[:, :k], moment[: k + 1]) if cut else Side(basis, moment))
        dense.append(Side(basis, moment))
    cut_one, whole_one = (make_filter(keys, values, 3.0, 0.1, tolerance=0.0) for keys, values in (sides, dense))
    matrix = torch.randn(5, 7, 9, generator=generator, dtype=torch.float64)
    for strength in (1.0, 4.0):
        torch.testing.assert_close(cut_one.apply(matrix, strength=strength), whole_one.apply(matrix, strength=strength))
    gradients, queries = (torch.randn(5, d, generator=generator, dtype=torch.float64) for d in (7, 9))
    values, keys = cut_one.stronger(4.0, tolerance=0.0).turn(gradients, queries)
    expected = whole_one.apply(torch.einsum("qo,qi->qoi", gradients, queries), strength=4.0)
    torch.testing.assert_close(torch.einsum("rqo,rqi->qoi", values, keys), expected)


def test_the_largest_eigenvectors_are_found_and_their_error_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "RANK", 12)
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(90, 90, generator=generator, dtype=torch.float64)).Q
    for falls in (1.0, 6.0):
        eigenvalues = torch.logspace(0, -falls, 90, dtype=torch.float64)
        moment = (basis * eigenvalues) @ basis.T
        side, error = largest_eigenvectors(moment.matmul, 90, float(moment.trace()))
        torch.testing.assert_close(side.moment[:12].flip(0), eigenvalues[:12], rtol=0.05, atol=0.0)
        kept = (side.basis * side.moment[:12]) @ side.basis.T
        kept += side.moment[12] * (torch.eye(90, dtype=torch.float64) - side.basis @ side.basis.T)
        assert float(kept.trace()) == pytest.approx(float(moment.trace()))
        truth = float((moment - kept).norm() / moment.norm())
        assert error == pytest.approx(truth, rel=0.35)
        assert 0.05 < truth < 0.6


def test_effects_of_wide_layers_come_from_their_largest_eigenvectors(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, model, _ = record(run, adam=False)
    inputs, labels = questions()
    exact = memory.attend(model, inputs, targets=labels)["0"].effects(per="pattern")
    monkeypatch.setattr(moments, "WIDEST", 3)
    monkeypatch.setattr(moments, "RANK", 2)
    monkeypatch.setattr(moments, "OVERSAMPLING", 1)
    other = dualform.open(run)
    found = dataclasses.replace(
        other.attend(model, inputs, targets=labels)["0"]._require_asked(), cache=cast(Any, _NoCache())
    )
    values = found.totals(other.attend(model, inputs, targets=labels)["0"]._group("pattern"))
    assert found.filter().keys.has_rest
    assert found.filter().values.has_rest
    assert set(found.moment_errors) == {"keys", "values"}
    assert all(0.02 < error < 1 for error in found.moment_errors.values())
    both = torch.stack([values.flatten(), exact.values.flatten()])
    assert not torch.allclose(values, exact.values)
    assert float(torch.corrcoef(both)[0, 1]) > 0.9


class _NoCache:
    """Keeps nothing."""

    def get(self, what: object, compute: Any) -> Any:
        return compute()

    def find(self, what: object) -> None:
        return None

    def keep(self, what: object, answer: Any) -> Any:
        return answer


def test_few_terms_are_enough() -> None:
    a, b = (torch.logspace(-6, 1, size, dtype=torch.float64) for size in (120, 80))
    whole = remaining(300.0 * torch.outer(b, a))
    weighted = b.sqrt()[:, None] * whole * a.sqrt()
    for tolerance, most in ((1e-2, 10), (1e-4, 20)):
        left, right = factorise(whole, b, a, tolerance=tolerance)
        assert len(left) <= most
        lost = b.sqrt()[:, None] * (left.T @ right) * a.sqrt() - weighted
        assert float(lost.norm()) <= tolerance * float(weighted.norm())


def test_what_is_left_of_an_update() -> None:
    exponent = torch.tensor([0.0, 1e-14, 1e-6, 1.0, 50.0, 1e6], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 1 - 5e-7, 0.6321205588285577, 0.02, 1e-6], dtype=torch.float64)
    torch.testing.assert_close(remaining(exponent), expected, rtol=1e-9, atol=0.0)


# What is refused ------------------------------------------------------------------------------------------------------


def test_effects_need_a_question(pair: Pair) -> None:
    spot = pair.memory.attend(pair.model, pair.queries("0"))
    with pytest.raises(QueryError, match="attend with targets and a quantity"):
        spot["0"].effects()
    with pytest.raises(QueryError, match="queries alone have no gradients"):
        pair.memory.attend(queries={"0": pair.queries("0")}, quantity="margin")
    with pytest.raises(QueryError, match="expected one of"):
        pair.memory.attend(pair.model, pair.queries("0"), quantity="logits")  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="belong to one layer"):
        pair.memory.attend(pair.model, pair.queries("0"), quantity="loss").effects(per="pattern")


@pytest.mark.parametrize(
    "quantity",
    [lambda outputs: outputs[:, 0], lambda: None, lambda outputs, targets, more: outputs[:, 0]],
    ids=["one argument", "no argument", "three arguments"],
)
def test_a_quantity_that_does_not_take_outputs_and_targets_is_refused_by_name(pair: Pair, quantity: Any) -> None:
    with pytest.raises(QueryError, match="expected a function of the model's outputs and the targets"):
        pair.memory.attend(pair.model, pair.queries("0"), quantity=quantity)


def test_an_error_inside_of_a_quantity_is_the_users_own(pair: Pair) -> None:
    with pytest.raises(ZeroDivisionError):
        pair.memory.attend(pair.model, pair.queries("0"), quantity=lambda outputs, targets: 1 / 0)  # type: ignore[arg-type,return-value]


def test_keys_only_layers_have_no_effects(run: Path) -> None:
    memory, model, _ = record(run, adam=False, layers={"0": "keys", "2": "keys+values"})
    inputs, labels = questions()
    spot = memory.attend(model, inputs, targets=labels)
    with pytest.raises(KeysOnlyError, match="keys only"):
        spot["0"].effects()
    with pytest.raises(KeysOnlyError, match="keys only"):
        spot.effects()
    assert spot["2"].effects().values.abs().sum() > 0


def test_an_untrained_layer_has_no_effects(run: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with dualform.record(model, optimizer, run):
        for step in range(3):
            inputs, labels = batch(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    memory = dualform.open(run)
    inputs, labels = batch(500)
    for view, layers in ((memory.at(step=0), ["2"]), (memory, [n for n in memory.layers if n == "0"])):
        for name in layers:
            with pytest.raises(QueryError, match="not trained within"):
                view.attend(model, inputs, targets=labels, layers=name, other_model=True)[name].effects(per="pattern")


def test_what_is_not_finite_is_named(run: Path) -> None:
    """The recorder refuses gradients that are not finite, so that only a damaged file can hold such patterns."""
    memory, model, _ = record(run, adam=False)
    shard = run / "shards" / "000000.safetensors"
    tensors = safetensors.torch.load_file(shard)
    tensors["0/keys"][0, 0] = torch.inf
    safetensors.torch.save_file(tensors, shard)
    inputs, labels = questions()
    with pytest.raises(QueryError, match="Layer '0' holds keys that are not finite, or too large to be squared"):
        memory.attend(model, inputs, targets=labels)["0"].effects()
    with torch.no_grad():
        model.get_parameter("2.weight").fill_(torch.nan)
    with pytest.raises(QueryError, match="gradient of the margin at layer '0' is not finite"):
        memory.attend(model, inputs, targets=labels)


# Other layers, losses and training tricks -----------------------------------------------------------------------------


def fit(path: Path, model: nn.Module, loss: Any, batches: Any, **options: Any) -> Memory:
    """Record three epochs over (inputs, targets) batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, path, **options) as recorder:
        for _ in range(3):
            for number, (inputs, targets) in enumerate(batches):
                recorder.annotate(sample=torch.arange(len(inputs)) + number * len(inputs))
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
    return dualform.open(path)


def known_losses(memory: Memory) -> Losses:
    return layer_effects.losses(memory._table, memory._cache)


def test_a_loss_that_is_no_softmax_has_weights_of_one(run: Path) -> None:
    model = network(dtype=torch.float64)
    batches = [(batch(i, dtype=torch.float64)[0], batch(i + 50, dtype=torch.float64)[0][:, :3]) for i in range(3)]
    memory = fit(run, model, functional.mse_loss, batches)
    found = known_losses(memory)
    assert (found.softmax, found.head) == (False, "2")
    assert all(bool((w == 1).all()) for w in found.weights.values())
    inputs = questions()[0]
    spot = memory.attend(model, inputs, quantity=lambda outputs, _: outputs[:, 0])
    both = spot.effects()
    assert both.values.shape == (4, 18)
    assert both.quantity == "<lambda>"
    assert bool((both.values != 0).any(dim=0).all()), "every sample did something"


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_a_single_output_is_no_softmax(run: Path, scale: float) -> None:
    """One value is never two probabilities, however small it is."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    batches = [(batch(0, dtype=torch.float64)[0], torch.zeros(6, 1, dtype=torch.float64))]
    memory = fit(run, model, lambda outputs, targets: scale * functional.mse_loss(outputs, targets), batches)
    assert not known_losses(memory).softmax


@pytest.mark.parametrize("way", ["mean", "sum", "ignored", "scaled", "accumulated", "halved"])
def test_the_softmax_is_found_however_the_loss_is_averaged(run: Path, way: str) -> None:
    """w is the same whatever 1/N the values contain."""
    model = network(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)  # so that the probabilities stay
    inputs, labels = batch(0, dtype=torch.float64, rows=8)
    with dualform.record(model, optimizer, run):
        if way in ("accumulated", "halved"):
            for half in (slice(0, 4), slice(4, 8)):
                scale = 0.5 if way == "halved" else 1.0
                (scale * functional.cross_entropy(model(inputs[half]), labels[half])).backward()
        else:
            wanted = labels.clone()
            if way == "ignored":
                wanted[5:] = -100
            reduction = "sum" if way == "sum" else "mean"
            scale = 1024.0 if way == "scaled" else 1.0
            (scale * functional.cross_entropy(model(inputs), wanted, reduction=reduction)).backward()
            if way == "scaled":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= scale
        optimizer.step()
    found = known_losses(dualform.open(run))
    assert found.softmax
    assert found.scaled == (way == "scaled")
    p = model(inputs).softmax(dim=1).detach()
    error = p - functional.one_hot(labels, 3)
    expected = (1 - p.square().sum(dim=1)) / error.square().sum(dim=1)
    if way == "ignored":
        expected[5:] = 0
    torch.testing.assert_close(torch.from_numpy(found.weights[0]), expected, rtol=1e-6, atol=1e-9)
    terms = {"mean": 8, "sum": 1, "ignored": 5, "scaled": 8, "accumulated": 4, "halved": 8}[way]
    assert found.terms[0].tolist() == [terms] * 8


class Tokens(nn.Module):
    """A table, a layer over positions, a normalisation, and logits at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(self.norm(torch.relu(self.mix(x.cumsum(dim=1)))))


def test_an_input_has_the_effects_of_all_its_positions(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    tokens = torch.randint(7, (6, 5))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    memory = fit(run, model, loss, [(tokens[:, :-1], tokens[:, 1:])])
    found = known_losses(memory)
    assert (found.softmax, found.head) == (True, "head")
    inputs, targets = tokens[:3, :-1], tokens[:3, 1:]
    spot = memory.attend(model, inputs, targets=targets, quantity="loss")
    both = spot.effects()
    assert (both.layers, list(both.outside)) == (("mix", "head"), ["table", "norm"])
    assert "'table' contributes nothing" in repr(both)
    with pytest.raises(QueryError, match="LayerNorm is not of the linear family"):
        spot["norm"].effects()
    alone = [memory.attend(model, inputs[i : i + 1], targets=targets[i : i + 1], quantity="loss") for i in range(3)]
    torch.testing.assert_close(both.values, torch.cat([one.effects().values for one in alone]), **EXACT)
    parts = memory.attend(model, [inputs[:2], inputs[2:]], targets=targets, quantity="loss")
    torch.testing.assert_close(both.values, parts.effects().values, **EXACT)
    monkeypatch.setattr(layer_effects, "MAX_EFFECT_SHARES_BYTES", 0)
    monkeypatch.setattr(layer_effects, "MAX_EFFECT_QUERIES", 4)  # one input a pass
    streamed = spot.effects().values
    assert float((streamed - both.values).norm()) < 1e-3 * float(both.values.norm())
    assert all(parameter.grad is not None for parameter in model.parameters()), "as the last training step left them"


def test_asking_leaves_the_model_as_it_was(run: Path) -> None:
    memory, model, _ = record(run, adam=False)
    model.train()
    model[0].weight.requires_grad_(False)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    inputs, labels = questions()
    spot = memory.attend(model, inputs, targets=labels)
    assert spot["0"].effects().values.abs().sum() > 0, "frozen by now, but it was trained"
    assert model.training
    assert not model[0].weight.requires_grad
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert not any(module._forward_hooks for module in model.modules())


def test_filters_are_kept_in_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, model, _ = record(run, adam=True)
    inputs, labels = questions()
    first = memory.attend(model, inputs, targets=labels).effects().values

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("built twice")

    for name in ("find_moments", "find_rates", "find_losses"):
        monkeypatch.setattr(layer_effects, name, never)
    again = dualform.open(run).attend(model, inputs, targets=labels).effects().values
    torch.testing.assert_close(first, again, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "expected one for each input"),
        (torch.zeros(5, dtype=torch.int64), "5 targets for 4 inputs"),
        (torch.zeros(4), "expected the number of a class"),
        (torch.zeros(4, 2, dtype=torch.int64), "expected the number of a class"),
    ],
)
def test_targets_that_do_not_fit(pair: Pair, targets: Tensor, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        pair.memory.attend(pair.model, pair.queries("0"), targets=targets)


# How far to trust them ------------------------------------------------------------------------------------------------


def test_the_spread_is_over_strengths_of_the_filter_of_all_layers_together(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, model, _ = record(run, adam=False)
    inputs, labels = questions()
    spot = memory.attend(model, inputs, targets=labels)
    found = spot.effects()
    sources = [(spot[layer]._require_asked(), spot[layer]._group("sample")) for layer in ("0", "2")]
    layers = [torch.stack([s.totals_at(g, (strength,))[0] for s, g in sources]) for strength in (0.25, 1.0, 4.0)]
    every = torch.stack([each.sum(dim=0) for each in layers])
    torch.testing.assert_close(found.values, every[1], **EXACT)
    assert found.spread is not None
    torch.testing.assert_close(found.spread, (every.amax(dim=0) - every.amin(dim=0)) / 2, **EXACT)
    assert float(found.spread.min()) > 0
    with monkeypatch.context() as patch:
        patch.setattr(layer_effects, "MAX_EFFECT_SHARES_BYTES", 0)  # by a pass over the patterns
        streamed = spot.effects().spread
        assert streamed is not None
        assert float((streamed - found.spread).norm()) < 0.02 * float(found.spread.norm())
    best = found.top(2)
    assert best.spread is not None
    at = [found.groups.index(group) for group in best.groups]
    torch.testing.assert_close(best.spread, found.spread[:, at])
    assert "±" in repr(found)
    assert found.to_arrow().column_names == ["query", "sample", "effect", "spread"]
    plain = spot.effects(spread=False)
    assert plain.spread is None
    assert "±" not in repr(plain)
    torch.testing.assert_close(plain.values, found.values)


def test_trainings_and_groups_unlike_those_that_were_compared_are_named(run: Path) -> None:
    memory, model, _ = record(run, adam=False)
    inputs, labels = questions()
    cautions = memory.attend(model, inputs, targets=labels).effects(by="micro").cautions
    assert any("9 steps; effects were compared with retraining from 75 steps on" in one for one in cautions)
    assert any("group 0 holds 100% of the patterns" in one for one in cautions)
    few = memory.attend(model, inputs, targets=labels).effects()
    assert not any("group" in one for one in few.cautions)
    assert "caution: the training has 9 steps" in repr(few)


def test_limits_of_what_was_compared() -> None:
    assert regime_cautions(75, 0.5) == []
    assert regime_cautions(74, None)[0].startswith("the training has 74 steps")
    assert "changed the weights by 1.0% of their size" in regime_cautions(500, 0.01)[0]
    assert size_cautions(["a", "b"], np.array([0, 0, 1, 1])) == []
    assert "group 'a' holds 75% of the patterns" in size_cautions(["a", "b"], np.array([0, 0, 0, 1]))[0]
    even = dict.fromkeys(range(1, 50), 1.0)
    assert step_cautions({0: 10.0, **even}) == [], "17 %, about what a first step has where all is well"
    assert "step 0 alone makes 67% of the derivative" in step_cautions({0: 100.0, **even})[0]
    assert step_cautions({0: 2.0, 1: 1.0}) == [], "few steps: each makes much of it"
    assert step_cautions({0: 0.0}) == []
