"""The run as it is now: opened when first asked for, and again when more of it has been published."""

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import dualform
from dualform.errors import QueryError
from dualform.opening import Train, check_end_state, published_stamp
from dualform.pieces import Tokenizer
from dualform.show.job import Cancelled
from dualform.show.model_loading import load_model
from dualform.show.session import Session
from dualform.show.viewer.replays import Replays

R = TypeVar("R")
ATTEMPTS = 5  # at one question, while the manifest keeps changing


class Opened:
    """Opens the run, and opens it again when its manifest has changed."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        budget: int = 512 << 20,
        accept_untrained: bool = False,
        train: Train | None = None,
        trust: bool = False,
        executor: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.path = path
        self._model = model
        self._accept_untrained = accept_untrained
        self._train = train
        self._trust = trust
        self._executor = executor
        self._tokenizer = tokenizer
        self._factory: tuple[str, Mapping[str, Any]] | None = None  # what the run remembered when it was first opened
        self._budget = budget
        self._lock = threading.Lock()
        self.replays = Replays()
        self._current: tuple[Hashable | None, Session] | None = None  # the manifest's stamp, and the session on it

    def answer(self, question: Callable[[Session], R]) -> R:
        """Answer a question on what is published now.

        A recording that goes on may remove files that were still to be read. Where the manifest has changed meanwhile,
        a question that failed is asked again of the session on the new one.
        """
        for _ in range(ATTEMPTS - 1):
            stamp = published_stamp(self.path)
            try:
                return question(self.session())
            except Cancelled:
                raise
            except Exception:
                if published_stamp(self.path) == stamp:
                    raise
        return question(self.session())

    def session(self) -> Session:
        """Return the session on what is published now; `RunNotFoundError` where there is no run."""
        current = self._current
        if current is not None and current[0] == published_stamp(self.path):
            return current[1]
        with self._lock:
            stamp = published_stamp(self.path)
            if self._current is None or self._current[0] != stamp:
                opened = self._open()
                if self._current is not None:
                    self._current[1].cancel()  # only now: where the run cannot be opened, the manifest may come back
                self._current = stamp, opened
            return self._current[1]

    def _open(self) -> Session:
        memory = dualform.open(self.path, executor=self._executor, train=self._train, trust=self._trust)
        if self._current is not None and self._model is None and memory.factory != self._factory:
            raise QueryError(
                f"{self.path} names another factory of its model by now, which a running viewer does not "
                "follow. Stop it, and start it again if you trust the run."
            )
        check_end_state(self.path)
        loaded = load_model(memory, self._model, accept_untrained=self._accept_untrained, trust=self._trust)
        self._factory = memory.factory
        return Session(memory, loaded.model, budget=self._budget, warnings=loaded.warnings, tokenizer=self._tokenizer)

    def close(self) -> None:
        """Stop the work in the background, and wait for its end."""
        self.replays.close()
        if self._current is not None:
            self._current[1].close()
