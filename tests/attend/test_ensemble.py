"""Ensembles: effects are averaged, all else stays each recording's own, and mixed recipes are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dualform
from dualform.attend.ensemble import EnsembleSpotlight
from dualform.errors import QueryError
from helpers.small import batch, network

STEPS, ROWS = 8, 6


def record(path: Path, *, seed: int, **changed: Any) -> nn.Sequential:
    """Record a training; what it has in common with others is said by `changed`."""
    model = changed.get("model") or network(dtype=torch.float64, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=changed.get("lr", 0.1), momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    with dualform.record(model, optimizer, path) as recorder:
        for _ in range(changed.get("steps", STEPS)):
            step = int(torch.randint(3, (1,), generator=generator)) if changed.get("shuffled") else 0
            inputs, labels = batch(step, dtype=torch.float64, rows=ROWS)
            recorder.annotate(
                sample=torch.arange(ROWS) + changed.get("first", 0), **{changed.get("by", "label"): labels}
            )
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model


def test_effects_are_averaged_and_shares_and_paths_are_not(tmp_path: Path) -> None:
    models = [record(tmp_path / str(seed), seed=seed) for seed in range(3)]
    ensemble = dualform.open_ensemble([tmp_path / "0", dualform.open(tmp_path / "1"), tmp_path / "2"])
    inputs, labels = batch(500, dtype=torch.float64, rows=4)
    spot = ensemble.attend(network(dtype=torch.float64, seed=9), inputs, targets=labels)
    for by in (None, "label"):
        found = spot.effects(by)
        alone = [
            memory.attend(model, inputs, targets=labels).effects(by)
            for memory, model in zip(ensemble.memories, models, strict=True)
        ]
        every = torch.stack([one.values for one in alone])
        torch.testing.assert_close(found.values, every.mean(dim=0))
        torch.testing.assert_close(found.spread, every.std(dim=0))
        assert found.groups == alone[0].groups
        assert float(found.spread.min()) >= 0 < float(found.spread.max())  # type: ignore[union-attr]
    assert "standard deviation over 3 recordings" in repr(found)
    for memory, shares in zip(ensemble.memories, ensemble.shares("label"), strict=True):
        assert all(torch.equal(shares[n].shares, memory.shares("label")[n].shares) for n in shares)
    paths = spot.path_contributions("label")
    assert len(paths) == 3
    assert not torch.allclose(paths[0].values, paths[1].values)
    kept = ensemble.where("label = 1").attend(models[0], inputs, targets=labels).effects("label")
    torch.testing.assert_close(kept.values, found.values[:, [found.groups.index(1)]])
    left = ensemble.without("label = 1").attend(models[0], inputs, targets=labels).effects("label")
    assert 1 not in left.groups


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": nn.Sequential(nn.Linear(5, 3)).double()}, "their layers differ"),
        ({"steps": STEPS + 1}, "their steps differ, 8 and 9"),
        ({"first": 2}, "4 samples are in one of them only"),
        ({"lr": 0.2}, "the optimizer's lr differs"),
        ({"by": "kind"}, "their columns differ"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mixed_recipes_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    record(tmp_path / "a", seed=0)
    record(tmp_path / "b", seed=1, **changed)
    with pytest.raises(QueryError, match=f"not two recordings of one recipe.*{message}"):
        dualform.open_ensemble([tmp_path / "a", tmp_path / "b"])


def test_an_ensemble_needs_two_different_recordings(tmp_path: Path) -> None:
    record(tmp_path / "a", seed=0)
    with pytest.raises(QueryError, match="needs two recordings or more; 1 came"):
        dualform.open_ensemble([tmp_path / "a"])
    with pytest.raises(QueryError, match="they are the same recording"):
        dualform.open_ensemble([tmp_path / "a", tmp_path / "a"])


def test_groups_that_only_one_recording_has_are_refused(tmp_path: Path) -> None:
    for seed in range(2):
        record(tmp_path / str(seed), seed=seed, shuffled=True)
    first, second = (dualform.open(tmp_path / name) for name in ("0", "1"))
    model, (inputs, _) = network(dtype=torch.float64), batch(500, dtype=torch.float64)
    views = (first, second.where("row < 2"))
    spots = tuple(view.attend(view.trained(model), inputs, quantity="margin") for view in views)
    with pytest.raises(QueryError, match="do not have the same groups by row"):
        EnsembleSpotlight(spots).effects("row")
