"""Load a user's tokenizer from `package.module:name`: the tokenizer itself, or a function that makes it."""

import importlib
import sys
from typing import Any

from dualform.errors import QueryError
from dualform.pieces import Tokenizer, check_tokenizer


def load_tokenizer(spec: str) -> Tokenizer:
    """Import a tokenizer; a class or function without `encode` is called without arguments to make it."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise QueryError(f"--tokenizer is {spec!r}; expected package.module:name.")
    sys.path.insert(0, "")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
        if isinstance(found, type) or (callable(found) and not hasattr(found, "encode")):
            found = found()
    except QueryError:
        raise
    except Exception as error:
        raise QueryError(f"--tokenizer {spec} cannot be loaded: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove("")
    check_tokenizer(found)
    tokenizer: Tokenizer = found
    return tokenizer
