"""Shares of trainings with accumulation, clipping, several optimizers, skipped steps and columns per position."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import dualform
from dualform.recording.share_bytes import share_bytes
from dualform.store.memory_blobs import MemoryBlobs
from dualform.store.reader import Run

make = torch.optim
BODY: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "momentum": lambda p: make.SGD(p, lr=0.1, momentum=0.9),
    "Nesterov, foreach": lambda p: make.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam": lambda p: make.Adam(p, lr=0.01, weight_decay=1e-2),
}


class Sequences(nn.Module):
    """Tokens, (L, B), to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(7, 6), nn.LSTM(6, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        """Take (L, B)."""
        found: Tensor = self.head(self.norm(self.lstm(self.table(tokens))[0]))
        return found


@pytest.mark.parametrize("body", BODY)
def test_shares_are_those_of_the_patterns_in_a_training_with_everything(body: str) -> None:
    torch.manual_seed(0)
    model = Sequences().double()
    optimizers = [
        BODY[body]([*model.table.parameters(), *model.lstm.parameters()]),
        make.RMSprop([*model.norm.parameters(), *model.head.parameters()], lr=1e-3),
    ]
    groupings: list[list[Any]] = [["source"], ["source", "token"], [dualform.bins("step", width=3)]]
    keep: list[dualform.Shares | dualform.Patterns]
    keep = [dualform.Shares(by=groupings, at=[5], groups=100), dualform.Patterns()]
    blobs = MemoryBlobs()
    with dualform.record(model, optimizers, blobs, batch_axis=1, keep=keep) as recorder:
        for step in range(7):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + micro)
                tokens = torch.randint(7, (4, 3), generator=generator)
                recorder.annotate(source=["a", "b", "c"] if micro else "b", token=tokens.T)
                (model(tokens).sin() * torch.randn(4, 3, 7, generator=generator)).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizers[0].step()
            optimizers[0].zero_grad(set_to_none=False)  # which writes to gradients before the other one's step
            if step != 4:
                optimizers[1].step()
    run, memory = Run(blobs), dualform.open(blobs)
    live = run.kept_shares
    assert live is not None
    patterns = memory.share_source(*groupings)
    for by in live.groupings:
        for name, parameter in model.named_parameters():
            found, expected = live.shares(name, by), patterns.shares(name, by)
            change = float((parameter.detach() - run.initial[name]).norm())
            assert found.labels == expected.labels
            assert float((found.shares - expected.shares).norm()) <= 1e-11 * change, (name, by)
            assert float(found.unexplained.norm()) <= 1e-11 * change, (name, by)
        for layer in run.layers:
            keys, expected_keys = live.key_sums(layer, by), patterns.key_sums(layer, by)
            torch.testing.assert_close(keys.sums, expected_keys.sums, rtol=1e-12, atol=1e-12)
            assert torch.equal(keys.counts, expected_keys.counts)
            # The live fold looks no further for the lowest key of a layer once a key has been negative.
            assert expected_keys.lowest <= keys.lowest < 0 or keys.lowest == expected_keys.lowest
    assert memory.verify(model).passed


@pytest.mark.parametrize("optimizer", ["Nesterov, foreach", "Adadelta"])
def test_what_a_step_overwrites_is_taken_before_it(optimizer: str) -> None:
    """Nesterov's fast step writes the update into the gradient; Adadelta's moves what its own map is made of."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    made = BODY[optimizer](list(model.parameters())) if optimizer in BODY else make.Adadelta(model.parameters(), lr=0.3)
    blobs = MemoryBlobs()
    with dualform.record(model, made, blobs, keep=dualform.Shares(by="label")) as recorder:
        for _ in range(4):
            recorder.annotate(label=[0, 1, 1, 0])
            made.zero_grad()
            model(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
            made.step()
    kept = Run(blobs).kept_shares
    assert kept is not None
    found = kept.shares("weight", ("label",))
    assert float(found.unexplained.norm()) <= 1e-12 * float(found.shares.norm())
    assert float(found.rounding.norm()) <= 1e-12 * float(found.shares.norm())


def test_a_skipped_step_leaves_shares_as_they_are() -> None:
    """A gradient scaler that found an infinity makes the optimizer skip; 0 · inf would be NaN."""
    found = []
    for skip in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = make.AdamW(model.parameters(), lr=0.1)
        blobs = MemoryBlobs()
        with dualform.record(model, optimizer, blobs, keep=dualform.Shares(by="label")) as recorder:
            for step in range(4):
                if step == 2 and not skip:
                    continue
                recorder.annotate(label=[0, 1])
                optimizer.zero_grad()
                scale = torch.inf if step == 2 else 1.0
                inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
                (scale * model(inputs).square().mean()).backward()
                if step != 2:  # as torch.amp.GradScaler.step does
                    optimizer.step()
        kept = Run(blobs).kept_shares
        assert kept is not None
        found.append(kept.shares("weight", ("label",)).shares)
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())


def test_a_gradient_that_is_not_finite_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = make.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, MemoryBlobs(), keep=dualform.Shares(by="label")) as recorder:
        recorder.annotate(label=[0, 1])
        (model(torch.randn(2, 3)).sum() * torch.inf).backward()
        with pytest.raises(dualform.DualformError, match=r"'(weight|bias)' cannot be recorded"):
            optimizer.step()


def test_bytes_are_those_of_the_tensors() -> None:
    found = share_bytes({"w": ["a", "b"], "v": ["a"]}, {"w": 100, "v": 10}, {"w": 1, "v": 0}, groups=5)
    assert found.per_group == 2 * 2 * 100 + 10
    assert found.device == 5 * found.per_group + 2 * 100 + 10


def test_no_sum_of_keys_is_written_to_twice_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    add = torch._foreach_add_

    def once(tensors: list[Tensor], *others: Any, **options: Any) -> None:
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), "on a GPU one of the two would be lost"
        add(tensors, *others, **options)

    monkeypatch.setattr(torch, "_foreach_add_", once)
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = make.SGD(model.parameters(), lr=0.1)
    blobs, keys = MemoryBlobs(), torch.randn(2, 4, 3).double()
    with dualform.record(model, optimizer, blobs, keep=dualform.Shares(by=["label"])) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            for rows in keys:
                recorder.annotate(label=[0, 1, 0, 1])
                model(rows).square().mean().backward()
            optimizer.step()
    kept = Run(blobs).kept_shares
    assert kept is not None
    found = kept.key_sums("", ("label",)).sums
    torch.testing.assert_close(found, 2 * torch.stack([keys[:, ::2].sum((0, 1)), keys[:, 1::2].sum((0, 1))]))
