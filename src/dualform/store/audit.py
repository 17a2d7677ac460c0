"""Compare the files of a run with the manifest: their checksums, and the ranges of their keys."""

import torch

from dualform.engine.reading import BLOCK_PATTERNS, decode
from dualform.errors import CorruptError, RemoteError
from dualform.store.blobs import Blob
from dualform.store.reader import Run

MAX_ROUNDING = {torch.float16: 2.0**-10, torch.int8: 1.001 / 127}
"""By how much storing a row may move an element, relative to the row's largest; a little for the scale's rounding."""


def check_files(run: Run) -> int:
    """Compare every listed file with its checksum; return how many there are."""
    listed = run.files()
    for name, entry in listed.items():
        blob = Blob(run.blobs, name)
        try:
            found = blob.checksum()
        except RemoteError:
            raise  # which says nothing of the file
        except OSError as error:
            raise CorruptError(f"{blob} cannot be read: {error}. Restore it from a copy.") from error
        if found != entry.xxh3:
            raise CorruptError(
                f"{blob} has checksum {found}, but {entry.xxh3} was published: its content was changed. "
                "Restore it from a copy of the run."
            )
    return len(listed)


def check_key_ranges(run: Run) -> None:
    """Raise where a stored key lies outside the range that the manifest gives: answers without signs rest on it.

    Keys that are stored as float16 or int8 were rounded after their range was taken, by at most 2⁻¹⁰ or 1/127 of the
    largest. No rounding changes a sign.
    """
    for shard in run.all_shards():
        for layer, entry in run.manifest.layers.items():
            if entry.store == "steps" or not shard.count(layer) or not entry.d_in:
                continue
            source = shard.pool(layer) if layer in shard.entry.pools else shard.rows(layer, "keys")
            low, high = shard.entry.key_range[layer]
            slack = MAX_ROUNDING.get(source.dtype, 0.0) * max(abs(low), abs(high))
            dtype = torch.float32 if source.dtype in MAX_ROUNDING else source.dtype
            for start in range(0, len(source), BLOCK_PATTERNS):
                rows = decode(*source.take(slice(start, start + BLOCK_PATTERNS)), dtype)
                least, greatest = (float(found) for found in torch.aminmax(rows))
                other_sign = (least < 0 <= low) or (high <= 0 < greatest)
                if least < low - slack or greatest > high + slack or other_sign:
                    raise CorruptError(
                        f"The keys of layer {layer!r} in shard {shard.entry.index} go from {least} to {greatest}, but "
                        f"the manifest says {low} to {high}. Restore the manifest from a copy of the run."
                    )
