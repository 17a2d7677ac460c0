"""A model that is saved whole while it is recorded: nothing of the recording is in the file or in a copy."""

import copy
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from helpers.loops import assert_exact, batches, counts, leftovers, mlp, sgd, train

WITHOUT_DUALFORM = """
import sys
sys.modules["dualform"] = None  # importing it raises from here on
import pickle, torch
from torch import nn
torch.set_num_threads(1)
models = []
for file, pickled, inputs in zip(*3 * [iter(sys.argv[1:])], strict=True):
    inputs = torch.load(inputs)
    models += [(pickle.load(open(pickled, "rb")), inputs), (torch.load(file, weights_only=False), inputs)]
assert len(models) == 6
for model, inputs in models:
    seen = []
    layers = [module for module in model.modules() if not list(module.children())]
    for layer in layers:
        for i in range(40):  # also under the numbers that the recording's hooks had
            layer.register_forward_hook(lambda module, args, output: seen.append(len(args)))
            layer.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = model(inputs)
    (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    optimizer.step()
    assert len(seen) >= 80, seen
"""


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return nn.LSTM(5, 4)


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[Any]]] = {
    "linear": (mlp, batches(1)[0], [nn.Sequential, nn.Linear, nn.ReLU]),
    "recurrent": (recurrent, torch.randn(3, 2, 5), [nn.LSTM]),
    "attention": (
        attention,
        torch.randn(3, 2, 4),
        [
            nn.TransformerEncoderLayer,
            nn.MultiheadAttention,
            nn.modules.linear.NonDynamicallyQuantizableLinear,
            nn.Linear,
            nn.LayerNorm,
            nn.Dropout,
            nn.functional.relu,
        ],
    ),
}


@contextmanager
def recording(model: nn.Module, inputs: Tensor, path: Path) -> Iterator[torch.optim.Optimizer]:
    """Record one step, and then what the block does."""
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path):
        outputs = model(inputs)
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum().backward()
        optimizer.step()
        yield optimizer


def save(folder: Path, case: str) -> list[Path]:
    """Save a model and its inputs while the model is recorded; torch reads the model back by its own classes alone."""
    make, inputs, classes = CASES[case]
    model = make()
    folder.mkdir()
    files = [folder / name for name in ("model.pt", "model.pickle", "inputs.pt")]
    with recording(model, inputs, folder / "run"):
        torch.save(model, files[0])
        files[1].write_bytes(pickle.dumps(model))
    with torch.serialization.safe_globals(classes):
        loaded = torch.load(files[0], weights_only=True)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert leftovers(loaded, sgd(loaded)) == []
    torch.save(inputs, files[2])
    return files


def test_a_saved_model_needs_the_classes_of_torch_alone(tmp_path: Path) -> None:
    files = [path for case in CASES for path in save(tmp_path / case, case)]
    command = [sys.executable, "-W", "error", "-c", WITHOUT_DUALFORM]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_the_same_with_and_without_recording(run: Path, protocol: int) -> None:
    """The user's own hooks are in it, and none of ours."""

    def operations(pickled: bytes) -> list[Any]:
        return [argument for _, argument, _ in pickletools.genops(pickled) if not isinstance(argument, bytes)]

    model = mlp()
    model[0].register_forward_hook(print_nothing, with_kwargs=True)
    model[0].register_forward_pre_hook(print_nothing)
    before = pickle.dumps(model, protocol)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        during = pickle.dumps(model, protocol)
    assert operations(during) == operations(before)
    assert operations(pickle.dumps(model, protocol)) == operations(before)


def print_nothing(*_: Any) -> None:
    """A hook of the user's."""


def test_copies_have_no_hook_and_the_model_keeps_its_own(run: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, run):
        train(model, optimizer, batches(2))
        deep, shallow = copy.deepcopy(model), copy.copy(model[0])
        assert leftovers(deep, sgd(deep)) == []
        train(deep, sgd(deep), batches(2))
        other = nn.Sequential(shallow)
        shallow._parameters = {name: nn.Parameter(p.detach().clone()) for name, p in shallow.named_parameters()}
        train(other, sgd(other), batches(2))
        train(model, optimizer, batches(1))
    memory = dualform.open(run)
    assert counts(memory) == {"0": 12, "2": 12}
    assert_exact(memory, model)


def test_two_recordings_and_the_end_of_one(tmp_path: Path) -> None:
    """The dictionaries of hooks are as they were only when the last recording has left them."""
    model = mlp()
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "a"):
        with dualform.record(model, optimizer, tmp_path / "b"):
            assert b"dualform" not in pickle.dumps(model)
        assert b"dualform" not in pickle.dumps(model)
        assert vars(model[0]._forward_hooks)
    for module in model:
        assert not any(vars(value) for value in vars(module).values() if hasattr(value, "move_to_end"))


def test_hooks_that_were_copied_by_hand_do_nothing(run: Path) -> None:
    model = mlp()
    with dualform.record(model, sgd(model), run):
        (mine,) = model[0]._forward_hooks.copy().values()
        restored = pickle.loads(pickle.dumps(mine))
    restored(model[0], (), {}, None)
    assert vars(restored) == {"_hook": None, "_arguments": 0, "_unless": None}
