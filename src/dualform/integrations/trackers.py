"""Numbers about a recording, handed to what the user watches a training with: TensorBoard, W&B, a Lightning logger.

A tracker is recognised by its method: `add_scalar` (TensorBoard's SummaryWriter), `log_metrics` (loggers of Lightning),
`log` (a run of W&B, trackers of accelerate), or it is a function of a step and its numbers. No tracker is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dualform
from dualform.recording.processes import is_first_process

Track = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its numbers by name."""


def as_trackers(given: Any) -> list[Track]:
    """Return what takes numbers, for each tracker that was given: one, several in a list, or None."""
    if given is None:
        return []
    return [_as_tracker(one) for one in (given if isinstance(given, Sequence) else [given])]


def _as_tracker(given: Any) -> Track:
    if callable(getattr(given, "add_scalar", None)):

        def scalars(step: int, numbers: Mapping[str, float]) -> None:
            for name, number in numbers.items():
                given.add_scalar(name, number, step)

        return scalars
    if callable(getattr(given, "log_metrics", None)):
        return lambda step, numbers: given.log_metrics(dict(numbers), step=step)
    if callable(getattr(given, "log", None)):
        return lambda step, numbers: given.log(dict(numbers), step=step)
    if callable(given):
        return lambda step, numbers: given(step, numbers)
    raise TypeError(
        f"trackers holds a {type(given).__name__}; expected a SummaryWriter of TensorBoard, a run of W&B, a logger of "
        "Lightning, a tracker of accelerate, or a function of a step and a dictionary of numbers."
    )


def track_step(trackers: Sequence[Track], recorder: dualform.Recorder) -> None:
    """Tell trackers how much was recorded by now, what the last step took, and what the patterns leave unexplained.

    Of several processes that record together the first does, with its own numbers.
    """
    if trackers and is_first_process():
        numbers = {
            "dualform/bytes": float(recorder.taken_bytes),
            "dualform/overhead": recorder.overhead,
            "dualform/unexplained": recorder.unexplained,
        }
        for track in trackers:
            track(recorder.step, numbers)


def track_end(trackers: Sequence[Track], path: Any) -> None:
    """Verify a closed run, and tell trackers the outcome: the error nearest to its bound, and that bound.

    Of several processes that recorded it together the first does.
    """
    if not trackers or not is_first_process():
        return
    memory = dualform.open(path)
    found = memory.verify()
    checks = [(layer.error, layer.bound) for layer in found.layers if layer.error is not None and layer.bound]
    numbers = {"dualform/passed": float(found.passed), "dualform/bytes_on_disk": float(memory.info().bytes)}
    if checks:
        error, bound = max(checks, key=lambda check: check[0] / check[1])
        numbers |= {"dualform/error": error, "dualform/error_bound": bound}
    for track in trackers:
        track(memory.step, numbers)
