"""Names of jobs by their content, so that the answer of a replay is found again when the same is asked."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from dualform.engine.jobs import Job, Pass
from dualform.engine.reducers import BestState


class _UnnamedError(Exception):
    """A part of a job has no content that could be named."""


def name_job(job: Job) -> str | None:
    """Return a name that two passes over one source share only if they ask the same; None where there is no such name.

    All settings count, tensors by their bytes. Block sizes do not: no answer depends on them.
    """
    if not isinstance(job, Pass):
        return None
    parts = (
        type(job).__name__,
        job.layer,
        repr(job.view.key),
        job.reducer,
        job.dtype,
        job.queries,
        job.measure,
        job.rows,
        job.groups,
        job.values,
        job.coefficients_of,
    )
    digest = xxhash.xxh3_128()
    try:
        for piece in _pieces(parts):
            digest.update(piece)
    except _UnnamedError:
        return None
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the content of a value as bytes."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, Tensor):
        yield from _pieces(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        yield f"{value.dtype} {tuple(value.shape)};".encode()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape};".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, tuple | list):
        yield f"{len(value)}[".encode()
        for one in value:
            yield from _pieces(one)
    elif isinstance(value, Mapping):
        yield from _pieces(list(value.items()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__qualname__} ".encode()
        yield from _pieces([getattr(value, one.name) for one in dataclasses.fields(value) if one.compare])
    else:
        raise _UnnamedError


def pack_answer(answer: Any) -> dict[str, Tensor] | None:
    """Return an answer as named tensors; None where it is neither a tensor nor the best patterns."""
    if isinstance(answer, Tensor):
        return {"whole": answer}
    return answer._asdict() if isinstance(answer, BestState) else None


def unpack_answer(packed: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return an answer that was packed, on a device."""
    there = {name: tensor.to(device, copy=True) for name, tensor in packed.items()}
    return there["whole"] if "whole" in there else BestState(**there)
