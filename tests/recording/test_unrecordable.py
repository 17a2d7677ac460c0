"""Models that cannot be recorded, wholly or in part: which of the usual reasons it is, whose parameters, what to do."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import CoverageError, UnknownLayerError
from dualform.recording.unrecordable import describe_unrecordable
from helpers.loops import mlp, sgd


class Goodness(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))


class Listed(nn.Module):
    """Keeps its layers where torch does not see them."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        layers = [nn.Linear(5, 5), nn.Linear(5, 5)]
        self.stages = dict(enumerate(layers)) if container is dict else container(layers)
        self.other = nn.PReLU()

    def parameters_of_all(self) -> list[nn.Parameter]:
        stages = self.stages.values() if isinstance(self.stages, dict) else self.stages
        return [*self.parameters(), *(p for layer in stages for p in layer.parameters())]


class Graph(nn.Module):
    """Computes with bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(5, 3))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.shift


class OwnRecurrent(nn.GRU):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


CASES: dict[str, tuple[Any, str, str]] = {
    "own forward": (
        lambda: nn.Sequential(Goodness(5, 4), Goodness(4, 3)),
        r"there are 2 Goodness \(a Linear with a forward of its own\)",
        r"Goodness is a subclass of Linear with a forward of its own.*hold an nn.Linear instead",
    ),
    "own forward of a recurrent layer": (
        lambda: OwnRecurrent(5, 4),
        r"there are 1 OwnRecurrent \(a GRU with a forward of its own\)",
        r"OwnRecurrent is a subclass of GRU",
    ),
    "list": (
        lambda: Listed(list),
        r"2 Linear in the plain list 'stages' of Listed",
        r"Listed keeps modules in the plain list 'stages'.*use nn.ModuleList",
    ),
    "tuple": (lambda: Listed(tuple), r"2 Linear in the plain tuple 'stages'", r"use nn.ModuleList"),
    "dictionary": (lambda: Listed(dict), r"2 Linear in the plain dict 'stages'", r"use nn.ModuleDict"),
    "bare": (
        lambda: nn.Sequential(Graph()),
        r"there are 2 Parameters of Graph \('kernel', 'shift'\)",
        r"Graph computes with bare Parameters.*nn.Linear",
    ),
    "unsupported": (lambda: nn.Sequential(nn.PReLU(), nn.PReLU()), r"there are 2 PReLU;", "supported kinds: .*Linear"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_any_layer_to_record_says_why(run: Path, case: str) -> None:
    make, found, advice = CASES[case]
    model = make()
    held = model.parameters_of_all() if isinstance(model, Listed) else model.parameters()
    optimizer = torch.optim.SGD(held, lr=0.1)
    with pytest.raises(UnknownLayerError, match=r"holds no layer that can be recorded") as caught:
        dualform.record(model, optimizer, run)
    for expected in (found, advice):
        assert re.search(expected, str(caught.value)), str(caught.value)


def test_a_model_with_nothing_at_all(run: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UnknownLayerError, match=r"Sequential holds no layer that can be recorded; supported kinds"):
        dualform.record(nn.Sequential(), optimizer, run)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.PReLU(2) for _ in range(5)))
        self.pos = nn.Parameter(torch.zeros(4))
        self.norm = Goodness(2, 2)
        self.head = nn.Linear(2, 2)
        self.tail = [nn.Bilinear(2, 2, 2)]


def test_the_warning_of_uncovered_parameters_names_types(run: Path) -> None:
    model = Generator()
    optimizer = torch.optim.SGD([*model.parameters(), *model.tail[0].parameters()], lr=0.1)
    with pytest.warns(UserWarning, match="10 trained parameters") as caught:
        dualform.record(model, optimizer, run)
    text = str(caught[0].message)
    assert "'blocks.0.weight'" in text
    assert "(5 PReLU, 1 Goodness (a Linear with a forward of its own), 1 Parameter of Generator ('pos')" in text
    assert "1 Bilinear in the plain list 'tail' of Generator)" in text
    with pytest.raises(CoverageError, match=r"5 PReLU.*strict=True"):
        dualform.record(model, optimizer, run, strict=True)


def test_layers_that_were_left_out_are_named_by_type_too(run: Path) -> None:
    model = mlp()
    with pytest.warns(UserWarning, match=r"'0.weight', '0.bias' \(1 Linear\)"):
        dualform.record(model, sgd(model), run, layers="2")


def test_many_bare_parameters_are_shortened() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(6)])
    assert describe_unrecordable(model) == "1 ParameterList"
    graphs = nn.Sequential(*(Graph() for _ in range(3)))
    assert describe_unrecordable(graphs) == "6 Parameters of Graph ('kernel', 'shift')"


# Where a warning points ---------------------------------------------------------------------------------------------

SCRIPT = """
import torch, dualform
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = dualform.record(model, optimizer, "a")  # line 6
with dualform.record(model, optimizer, "b"):  # line 7
    pass
"""


def test_the_warning_points_at_the_line_that_records(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": str(Path(dualform.__file__).parent.parent), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-W", "always", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert [line.split(": ")[0].rpartition("/")[2] for line in lines] == ["script.py:6", "script.py:7"]


def test_the_warning_points_at_a_test_as_well(run: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dualform.record(model, sgd(model), run)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
