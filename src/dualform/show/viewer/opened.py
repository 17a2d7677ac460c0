"""The run as it is now: opened when first asked for, and again when more of it has been published."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dualform
from dualform.errors import QueryError
from dualform.show.model_loading import load_model
from dualform.show.session import Session
from dualform.store.format import MANIFEST


class Opened:
    """Opens the run, and opens it again when its manifest has changed."""

    def __init__(
        self,
        path: Path,
        *,
        model: str | None = None,
        budget: int = 512 << 20,
        accept_untrained: bool = False,
        trust: bool = False,
    ) -> None:
        self.path = path
        self._model = model
        self._accept_untrained = accept_untrained
        self._trust = trust
        self._factory: tuple[str, Mapping[str, Any]] | None = None  # what the run remembered when it was first opened
        self._budget = budget
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._stamp: tuple[int, int] | None = None

    def session(self) -> Session:
        """Return the session on what is published now; `RunNotFoundError` where there is no run."""
        stamp = self._stamp_now()
        session = self._session
        if session is not None and stamp == self._stamp:
            return session
        with self._lock:
            if self._session is None or stamp != self._stamp:
                self.close()
                memory = dualform.open(self.path)
                if self._session is not None and self._model is None and memory.factory != self._factory:
                    raise QueryError(
                        f"{self.path} names another factory of its model by now, which a running viewer does not "
                        "follow. Stop it, and start it again if you trust the run."
                    )
                self._factory = memory.factory
                loaded = load_model(memory, self._model, accept_untrained=self._accept_untrained, trust=self._trust)
                self._session = Session(memory, loaded.model, budget=self._budget, warnings=loaded.warnings)
                self._stamp = stamp
            return self._session

    def close(self) -> None:
        """Stop what is going on in the background."""
        if self._session is not None:
            self._session.close()

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path / MANIFEST)  # noqa: PTH116 (one call, many times a second)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size
