"""Rows that are not copied: whoever else holds them, or writes to them, changes nothing of what is recorded."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.errors import RefusedError
from dualform.recording import borrowed_rows, hooks
from dualform.recording.borrowed_rows import BorrowedRows

ROWS, WIDTH = 256, 96  # rows of 96 kB
Held = list[Tensor]


class Watching(nn.Module):
    """Two layers, whose inputs and the errors at whose outputs somebody else may keep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.hold: Callable[[str, Tensor], None] = lambda what, tensor: None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, telling of everything on the way."""
        hidden = torch.relu(self.first(inputs))
        self.hold("key", hidden)
        output = self.second(hidden)
        if output.requires_grad:
            output.register_hook(lambda error: self.hold("value", error))
        found: Tensor = self.last(torch.relu(output))
        return found


class Settled:
    """Counts the rows that were borrowed, and those of them that were copied after all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.borrowed, self.copied = 0, list[str]()
        self._settle = borrowed_rows.settle_borrowed
        monkeypatch.setattr(hooks, "settle_borrowed", self)

    def __call__(self, borrowed: Sequence[BorrowedRows], held: Any, pool: Any) -> None:
        places = [one.rows.data_ptr() for one in borrowed]
        self._settle(borrowed, held, pool)
        self.borrowed += len(borrowed)
        self.copied += [one.layer for one, place in zip(borrowed, places, strict=True) if one.rows.data_ptr() != place]


def train(model: Watching, folder: Path, *, spoil: Callable[[], None], inputs: Tensor | None = None) -> Any:
    """Record three steps, after each backward of which something is spoilt; return what `verify` says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    with dualform.record(model, optimizer, folder):
        for _ in range(3):
            batch = torch.randn(ROWS, WIDTH) if inputs is None else inputs
            loss = functional.cross_entropy(model(batch), torch.arange(ROWS) % 4)
            optimizer.zero_grad()
            loss.backward()
            spoil()
            optimizer.step()
    return dualform.open(folder).verify(model)


def test_rows_that_nobody_else_holds_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = Settled(monkeypatch)
    assert train(Watching(), tmp_path / "run", spoil=lambda: None).passed
    assert settled.borrowed == 3 * 4, "keys and values of the second layer, values of the first, keys of the last"
    assert not settled.copied


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "detached": lambda tensor: tensor.detach(),
    "a view": lambda tensor: tensor.detach()[1:],
    "numpy": lambda tensor: tensor.detach().numpy(),
    "the storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("how", HOLDS)
@pytest.mark.parametrize("what", ["key", "value"])
def test_what_somebody_else_holds_is_copied_before_it_is_written_to(
    what: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, held = Settled(monkeypatch), list[Any]()
    model = Watching()
    model.hold = lambda kind, tensor: held.append(HOLDS[how](tensor)) if kind == what else None

    def spoil() -> None:
        while held:
            one = held.pop()
            if isinstance(one, Tensor):
                one.data.fill_(7.0)
            else:
                one.fill(7) if how == "numpy" else one.fill_(7)

    assert train(model, tmp_path / "run", spoil=spoil).passed
    # What numpy knows of is not even borrowed.
    assert settled.copied.count("second") == (0 if how == "numpy" else 3)


def test_an_input_in_memory_of_numpy_is_copied_at_once(tmp_path: Path) -> None:
    array = torch.randn(ROWS, WIDTH).numpy()

    class Fed(Watching):
        def forward(self, inputs: Tensor) -> Tensor:
            """Take what numpy holds, as something that autograd computed."""
            fed = torch.from_numpy(array).requires_grad_().view(ROWS, WIDTH)
            assert fed.grad_fn is not None
            return super().forward(fed)

    def refill() -> None:
        array[:] = torch.randn(ROWS, WIDTH).numpy()

    assert train(Fed(), tmp_path / "run", spoil=refill).passed


def test_a_graph_that_is_kept_has_its_rows_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, model = Settled(monkeypatch), Watching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run"):
        loss = functional.cross_entropy(model(torch.randn(ROWS, WIDTH)), torch.arange(ROWS) % 4)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    assert dualform.open(tmp_path / "run").verify(model).passed
    assert {"second", "last"} <= set(settled.copied), "the graph has their keys"


@pytest.mark.parametrize("how", ["write", "free"])
def test_rows_that_change_within_their_backward_are_refused(how: str, tmp_path: Path) -> None:
    def spoil(hidden: Tensor) -> None:
        if how == "write":
            hidden.detach().mul_(2.0)
        else:
            hidden.untyped_storage().resize_(0)

    class Spoilt(Watching):
        def forward(self, inputs: Tensor) -> Tensor:
            """Spoil the input of the second layer between its backward and the first's."""
            hidden = torch.tanh(self.first(inputs)).clone()
            hidden.register_hook(lambda _: spoil(hidden))
            found: Tensor = self.last(torch.relu(self.second(hidden)))
            return found

    with pytest.raises(RefusedError, match=r"'second' cannot be recorded exactly: .* written to or freed"):
        train(Spoilt(), tmp_path / "run", spoil=lambda: None)


def test_a_step_within_a_backward_takes_the_rows_as_they_are_then(tmp_path: Path) -> None:
    model, held = Watching(), list[Tensor]()
    model.hold = lambda kind, tensor: held.append(tensor) if kind == "key" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    waiting = set(model.parameters())

    def accumulated(parameter: Tensor) -> None:
        waiting.discard(parameter)
        if not waiting:
            optimizer.step()
            held.pop().detach().mul_(2.0)  # still within the backward, and the recording has not copied it before

    with dualform.record(model, optimizer, tmp_path / "run"):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(accumulated)
        functional.cross_entropy(model(torch.randn(ROWS, WIDTH)), torch.arange(ROWS) % 4).backward()
    assert not held
    assert dualform.open(tmp_path / "run").verify(model).passed
