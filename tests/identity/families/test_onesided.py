"""Muon: weights, masks, horizons, contributions, rounding and replays against live training and a dense loop."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.engine.verification import Verification
from dualform.errors import ResumeError
from dualform.identity.families import optimizer_kinds
from dualform.identity.families.onesided import polynomial
from dualform.identity.parameter_maps import OuterMap, ParameterMap, RowsMap, ScaleMap, TransposedMap
from dualform.identity.parameter_use import ParameterUse
from dualform.recording.sinks import CallRecord, LayerStart, ParameterFacts, Start, StepCall, StepFacts, sample
from dualform.store.folder_blobs import FolderBlobs
from dualform.store.reader import Run
from dualform.store.writer import DiskWriter
from helpers.blob_files import file_checksum, write_parts_file
from helpers.folds import folded
from helpers.loops import gradient_of, state
from helpers.manifests import write_manifest

WIDE, SQUARE, TALL = "0", "2", "4"
LAYERS = (WIDE, SQUARE, TALL)
STEPS = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain momentum": {"nesterov": False, "weight_decay": 0.0},
    "decay": {"weight_decay": 1.0, "momentum": 0.8},
    "as AdamW": {"adjust_lr_fn": "match_rms_adamw", "lr": 0.05},
    "original": {"adjust_lr_fn": "original"},
    "no momentum": {"momentum": 0.0},
    "another polynomial": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1e-3},
}
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
EVERY = pytest.mark.parametrize("name", SETTINGS)


def network(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(9, 6, bias=bias), nn.Tanh(), nn.Linear(6, 6, bias=bias), nn.Tanh(), nn.Linear(6, 8, bias=bias)
    ).to(dtype)


def muon(model: nn.Module, **settings: Any) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], **{"lr": 0.02, **settings})


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 9, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs[:, :8].argmax(1)


def train(
    folder: Path,
    name: str = "defaults",
    *,
    dtype: torch.dtype = torch.float32,
    tricks: bool = False,
    stored: Any = None,
    shard_bytes: int = 20_000,
) -> tuple[nn.Sequential, dict[int, dict[str, Tensor]]]:
    """Record a run; return the model, and its state after each step. Tricks are accumulation, clipping and decay."""
    model = network(dtype)
    optimizer = muon(model, **SETTINGS[name])
    checkpoints = {0: state(model)}
    with dualform.record(model, optimizer, folder, dtype=stored, shard_bytes=shard_bytes) as recorder:
        for step in range(STEPS):
            inputs, labels = batch(step, dtype)
            optimizer.zero_grad()
            for part, target in zip(inputs.split(4), labels.split(4), strict=True) if tricks else [(inputs, labels)]:
                recorder.annotate(label=target, sample=torch.arange(len(part)) + step % 5)
                functional.cross_entropy(model(part), target).backward()
            if tricks:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.99
            checkpoints[step + 1] = state(model)
    return model, checkpoints


# The dense, obvious way: no hooks, no files, singular values instead of powers, a share of every single pattern. ------


class Dense:
    """One layer of a run taken apart: what start, rounding and each pattern are of its weight, after every step."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double().clone()
        self.start = self.weight.clone()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.labels: list[int] = []
        self.shares: list[Tensor] = []
        self.averages: list[Tensor] = []

    def step(self, keys: Tensor, values: Tensor, labels: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        rows, cols = update.shape
        u, sizes, vt = torch.linalg.svd(update.double(), full_matrices=False)
        unit = sizes / max(float(sizes.norm()), group["eps"])
        now, ratio = unit.clone(), torch.ones_like(unit)
        a, b, c = group["ns_coefficients"]
        for _ in range(group["ns_steps"]):
            factor = a + b * now**2 + c * now**4
            now, ratio = now * factor, ratio * factor
        side = (vt.T if rows > cols else u) @ torch.diag(ratio / max(float(sizes.norm()), group["eps"]))
        side = side @ (vt if rows > cols else u.T)
        scale = math.sqrt(max(1.0, rows / cols))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, cols))
        for key, value, label in zip(keys.double(), values.double(), labels.tolist(), strict=True):
            self.keys.append(key)
            self.values.append(value)
            self.labels.append(label)
            self.shares.append(torch.zeros_like(self.start))
            self.averages.append(torch.zeros_like(self.start))
        fresh = len(self.shares) - len(keys)
        momentum, decay = group["momentum"], 1 - group["lr"] * group["weight_decay"]
        for i, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            gradient = torch.outer(value, key) if i >= fresh else torch.zeros_like(self.start)
            self.averages[i] = momentum * self.averages[i] + (1 - momentum) * gradient
            moved = self.averages[i]
            if group["nesterov"]:
                moved = (1 - momentum) * gradient + momentum * moved
            turned = moved @ side if rows > cols else side @ moved
            self.shares[i] = decay * self.shares[i] - group["lr"] * scale * turned
        self.start = decay * self.start


def dense(name: str, steps: int) -> dict[str, Dense]:
    """Train in float64 by torch's own Muon, and take every layer apart by the loop above."""
    model = network(torch.float64)
    optimizer = muon(model, **SETTINGS[name])
    found = {layer: Dense(model.get_parameter(f"{layer}.weight")) for layer in LAYERS}
    for step in range(steps):
        inputs, labels = batch(step, torch.float64)
        keys, outputs, x = {}, {}, inputs
        for layer, module in model.named_children():
            keys[layer] = x.detach()
            x = outputs[layer] = module(x)
        optimizer.zero_grad()
        errors = torch.autograd.grad(
            functional.cross_entropy(x, labels), [outputs[layer] for layer in LAYERS], retain_graph=True
        )
        functional.cross_entropy(x, labels).backward()
        group = dict(optimizer.param_groups[0])
        optimizer.step()
        for layer, error in zip(LAYERS, errors, strict=True):
            weight = model.get_parameter(f"{layer}.weight")
            buffer = optimizer.state[weight]["momentum_buffer"]
            update = gradient_of(weight).lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
            found[layer].step(keys[layer], error, labels, update, group)
            found[layer].weight = weight.detach().clone()
        optimizer.param_groups[0]["lr"] *= 0.99
    return found


@pytest.mark.mostly_slow(fast=1)
@EVERY
def test_everything_equals_the_dense_loop(run: Path, name: str) -> None:
    model, _ = train(run, name, dtype=torch.float64)
    memory = dualform.open(run)
    for horizon in (STEPS, 13):
        view = memory.at(step=horizon)
        expected = dense(name, horizon)
        inputs = batch(1000, torch.float64)[0]
        spotlight = view.attend(model, inputs, other_model=True)
        shares, chosen, weights = view.shares(), view.where(label=[1, 2]).shares(), view.weights()
        for layer in LAYERS:
            one = expected[layer]
            wanted: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
            kept_shares = [s for s, label in zip(one.shares, one.labels, strict=True) if label in (1, 2)]
            torch.testing.assert_close(shares[f"{layer}.weight"], torch.stack(one.shares).sum(0), **wanted)
            torch.testing.assert_close(chosen[f"{layer}.weight"], torch.stack(kept_shares).sum(0), **wanted)
            torch.testing.assert_close(weights[f"{layer}.weight"], one.weight, rtol=1e-12, atol=1e-12)
            queries = spotlight[layer].queries
            each = torch.stack([queries @ share.T for share in one.shares], dim=1)  # (Q, T, d_out)
            torch.testing.assert_close(spotlight[layer].contributions(), each, **wanted)
            totals = spotlight[layer].totals("label", of="contribution")
            for group, label in enumerate(totals.groups):
                mine = torch.tensor([found == label for found in one.labels])
                torch.testing.assert_close(totals.values[:, group], each[:, mine].sum(1), **wanted)
            rounding = one.weight - one.start - torch.stack(one.shares).sum(0)
            torch.testing.assert_close(spotlight[layer].start(), queries @ (one.start + rounding).T, **wanted)


@pytest.mark.mostly_slow(fast=3)
@BOTH
@EVERY
def test_weights_outputs_horizons_and_masks(run: Path, name: str, dtype: torch.dtype) -> None:
    model, checkpoints = train(run, name, dtype=dtype, tricks=True)
    memory = dualform.open(run)
    within = {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    for step in (0, 1, 11, STEPS):
        found = memory.at(step=step).verify(checkpoints[step])
        assert found.passed, found
        assert all((layer.error or 0) < within for layer in found.layers), found
        for parameter, tensor in memory.at(step=step).weights().items():
            torch.testing.assert_close(tensor, checkpoints[step][parameter], rtol=within, atol=within)
    assert not memory.at(step=17).verify(checkpoints[19]).passed
    chosen, rest, whole = (m.shares() for m in (memory.where(label=[1]), memory.without(label=[1]), memory))
    for parameter, share in whole.items():
        torch.testing.assert_close(chosen[parameter] + rest[parameter], share, rtol=1e-5, atol=within)
    inputs, _ = batch(1000, dtype)
    applied = memory.apply(model)
    torch.testing.assert_close(applied(inputs), model(inputs), rtol=1e-5, atol=100 * within)
    masked = memory.without(label=[1])
    difference = masked.weights()["2.weight"] + chosen["2.weight"]  # a mask takes away its shares, and nothing else
    torch.testing.assert_close(difference, model.get_parameter("2.weight").detach(), rtol=1e-5, atol=within)
    for view in (memory, masked, masked.at(step=11)):
        layer = view.attend(model, inputs, other_model=True)["2"]
        expected = layer.queries @ view.weights()["2.weight"].T
        torch.testing.assert_close(layer.output(), expected, rtol=1e-5, atol=100 * within)


def test_top_contributions_equal_the_dense_ones(run: Path) -> None:
    model, _ = train(run, dtype=torch.float64)
    inputs, _ = batch(1000, torch.float64)
    for memory in (dualform.open(run), dualform.open(run).where("label > 0").at(step=23)):
        for name in LAYERS:
            layer = memory.attend(model, inputs, other_model=True)[name]
            each = layer.contributions()
            units = torch.arange(len(inputs)) % 6
            mine = each.gather(2, units[:, None, None].expand(-1, each.shape[1], 1))[:, :, 0]
            for largest in (True, False):
                best = mine.topk(4, dim=1, largest=largest).values
                found = layer.top(4, of="contribution", unit=units, largest=largest)
                torch.testing.assert_close(found.values[:, 0], best, rtol=1e-9, atol=1e-12)
            samples = memory.patterns(name, columns=["sample"])["sample"].to_numpy()
            sums = [mine[:, torch.from_numpy(samples == s)].sum(1) for s in sorted(set(samples.tolist()))]
            found = layer.top(2, of="contribution", per="sample", unit=units)
            torch.testing.assert_close(found.values[:, 0], torch.stack(sums, 1).topk(2, dim=1).values)


@pytest.mark.mostly_slow(fast=3)
@BOTH
@EVERY
def test_replaying_torchs_own_steps_is_equal_to_the_bit(run: Path, name: str, dtype: torch.dtype) -> None:
    model, _ = train(run, name, dtype=dtype)
    found = folded(Run(run), LAYERS, horizon=STEPS)
    for parameter, tensor in model.named_parameters():
        assert torch.equal(found[parameter].parameter, tensor.detach()), parameter


def checked(found: Verification) -> list[Any]:
    return [check for layer in found.layers for check in layer.parameters]


@BOTH
def test_verify_reports_the_rounding(run: Path, dtype: torch.dtype) -> None:
    model, _ = train(run, dtype=dtype)
    found = dualform.open(run).verify(model)
    assert found.passed
    for check in checked(found):
        assert 1e-4 < check.rounding.size / check.change < 5e-2  # torch rounds to bfloat16, whatever the dtype
        assert check.rounding.error == pytest.approx(check.rounding.size, rel=1e-3)
        assert check.rounding.replay == 0.0
        assert check.rounding.repeatable
    head = repr(found).splitlines()[0].split()
    assert head == ["layer", "patterns", "stored", "relative", "error", "bound", "rounding", "replay", "result"]
    assert all(line.split()[-2:] == ["equal", "passed"] for line in repr(found).splitlines()[1:-1])
    assert all(0 < (layer.rounding or 0) < 5e-2 for layer in found.layers)


def test_a_first_step_of_low_rank_is_mostly_rounding_and_says_so(run: Path) -> None:
    """One pattern in 64 dimensions: the polynomial makes noise of bfloat16 hundreds of times larger, and keeps it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = muon(model)
    with dualform.record(model, optimizer, run):
        model(torch.randn(1, 64)).square().sum().backward()
        optimizer.step()
    found = dualform.open(run).verify(model)
    assert found.passed
    assert (found.layers[0].rounding or 0) > 0.2
    assert (found.layers[0].error or 0) < 1e-6


def test_patterns_in_int8_are_held_to_a_quarter_of_the_change(run: Path) -> None:
    model, _ = train(run, tricks=False, stored="int8")
    found = dualform.open(run).verify(model)
    assert found.passed, found
    assert max(layer.error or 0 for layer in found.layers) > 2e-3, "or this shows nothing"
    with torch.no_grad():
        weight = model.get_parameter("2.weight")
        weight.add_(0.5 * (weight - dualform.open(run)._run.initial["2.weight"]))
    assert not dualform.open(run).verify(model).passed


@pytest.mark.parametrize(("stored", "tricks"), [("float16", False), (None, True)], ids=["float16", "rescaled"])
def test_where_the_replay_need_not_be_equal_rounding_is_allowed_for(run: Path, stored: Any, *, tricks: bool) -> None:
    model, _ = train(run, tricks=tricks, stored=stored)
    found = dualform.open(run).verify(model)
    assert found.passed, found
    assert not any(check.rounding.repeatable for check in checked(found))
    assert all((layer.error or 0) < 4e-2 for layer in found.layers)
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(1.1)
    assert not dualform.open(run).verify(model).passed


def test_another_machine_rounds_otherwise(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualform.identity.families.onesided.machine", lambda device: "cuda of another kind")
    model, _ = train(run)
    found = dualform.open(run).verify(model)
    assert found.passed
    assert not any(check.rounding.repeatable for check in checked(found))


def tamper(folder: Path, layer: str, factor: float) -> None:
    """Change one value row of the first shard, and its checksum, so that only the mathematics can tell."""
    path = folder / "shards" / "000000.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    tensors[f"{layer}/values"][3] *= factor
    before = file_checksum(path)
    write_parts_file(path, {name: [tensor] for name, tensor in tensors.items()})
    write_manifest(folder, json.loads((folder / "manifest.json").read_text().replace(before, file_checksum(path))))


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("factor", [1.001, 1.1, -1.0, 30.0])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_changed_value_does_not_verify(run: Path, layer: str, factor: float) -> None:
    model, _ = train(run)
    assert dualform.open(run).verify(model).passed
    tamper(run, layer, factor)
    found = dualform.open(run).verify(model)
    failed = {check.layer for check in found.layers if not check.passed}
    assert failed == {layer}, found
    assert "differs" in repr(found)


def test_rounding_does_not_hide_a_wrong_map(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third term takes up whatever the map does not say; its size is what tells."""
    model, _ = train(run)
    wrong = lambda update, *chosen: 1.1 * polynomial(update, *chosen)  # noqa: E731
    monkeypatch.setattr("dualform.identity.families.onesided.polynomial", wrong)
    found = dualform.open(run).verify(model)
    assert all(check.rounding.replay == 0.0 for check in checked(found))
    assert not any(layer.passed for layer in found.layers), found


def test_weights_edited_by_a_thousandth_do_not_verify(run: Path) -> None:
    model, _ = train(run)
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1.001)
    assert not dualform.open(run).verify(model).passed


@BOTH
def test_a_warm_buffer_is_part_of_the_start(run: Path, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = muon(model)

    def step(number: int) -> None:
        inputs, labels = batch(number, dtype)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for number in range(10):
        step(number)
    with dualform.record(model, optimizer, run):
        for number in range(10, 30):
            step(number)
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed
    assert all(0 < check.rounding.size < 5e-2 * check.change for check in checked(found))
    # Without the buffer, its share of every later step would be missing.
    run_without = Run(run)
    run_without.initial_states.clear()
    cold = folded(run_without, LAYERS, horizon=20)
    warm = folded(Run(run), LAYERS, horizon=20)
    assert all(not torch.equal(cold[name].parameter, warm[name].parameter) for name in warm)


def test_resume_proves_the_buffer(run: Path) -> None:
    model = network()
    optimizer = muon(model)

    def steps(numbers: range) -> None:
        for number in numbers:
            inputs, labels = batch(number)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    with dualform.record(model, optimizer, run):
        steps(range(12))
    buffer = optimizer.state[model.get_parameter("0.weight")]["momentum_buffer"]
    buffer *= 2
    with pytest.raises(ResumeError, match=r"momentum_buffer of '0.weight' is not that of step 12"):
        dualform.record(model, optimizer, run, resume=True).__enter__()
    buffer /= 2
    with dualform.record(model, optimizer, run, resume=True):
        steps(range(12, 20))
    found = dualform.open(run).verify(model)
    assert found.passed
    assert all(check.rounding.replay == 0.0 for check in checked(found))


def test_resume_inside_a_shard_rebuilds_the_weights(run: Path) -> None:
    model, checkpoints = train(run, shard_bytes=10**9)
    optimizer = muon(model)
    model.load_state_dict(checkpoints[21])
    with dualform.record(model, optimizer, run, resume=True) as recorder:  # a fresh optimizer: nothing warm to prove
        assert recorder.step == 21
    spoilt = {name: tensor * 1.0001 for name, tensor in checkpoints[11].items()}
    model.load_state_dict(spoilt)
    with pytest.raises(ResumeError, match="not those of step 11"):
        dualform.record(model, optimizer, run, resume=11).__enter__()


def test_frozen_biases_stay_and_missing_gradients_are_no_steps(run: Path) -> None:
    model = network(bias=True)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    optimizer = muon(model)
    with dualform.record(model, optimizer, run) as recorder:
        for number in range(20):
            inputs, labels = batch(number)
            recorder.annotate(label=labels)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            if number % 3 == 0:
                model[2].weight.grad = None
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    inputs, _ = batch(1000)
    layer = memory.attend(model, inputs)["4"]
    torch.testing.assert_close(layer.output(), model(inputs).detach(), rtol=1e-5, atol=1e-5)
    total = layer.start() + layer.contributions().sum(1)
    torch.testing.assert_close(total, model(inputs).detach(), rtol=1e-4, atol=1e-4)


def test_the_settings_of_a_step_survive_the_steps_table(run: Path) -> None:
    train(run, "another polynomial")
    row = dualform.open(run).steps().to_pylist()[-1]
    kind = optimizer_kinds()[torch.optim.Muon]
    group = muon(network(), **SETTINGS["another polynomial"]).param_groups[0]
    group["lr"] = row["lr"]
    settings = dict(kind.decode(row))
    assert settings.pop("adjust_lr_fn") == "original"
    assert settings == {name: group[name] for name in settings}
    assert settings["lr"] == pytest.approx(0.02 * 0.99 ** (STEPS - 1))
    assert group.keys() - settings.keys() == {"params", "adjust_lr_fn"}  # nothing that the group has is left out


def test_two_layers_that_share_a_weight_and_a_module_that_is_called_twice(run: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    optimizer = muon(model)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(15):
            recorder.annotate(half=step % 2)
            optimizer.zero_grad()
            model(model(batch(step)[0][:, :5].reshape(2, 4, 5))).square().mean().backward()
            optimizer.step()
    memory = dualform.open(run)
    found = memory.verify(model)
    assert found.passed, found
    inputs = batch(99)[0][:, :5]
    for view in (memory, memory.where(half=1), memory.at(step=7)):
        hidden = model[1](model[0](inputs)).detach()
        expected = hidden @ view.weights()["0.weight"].T
        torch.testing.assert_close(
            view.attend(model, inputs, other_model=True)["2"].output(), expected, rtol=1e-4, atol=1e-5
        )


class Texts(nn.Module):
    """A tall table and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm((3, 4))
        self.out = nn.Linear(4, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.table(tokens)))
        return out


def test_tables_and_normalisations_in_two_dimensions(run: Path) -> None:
    model = Texts().double()
    optimizer = muon(model)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(12):
            tokens = torch.randint(11, (5, 3), generator=torch.Generator().manual_seed(step))
            recorder.annotate(half=torch.arange(5) % 2)
            optimizer.zero_grad()
            functional.cross_entropy(model(tokens).reshape(-1, 11), tokens.roll(1, 1).reshape(-1)).backward()
            optimizer.step()
    memory = dualform.open(run)
    assert memory.verify(model).passed
    tokens = torch.tensor([[1, 2, 3], [9, 0, 1]])
    spotlight = memory.attend(model, tokens)
    for name in memory.layers:
        layer = spotlight[name]
        each, totals = layer.contributions(), layer.totals("half", of="contribution").values.sum(1)
        torch.testing.assert_close(each.sum(1), totals, rtol=1e-9, atol=1e-11)
        whole = (layer.start() + totals).reshape(layer.output().shape)
        torch.testing.assert_close(whole, layer.output(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("name", ["defaults", "another polynomial"])
def test_the_polynomial_is_what_the_rounds_do_one_after_the_other(name: str, rank: int) -> None:
    group = muon(network(), **SETTINGS[name]).param_groups[0]
    a, b, c = group["ns_coefficients"]
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in (5, 7))
    for size in (1.0, 1e-9, 0.0):  # the second is below eps, the third has no direction
        update = size * left @ right.T
        x = update / max(float(update.norm()), group["eps"])
        for _ in range(group["ns_steps"]):
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        side = polynomial(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        torch.testing.assert_close(side @ update, x, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(side, side.T)
    assert polynomial(update * torch.nan, (a, b, c), 5, 1e-7).isnan().all()


@pytest.mark.parametrize(
    ("parameter_map", "shape"),
    [
        *((OuterMap(), shape) for shape in ((3, 5), (7, 4), (4, 4))),
        *((TransposedMap(), shape) for shape in ((5, 3), (4, 7), (4, 4))),
        *((RowsMap(), shape) for shape in ((6, 4), (3, 5))),
        *((ScaleMap(), shape) for shape in ((2, 3), (3, 2))),
    ],
    ids=lambda found: type(found).__name__ if isinstance(found, ParameterMap) else str(found),
)
def test_every_map_multiplied_from_one_side_equals_its_definition(
    parameter_map: ParameterMap, shape: Sequence[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, cols = shape
    widths = {OuterMap: (cols, rows), TransposedMap: (rows, cols), RowsMap: (1, cols), ScaleMap: (6, 6)}
    d_in, d_out = widths[type(parameter_map)]
    keys, queries = (torch.randn(n, d_in, generator=generator, dtype=torch.float64) for n in (8, 5))
    if isinstance(parameter_map, RowsMap):
        keys, queries = (torch.randint(rows, (n, 1), generator=generator) for n in (8, 5))
    values = torch.randn(8, d_out, generator=generator, dtype=torch.float64)
    units = torch.arange(5) % d_out
    side = torch.randn(min(shape), min(shape), generator=generator, dtype=torch.float64)
    side = side + side.T
    found = parameter_map.unit_contributions(queries, keys, values, units, side, shape)
    general = ParameterMap.unit_contributions(parameter_map, queries, keys, values, units, side, shape)
    torch.testing.assert_close(found, general)
    for t in range(8):
        gradient = parameter_map.gradient(values[t : t + 1], keys[t : t + 1], shape)
        moved = gradient @ side if rows > cols else side @ gradient
        outputs = parameter_map.apply(moved, queries)
        torch.testing.assert_close(found[:, t], outputs[torch.arange(5), units])


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW])
def test_a_weight_by_muon_and_its_bias_by_another(run: Path, other: Callable[..., torch.optim.Optimizer]) -> None:
    """The families of one layer may differ; the record is made by hand here, pattern by pattern."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).double()
    first = torch.optim.Muon([layer.weight], lr=0.02)
    second = other([layer.bias], lr=0.02)
    options: dict[str, Any] = {"dtype": None, "shard_bytes": 3000, "queue_bytes": 1 << 20, "resume": False}
    sink = DiskWriter(FolderBlobs(run), **options, steps=None, factory=None, factory_arguments={})
    names = {"weight": ("fc.weight", first, layer.weight), "bias": ("fc.bias", second, layer.bias)}
    now = {name: parameter.detach().clone() for name, _, parameter in names.values()}
    uses = (ParameterUse("weight", "fc.weight", "outer"), ParameterUse("bias", "fc.bias", "bias"))
    entry = LayerStart("Linear", 6, 4, uses, keys_only=False)
    sink.open(Start({"fc": entry}, now, {}, ("Muon", other.__name__), {}, 0))
    for step in range(25):
        keys = batch(step, torch.float64)[0][:, :6]
        outputs = layer(keys)
        (values,) = torch.autograd.grad(outputs.pow(4).mean(), outputs, retain_graph=True)
        outputs.pow(4).mean().backward()
        facts = []
        for name, optimizer, _ in names.values():
            settings = optimizer_kinds()[type(optimizer)].encode(optimizer.param_groups[0], {})
            facts.append(ParameterFacts(name, type(optimizer).__name__, True, settings, [1.0]))
            optimizer.step()
            optimizer.zero_grad()
        now = {name: parameter.detach().clone() for name, _, parameter in names.values()}
        samples = {name: sample(tensor) for name, tensor in now.items()}
        sink.call(CallRecord(step, step, "fc", keys, values))
        call = StepCall(step, micro=0, call=0, rows=8, positions=1, inner=1, binding=None)
        sink.step(StepFacts(step, [call], facts, samples, lambda now=now: now))  # type: ignore[misc]
        sink.discard([step])
    sink.close(now)
    memory = dualform.open(run)
    found = memory.verify()
    assert found.passed, found
    assert [check.rounding is None for check in checked(found)] == [False, True]
    queries = batch(99, torch.float64)[0][:, :6]
    for view in (memory, memory.where("row < 3"), memory.at(step=9)):
        asked = view.attend(queries={"fc": queries})["fc"]
        weights = view.weights()
        expected = queries @ weights["fc.weight"].T + weights["fc.bias"]
        each = asked.contributions()
        torch.testing.assert_close(asked.output(), expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(asked.start() + each.sum(1), expected, rtol=1e-9, atol=1e-11)
        top = asked.top(3, of="contribution", unit=2)
        torch.testing.assert_close(top.values[:, 0], each[:, :, 2].topk(3, dim=1).values, rtol=1e-9, atol=1e-12)
