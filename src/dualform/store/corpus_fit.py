"""Does a text fit what was recorded? Wherever patterns have a `place` and a `token`, `train[place]` must be that token.

Every annotation row of the run is compared: two columns of whole numbers, and no keys. A run without the column `token`
can only be checked for places beyond the text, one without `place` not at all.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualform.corpus import PLACE, TOKEN, Ids
from dualform.errors import QueryError
from dualform.store.reader import Run
from dualform.store.shard_reading import Shard

INTEGER_COLUMN = "int64"  # the Arrow type of a column of whole numbers
MAX_REMEMBERED_FITS = 1 << 16  # outcomes of shards; one takes some hundred bytes


@dataclass(frozen=True, slots=True)
class ShardFit:
    """How the annotations of one shard fit a text.

    Attributes:
        checked: how many places were compared.
        wrong: how many of them do not fit.
        shifted: how many would fit if places were one less, and one more.
        example: place, and the token that was recorded there (None: it has none), of the first that does not fit.
    """

    checked: int
    wrong: int
    shifted: tuple[int, int]
    example: tuple[int, int | None] | None


_outcomes: dict[tuple[str, ...], ShardFit] = {}  # by the digests of text and annotations, which never change


def check_fit(run: Run, train: Ids, *, digest: str | None = None) -> None:
    """Raise unless a text fits the places and tokens that a run's patterns are annotated with.

    Args:
        run: the run.
        train: (N,) the tokens of the text.
        digest: of the text, by which outcomes are remembered.
    """
    columns = run.manifest.columns
    if columns.get(PLACE) != INTEGER_COLUMN:
        return
    fits = [_fit(shard, train, digest, tokens=columns.get(TOKEN) == INTEGER_COLUMN) for shard in run.all_shards()]
    wrong, checked = sum(fit.wrong for fit in fits), sum(fit.checked for fit in fits)
    if not wrong:
        return
    place, token = next(fit.example for fit in fits if fit.example is not None)
    if 0 <= place < len(train):
        found = f"at place {place} it has token {int(train[place])}, but token {token} was recorded there"
    else:
        found = f"place {place} is outside of its {len(train):,} tokens"
    shifts = [(sum(fit.shifted[i] for fit in fits), way) for i, way in enumerate(("less", "more"))]
    hint = next((f" It would fit if every place were one {way}." for n, way in shifts if n == checked), "")
    raise QueryError(
        f"The text does not fit what was recorded: {wrong:,} of {checked:,} annotated places are wrong; for example, "
        f"{found}.{hint} Keep the text that the model was trained on (memory.add_corpus), and annotate each input "
        "token with its place there, counted from 0 over the training part, and with that token."
    )


def _fit(shard: Shard, train: Ids, digest: str | None, *, tokens: bool) -> ShardFit:
    name = shard.blob("annotations").name
    rows = shard.annotated_rows()
    if digest is None:
        return _compare_places(shard, rows, train, tokens=tokens)
    key = (digest, shard.entry.files[name].xxh3, str(rows), str(tokens))
    if key not in _outcomes:
        while len(_outcomes) >= MAX_REMEMBERED_FITS:
            _outcomes.pop(next(iter(_outcomes)), None)
        _outcomes[key] = _compare_places(shard, rows, train, tokens=tokens)
    return _outcomes[key]


def _compare_places(shard: Shard, rows: int, train: Ids, *, tokens: bool) -> ShardFit:
    places, placed = _column(shard, PLACE, rows)
    recorded, known = _column(shard, TOKEN, rows) if tokens else (places, np.zeros(rows, dtype=bool))
    inside = (places >= 0) & (places < len(train))
    padded = np.concatenate([[-1], train, [-1]])  # one place more on either side
    at = np.clip(places, -1, len(train)) + 1
    wrong = placed & (~inside | (known & (padded[at] != recorded)))
    checked = int((placed & (known | ~inside)).sum()) if tokens else int(placed.sum())
    first = int(wrong.argmax()) if wrong.any() else None
    return ShardFit(
        checked=checked,
        wrong=int(wrong.sum()),
        shifted=tuple(  # type: ignore[arg-type]
            int((placed & known & (padded[np.clip(at + by, 0, len(padded) - 1)] == recorded)).sum()) for by in (-1, 1)
        ),
        example=None if first is None else (int(places[first]), int(recorded[first]) if known[first] else None),
    )


def _column(shard: Shard, name: str, rows: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return the first rows of a column, and where it has a value."""
    column = shard.annotation(name)
    if column is None:
        return np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)
    column = column.slice(0, rows)
    return np.asarray(column.fill_null(0), dtype=np.int64), np.asarray(column.is_valid())
