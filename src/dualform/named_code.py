"""Functions by name, `package.module:function`: those that a user names, and those that a run remembers.

A function that the user names is imported, as servers take an application. One that a run remembers is the word of
whoever made the run: calling it runs code of their choice, so it is imported only where it belongs to a package that
every run may name, or where the user trusts the run (docs/security.md).
"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dualform.errors import QueryError
from dualform.printable import printable


@dataclass(frozen=True, slots=True)
class RememberedFunction:
    """A function that a run names, with the words for asking about it and for refusing it.

    Attributes:
        run: the run, as messages call it.
        spec: `package.module:function`.
        arguments: what it would be called with.
        purpose: what it does for the run: "its model is made".
        trusting: how the user says that the run is trusted: "pass --trust".
        instead: how the user names a function without trusting the run, as the end of a sentence.
        free: a package whose functions a run may name without being trusted; empty for none.
        kind: classes of this kind will do too, beside functions; None for functions alone.
    """

    run: str
    spec: str
    purpose: str
    trusting: str
    instead: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    free: str = ""
    kind: type | None = None

    def load(self, *, trust: bool) -> Any:
        """Import the function, if the run may be believed; otherwise ask on a terminal, or raise."""
        module_name, _ = split_name(self.spec)
        free = bool(self.free) and (module_name == self.free or module_name.startswith(f"{self.free}."))
        if not free and not trust and not self._is_agreed():
            raise QueryError(
                f"{self.run} says that {self.purpose} by calling {self.call}, which runs code that the run names. If "
                f"you trust whoever made the run, {self.trusting}; or {self.instead}."
            )
        try:
            with _without_current_folder():
                found = import_name(self.spec)
        except QueryError as error:
            raise QueryError(
                f"What a run names is not looked for in the current folder: {error} If you trust it, {self.instead}."
            ) from error
        home = str(getattr(found, "__module__", ""))
        plain = inspect.isfunction(found) or (
            self.kind is not None and inspect.isclass(found) and issubclass(found, self.kind)
        )
        if not plain or not (home == module_name or home.startswith(f"{module_name}.")):
            classes = "" if self.kind is None else ", or a class of modules,"
            raise QueryError(
                f"{self.run} says that {self.purpose} by calling {self.spec}; expected a function{classes} that is "
                f"defined in {module_name}. Instead, {self.instead}."
            )
        return found

    @property
    def call(self) -> str:
        """The call as people read it, without control characters that a terminal would obey."""
        listed = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return printable(f"{self.spec}({listed})"[:500])

    def _is_agreed(self) -> bool:
        """Ask on a terminal whether to call what the run names; without a terminal the answer is no."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        sys.stderr.write(
            f"{printable(self.run)} says that {self.purpose} by calling\n  {self.call}\n"
            "This runs code that the run names. Do you trust whoever made the run? [y/N] "
        )
        sys.stderr.flush()
        return sys.stdin.readline().strip().casefold() in ("y", "yes")


def import_named(spec: str, *, option: str, kind: str = "function") -> Any:
    """Import what the user names by an option, also from the current folder; `kind` says in messages what it is."""
    if not all(spec.partition(":")):
        raise QueryError(f"{option} is {spec!r}; expected package.module:{kind}.")
    sys.path.insert(0, "")
    try:
        return import_name(spec)
    finally:
        sys.path.remove("")


def split_name(spec: str) -> tuple[str, str]:
    """Return the module and the attribute of a name."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise QueryError(f"{spec!r} is no name of a function; expected package.module:function.")
    return module_name, attribute


def import_name(spec: str) -> Any:
    """Import what a name stands for."""
    module_name, attribute = split_name(spec)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise QueryError(f"{spec} cannot be imported: {error}.") from error


def find_name(function: Any) -> str | None:
    """Return the name by which a function can be imported again; None where it has none, as in a script."""
    module_name, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module_name or not attribute or module_name == "__main__" or "." in attribute:
        return None
    found = getattr(sys.modules.get(module_name), attribute, None)
    return f"{module_name}:{attribute}" if found is function else None


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Leave the current folder out of the import path: a file there is not what the run's maker meant."""
    before = list(sys.path)
    here = os.path.realpath(".")
    sys.path[:] = [entry for entry in before if entry and os.path.realpath(entry) != here]
    try:
        yield
    finally:
        sys.path[:] = before
