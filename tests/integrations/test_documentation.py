"""The scripts of docs/integrations.md, run as they stand with tiny models in place of the reader's."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dualform

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SCRIPTS = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
MAX_LINES = 13

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*:UserWarning:lightning", "ignore:.*treespec.*"
)


def transformers_names() -> dict[str, Any]:
    from helpers.hugging_face import llama, make_tokenizer, texts

    torch.manual_seed(0)
    return {"model": llama(), "tokenizer": make_tokenizer(), "dataset": texts("llama")}


def lightning_names() -> dict[str, Any]:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def training_step(self, batch: Any, index: int) -> Any:
            (inputs, labels), _ = batch
            return F.cross_entropy(self.layer(inputs), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return {"module": Module(), "dataset": loop_names()["dataset"]}


def accelerate_names() -> dict[str, Any]:
    pytest.importorskip("accelerate")
    names = loop_names()
    return {**names, "loader": DataLoader(dualform.indexed(names["dataset"]), batch_size=4)}


def loop_names() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    inputs = torch.randn(16, 5)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "dataset": TensorDataset(inputs, (inputs.sum(1) > 0).long()),
        "loss": F.cross_entropy,
    }


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "transformers": transformers_names,
    "lightning": lightning_names,
    "accelerate": accelerate_names,
    "loop": loop_names,
}


def test_every_script_is_run() -> None:
    assert SCRIPTS.keys() == NAMES.keys()
    assert max(len(script.strip().splitlines()) for script in SCRIPTS.values()) <= MAX_LINES


@pytest.mark.parametrize("name", NAMES)
def test_a_script_does_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = NAMES[name]()
    if name == "transformers":
        quiet = "use_cpu=True, report_to=[], disable_tqdm=True, save_strategy='no', "
        SCRIPTS[name] = SCRIPTS[name].replace('"checkpoints", ', f'"checkpoints", {quiet}')
    exec(SCRIPTS[name], names)
    (run,) = (tmp_path / "runs").iterdir()
    memory = dualform.open(run)
    assert memory.verify().passed
    layer = next(iter(memory.layers))
    assert set(memory.patterns(layer)["sample"].to_pylist()) == set(range(16))
