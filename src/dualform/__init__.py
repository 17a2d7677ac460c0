"""See what a trained network owes to each thing it was trained on."""

from typing import TYPE_CHECKING, Any

from dualform import show  # noqa: F401 (an import registers what draws answers in notebooks)
from dualform._version import __version__

if TYPE_CHECKING:
    from dualform.attend.memory import Memory
    from dualform.attend.path_question import PathQuestion
    from dualform.attend.questions import Top, Totals
    from dualform.attend.spotlight import Spotlight
    from dualform.binning import bins
    from dualform.corpus import Corpus
    from dualform.effects.output_gradients import contrast
    from dualform.errors import DualformError
    from dualform.indexing import indexed
    from dualform.opening import from_checkpoints, open, open_ensemble
    from dualform.recording.estimate import estimate
    from dualform.recording.keep import Patterns, Shares, Steps
    from dualform.recording.layers import register_layer
    from dualform.recording.recorder import Recorder
    from dualform.replaying.replay_training import replay
    from dualform.replaying.restartable import Restartable
    from dualform.replaying.training import record_training
    from dualform.store.record_to_folder import record

_HOME = {
    "Corpus": "dualform.corpus",
    "DualformError": "dualform.errors",
    "Memory": "dualform.attend.memory",
    "PathQuestion": "dualform.attend.path_question",
    "Patterns": "dualform.recording.keep",
    "Recorder": "dualform.recording.recorder",
    "Restartable": "dualform.replaying.restartable",
    "Shares": "dualform.recording.keep",
    "Spotlight": "dualform.attend.spotlight",
    "Steps": "dualform.recording.keep",
    "Top": "dualform.attend.questions",
    "Totals": "dualform.attend.questions",
    "bins": "dualform.binning",
    "contrast": "dualform.effects.output_gradients",
    "estimate": "dualform.recording.estimate",
    "from_checkpoints": "dualform.opening",
    "indexed": "dualform.indexing",
    "open": "dualform.opening",
    "open_ensemble": "dualform.opening",
    "record": "dualform.store.record_to_folder",
    "record_training": "dualform.replaying.training",
    "register_layer": "dualform.recording.layers",
    "replay": "dualform.replaying.replay_training",
}

__all__ = [
    "Corpus",
    "DualformError",
    "Memory",
    "PathQuestion",
    "Patterns",
    "Recorder",
    "Restartable",
    "Shares",
    "Spotlight",
    "Steps",
    "Top",
    "Totals",
    "__version__",
    "bins",
    "contrast",
    "estimate",
    "from_checkpoints",
    "indexed",
    "open",
    "open_ensemble",
    "record",
    "record_training",
    "register_layer",
    "replay",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `dualform --help` needs no torch.
    if name not in _HOME:
        raise AttributeError(f"module 'dualform' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
