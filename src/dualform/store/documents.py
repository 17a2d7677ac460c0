"""JSON texts: those of files that may come from anybody, without what the standard parser lets through, and our own."""

import json
from collections import Counter
from typing import Any

import msgspec

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


def indented(document: Any) -> str:
    """Return the JSON text of a document, indented by one space: the same as `json.dumps(document, indent=1)`.

    A manifest is written whenever a shard is published, while the training runs. The standard encoder indents in
    Python, which holds the interpreter a hundred times as long; without an indent it is compiled, and so is msgspec's.

    >>> print(indented({"steps": 2}))
    {
     "steps": 2
    }
    """
    text = json.dumps(document)
    try:
        return msgspec.json.format(text, indent=1)
    except msgspec.DecodeError:  # NaN and infinities, which are no JSON, and which the standard parser takes
        return json.dumps(document, indent=1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a key that comes twice would let two readers see two different documents."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {cut(repr(twice))} comes twice")
    return found
