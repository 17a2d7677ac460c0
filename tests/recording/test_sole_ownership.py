"""Rows that are not copied, as on a GPU: whoever else holds their memory, or writes to it, changes nothing recorded."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualform
from dualform.recording import pattern_copies
from dualform.recording.sole_ownership import is_owned_alone

ROWS, WIDTH = 64, 96


def own(tensor: Tensor) -> Tensor:
    """Return a tensor of one's own over the memory of another one."""
    return tensor.detach()


def test_memory_that_one_tensor_refers_to_is_owned() -> None:
    rows = own(torch.randn(3, 4))
    assert is_owned_alone(rows, [])


def test_views_of_ones_own_do_not_count() -> None:
    whole = own(torch.randn(2, 3, 4))
    rows = whole.view(-1, 4)
    assert is_owned_alone(rows, [whole])
    assert is_owned_alone(rows, [whole, None, torch.randn(3), "no tensor"])
    other = whole.view(-1, 2)
    assert not is_owned_alone(rows, [whole])
    assert is_owned_alone(rows, [whole, other])


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "detached": lambda tensor: tensor.detach(),
    "a view": lambda tensor: tensor.detach()[1:],
    "numpy": lambda tensor: tensor.detach().numpy(),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "dlpack": lambda tensor: tensor.detach().__dlpack__(),
    "memoryview": lambda tensor: tensor.detach().numpy().data,
}


@pytest.mark.parametrize("how", HOLDS)
def test_memory_that_anybody_else_holds_is_not_owned(how: str) -> None:
    tensor = torch.randn(3, 4)
    held = HOLDS[how](tensor)
    rows = own(tensor)
    del tensor
    assert not is_owned_alone(rows, [])
    del held
    if how not in ("numpy", "memoryview"):  # what numpy knew of once is never owned again
        assert is_owned_alone(rows, [])


NOT_OWNED: dict[str, Callable[[], Tensor]] = {
    "numpy's": lambda: torch.from_numpy(np.zeros((3, 4), np.float32)),
    "an object's": lambda: torch.frombuffer(bytearray(48), dtype=torch.float32),
    "shared among processes": lambda: torch.randn(3, 4).share_memory_(),
    "larger than the rows": lambda: torch.randn(6, 4)[:3],  # the rest would be held with them
    "not row by row": lambda: torch.randn(4, 3).T,
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
}


@pytest.mark.parametrize("what", NOT_OWNED)
def test_other_memory_is_not_owned_by_whoever_alone_refers_to_it(what: str) -> None:
    rows = own(NOT_OWNED[what]())  # by a name: pytest holds what an assert statement computes on the way
    assert not is_owned_alone(rows, [])


def test_other_classes_are_not_owned() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    assert not is_owned_alone(parameter, [])


class Watching(nn.Module):
    """Layers whose inputs, and the errors at whose outputs, somebody else may keep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.hold: Callable[[str, Tensor], None] = lambda what, tensor: None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, telling of everything on the way."""
        hidden = torch.nn.functional.gelu(self.first(inputs))
        self.hold("key", hidden)
        output = self.second(hidden)
        if output.requires_grad:
            output.register_hook(lambda error: self.hold("value", error))
        found: Tensor = self.last(functional.gelu(output))
        return found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Keep rows wherever they are, and list those that were not copied."""
    found: list[Tensor] = []

    def asked(rows: Tensor, others: Any) -> bool:
        owned = is_owned_alone(rows, others)
        if owned:
            found.append(rows)
        return owned

    monkeypatch.setattr(pattern_copies, "_may_keep", lambda rows: True)
    monkeypatch.setattr(pattern_copies, "is_owned_alone", asked)
    return found


def train(
    model: nn.Module,
    folder: Path,
    *,
    spoil: Callable[[], None] = lambda: None,
    batch: Callable[[], Tensor] = lambda: torch.randn(ROWS, WIDTH),
    backwards: int = 1,
) -> Any:
    """Record three steps, after each backward of which something is spoilt; return what `verify` says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    with dualform.record(model, optimizer, folder, check="every"):
        for _ in range(3):
            loss = functional.cross_entropy(model(batch()), torch.arange(ROWS) % 4)
            optimizer.zero_grad()
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
                spoil()
            optimizer.step()
    return dualform.open(folder).verify(model)


def test_rows_that_nobody_else_holds_are_not_copied(tmp_path: Path, kept: list[Tensor]) -> None:
    assert train(Watching(), tmp_path / "run").passed
    assert len(kept) == 3 * 6, "keys and values of three layers"


@pytest.mark.parametrize("how", ["itself", "detached", "a view", "numpy", "the storage"])
@pytest.mark.parametrize("what", ["key", "value"])
def test_what_somebody_else_holds_is_copied_before_it_is_written_to(
    what: str, how: str, tmp_path: Path, kept: list[Tensor]
) -> None:
    held = list[Any]()
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
    assert len(kept) == 3 * 5, "all but what is held"


@pytest.mark.parametrize("how", ["one buffer", "numpy"])
def test_a_batch_that_is_filled_anew_is_copied(how: str, tmp_path: Path, kept: list[Tensor]) -> None:
    buffer = torch.empty(ROWS, WIDTH)
    array = np.zeros((ROWS, WIDTH), np.float32)

    def batch() -> Tensor:
        if how == "one buffer":
            return buffer.normal_()
        array[:] = torch.randn(ROWS, WIDTH).numpy()
        return torch.from_numpy(array)

    def refill() -> None:
        buffer.fill_(7.0)
        array.fill(7.0)

    assert train(Watching(), tmp_path / "run", spoil=refill, batch=batch).passed
    assert len(kept) == 3 * 5


def test_several_layers_over_one_input_have_it_copied(tmp_path: Path, kept: list[Tensor]) -> None:
    class Several(Watching):
        def forward(self, inputs: Tensor) -> Tensor:
            """Feed two layers with one tensor, as queries, keys and values of an attention are fed."""
            shared = functional.gelu(inputs)
            self.hold("key", shared)
            found: Tensor = self.last(self.first(shared) + self.second(shared))
            return found

    model, held = Several(), list[Tensor]()
    model.hold = lambda _, tensor: held.append(tensor)

    def spoil() -> None:
        held.pop().data.fill_(7.0)

    assert train(model, tmp_path / "run", spoil=spoil).passed


def test_a_graph_that_is_kept_has_its_rows_copied(tmp_path: Path, kept: list[Tensor]) -> None:
    assert train(Watching(), tmp_path / "run", backwards=2).passed


@pytest.mark.parametrize("counted", [True, False])
def test_errors_that_a_hook_writes_to_are_recorded_as_the_layer_takes_them(
    counted: bool, tmp_path: Path, kept: list[Tensor]
) -> None:
    """Hooks that write to what they are given, by torch's own count or around it, as clipping of errors does."""

    def halve(error: Tensor) -> None:
        (error if counted else error.data).mul_(0.5)

    class Clipping(Watching):
        def forward(self, inputs: Tensor) -> Tensor:
            """Halve the errors at the second layer, in place."""
            output = self.second(functional.gelu(self.first(inputs)))
            if output.requires_grad:
                output.register_hook(halve)
            found: Tensor = self.last(functional.gelu(output))
            return found

    assert train(Clipping(), tmp_path / "run").passed
    assert len(kept) == 3 * 6


def test_a_backward_that_raises_is_copied_as_far_as_it_came(tmp_path: Path, kept: list[Tensor]) -> None:
    class Raising(Watching):
        fails = False

        def forward(self, inputs: Tensor) -> Tensor:
            """Raise between the backwards of the second and the first layer, where that is wanted."""
            hidden = functional.gelu(self.first(inputs))
            if self.fails:
                hidden.register_hook(self.stop)
            found: Tensor = self.last(functional.gelu(self.second(hidden)))
            return found

        def stop(self, _: Tensor) -> None:
            raise ValueError("stop")

    model = Raising()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dualform.record(model, optimizer, tmp_path / "run", check="every"):
        for step in range(4):
            model.fails = step == 1
            optimizer.zero_grad()
            try:
                functional.cross_entropy(model(torch.randn(ROWS, WIDTH)), torch.arange(ROWS) % 4).backward()
            except ValueError:
                assert model.fails
            optimizer.step()
    assert dualform.open(tmp_path / "run").verify(model).passed


def test_nothing_is_kept_where_compiled_programs_use_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    rows: Any = OnGpu()
    assert pattern_copies._may_keep(rows)
    monkeypatch.setitem(sys.modules, pattern_copies.CUDA_GRAPHS_OF_COMPILED, sys)
    assert not pattern_copies._may_keep(rows)
    assert not pattern_copies._may_keep(torch.zeros(2))
