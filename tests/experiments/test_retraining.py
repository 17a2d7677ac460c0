"""The evaluation of effects: stacks train as single networks do, scores are right, and nothing is lost."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualform import cli
from dualform.effects.layer_effects import FILTERING
from dualform.effects.output_gradients import measure_quantity
from dualform.errors import DataError
from dualform.experiments import retraining
from dualform.experiments.page import Section, write_page
from dualform.experiments.retraining import (
    PLAIN_TRAINING,
    RECORDED_TRAINING,
    ceiling,
    correlate,
    costs,
    evaluate_effects,
    mean_and_error,
    score,
    scores,
)
from dualform.experiments.retraining_config import NETWORKS, RetrainingConfig, make_split, read_config
from dualform.experiments.retraining_page import EARLIER, NEW_ROWS, cost_table, decision, section, table
from dualform.experiments.retraining_results import Cost, Evaluation, load_evaluations, store_evaluation
from dualform.experiments.stacked_training import (
    SECOND_MOMENT,
    initial,
    loss_of,
    make_optimizer,
    measure_stack,
    order,
    train_recorded,
    train_stack,
)

SMALL = RetrainingConfig(
    name="small",
    data="digits",
    epochs=6,
    train=120,
    tests=20,
    hidden=(24,),
    batch=20,
    subsets=24,
    seeds=4,
    recordings=1,
    models=2,
    splits=2,
)
CHARACTERS = RetrainingConfig(
    name="characters",
    data="text",
    text="text.txt",
    epochs=2,
    train=40,
    tests=4,
    length=8,
    hidden=(8,),
    optimizer="AdamW",
    learning_rate=0.01,
    weight_decay=0.01,
    batch=10,
    subsets=4,
    seeds=2,
    recordings=1,
    models=1,
    splits=1,
)


@pytest.fixture
def characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RetrainingConfig:
    """A configuration whose text is there."""
    text = "".join(f"The {i * i % 97}th fox saw {i % 13} crows; none was hungry. " for i in range(60))
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setenv("DUALFORM_DATA", str(tmp_path))
    return CHARACTERS


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small evaluation."""
    folder = tmp_path_factory.mktemp("truth") / "small"
    evaluate_effects(SMALL, folder)
    return folder


def loop(config: RetrainingConfig, inputs: Tensor, targets: Tensor, seed: int) -> dict[str, Tensor]:
    """Train one network alone, the plain way."""
    model = initial(config, seed)
    optimizer = make_optimizer(config, model.parameters())
    for rows in order(len(inputs), config, seed):
        optimizer.zero_grad()
        loss_of(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_stack_trains_as_single_networks_do(optimizer: str) -> None:
    config = dataclasses.replace(SMALL, optimizer=optimizer, learning_rate=0.01, weight_decay=0.1)
    split = make_split(config, 0)
    seeds = (5, 6, 7)
    stacked, kept = train_stack(config, split.train, split.train_targets, split.halves[:3], seeds, keep=[4, 18])
    assert len(kept) == 2
    assert (SECOND_MOMENT + "layers.0.weight" in kept[0]) == (optimizer == "AdamW")
    for i, (seed, rows) in enumerate(zip(seeds, split.halves[:3], strict=True)):
        alone = loop(config, split.train[rows], split.train_targets[rows], seed)
        for name, parameter in alone.items():
            torch.testing.assert_close(stacked[name][i], parameter, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(kept[-1][name][i], stacked[name][i])
        start = initial(config, seed).get_parameter("layers.0.weight").detach()
        assert float((stacked["layers.0.weight"][i] - start).norm()) > 0.1


def test_a_stack_of_transformers_trains_as_one_does(characters: RetrainingConfig) -> None:
    split = make_split(characters, 0)
    torch.set_default_dtype(torch.float64)  # AdamW makes much of the rounding of gradients that are truly zero
    try:
        stacked, _ = train_stack(characters, split.train, split.train_targets, split.halves[:2], (1, 2))
        alone = [
            loop(characters, split.train[rows], split.train_targets[rows], i + 1)
            for i, rows in enumerate(split.halves[:2])
        ]
        margins = measure_stack(characters, stacked, split.test, split.test_targets)
    finally:
        torch.set_default_dtype(torch.float32)
    for i, network in enumerate(alone):
        for name, parameter in network.items():
            if "qkv.bias" not in name:
                torch.testing.assert_close(stacked[name][i], parameter, rtol=1e-8, atol=1e-9)
    assert margins.shape == (2, 4)


NETWORK_ROWS: dict[str, dict[str, Any]] = {
    "cnn": {"network": "cnn", "hidden": (2, 3, 5)},
    "residual": {"network": "residual", "hidden": (6,), "blocks": 3},
    "lstm": {"network": "lstm", "hidden": (5, 6)},
    "transformer": {"network": "transformer", "hidden": (8,), "blocks": 1},
}


@pytest.mark.parametrize("name", NETWORK_ROWS)
def test_every_network_trains_in_a_stack_as_alone(name: str, characters: RetrainingConfig) -> None:
    base = characters if NETWORKS[name] == "text" else dataclasses.replace(SMALL, epochs=1, tests=4)
    config = dataclasses.replace(base, **NETWORK_ROWS[name], optimizer="SGD", learning_rate=0.05)
    split = make_split(config, 0)
    stacked, _ = train_stack(config, split.train, split.train_targets, split.halves[:2], (1, 2))
    margins = measure_stack(config, stacked, split.test, split.test_targets)
    for i, rows in enumerate(split.halves[:2]):
        model = initial(config, i + 1)
        state = loop(config, split.train[rows], split.train_targets[rows], i + 1)
        for parameter, tensor in state.items():
            torch.testing.assert_close(stacked[parameter][i], tensor, rtol=1e-4, atol=1e-5)
        model.load_state_dict(state)
        expected = measure_quantity(model(split.test), split.test_targets, "margin")
        torch.testing.assert_close(margins[i], expected.detach(), rtol=1e-4, atol=1e-4)


def test_checkpoints_have_adams_second_moments_without_bias() -> None:
    config = dataclasses.replace(SMALL, optimizer="AdamW", learning_rate=0.0)
    split = make_split(config, 0)
    _, (kept,) = train_stack(config, split.train, split.train_targets, split.halves[:1], [3], keep=[2])
    model, squares = initial(config, 3), []
    for rows in order(config.train // 2, config, 3)[:2]:
        model.zero_grad()
        loss_of(model(split.train[split.halves[0][rows]]), split.train_targets[split.halves[0][rows]]).backward()
        squares.append(model.get_parameter("layers.0.weight").grad.square())  # type: ignore[union-attr]
    expected = (0.999 * squares[0] + squares[1]) / 1.999
    torch.testing.assert_close(kept[SECOND_MOMENT + "layers.0.weight"][0], expected, rtol=1e-3, atol=1e-12)


def test_the_recorded_network_is_the_stacks(tmp_path: Path) -> None:
    split = make_split(SMALL, 0)
    model = train_recorded(SMALL, split.train, split.train_targets, tmp_path / "run", 9)
    stacked, _ = train_stack(SMALL, split.train, split.train_targets, torch.arange(SMALL.train)[None], [9])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stacked[name][0], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_effects_predict_retraining_and_controls_do_not(evaluated: Path) -> None:
    found = scores(SMALL, evaluated)
    assert all(list(each) == [0, 1] for each in found.values())
    mean = {name: sum(each.values()) / len(each) for name, each in found.items()}
    assert mean["effects"] > 0.4
    assert mean["effects"] > mean["direct"] - 0.05
    assert mean["effects"] > mean["effects, against one retraining"]
    assert abs(mean["random"]) < 0.15
    assert abs(mean["shuffled"]) < 0.15
    assert mean["effects"] < mean["ceiling"] <= 1


def test_an_evaluation_goes_on_where_it_stopped(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in evaluated.rglob("*.safetensors")}
    assert len(before) == SMALL.splits * (SMALL.seeds + retraining.CHECKPOINTS + SMALL.recordings)
    lost = evaluated / "split-1" / "retrained-2.safetensors"
    kept = load_file(lost)["margins"].clone()
    lost.unlink()
    told: list[str] = []
    evaluate_effects(SMALL, evaluated, tell=told.append)
    assert told == ["small: split 1, retrained 24 halves with seed 2"]
    torch.testing.assert_close(load_file(lost)["margins"], kept)
    after = {path: path.stat().st_mtime_ns for path in evaluated.rglob("*.safetensors")}
    assert {path for path in before if after[path] != before[path]} == {lost}
    with pytest.raises(DataError, match="holds another evaluation"):
        evaluate_effects(dataclasses.replace(SMALL, epochs=7), evaluated)


def test_a_split_is_run_alone_and_joins_what_is_stored_of_others(evaluated: Path, tmp_path: Path) -> None:
    alone, results, told = tmp_path / "alone", tmp_path / "results", list[str]()
    shutil.copytree(evaluated / "split-1", alone / "split-1")
    (alone / "split-1" / "ours-0.safetensors").unlink()
    evaluate_effects(SMALL, alone, splits=[1], tell=told.append)
    assert told == ["small: split 1, effects of recording 0"]
    assert not (alone / "split-0").exists()
    whole, second = scores(SMALL, evaluated), scores(SMALL, alone)
    assert second == {name: {1: pytest.approx(each[1])} for name, each in whole.items()}
    store_evaluation(results, Evaluation(SMALL, {name: {0: each[0]} for name, each in whole.items()}))
    store_evaluation(results, Evaluation(SMALL, second))
    (found,) = load_evaluations(results)
    assert found.splits == [0, 1]
    assert found.scores == {
        name: {number: pytest.approx(score, abs=1e-4) for number, score in each.items()} for name, each in whole.items()
    }
    with pytest.raises(DataError, match="no split 2, 5; its splits are 0, 1"):
        evaluate_effects(SMALL, tmp_path / "none", splits=[5, 0, 2])
    assert not (tmp_path / "none").exists()


def test_seeds_never_meet() -> None:
    used = range(retraining.RETRAINING, retraining.RETRAINING + 3 * 6 * 100)
    for number in range(3):
        assert not set(used) & set(retraining.attribution_seeds(SMALL, number))


def test_a_perfect_prediction_scores_one_and_its_opposite_minus_one() -> None:
    generator = torch.Generator().manual_seed(0)
    members = (torch.rand(30, 40, generator=generator) < 0.5).double()
    effects = torch.randn(5, 40, generator=generator, dtype=torch.float64)
    actual = members @ effects.T
    assert score(effects, members, actual) == pytest.approx(1.0)
    assert score(effects, members, actual.exp()) == pytest.approx(1.0), "ranks only"
    assert score(-effects, members, actual) == pytest.approx(-1.0)
    noise = torch.randn(20, 30, 5, generator=generator, dtype=torch.float64)
    assert ceiling(actual + 0 * noise) == pytest.approx(1.0)
    noisy = actual + 2 * actual.std() * noise
    expected = float(correlate(noisy.mean(dim=0), actual).mean())
    assert ceiling(noisy) == pytest.approx(expected, abs=0.06), "what the truth itself scores against noisy means"


def test_ties_share_a_rank() -> None:
    scipy = pytest.importorskip("scipy.stats")
    a = torch.tensor([[1.0], [2.0], [2.0], [5.0], [0.0]])
    b = torch.tensor([[3.0], [1.0], [4.0], [4.0], [0.5]])
    expected = scipy.spearmanr(a[:, 0].numpy(), b[:, 0].numpy()).statistic
    assert float(correlate(a, b)) == pytest.approx(expected)
    assert float(correlate(a, torch.ones(5, 1))) == 0.0


def test_the_page_has_a_section_that_can_be_replaced(evaluated: Path, tmp_path: Path) -> None:
    found = [Evaluation(SMALL, scores(SMALL, evaluated))]
    page = tmp_path / "results.md"
    write_page(page, [Section("single", "One task", ("Other things.",), [])])
    write_page(page, [section(found)])
    first = page.read_text()
    assert "Other things." in first
    assert f"| effects | {mean_and_error(list(found[0].scores['effects'].values()))} |" in first
    assert "- small: 120 samples of digits, an MLP with hidden units 24; 6 epochs of SGD" in first
    write_page(page, [section(found)])
    assert page.read_text() == first


def test_results_are_kept_with_cells_of_earlier_runs(tmp_path: Path) -> None:
    ekfac = "kronfluence EK-FAC, best damping"
    store_evaluation(tmp_path, Evaluation(SMALL, {"effects": {0: 0.5}}, {ekfac: "0.60 ± 0.01", "effects": "0.1"}))
    store_evaluation(
        tmp_path,
        Evaluation(SMALL, {"effects": {0: 0.5, 1: 0.6}, "joint": {0: 0.5, 1: 0.6}, "layerwise": {0: 0.4, 1: 0.6}}),
    )
    other = dataclasses.replace(SMALL, name="other", epochs=7)
    store_evaluation(tmp_path, Evaluation(other, {"effects": {0: 0.5}, "joint": {0: 0.5}, "layerwise": {0: 0.6}}))
    found = load_evaluations(tmp_path)
    assert [one.config for one in found] == [other, SMALL]
    rows = {row[0]: row[1:] for row in table(found).rows}
    assert rows["effects"] == ("0.55 ± 0.05", "0.50")
    assert rows[ekfac] == ("(0.60 ± 0.01)", "-")
    assert EARLIER in section(found).text
    assert EARLIER not in section(found[:1]).text
    first, *_ = section(found).text[1:]
    assert first == f"**Behind a peer on average:** small, {ekfac} 0.60 to 0.55 of effects."
    asked = Evaluation(SMALL, {"effects": {0: 0.5, 1: 0.9}, "EK-FAC, damping 1": {0: 0.6}})
    assert f"small, {ekfac} 0.60 to 0.50 of effects" in section([asked]).text[1], "on the split of the peer"
    assert (
        "ahead of every peer"
        in section([Evaluation(SMALL, {"effects": {0: 0.5}, "EK-FAC, damping 1": {0: 0.4}})]).text[1]
    )
    assert "**Not compared with any peer:** other." in section(found).text
    assert "**Splits run with both filters:** other 1 of 2; all of the other rows." in section(found).text
    assert f"a dash in the table:** {ekfac} on other." in section(found).text[3]
    grid = decision(found)
    assert [row[4] for row in grid.rows] == ["+0.050", "-0.100"]
    new = [
        Evaluation(dataclasses.replace(SMALL, name=name), {"joint": {0: 0.5}, "layerwise": {0: 0.4}})
        for name in NEW_ROWS
    ]
    assert "joint is adopted" in decision(new).note
    assert "joint is not adopted" in decision([*new, found[0]]).note, "one row loses more than 0.02"
    assert "joint is not adopted" in decision(new[1:]).note, "a new row is missing"


def test_results_keep_splits_methods_and_costs_that_are_not_found_again(tmp_path: Path) -> None:
    first = {"effects": {0: 0.5, 1: 0.6}, "EK-FAC, damping 1": {0: 0.4}}
    store_evaluation(tmp_path, Evaluation(SMALL, first, costs={"effects": Cost(1.0, 10), "joint": Cost(2.0, 0)}))
    store_evaluation(tmp_path, Evaluation(SMALL, {"effects": {0: 0.55}}, costs={"effects": Cost(3.25, 30)}))
    (found,) = load_evaluations(tmp_path)
    assert found.scores == {"effects": {0: 0.55, 1: 0.6}, "EK-FAC, damping 1": {0: 0.4}}
    assert found.costs == {"effects": Cost(3.25, 30), "joint": Cost(2.0, 0)}


def test_results_of_splits_join_in_any_order_and_those_of_another_recipe_are_refused(tmp_path: Path) -> None:
    store_evaluation(tmp_path, Evaluation(SMALL, {"effects": {1: 0.6}, "EK-FAC, damping 1": {1: 0.4}}))
    more = dataclasses.replace(SMALL, splits=11)
    store_evaluation(tmp_path, Evaluation(more, {"effects": {10: 0.8, 0: 0.51236}}))
    stored = (tmp_path / "small.json").read_text()
    assert json.loads(stored)["scores"] == {
        "effects": {"0": 0.5124, "1": 0.6, "10": 0.8},
        "EK-FAC, damping 1": {"1": 0.4},
    }
    assert list(json.loads(stored)["scores"]["effects"]) == ["0", "1", "10"]
    other = dataclasses.replace(more, epochs=7, seeds=2)
    with pytest.raises(DataError, match=r"small.json holds scores of another recipe, which differs in epochs, seeds\."):
        store_evaluation(tmp_path, Evaluation(other, {"effects": {0: 0.1}}))
    assert (tmp_path / "small.json").read_text() == stored
    (found,) = load_evaluations(tmp_path)
    assert (found.config, found.splits) == (more, [0, 1, 10])


def test_effects_are_compared_with_a_peer_on_the_splits_of_both() -> None:
    ekfac, peer = "kronfluence EK-FAC, best damping", "EK-FAC, damping 1"

    def said(**by_name: dict[int, float]) -> str:
        return " ".join(section([Evaluation(SMALL, {"effects": ours, **by_name})]).text)

    ours = {0: 0.5, 1: 0.9}
    text = said(**{peer: {1: 0.6}})
    assert "Effects are ahead of every peer asked." in text, "0.6 is more than 0.5, which is another split's"
    assert f"**Asked about fewer splits than effects:** {ekfac} on small." in text
    assert f"**Behind a peer on average:** small, {ekfac} 0.95 to 0.90 of effects." in said(**{peer: {1: 0.95, 2: 0.1}})
    text = said(**{peer: {2: 0.95}})
    assert "Effects are ahead of every peer asked." in text, "no split in common"
    text = said(**{peer: {0: 0.5, 1: 0.7}, "EK-FAC, damping 2": {1: 0.99}})
    assert "**Behind" not in text, "a setting asked about one split alone is not the best of those asked about two"
    assert "Asked about fewer" not in text
    text = said(**{peer: {0: 0.6, 1: 0.94}})
    assert f"**Behind a peer on average:** small, {ekfac} 0.77 to 0.70 of effects (behind by 0.070 ± 0.030)." in text
    text = said(**{peer: {0: 0.8, 1: 0.8}})
    assert f"{ekfac} 0.80 to 0.70 of effects (behind by 0.100 ± 0.200, within its error)." in text
    assert "**Level with a peer" not in text
    text = said(**{peer: {0: 0.6, 1: 0.6}})
    level = "**Level with a peer, to two digits or within the standard error of the difference:**"
    assert f"Effects are on average behind no peer asked. {level} small, {ekfac} 0.60 to 0.70" in text
    assert f"small, {ekfac} 0.60 to 0.70 of effects (ahead by 0.100 ± 0.200, within its error)." in text
    text = said(**{peer: {0: 0.496, 1: 0.898}})
    assert f"{level} small, {ekfac} 0.70 to 0.70 of effects (ahead by 0.003 ± 0.001)." in text, "0.697 to 0.7"
    assert f"{level} small, {ekfac} 0.50 to 0.50 of effects." in said(**{peer: {0: 0.5}}), "a tie of one split"
    assert "**Behind" not in said(**{peer: {0: 0.03, 1: 1.37}}), "a tie but for rounding"


def test_what_methods_took_is_known(evaluated: Path) -> None:
    found = costs(SMALL, evaluated)
    assert set(found) == {
        *(f"{name}{several}" for name in ("effects", "direct", "attention") for several in ("", ", mean of 1")),
        PLAIN_TRAINING,
        RECORDED_TRAINING,
    }
    assert all(cost.seconds > 0 for cost in found.values())
    values = SMALL.epochs * SMALL.train * 4 * (24 + 10)
    keys = SMALL.epochs * SMALL.train * 4 * 24 + SMALL.train * 4 * 64  # inputs are the same in every epoch
    assert values + keys / 2 < found["effects"].size < 1.5 * (values + keys)
    assert found["effects"].size == found[RECORDED_TRAINING].size
    assert found[PLAIN_TRAINING].size == 0


def test_costs_stand_beside_scores() -> None:
    scored = {"effects": {0: 0.5}, "EK-FAC, damping 1": {0: 0.4}, "EK-FAC, damping 2": {0: 0.45}}
    took = {"effects": Cost(0.5, 10**6), "EK-FAC, damping 1": Cost(1, 1), "EK-FAC, damping 2": Cost(20, 2000)}
    one = Evaluation(SMALL, scored, costs={**took, PLAIN_TRAINING: Cost(0.2, 0)})
    other = Evaluation(dataclasses.replace(SMALL, name="other", epochs=7), scored, costs={"effects": Cost(30, 10**7)})
    rows = {row[0]: row[1:] for row in table([one, other]).rows}
    assert rows["effects"] == ("0.50", "0.50", "0.5 to 30", "1.0 MB to 10.0 MB")
    assert rows["kronfluence EK-FAC, best damping"] == ("0.45", "0.45", "20", "2.0 kB"), "of that shown"
    assert "500 to 500 times the bytes, and 0.025 to 0.025 times the seconds" in " ".join(section([one, other]).text)
    each = {row[0]: row[1:] for row in cost_table([one, other]).rows}
    assert each["effects"] == ("0.5 s, 1.0 MB", "30 s, 10.0 MB")
    assert each["kronfluence EK-FAC, best damping"] == ("20 s, 2.0 kB", "-")
    assert each[PLAIN_TRAINING] == ("0.2 s", "-")


def test_the_mean_of_several_networks_is_scored_and_compared_with_that_of_several_recordings(
    evaluated: Path, tmp_path: Path
) -> None:
    here = tmp_path / "split-0"
    shutil.copytree(evaluated / "split-0", here)
    ours = load_file(here / "ours-0.safetensors")[FILTERING]
    noise = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * ours.std() * 3
    save_file({"EK-FAC, damping 1": torch.stack([ours + noise, ours - noise])}, here / "peer-x.safetensors")
    found = scores(SMALL, tmp_path)
    assert found["mean of 2 networks: EK-FAC, damping 1"][0] == pytest.approx(found["effects"][0])
    assert found["EK-FAC, damping 1"][0] < found["effects"][0] - 0.1
    many = {"effects": {0: 0.5}, "effects, mean of 2": {0: 0.7}, "mean of 2 networks: EK-FAC, damping 1": {0: 0.6}}
    assert "ahead of every peer" in section([Evaluation(SMALL, many)]).text[1]
    many["mean of 2 networks: EK-FAC, damping 1"] = {0: 0.8}
    assert "mean of as many networks 0.80 to 0.70 of effects" in section([Evaluation(SMALL, many)]).text[1]


def test_peers_are_shown_at_their_best(evaluated: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    for path in evaluated.rglob("*.safetensors"):
        target = folder / path.relative_to(evaluated)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    for number in range(SMALL.splits):
        here = folder / f"split-{number}"
        ours = load_file(here / "ours-0.safetensors")[FILTERING]
        save_file(
            {"EK-FAC, damping 1": -ours[None], "EK-FAC, damping 2": ours[None].clone()}, here / "peer-x.safetensors"
        )
    rows = {row[0]: row[1] for row in table([Evaluation(SMALL, scores(SMALL, folder))]).rows}
    assert rows["kronfluence EK-FAC, best damping"] == rows["effects"]
    assert "traker TRAK, 1 network" not in rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('data = "digits"\nepochs = 3\nepoch = 4\n', "settings epoch; known are"),
        ('data = "digits"\n', "is no evaluation"),
        ('data = "cifar"\nepochs = 3\n', "expected one of digits"),
        ('data = "digits"\nepochs = 3\nseeds = 1\n', "at least 2 seeds"),
        ('data = "digits"\nepochs = 3\nnetwork = "lstm"\n', "expected one of mlp, cnn, residual"),
        ('data = "digits"\nepochs = 3\nnetwork = "cnn"\n', "3 for cnn"),
        ("data = \n", "TOML"),
    ],
)
def test_a_configuration_is_checked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_config(path)
    with pytest.raises(DataError, match="wants more"):
        make_split(dataclasses.replace(SMALL, train=5000), 0)


def test_the_benchmarks_configurations_are_right() -> None:
    found = [read_config(path) for path in Path(__file__).parents[2].glob("benchmarks/truth/*.toml")]
    assert {(c.data, c.epochs, c.optimizer) for c in found} >= {
        ("digits", epochs, optimizer) for epochs in (5, 15, 60) for optimizer in ("SGD", "AdamW")
    }
    assert all(c.splits >= 3 for c in found if c.data == "digits" and c.network == "mlp")
    assert {c.network for c in found} == set(NETWORKS)


def test_the_command_evaluates(
    tmp_path: Path, characters: RetrainingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "characters.toml"
    fields = {
        k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(characters).items() if k != "name"
    }
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
    for arguments in (["--json"], []):
        folder = str(tmp_path / "out")
        monkeypatch.setattr(sys, "argv", ["dualform", "evaluate", str(path), "--folder", folder, *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        captured = capsys.readouterr()
        if arguments:
            found = json.loads(captured.out)
            assert set(found["scores"]) >= {"effects", "direct", "attention", "random", "shuffled", "ceiling"}
            assert isinstance(found["scores"]["effects"], list), "in the order of the splits, all of which are run"
            assert "characters: split 0, effects of recording 0" in captured.err
        else:
            assert captured.err == "", "everything was there"
            assert "prediction of retraining" in " ".join(captured.out.split())
