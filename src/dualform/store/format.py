"""The names of a run's blobs. docs/format.md describes their content.

How a blob is published is said in `blobs.py`, the manifest is read and written in `manifest.py`.
"""

import torch

from dualform.recording.media import CORPUS as CORPUS
from dualform.recording.media import VOCABULARY as VOCABULARY

MANIFEST = "manifest.json"
INITIAL = "initial.safetensors"
FINAL = "final.safetensors"
FROZEN = "frozen.safetensors"
UNCOVERED = "uncovered.safetensors"
STARTING = "starting.safetensors"
SHARES = "shares/"  # the folder of shares by group
UNEXPLAINED = "unexplained/"  # the folder of what no pattern explains, of a run made from checkpoints
RESTART = "restart/"  # the folder of restart points, which the manifest does not list
LOCK = ".lock"
STATE = ":"  # ENTRY:NAME in initial.safetensors is a warm entry of a parameter's optimizer state


def rank_folder(rank: int) -> str:
    """Return the folder of the files of one of several processes; those of process 0 lie at the top."""
    return f"ranks/{rank:06d}"


def shares_file(step: int) -> str:
    """Return the name of the blob of shares after a step."""
    return f"{SHARES}{step:09d}.safetensors"


def shares_state_file(step: int) -> str:
    """Return the name of the blob that a recording of shares goes on from after a step."""
    return f"{SHARES}state-{step:09d}.safetensors"


def unexplained_file(step: int) -> str:
    """Return the name of the blob of what no pattern explains after a step."""
    return f"{UNEXPLAINED}{step:09d}.safetensors"


def restart_file(step: int) -> str:
    """Return the name of the blob of the state that a replayed training had before a step."""
    return f"{RESTART}{step:09d}.safetensors"


def shard_files(index: int) -> dict[str, str]:
    """Return the names of a shard's blobs by kind; `uncovered` is published only where there is uncovered state."""
    return {
        "patterns": f"shards/{index:06d}.safetensors",
        "calls": f"calls/{index:06d}.parquet",
        "annotations": f"annotations/{index:06d}.parquet",
        "steps": f"steps/{index:06d}.parquet",
        "uncovered": f"uncovered/{index:06d}.safetensors",
    }


STORABLE_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""The dtypes of uncovered state whose values are kept; a tensor of another dtype is known by its checksum."""
