"""What can go wrong, by name.

Every error of dualform is a `DualformError` and also the builtin that fits. A message says what came, what was
expected, and what to do. Nothing here decides when to raise.
"""


class DualformError(Exception):
    """Anything dualform raises on purpose."""


class RefusedError(DualformError, RuntimeError):
    """The identity does not cover what the training did, so the recording would not be exact."""


class CoverageError(DualformError, ValueError):
    """Parameters are trained that no recorded layer covers, and `strict=True` was asked for."""


class OptimizerError(DualformError, TypeError):
    """Something was given as optimizer that is none."""


class AnnotationError(DualformError, ValueError):
    """An annotation has the wrong length, type or name."""


class UnknownLayerError(DualformError, LookupError):
    """A layer was named that is not there."""


class RunNotFoundError(DualformError, FileNotFoundError):
    """The path holds no recorded run."""


class RunExistsError(DualformError, FileExistsError):
    """The path holds a recorded run already, or somebody else is writing to it."""


class FormatError(DualformError, ValueError):
    """The run folder was written in a form that this version does not read."""


class CorruptError(DualformError, RuntimeError):
    """A published file is missing, cut short or changed."""


class RunFactoryError(DualformError, ValueError):
    """The name of a model's factory, or its arguments, cannot be remembered."""


class StoreError(DualformError, OSError):
    """The memory could not be written."""


class RemoteError(StoreError):
    """A run in object storage could not be read or written: no connection, no permission, or replaced meanwhile."""


class ResumeError(DualformError, ValueError):
    """The model or its optimizer does not stand where the memory says."""


class SelectionError(DualformError, ValueError):
    """A condition, a column or a grouping cannot be evaluated on the pattern table."""


class QueryError(DualformError, ValueError):
    """The queries do not fit the memory."""


class MediaError(DualformError, ValueError):
    """What a person should see of a sample or a text is not in a form that can be kept."""


class KeysOnlyError(DualformError, RuntimeError):
    """The answer needs values, and the layer was recorded with its keys only."""


class SharesOnlyError(DualformError, RuntimeError):
    """The answer needs patterns, or groups of them, of which the run keeps no shares."""


class DataError(DualformError, RuntimeError):
    """A data set could not be had, or is not what it should be."""


class ReplayError(DualformError, RuntimeError):
    """A training cannot be run again, or is not the recorded one when it is."""


class ReplayNeededError(DualformError, RuntimeError):
    """A question needs a replay of the training, where replays are asked for first.

    Attributes:
        seconds: about how long the replay takes: as long as the recorded training took.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds
