"""What one process of a recording has logged of its steps, to compare a replay with: facts, and marks.

Process 0 logs the facts of every step, which are the same in all processes; each process the marks of its own
parameters and calls. The shard of a step is opened when the replay comes there, and one at a time.
"""

from collections.abc import Sequence
from typing import Any

from dualform.errors import ReplayError
from dualform.recording.sinks import RESIDUAL
from dualform.store.reader import Run
from dualform.store.shard_reading import Shard
from dualform.store.tables import LATER_MARKS, MARKS, STEPS


class LoggedSteps:
    """The steps in the shards of one process.

    Attributes:
        rows: the columns of the open shard's table of steps.
        setting_names: the names of the optimizers' settings among these columns.
        settings: the settings of each row, without empty cells.
    """

    def __init__(self, run: Run, shards: Sequence[Shard]) -> None:
        """Take a run, and the shards of one of its processes."""
        self.rows: dict[str, list[Any]] = {}
        self.setting_names: list[str] = []
        self.settings: list[dict[str, Any]] = []
        self._run = run
        self._shards = shards
        self._shard: Shard | None = None
        self._first_row: dict[int, int] = {}  # of each step

    def find(self, step: int) -> int | None:
        """Open the shard of a step, and return the first of the step's rows; None where it moved no parameter."""
        if self._shard is None or not self._shard.start <= step < self._shard.stop:
            self._open(step)
        return self._first_row.get(step)

    def _open(self, step: int) -> None:
        found = next((shard for shard in self._shards if shard.start <= step < shard.stop), None)
        if found is None:
            raise ReplayError(
                f"The replay goes on after {self._run.steps} steps, which is where the recording ended. Give the "
                "training function of this very run."
            )
        table = found.steps
        if missing := [n for n in MARKS if n not in table.column_names and n not in LATER_MARKS]:
            raise ReplayError(
                f"{self._run.name} keeps no {missing[0]} of its steps, so that a replay cannot be proved. Record "
                "it with dualform.record_training."
            )
        self._shard = found
        self.rows = {name: table[name].to_pylist() for name in table.column_names}
        self.setting_names = [one for one in self.rows if one not in STEPS and one not in MARKS and one != RESIDUAL]
        columns = [self.rows[name] for name in self.setting_names]
        self.settings = [
            {name: cell for name, cell in zip(self.setting_names, cells, strict=True) if cell is not None}
            for cells in zip(*columns, strict=True)
        ] or [{}] * len(self.rows["step"])
        self._first_row = {}
        for row, number in enumerate(self.rows["step"]):
            self._first_row.setdefault(number, row)
