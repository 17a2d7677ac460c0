"""The workspace of oneDNN's LSTM: what is read out of it is what is computed, and nothing is read that does not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from conformance.sinks import ListSink
from dualform.recording.layers import recurrent
from dualform.recording.layers.gates import LSTM, MAX_LAYOUTS, Outer, Ran, Weights
from dualform.recording.layers.lstm_workspace import Workspace, find_layout, is_near, workspace_of
from dualform.recording.recorder import Recorder

SHAPES = [(40, 32, 32, 128), (7, 1, 3, 5), (1, 4, 16, 16), (9, 6, 20, 200)]


@pytest.fixture(autouse=True)
def no_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LSTM, "layouts", {})


def called(shape: tuple[int, int, int, int], seed: int = 0) -> tuple[Weights, Ran, Outer, Tensor]:
    """Run an LSTM forward and backward; return what its values are made of, and its workspace."""
    steps, rows, width, units = shape
    torch.manual_seed(0)
    layer = nn.LSTM(width, units)
    torch.manual_seed(seed)
    x, first, cell = torch.randn(steps, rows, width), torch.randn(1, rows, units), torch.randn(1, rows, units)
    outputs, (last, end) = layer(x, (first, cell))
    workspace = workspace_of(outputs)
    if workspace is None:
        pytest.skip("this torch does not run an LSTM by oneDNN, or keeps no workspace that can be read")
    outer = Outer(torch.randn(steps, rows, units), torch.randn(rows, units), torch.randn(rows, units))
    assert outer.cell is not None
    torch.autograd.backward([outputs, last, end], [outer.outputs, outer.hidden[None], outer.cell[None]])
    keys = torch.cat([x, torch.cat([first, outputs.detach()[:-1]])], dim=2)
    weights = Weights(*(parameter.detach() for parameter in layer.parameters()))
    memory = workspace._memory
    assert memory is not None
    return weights, Ran(keys, outputs[-1].detach(), cell[0], None, workspace), outer, memory


def refuse(*_: object) -> Tensor:
    raise AssertionError("computed, although the workspace has it")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_workspace_holds_what_is_computed(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weights, ran, outer, _ = called(shape)
    computed = LSTM().computed_errors(weights, ran, outer)
    first = LSTM().errors(weights, ran, outer)
    assert LSTM.layouts[(*ran.keys.shape, weights.units)] is not None
    torch.testing.assert_close(first, computed, rtol=0, atol=3e-6 * float(computed.abs().max()))
    weights, ran, outer, _ = called(shape, seed=1)
    computed = LSTM().computed_errors(weights, ran, outer)
    with monkeypatch.context() as patched:
        patched.setattr(LSTM, "computed_errors", refuse)
        found = LSTM().errors(weights, ran, outer)
    torch.testing.assert_close(found, computed, rtol=0, atol=3e-6 * float(computed.abs().max()))


def test_a_call_gives_the_same_values_first_and_later() -> None:
    values = [LSTM().errors(*called(SHAPES[0], seed=1)[:3]) for _ in range(2)]
    assert torch.equal(values[0], values[1])


@pytest.mark.parametrize("what", ["gates", "hidden", "cell", "states"])
def test_a_workspace_that_was_written_to_is_not_read(what: str) -> None:
    LSTM().errors(*called(SHAPES[0])[:3])
    weights, ran, outer, memory = called(SHAPES[0], seed=1)
    layout = LSTM.layouts[(*ran.keys.shape, weights.units)]
    assert layout is not None
    place = getattr(layout, what)
    if place is None:
        pytest.skip("this torch keeps no cell states that can be read")
    stop = layout.hidden.begin if layout.hidden.begin > place.begin and what == "states" else len(memory)
    memory[place.begin : stop] *= 1.01
    assert torch.equal(LSTM().errors(weights, ran, outer), LSTM().computed_errors(weights, ran, outer))


def test_a_workspace_is_read_once() -> None:
    weights, ran, outer, _ = called(SHAPES[0])
    LSTM().errors(weights, ran, outer)
    assert ran.workspace is not None
    assert ran.workspace.take() is None
    assert torch.equal(LSTM().errors(weights, ran, outer), LSTM().computed_errors(weights, ran, outer))


def test_a_layout_that_is_not_found_is_not_sought_again() -> None:
    weights, ran, outer, memory = called(SHAPES[0])
    memory.zero_()
    computed = LSTM().computed_errors(weights, ran, outer)
    assert torch.equal(LSTM().errors(weights, ran, outer), computed)
    assert LSTM.layouts == {(*ran.keys.shape, weights.units): None}
    weights, ran, outer, _ = called(SHAPES[0])
    assert torch.equal(LSTM().errors(weights, ran, outer), computed)


def test_errors_of_zero_say_nothing_of_a_layout() -> None:
    weights, ran, outer, _ = called(SHAPES[1])
    nothing = Outer(*(torch.zeros_like(error) for error in (outer.outputs, outer.hidden, outer.hidden)))
    assert not LSTM().errors(weights, ran, nothing).any()
    assert not LSTM.layouts


def test_a_bounded_number_of_layouts_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LSTM, "layouts", dict.fromkeys([(n,) for n in range(MAX_LAYOUTS)]))
    weights, ran, outer, _ = called(SHAPES[1])
    assert torch.equal(LSTM().errors(weights, ran, outer), LSTM().computed_errors(weights, ran, outer))
    assert len(LSTM.layouts) == MAX_LAYOUTS


def test_nobody_asks_for_a_workspace_where_saved_tensors_have_hooks() -> None:
    unpacked = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        outputs, _ = nn.LSTM(3, 5)(torch.randn(2, 2, 3))
        assert workspace_of(outputs) is None
    assert not unpacked


@pytest.mark.parametrize("what", ["keys", "keys+values"])
def test_a_recording_lets_go_of_the_workspace_after_the_backward(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Workspace] = []

    def noted(outputs: Tensor) -> Workspace | None:
        found = workspace_of(outputs)
        made.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(recurrent, "workspace_of", noted)
    model = nn.LSTM(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, ListSink(), layers={"*": what}):
        model(torch.randn(4, 2, 3))[0].square().sum().backward()
        assert all(workspace._memory is None for workspace in made)
        optimizer.step()


def test_other_outputs_have_no_workspace() -> None:
    assert workspace_of(torch.randn(2, 2)) is None
    assert workspace_of(nn.GRU(3, 5)(torch.randn(2, 2, 3))[0]) is None
    assert workspace_of(nn.LSTM(3, 5, bidirectional=True)(torch.randn(2, 2, 3))[0]) is None
    assert workspace_of(nn.LSTM(3, 5, dtype=torch.float64)(torch.randn(2, 2, 3, dtype=torch.float64))[0]) is None


def test_places_are_found_by_their_numbers_alone() -> None:
    memory = torch.zeros(4 * 1024)
    wanted = torch.randn(3, 2, 10)
    memory[1024:].as_strided((3, 2, 10), (26, 13, 1), 1024).copy_(wanted)
    layout = find_layout(memory, wanted, wanted, wanted, wanted)
    assert layout is not None
    assert (layout.cell.begin, layout.cell.row) == (1024, 13)
    assert find_layout(memory, wanted, wanted, wanted + 1, wanted) is None
    assert not is_near(torch.zeros(3), torch.zeros(3))
