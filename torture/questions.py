"""What the campaign of forgeries asks a run, and how an answer is made comparable."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

import dualform
from dualform.attend.memory import Memory
from dualform.errors import KeysOnlyError, SharesOnlyError
from dualform.replaying.replayed_patterns import ReplayedPatterns
from dualform.show.report.build import build_report
from dualform.show.session import Session
from dualform.store.reader import Run
from torture.good_runs import GoodRun

Question = Callable[[Memory, GoodRun], Any]
REFUSED = "refused, because the run keeps shares alone"


def _info(memory: Memory, run: GoodRun) -> Any:
    found = memory.info()
    repr(found)
    layers = {name: {k: v for k, v in layer.items() if k != "bytes"} for name, layer in found.layers.items()}
    return dataclasses.replace(found, path="", bytes=0, layers=layers)  # a forger may make files larger


def _verify(memory: Memory, run: GoodRun) -> Any:
    return bool(memory.verify().passed)


def _attention(memory: Memory, run: GoodRun) -> Any:
    spotlight = memory.attend(queries=run.queries)
    return {name: layer.totals(by=list(run.by)) for name, layer in spotlight.layers.items()}


def _magnitude(memory: Memory, run: GoodRun) -> Any:
    # Queries without signs take the shorter way, where keys have none either.
    asked = {name: query.abs() for name, query in run.queries.items()}
    spotlight = memory.attend(queries=asked)
    return {name: layer.totals(by="label", of="magnitude") for name, layer in spotlight.layers.items()}


def _contribution(memory: Memory, run: GoodRun) -> Any:
    spotlight = memory.attend(queries=run.queries)
    return {
        name: (layer.totals(by="label", of="contribution"), layer.output())
        for name, layer in spotlight.layers.items()
        if memory.layers[name].store != "keys"
    }


def _top(memory: Memory, run: GoodRun) -> Any:
    spotlight = memory.attend(queries=run.queries)
    return {name: layer.top(3) for name, layer in spotlight.layers.items()}


def _where(memory: Memory, run: GoodRun) -> Any:
    try:
        kept = memory.where(label=1).unwarned().shares()
        left = memory.without("label = 1 and step >= 1" if "step" in run.by else "label = 1").unwarned().weights()
    except KeysOnlyError:
        return "keys only"
    return kept, left


def _patterns(memory: Memory, run: GoodRun) -> Any:
    return {name: memory.patterns(name) for name in memory.layers}


def _kept(memory: Memory, run: GoodRun) -> Any:
    """Ask for everything that is kept beside the patterns."""
    stored = memory._run.run if isinstance(memory._run, ReplayedPatterns) else memory._run
    assert isinstance(stored, Run)
    files = stored.manifest.files
    found: list[Any] = [memory.media.labels, memory.media.scale, memory.media.image(0)]
    if "media/tests.safetensors" in files:
        found += [*memory.tests(), memory.test_images()]
    if "media/corpus.safetensors" in files:
        found += [repr(memory.corpus()), memory.place_counts(next(iter(memory.layers)))]
    trained, doubts = memory.restored(run.model)
    return [*found, dict(trained.state_dict()), doubts]


def _report(memory: Memory, run: GoodRun) -> Any:
    session = Session(memory, memory.restored(run.model)[0], budget=1 << 24)
    if not len(session.tests):
        return "no tests"
    return len(build_report(session, tests=[0], by=("label",))) > 0


QUESTIONS: dict[str, Question] = {
    "info": _info,
    "verify": _verify,
    "attention": _attention,
    "magnitude": _magnitude,
    "contribution": _contribution,
    "top": _top,
    "where": _where,
    "patterns": _patterns,
    "kept": _kept,
    "report": _report,
}


def comparable(answer: Any) -> Any:
    """Return an answer as plain values and arrays."""
    if isinstance(answer, Tensor):
        return answer.detach().cpu().numpy()
    if isinstance(answer, pa.Table):
        return repr(answer.to_pydict())
    if isinstance(answer, dict):
        return {str(key): comparable(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [comparable(value) for value in answer]
    if isinstance(answer, str | int | float | bool | type(None)):
        return repr(answer)
    fields = getattr(answer, "__dataclass_fields__", ())
    return {name: comparable(getattr(answer, name)) for name in fields} or repr(answer)


def same(one: Any, other: Any, rounding: float) -> bool:
    """Say whether two comparable answers are equal; numbers may differ by rounding, relative to the largest."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.dtype.kind != "f":
            return bool((one == other).all())
        size = float(np.abs(other).max(initial=0.0))
        return np.allclose(one, other, rtol=0.0, atol=rounding * size, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], rounding) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b, rounding) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and not isinstance(one, np.ndarray) and bool(one == other)


def open_run(path: Any, run: GoodRun) -> Memory:
    """Open a good run, or a forged copy of it in another folder."""
    return dualform.open(path) if run.train is None else dualform.open(path, train=run.train)


def answers(memory: Memory, run: GoodRun) -> dict[str, Any]:
    """Ask a good run every question; return the answers made comparable, or `REFUSED` where it lacks what is asked."""
    found = {}
    for name, ask in QUESTIONS.items():
        try:
            found[name] = comparable(ask(memory, run))
        except SharesOnlyError:
            found[name] = REFUSED
    return found
