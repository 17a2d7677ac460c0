"""A tokenizer's pieces as texts: what each token of a vocabulary stands for, and the tokens of a prompt.

A tokenizer is any object with `encode` (text -> tokens) and `decode` (tokens -> text): those of transformers,
tokenizers, tiktoken and sentencepiece have both. No such package is imported here.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from dualform.errors import QueryError
from dualform.tokens import spell

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are no character


class Tokenizer(Protocol):
    """Anything that turns a text into tokens and back."""

    def encode(self, text: str) -> Any:
        """Return the tokens of a text."""

    def decode(self, tokens: Any) -> str:
        """Return the text of some tokens."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raise unless an object has `encode` and `decode`."""
    missing = [name for name in ("encode", "decode") if not callable(getattr(tokenizer, name, None))]
    if missing:
        raise QueryError(
            f"The tokenizer is of type {type(tokenizer).__name__}, without {' and '.join(missing)}; expected an object "
            "with encode(text) -> tokens and decode(tokens) -> text."
        )


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, without the special tokens that some tokenizers put around it."""
    check_tokenizer(tokenizer)
    try:
        found = _without_specials(tokenizer.encode, "add_special_tokens", text)
        found = getattr(found, "ids", found)  # an Encoding of the package tokenizers
        return [operator.index(token) for token in getattr(found, "tolist", lambda: found)()]
    except Exception as error:
        raise QueryError(
            f"The tokenizer could not encode {text!r}: {type(error).__name__}: {error}. Expected encode(text) to "
            "return a list of whole numbers."
        ) from error


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that a tokenizer's chat template makes of messages, up to where the model would go on.

    After a message of the assistant nothing is added; after any other the template's beginning of an answer.

    Args:
        tokenizer: has a method `apply_chat_template`, as those of transformers have.
        messages: each with `role` and `content`.
    """
    render = getattr(tokenizer, "apply_chat_template", None)
    if not callable(render):
        raise QueryError(
            f"The prompt is a chat of {len(messages)} messages, but the tokenizer, of type {type(tokenizer).__name__}, "
            "has no chat template. Give one with apply_chat_template, or give the prompt as a text."
        )
    try:
        answered = messages[-1].get("role") == "assistant"
        return str(render([dict(one) for one in messages], tokenize=False, add_generation_prompt=not answered))
    except Exception as error:
        raise QueryError(
            f"The tokenizer's chat template failed: {type(error).__name__}: {error}. Expected messages such as "
            '{"role": "user", "content": "a text"}.'
        ) from error


def piece_texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    """Return the text of each of some tokens, such that a text is all of its pieces in a row."""
    check_tokenizer(tokenizer)
    before = _opening(tokenizer)
    return [_piece(tokenizer, token, before) for token in tokens]


def vocabulary_size(tokenizer: Any) -> int:
    """Return how many tokens a tokenizer knows of, 0 where it does not say."""
    if hasattr(tokenizer, "__len__"):
        return len(tokenizer)
    for name in ("n_vocab", "get_vocab_size", "get_piece_size", "vocab_size"):
        found = getattr(tokenizer, name, None)
        if found is not None:
            return int(found() if callable(found) else found)
    return 0


def raw_piece(tokenizer: Any, token: int) -> str | None:
    """Return how a tokenizer itself writes a token ("Ġthe", "▁the", "##ing"), where it says."""
    for name in ("convert_ids_to_tokens", "id_to_token", "id_to_piece"):
        if callable(get := getattr(tokenizer, name, None)):
            try:
                found = get(token)
            except Exception:  # a number without a token
                return None
            return found if isinstance(found, str) else None
    return None


def _opening(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Return a token to put before others, and its text: some tokenizers drop the space before the first piece."""
    try:
        tokens = encode_text(tokenizer, "a")[-1:]
    except QueryError:  # a vocabulary without that letter
        return [], ""
    text = _decoded_text(tokenizer, tokens)
    return (tokens, text) if text else ([], "")


def _piece(tokenizer: Tokenizer, token: int, before: tuple[Sequence[int], str]) -> str:
    tokens, start = before
    whole = _decoded_text(tokenizer, [*tokens, token])
    text = whole[len(start) :] if whole is not None and whole.startswith(start) else _decoded_text(tokenizer, [token])
    if text and REPLACEMENT in text:
        found = _token_bytes(tokenizer, token)
        text = text if found is None else spell(found)
    return text or raw_piece(tokenizer, token) or f"<{token}>"


def _token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Return the bytes of a token that is no whole text, where the tokenizer says."""
    if callable(get := getattr(tokenizer, "decode_single_token_bytes", None)):
        found = get(token)
        return bytes(found) if isinstance(found, bytes | bytearray) else None
    raw = raw_piece(tokenizer, token)
    if raw is None:
        return None
    if len(raw) == 6 and raw.startswith("<0x") and raw.endswith(">"):
        return bytes.fromhex(raw[3:5])
    signs = _byte_signs()
    return bytes(signs[sign] for sign in raw) if all(sign in signs for sign in raw) else None


@functools.cache
def _byte_signs() -> dict[str, int]:
    """Return the byte behind each sign of a byte-level vocabulary, which writes unprintable bytes from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoded_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str | None:
    try:
        found = _without_specials(tokenizer.decode, "skip_special_tokens", list(tokens))
    except Exception:  # a number without a token
        return None
    return found if isinstance(found, str) else None


def _without_specials(method: Any, option: str, argument: Any) -> Any:
    """Call a method with an option off, or without that option where it has none."""
    try:
        return method(argument, **{option: False})
    except TypeError:
        return method(argument)
