"""SOURCE's formula, as a peer of effects, beside training that is really unrolled."""

from collections.abc import Callable

import pytest
import torch
from benchmarks.source_peer import (
    Checkpoint,
    Curvature,
    Task,
    find_curvatures,
    find_pairs,
    find_preconditioners,
    find_queries,
    gather,
    pull_back,
    pull_back_adam,
    score_samples,
)
from benchmarks.truth_peers import RENAMED, LinearLSTM, sample_losses
from torch import Tensor, nn
from torch.nn import functional

from dualform.effects.output_gradients import measure_quantity
from dualform.experiments.retraining import correlate
from dualform.experiments.retraining_networks import CharacterLSTM, SmallCNN

D_OUT, D_IN, SAMPLES = 3, 4, 5


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curvature(seed: int, *, diagonal: bool = False) -> Curvature:
    """A curvature whose largest eigenvalue is about 1."""
    values, keys = (torch.linalg.qr(random(d, d, seed=seed + d))[0] for d in (D_OUT, D_IN))
    if diagonal:
        values, keys = torch.eye(D_OUT).double(), torch.eye(D_IN).double()
    return Curvature(values, keys, random(D_OUT, D_IN, seed=seed + 50).square() / 3)


def unrolled(
    curvatures: list[Curvature], gradients: list[Tensor], query: Tensor, rate: float, steps: int, scales: list[Tensor]
) -> Tensor:
    """Return the derivative of <query, end> by each sample's weight, through every step of a quadratic training."""
    weights = torch.ones(SAMPLES, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(D_OUT, D_IN, dtype=torch.float64)
    for each, of_samples, scale in zip(curvatures, gradients, scales, strict=True):
        for _ in range(steps):
            gradient = each.scale(w, each.eigenvalues) + torch.einsum("n,noi->oi", weights, of_samples) / SAMPLES
            w = w - rate * scale * gradient
    (found,) = torch.autograd.grad((query * w).sum(), weights)
    return found


@pytest.mark.parametrize("form", ["plain", "Adam, damped", "Adam, diagonal"])
def test_the_formula_is_exact_unrolling_of_a_quadratic_as_steps_shrink(form: str) -> None:
    adam = form != "plain"
    curvatures = [curvature(seed, diagonal=adam) for seed in (1, 2, 3)]
    gradients = [random(SAMPLES, D_OUT, D_IN, seed=10 + i) for i in range(3)]
    scales = [random(D_OUT, D_IN, seed=20 + i).square() + 0.5 if adam else torch.ones(D_OUT, D_IN) for i in range(3)]
    query = random(D_OUT, D_IN, seed=30)
    errors = []
    for steps in (20, 200):
        rate = 4.0 / steps  # so that each segment takes the eigenvalues of 1 to exp(-4)
        times = [rate * steps] * 3
        if adam:
            damping = 1e-12 if form == "Adam, damped" else None
            pulled = pull_back_adam(curvatures, times, scales, query[None], damping)
        else:
            pulled = pull_back(curvatures, times, query[None])
        said = -sum(torch.einsum("noi,oi->n", g, m[0]) for g, m in zip(gradients, pulled, strict=True)) / SAMPLES
        exact = unrolled(curvatures, gradients, query, rate, steps, scales)
        errors.append(float((said - exact).norm() / exact.norm()))
    assert errors[0] < 0.2
    assert errors[1] < 0.15 * errors[0], "the error is of the order of one step"


def test_scores_are_near_the_unrolled_derivative_of_a_trained_layer() -> None:
    inputs, targets = random(40, 6, seed=0), torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))
    inputs = inputs + 2 * functional.one_hot(targets, 6)
    test, wanted = inputs[:8] + 0.5 * random(8, 6, seed=2), targets[:8]
    weights = torch.ones(40, dtype=torch.float64, requires_grad=True)
    w, b = (torch.zeros(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 6), (3,)))
    checkpoints, rate, steps = [], 0.05, 150
    for step in range(steps):
        losses = functional.cross_entropy(functional.linear(inputs, w, b), targets, reduction="none")
        moved = torch.autograd.grad((weights * losses).mean(), (w, b), create_graph=True)
        w, b = w - rate * moved[0], b - rate * moved[1]
        if (step + 1) % 30 == 0:
            model = nn.Linear(6, 3).double()
            model.load_state_dict({"weight": w.detach(), "bias": b.detach()})
            checkpoints.append(Checkpoint(model, 30, {}))
    margins = measure_quantity(functional.linear(test, w, b), wanted, "margin")
    exact = torch.stack([torch.autograd.grad(margin, weights, retain_graph=True)[0] for margin in margins])
    task = Task(
        sample_losses, lambda out, to: measure_quantity(out, to, "margin"), (inputs, targets), (test, wanted), rate
    )
    for segments in (1, 5):
        scored = score_samples(task, [gather(task, each) for each in checkpoints], segments=segments)
        said = scored.scores[""].double() / 40
        assert float(correlate(said.T, exact.T).mean()) > 0.85
        assert 0.7 < float((said * exact).sum() / said.square().sum()) < 1.4, "the size is right too"
    assert set(scored.scores) == {""}
    assert scored.factor_bytes == 5 * 4 * (3 * 3 + 7 * 7 + 3 * 7)


def test_the_curvature_of_passages_is_that_of_their_terms() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    passages, targets = random(200, 6, 4, seed=1), torch.zeros(200, 6, dtype=torch.long)
    found = []
    for inputs, wanted in ((passages, targets), (passages.flatten(0, 1), targets.flatten())):
        task = Task(sample_losses, sample_losses, (inputs, wanted), (inputs[:1], wanted[:1]), 0.1)
        found.append(float(find_curvatures(task, [gather(task, Checkpoint(model, 1, {}))])[""].eigenvalues.sum()))
    assert found[0] == pytest.approx(found[1], rel=0.1)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "cnn": lambda: (SmallCNN(64, (2, 3), 5, 4), torch.randn(7, 64), torch.arange(7) % 4),
    "lstm": lambda: (LinearLSTM(CharacterLSTM(5, 6)), torch.randint(90, (7, 8)), torch.randint(90, (7, 8))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_inputs_and_errors_make_the_gradients(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, targets = NETWORKS[name]()
    sample_losses(model(inputs), targets).sum().backward()
    expected = {
        key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None
    }
    pairs = find_pairs(model, sample_losses, (inputs, targets))
    assert len(pairs) == {"cnn": 4, "lstm": 3}[name]
    for layer, (keys, errors) in pairs.items():
        whole = torch.einsum("bto,bti->oi", errors, keys)
        torch.testing.assert_close(whole[:, :-1], expected[f"{layer}.weight"].flatten(1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(whole[:, -1], expected[f"{layer}.bias"], rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters()), "nothing is left"
    task = Task(sample_losses, sample_losses, (inputs, targets), (inputs, targets), 0.1)
    moments = {key: torch.full_like(parameter, 4.0) for key, parameter in model.named_parameters()}
    preconditioners = find_preconditioners([Checkpoint(model, 1, moments), Checkpoint(model, 1, moments)])
    for layer, queries in find_queries(task, model).items():
        assert preconditioners[layer].shape == queries.shape[1:]
        torch.testing.assert_close(preconditioners[layer], torch.full_like(preconditioners[layer], 0.5))


def test_the_lstm_written_out_for_peers_is_the_lstm() -> None:
    torch.manual_seed(0)
    lstm, tokens = CharacterLSTM(5, 6), torch.randint(90, (4, 9))
    written = LinearLSTM(lstm)
    torch.testing.assert_close(written(tokens), lstm(tokens))
    written(tokens).square().sum().backward()
    lstm(tokens).square().sum().backward()
    for name, parameter in lstm.named_parameters():
        found = written.get_parameter(RENAMED.get(name, name)).grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
