"""JSON texts from files that may come from anybody: the parts that the standard parser lets through and we do not."""

import json
from collections import Counter
from typing import Any

from dualform.printable import cut


def parse_json(text: str | bytes) -> Any:
    """Return a JSON document; raise `ValueError` where a key comes twice, it nests too deeply, or a text is none.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' comes twice
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique)
        lone = "\\ud" if isinstance(text, str) else b"\\ud"
        if lone in text.lower():  # type: ignore[operator]
            json.dumps(found, ensure_ascii=False).encode()  # raises a ValueError on a lone surrogate
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a key that comes twice would let two readers see two different documents."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {cut(repr(twice))} comes twice")
    return found
