"""Training loops over objects that an Accelerator prepared: by `dualform.record`, and by the one for accelerate."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dualform
from helpers.together import run_together

accelerate = pytest.importorskip("accelerate", reason="pip install -c constraints.txt '.[accelerate]'")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SAMPLES = 16


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    """Let each test make an Accelerator of its own: its settings are shared by all of a process."""
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def train(path: Path | None, *, own: bool = True, **options: Any) -> Any:
    """Train with accumulation and clipping, recorded where a folder is given; return the accelerator and the model."""
    from dualform.integrations.accelerate import record

    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    data = dualform.indexed(TensorDataset(inputs, (inputs.sum(1) > 0).long()))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loop(recorder: Any) -> None:
        for (images, labels), ids in loader:
            if recorder is not None:
                recorder.annotate(sample=ids)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()

    if path is None:
        loop(None)
    else:
        with (
            record(accelerator, model, optimizer, path) if own else dualform.record(model, optimizer, path) as recorder
        ):
            loop(recorder)
    return accelerator, accelerator.unwrap_model(model)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("own", [True, False], ids=["integration", "dualform.record"])
def test_prepared_objects_are_recorded(own: bool, options: dict[str, Any], tmp_path: Path) -> None:
    _, plain = train(None, **options)
    accelerate.state.AcceleratorState._reset_state(True)
    _, model = train(tmp_path / "run", own=own, **options)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())
    memory = dualform.open(tmp_path / "run")
    checked = memory.verify(model)
    print(checked)
    assert checked.passed
    assert sorted(memory.patterns("0")["sample"].to_pylist()) == list(range(SAMPLES))


def test_numbers_go_to_the_accelerators_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, float]] = []

    class Tracker:
        def log(self, values: dict[str, float], step: int) -> None:
            told.append({"step": step, **values})

    monkeypatch.setattr(accelerate.Accelerator, "trackers", [Tracker()], raising=False)
    original = accelerate.Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.trackers = [Tracker()]

    monkeypatch.setattr(accelerate.Accelerator, "__init__", init)
    train(tmp_path / "run")
    assert told[0]["step"] == 2
    assert told[0]["dualform/passed"] == 1


def test_two_processes_record_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> tuple[int, bool]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        accelerator, _ = train(tmp_path / "run")
        return accelerator.num_processes, dualform.open(tmp_path / "run").verify().passed

    assert run_together(tmp_path, work) == [(2, True), (2, True)]
    memory = dualform.open(tmp_path / "run")
    assert sorted(memory.patterns("0")["sample"].to_pylist()) == list(range(SAMPLES))
    assert set(memory.patterns("0")["rank"].to_pylist()) == {0, 1}
