"""Prepare the group weights of a run in a thread of its own, which goes on when the request that began it ends."""

import threading
from collections.abc import Mapping

from dualform.attend.memory import Memory
from dualform.attend.weights import GroupWeights
from dualform.engine.verification import LayerCheck
from dualform.progress import watching
from dualform.show.job import Cancelled, ReportedJob


class Preparation:
    """A thread that prepares group weights, and then measures how well they rebuild the run's weights."""

    def __init__(self, memory: Memory, weights: GroupWeights) -> None:
        self.job = ReportedJob()
        self.error: str | None = None
        self.checks: Mapping[str, LayerCheck] = {}
        self._memory = memory
        self._weights = weights
        self.thread = threading.Thread(target=self._work, name="dualform-prepare", daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        """Stop at the next step of the work."""
        self.job.cancelled = True

    def _work(self) -> None:
        try:
            with watching(self.job.report):
                self._weights.prepare()
                if self._weights.ready:
                    self.checks = self._memory.rebuild_errors(self._weights)
        except Cancelled:
            self.error = "stopped"
        except Exception as error:  # shown in the badge; masks take a pass each then
            self.error = f"{type(error).__name__}: {error}"
