"""Prepare the group weights of a run in a thread of its own, which goes on when the request that began it ends."""

import contextvars
import threading
import time
from collections.abc import Mapping

from dualform.attend.memory import Memory
from dualform.attend.weights import GroupWeights
from dualform.engine.verification import LayerCheck
from dualform.errors import ReplayNeededError
from dualform.progress import watching
from dualform.show.job import Cancelled, ReportedJob

QUICK_SECONDS = 2.0
"""A preparation that failed within this time is begun again at the next question."""


class Preparation:
    """A thread that prepares group weights, and then measures how well they rebuild the run's weights."""

    def __init__(self, memory: Memory, weights: GroupWeights) -> None:
        self.job = ReportedJob()
        self.error: str | None = None
        self.needs_replay: ReplayNeededError | None = None
        self.checks: Mapping[str, LayerCheck] = {}
        self._began = time.monotonic()
        self._failed_at: float | None = None
        self._memory = memory
        self._weights = weights
        # With the context of the question that begins it: there replays may have to be asked for first.
        context = contextvars.copy_context()
        self.thread = threading.Thread(target=context.run, args=(self._work,), name="dualform-prepare", daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        """Stop at the next step of the work."""
        self.job.cancelled = True

    def may_be_repeated(self) -> bool:
        """Say whether this preparation failed and may be begun again.

        A file that was missing may be back. A long preparation is repeated only after as much time as it took, so
        that its error can be read meanwhile.
        """
        if self._failed_at is None:
            return False
        took, since = self._failed_at - self._began, time.monotonic() - self._failed_at
        return took < QUICK_SECONDS or since > took

    def _work(self) -> None:
        try:
            with watching(self.job.report):
                self._weights.prepare()
                if self._weights.ready:
                    self.checks = self._memory.rebuild_errors(self._weights)
        except ReplayNeededError as error:
            self.needs_replay = error
            self._failed_at = self._began  # it is begun again whenever it is asked for
        except Cancelled:
            self.error = "stopped"
        except Exception as error:  # shown in the badge; masks take a pass each then
            self.error = f"{type(error).__name__}: {error}"
            self._failed_at = time.monotonic()
