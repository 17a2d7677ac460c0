"""The parameters of a request, read from its address within limits; a value outside of them is a `BadQuestion`."""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dualform.attend.last_tokens import as_model_takes
from dualform.attend.prompts import read_prompt
from dualform.attend.removal import Removal
from dualform.binning import Bins
from dualform.errors import DualformError, QueryError
from dualform.show.grouping import GroupingColumns, parse_by
from dualform.show.session import Mask, Session, Subject

LONGEST_LIST = 256  # groups, ranges or pins of one mask
LONGEST_PROMPT = 4096  # characters
STEP_RANGE = re.compile(r"(\d{1,12})-(\d{1,12})")
JOB_NAME = re.compile(r"[A-Za-z0-9-]{0,64}")


class BadQuestion(DualformError, ValueError):
    """A parameter of a request is missing, or its value is not allowed."""


class RequestParameters:
    """The parameters of one request: names and values, some of them several times."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._lists: dict[str, list[str]] = {}
        for name, value in pairs:
            self._lists.setdefault(name, []).append(value)

    def text(self, name: str, default: str | None = None, *, longest: int = 200) -> str:
        """Return a text."""
        found = self._lists[name][-1] if name in self._lists else default
        if found is None:
            raise BadQuestion(f"The parameter {name} is missing.")
        if len(found) > longest:
            raise BadQuestion(f"The parameter {name} has {len(found)} characters; at most {longest}.")
        return found

    def number(self, name: str, default: int | None = None, *, low: int = 0, high: int = 1 << 40) -> int:
        """Return a whole number within bounds."""
        text = self.text(name, None if default is None else str(default), longest=20)
        if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII) or not low <= int(text) <= high:
            raise BadQuestion(f"The parameter {name} is {text!r}; expected a whole number from {low} to {high}.")
        return int(text)

    def optional(self, name: str, *, high: int = 1 << 40) -> int | None:
        """Return a whole number, or None if the parameter is not given."""
        return self.number(name, low=0, high=high) if self.text(name, "") else None

    def choice(self, name: str, options: Sequence[str], default: str | None = None) -> str:
        """Return one of several words."""
        text = self.text(name, options[0] if default is None else default)
        if text not in options:
            raise BadQuestion(f"The parameter {name} is {text!r}; expected one of {', '.join(options)}.")
        return text

    def flag(self, name: str) -> bool:
        """Return whether a switch is on."""
        return self.choice(name, ("0", "1")) == "1"

    def steps(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return all ranges of steps that are given, each written as `0-600`."""
        return tuple(self._range(name, text) for text in self._many(name))

    def job(self) -> str:
        """Return the name that the page gave to this question."""
        text = self.text("job", "", longest=64)
        if not JOB_NAME.fullmatch(text):
            raise BadQuestion(f"The parameter job is {text!r}; expected letters, digits and hyphens.")
        return text

    def layer(self, session: Session) -> str:
        """Return the name of a recorded layer; by default the last one."""
        text = self.text("layer", list(session.memory.layers)[-1])
        if text not in session.memory.layers:
            raise BadQuestion(f"There is no layer {text!r}; there are {', '.join(session.memory.layers)}.")
        return text

    def by(self, session: Session) -> GroupingColumns:
        """Return the columns to group by, as `dualform attend --by` takes them."""
        columns = parse_by(self.text("by"))
        for column in columns:
            name = column if isinstance(column, str) else column.column
            if name not in session.memory.columns:
                raise BadQuestion(f"There is no column {name!r}; there are {', '.join(session.memory.columns)}.")
        return columns

    def subject(self, session: Session) -> Subject:
        """Return the input that the question is about: `test`, `drawn` (base64 of grey pixels) or `prompt`."""
        if "drawn" in self._lists:
            return self._drawn(session)
        if "prompt" in self._lists:
            return self._prompt(session)
        number = self.number("test", 0)
        try:
            return session.test(number)
        except QueryError as error:
            raise BadQuestion(str(error)) from error

    def mask(self, session: Session) -> Mask:
        """Return the mask: groups `g`, ranges of steps `s`, samples `p`, a random part `r`; `only` keeps these."""
        by = self.by(session) if "by" in self._lists else ()
        removal = Removal(
            by=by,
            groups=tuple(_group(text, by) for text in self._many("g")),
            steps=self.steps("s"),
            samples=tuple(_scalar(text, "p") for text in self._many("p")),
            random=self.number("r", 0, high=1_000_000) / 1_000_000,
            seed=self.number("seed", 0, high=1 << 31),
            only=self.flag("only"),
            keep_start=self.choice("start", ("kept", "dropped")) == "kept",
        )
        if removal.samples and "sample" not in session.memory.columns:
            raise BadQuestion("Samples were given, but the run has no column named sample.")
        active = self.choice("in", ("all", "active")) == "active"
        return Mask(removal, (self.layer(session),) if active else ())

    def _many(self, name: str) -> list[str]:
        found = self._lists.get(name, [])
        if len(found) > LONGEST_LIST:
            raise BadQuestion(f"The parameter {name} was given {len(found)} times; at most {LONGEST_LIST}.")
        return found

    def _range(self, name: str, text: str) -> tuple[int, int]:
        found = STEP_RANGE.fullmatch(text)
        if found is None or int(found[1]) >= int(found[2]):
            raise BadQuestion(
                f"The parameter {name} is {text[:40]!r}; expected steps as 0-600, the first below the second."
            )
        return int(found[1]), int(found[2])

    def _drawn(self, session: Session) -> Subject:
        text = self.text("drawn", longest=16 << 10)
        scale, tests = session.media.scale, session.tests
        if scale is None or not len(tests) or not tests.is_floating_point():
            raise BadQuestion("This run does not know how a drawn image becomes an input: see Recorder.media.")
        try:
            pixels = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadQuestion(f"The parameter drawn is not base64: {error}.") from error
        size = tests[0].numel()
        if len(pixels) != size:
            raise BadQuestion(f"The drawing has {len(pixels)} values; an input has {size}.")
        mean, deviation = scale
        values = (torch.frombuffer(bytearray(pixels), dtype=torch.uint8).to(tests.dtype) - mean) / deviation
        return Subject(("drawn", text), values.reshape(1, *tests.shape[1:]))

    def _prompt(self, session: Session) -> Subject:
        text = self.text("prompt", longest=LONGEST_PROMPT)
        corpus = session.media.text
        if corpus is None:
            raise BadQuestion(
                "This run keeps no vocabulary, so a text cannot be turned into tokens. Give one: dualform view RUN "
                "--tokenizer package.module:name."
            )
        try:
            prompt = read_prompt(corpus, text, context=session.context, tokenizer=session.media.tokenizer)
            subject = Subject(("prompt", text), as_model_takes(prompt.tokens[None], session.memory.batch_axis))
            if session.context is None:
                session.outputs(subject)  # raises where the prompt is longer than the model takes
        except QueryError as error:
            raise BadQuestion(str(error)) from error
        return subject


def _group(text: str, by: GroupingColumns) -> Any:
    """Return a group of the patterns grouped by these columns: a value, or one for each of several columns."""
    if not by:
        raise BadQuestion("Groups were given without the column that they are values of: by=label.")
    value = _json(text, "g")
    values = tuple(_plain(part, "g", text) for part in (value if isinstance(value, list) else [value]))
    if len(values) != len(by):
        raise BadQuestion("A group has another number of values than there are columns in by.")
    for column, part in zip(by, values, strict=True):
        if isinstance(column, Bins) and (isinstance(part, str | bool)):
            raise BadQuestion(f"The parameter g is {text[:40]!r}; bins of {column.column} are named by numbers.")
    return values if len(by) > 1 else values[0]


def _scalar(text: str, name: str) -> Any:
    return _plain(_json(text, name), name, text)


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text[:2000])
    except (ValueError, RecursionError) as error:
        raise BadQuestion(f"The parameter {name} is {text[:40]!r}; expected a JSON value.") from error


def _plain(value: Any, name: str, text: str) -> Any:
    if value is not None and not isinstance(value, str | int | float | bool):
        raise BadQuestion(f"The parameter {name} is {text[:40]!r}; expected a number, a text, or null.")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise BadQuestion(f"The parameter {name} is {text[:40]!r}; expected a number of 64 bits.")
    if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        raise BadQuestion(f"The parameter {name} is {text[:40]!r}, a text that cannot be encoded.")
    return value
