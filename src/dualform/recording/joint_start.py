"""The beginning of a recording in several processes: they agree on the model, and open their sinks in turn.

The first process opens the run, or finds the step to continue it at; the others join it there.
"""

import torch
import xxhash

from dualform.errors import RefusedError
from dualform.recording.sinks import Sink, Start
from dualform.recording.world import World

ELSEWHERE = "Another process of this training could not begin to record, as its own error says; so no process records."


def open_together(world: World, sink: Sink, start: Start) -> int:
    """Open the sinks of all processes, and return the number of the first step to come; or refuse in all of them."""
    if world.size == 1:
        return sink.open(start)
    if len(set(world.gather(_digest(start)))) > 1:
        raise RefusedError(
            f"The {world.size} processes of torch.distributed do not begin with the same model: layers or parameters "
            "differ. Wrap the model in DistributedDataParallel before recording, which gives every process the "
            "parameters of the first; or record trainings that do not belong together without torch.distributed."
        )
    failure: Exception | None = None
    steps, opened = 0, False
    for my_turn in (world.rank == 0, world.rank > 0):
        if my_turn:
            try:
                steps = sink.open(start)
                opened = True
            except Exception as error:
                failure = error
        if world.any(failure is not None):
            if opened:
                sink.abandon()
            raise failure or RefusedError(ELSEWHERE)
    if len(set(world.gather(steps))) > 1:
        sink.abandon()
        raise RefusedError("The processes of this training would continue the run at different steps.")
    return steps


def _digest(start: Start) -> str:
    """Return a checksum of the layers and of all bits of the parameters; of divided ones of the bits of a sample."""
    digest = xxhash.xxh3_128(repr([(name, layer.uses) for name, layer in start.layers.items()]).encode())
    for name, rows in start.parameters.items():
        divided = start.divided.get(name)
        shape, tensor = (tuple(rows.shape), rows) if divided is None else (divided.shape, divided.sample)
        digest.update(f"{name} {shape} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
