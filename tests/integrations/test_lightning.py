"""Trainings by Lightning's Trainer with the callback: exact, equal to the bit, every sample found, no trace left."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dualform
from dualform.errors import RefusedError

lightning = pytest.importorskip("lightning.pytorch", reason="pip install -c constraints.txt '.[lightning]'")

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*:UserWarning:lightning",
    "ignore:.*isinstance.*treespec.*",
)

SAMPLES = 16


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A small network, trained by AdamW; or with `several` by two optimizers in turn, by hand."""

    def __init__(self, *, several: bool = False, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.automatic_optimization = not several
        self.fail_at = fail_at

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == self.fail_at:
            raise KeyError("a mistake in a training step")
        (inputs, targets), _ = batch
        loss = F.cross_entropy(self.second(self.first(inputs).tanh()), targets)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return [torch.optim.SGD(self.first.parameters(), lr=0.1), torch.optim.Adam(self.second.parameters(), lr=0.01)]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return DataLoader(dualform.indexed(data), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


def fit(module: Any, folder: Path, *callbacks: Any, checkpoint: Any = None, **options: Any) -> Any:
    """Train for 2 epochs of 4 steps, quietly; return the trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **settings)
    trainer.fit(module, loader(), ckpt_path=checkpoint)
    return trainer


def samples(batch: Any) -> dict[str, Any]:
    return {"sample": batch[1]}


def callback(path: Path, **options: Any) -> Any:
    from dualform.integrations.lightning import RecorderCallback

    return RecorderCallback(path, annotate=samples, **options)


def assert_untouched(module: nn.Module) -> None:
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"several": True}],
    ids=["plain", "clipping and accumulation", "bfloat16", "two optimizers by hand"],
)
def test_a_way_of_training(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    several = options.pop("several", False)
    plain = Module(several=several)
    fit(plain, tmp_path, **options)
    module = Module(several=several)
    fit(module, tmp_path, callback(tmp_path / "run"), **options)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    assert_untouched(module)
    memory = dualform.open(tmp_path / "run")
    checked = memory.verify(module)
    print(checked)
    assert checked.passed
    for layer in memory.layers:
        assert sorted(memory.patterns(layer)["sample"].to_pylist()) == sorted([*range(SAMPLES)] * 2)


def test_an_exception_closes_the_recording(tmp_path: Path) -> None:
    module = Module(fail_at=3)
    with pytest.raises(KeyError, match="a mistake"):
        fit(module, tmp_path, callback(tmp_path / "run"))
    assert_untouched(module)
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 3
    assert memory.verify(module).passed


def test_a_training_that_is_resumed(tmp_path: Path) -> None:
    plain = Module()
    saved = lightning.callbacks.ModelCheckpoint(tmp_path, filename="saved", every_n_epochs=1, save_top_k=-1)
    saved.FILE_EXTENSION = ".ckpt"
    fit(plain, tmp_path, saved, callback(tmp_path / "run"), max_epochs=1, enable_checkpointing=True)
    module = Module()
    fit(module, tmp_path, callback(tmp_path / "run"), checkpoint=tmp_path / "saved.ckpt")
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 8
    assert memory.verify(module).passed


def test_numbers_go_to_the_trainers_loggers(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path)
    fit(Module(), tmp_path, callback(tmp_path / "run", trackers="loggers"), logger=logger)
    written = [numbers for numbers in logger.experiment.metrics if "dualform/bytes" in numbers]
    logger.save()
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "dualform/error_bound" in text
    assert "dualform/bytes" in text or written


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    recorder = callback(tmp_path / "run")
    module = Module()

    class Trainer:
        model, loggers, global_step = module, (), 0
        optimizers = (module.configure_optimizers(),)

    with pytest.raises(RefusedError, match="one of 2 processes"):
        recorder.on_train_start(Trainer(), module)
