"""Load a user's tokenizer: `package.module:name`, a file tokenizer.json, or a folder that transformers wrote."""

import importlib
import sys
from pathlib import Path
from typing import Any

from dualform.errors import QueryError
from dualform.pieces import Tokenizer, check_tokenizer


def load_tokenizer(spec: str) -> Tokenizer:
    """Load a tokenizer; of `package.module:name`, a class or function without `encode` is called to make it.

    A file is read by the package tokenizers, a folder by transformers, which runs no code that lies in it.
    """
    try:
        found = _read(Path(spec)) if Path(spec).exists() else _imported(spec)
    except QueryError:
        raise
    except Exception as error:
        raise QueryError(f"--tokenizer {spec} cannot be loaded: {type(error).__name__}: {error}.") from error
    check_tokenizer(found)
    tokenizer: Tokenizer = found
    return tokenizer


def _read(path: Path) -> Any:
    """Read a tokenizer from a file, or from a folder."""
    if path.is_dir():
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)
    return importlib.import_module("tokenizers").Tokenizer.from_file(str(path))


def _imported(spec: str) -> Any:
    """Import a tokenizer, also from the current folder."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise QueryError(
            f"--tokenizer is {spec!r}; expected package.module:name, a file tokenizer.json, or a folder of a "
            "tokenizer that transformers wrote."
        )
    sys.path.insert(0, "")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
        return found() if isinstance(found, type) or (callable(found) and not hasattr(found, "encode")) else found
    finally:
        sys.path.remove("")
