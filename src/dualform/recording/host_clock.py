"""How long a recording itself takes of a training, step by step, by the clock of the process.

Counted is the time inside of the recorder's own functions in the threads that train: hooks, the preparation of a step,
and the sink that takes the step, where it waits for its disk or for other processes too. Work on a GPU goes on while
these functions run, and is not counted; nor is the work of the thread that writes.
"""

from time import perf_counter


class HostClock:
    """Adds up the seconds inside of a recorder; `with clock:` around whatever counts, never one inside of another.

    Hooks, of which a step calls many, add to `seconds` themselves: a with statement takes twice as long.

    Attributes:
        seconds: the seconds so far.
        step_seconds: those of the last step: since the end of the step before it.
    """

    __slots__ = ("_begin", "_ended", "seconds", "step_seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.step_seconds = 0.0
        self._ended = 0.0  # `seconds` at the end of the last step
        self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._begin

    def end_step(self) -> None:
        """Note that a step has ended, so that what follows is of the next one."""
        self.step_seconds, self._ended = self.seconds - self._ended, self.seconds
