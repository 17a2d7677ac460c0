"""Which step do weights belong to? Checksums of samples of the parameters, which a recording logs at every step."""

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from dualform.engine.source import PatternSource
from dualform.lazy import compute as pc
from dualform.recording.sinks import sample


def fingerprint(tensor: Tensor) -> str:
    """Return the xxh3 checksum of a tensor's bytes, as hexadecimal."""
    return xxhash.xxh3_64_hexdigest(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


def matching_steps(run: PatternSource, live: Mapping[str, Tensor]) -> set[int]:
    """Return the steps after which the logged fingerprints are those of the live parameters; 0 is the start."""
    wanted = {name: fingerprint(sample(tensor.detach().cpu())) for name, tensor in live.items()}
    candidates: set[int] = set()
    if all(fingerprint(sample(tensor)) == wanted[name] for name, tensor in run.initial.items()):
        candidates.add(0)
    table = run.steps_table
    if table.num_rows:
        matching: set[int] | None = None
        for name, mark in wanted.items():
            rows = table.filter((pc.field("parameter") == name) & (pc.field("fingerprint") == mark))
            logged = pc.any(pc.equal(table["parameter"], name)).as_py()
            if logged:  # a parameter outside the optimizer never moves and says nothing
                steps = {step + 1 for step in rows["step"].to_pylist()}
                matching = steps if matching is None else matching & steps
        candidates |= matching or set()
    return candidates
