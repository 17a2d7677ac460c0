"""Continue a run from a checkpoint: find the step at which it stands, prove it, and drop what came later.

A step is recognised by the fingerprint that was logged of each parameter, and proven by rebuilding the weights and
momentum buffers there (or by their full checksum, where a shard ends at that very step).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualform.engine.fingerprints import fingerprint, matching_steps
from dualform.engine.jobs import WholeView
from dualform.engine.local import LocalExecutor
from dualform.engine.rebuild import parts, states
from dualform.engine.verification import compare
from dualform.errors import ResumeError
from dualform.identity.families.naming import same_optimizer
from dualform.recording.annotations import RANK
from dualform.recording.sinks import Start
from dualform.store.attach import remove_unlisted
from dualform.store.blobs import Blobs, Tag
from dualform.store.format import FINAL, FROZEN, SHARES, UNCOVERED, shard_files, shares_file, shares_state_file
from dualform.store.joined_ranks import cut_shards
from dualform.store.manifest import Manifest
from dualform.store.pool import Pool
from dualform.store.reader import Run

MAX_STATE_ERROR = 2e-3
"""How far an optimizer's state may be from the one that patterns imply, relative to the larger of the two."""
MAX_INT8_STATE_ERROR = 0.25
"""The same where patterns are stored as int8: a momentum buffer holds few steps, whose rounding averages out less.

The step itself is known by the fingerprints of the weights; what is refused is a state that is fresh or foreign.
"""


def resume_at(blobs: Blobs, wanted: Manifest, start: Start, step: int | None) -> tuple[Manifest, Tag]:
    """Cut the run back to the step where the model stands, and return its manifest from there on, with its tag.

    Args:
        blobs: where the run is kept.
        wanted: what a new run would be described as; it must agree with the run.
        start: the model and optimizer as they are now.
        step: where the checkpoint stands, if the user says so; otherwise it is found.
    """
    run = Run(blobs)
    if run.manifest.checkpoints is not None:
        raise ResumeError(
            f"{run.name} was made from checkpoints, and no training can be added to it. Record to another folder."
        )
    _same_shape(run.manifest, as_stored(run.manifest, wanted))
    if run.manifest.shares is not None and run.published.divided != bool(start.divided):
        was, now = ("divided", "whole") if run.published.divided else ("whole", "divided")
        raise ResumeError(
            f"{run.name} keeps shares of {was} weights, and the weights are {now} now. A recording of shares goes on "
            "with weights as they were: call fully_shard as before, or not at all; or record to another folder."
        )
    if start.processes > 1 and RANK in run.manifest.columns:
        raise ResumeError(
            f"The run has a column {RANK!r}, which is the name of a process's number in a run of several processes. "
            "Continue it in one process, or record to another folder."
        )
    marked = {name: rows.sample for name, rows in start.divided.items()}  # a sample is its own sample
    step = _step_of(run, {**start.parameters, **marked}) if step is None else _checked_step(run, step)
    _prove(run, start, step)
    manifest = _cut(run.published, step)
    manifest = dataclasses.replace(
        manifest,
        processes=_processes(manifest.processes, step, start.processes),
        divided=manifest.divided or bool(start.divided),
    )
    tag = manifest.publish(blobs, was=run.manifest_tag)
    _remove_later_files(blobs, manifest)
    return manifest, tag


def join_at(blobs: Blobs, wanted: Manifest, step: int) -> tuple[Manifest, Tag]:
    """Cut the files of a process after the first back to the step where the run is continued; as `resume_at` returns.

    Args:
        blobs: where the files of this process are kept.
        wanted: what a new run would be described as.
        step: where the first process continues the run.
    """
    run = Run(blobs, rank=wanted.rank)
    _same_shape(run.manifest, as_stored(run.manifest, wanted))
    manifest = _cut(run.published, step)
    manifest = dataclasses.replace(manifest, divided=manifest.divided or wanted.divided)
    tag = manifest.publish(blobs, was=run.manifest_tag)
    _remove_later_files(blobs, manifest)
    return manifest, tag


def _processes(before: Sequence[tuple[int, int]], step: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return from which steps on how many processes recorded a run, once `count` continue it at a step.

    >>> _processes([(0, 4), (50, 2)], 80, 3), _processes([(0, 4), (50, 2)], 50, 4), _processes([], 9, 2)
    (((0, 4), (50, 2), (80, 3)), ((0, 4),), ((0, 1), (9, 2)))
    """
    found = [(first, number) for first, number in before or [(0, 1)] if first < step]
    if not found or found[-1][1] != count:
        found.append((step, count))
    return () if found == [(0, 1)] else tuple(found)


def find_step(run: Run, live: Mapping[str, Tensor]) -> int | None:
    """Return the one step whose fingerprints are those of the live parameters, or None."""
    try:
        return _step_of(run, live)
    except ResumeError:
        return None


def count_updates(run: Run, steps: int | None = None) -> dict[str, int]:
    """Return the number of updates of each parameter as its optimizer counts them, from before a warm start on.

    Args:
        run: the run.
        steps: count those of so many steps; by default of all.
    """
    counts = {}
    for name in run.manifest.parameters:
        warm = run.initial_states.get(name, {}).get("step")
        updated = run.facts(name)[0].step
        taken = len(updated) if steps is None else int((updated < steps).sum())
        counts[name] = taken + (0 if warm is None else int(warm))
    return counts


def read_pools(run: Run) -> tuple[set[str], dict[str, Pool]]:
    """Return the layers that have patterns, and the pools of distinct keys by layer, as the run left them."""
    seen = {name for name in run.manifest.layers if run.count(name)}
    pools: dict[str, Pool] = {}
    for shard in run.shards:
        for layer, (base, _) in shard.entry.pools.items():
            pools.setdefault(layer, Pool()).remember(base, shard.digests(layer))
    return seen, pools


def as_stored(old: Manifest, new: Manifest) -> Manifest:
    """Return the description of a recording that goes on with a run which stores keys, where it would store inputs."""
    layers = {
        name: dataclasses.replace(layer, unfolding=None)
        if name in old.layers and old.layers[name].unfolding is None
        else layer
        for name, layer in new.layers.items()
    }
    return dataclasses.replace(new, layers=layers)


def _same_shape(old: Manifest, new: Manifest) -> None:
    for what in ("layers", "parameters", "optimizers", "batch_axis"):
        before, now = getattr(old, what), getattr(new, what)
        if before != now and not (what == "optimizers" and _same_optimizers(before, now)):
            raise ResumeError(
                f"The run was recorded with other {what}: {_first_difference(before, now)}. "
                "Resume with the same model and options (layers=[...] names the layers, where more of the model are "
                "recorded now), or record to another folder."
            )


def _same_optimizers(before: Sequence[str], now: Sequence[str]) -> bool:
    """Say whether two runs have the same optimizers, whose names have no module in runs of earlier versions."""
    return len(before) == len(now) and all(map(same_optimizer, before, now))


def _first_difference(before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                return f"{name!r} was {before.get(name)}, is {now.get(name)}"
    return f"was {before}, is {now}"


def _step_of(run: Run, live: Mapping[str, Tensor]) -> int:
    """Return the one step whose fingerprints are those of the live parameters."""
    candidates = matching_steps(run, live)
    if not candidates:
        raise ResumeError(
            f"The model's weights are those of no recorded step (0 to {run.steps}) of {run.name}. "
            "Load the checkpoint into the model before recording, or record to another folder."
        )
    if len(candidates) > 1:
        raise ResumeError(
            f"The model's weights are the same at steps {sorted(candidates)}. Pass the step of the checkpoint: "
            f"resume={max(candidates)}."
        )
    return candidates.pop()


def _checked_step(run: Run, step: int) -> int:
    if not 0 <= step <= run.steps:
        raise ResumeError(f"Step {step} is outside the recorded run, which has steps 0 to {run.steps}.")
    return step


def _prove(run: Run, start: Start, step: int) -> None:
    whole = {} if start.divided else {name: fingerprint(tensor) for name, tensor in start.parameters.items()}
    if not whole or not any(shard.stop == step and shard.parameters == whole for shard in run.manifest.shards):
        executor = LocalExecutor()
        weights = parts(run, WholeView(run, step), executor)
        live = {name: _with_rows(start, name, found.whole) for name, found in weights.items()}
        checks = compare(run, weights, live, executor, horizon=step)
        wrong = [check for check in checks.values() if not check.passed]
        if wrong:
            raise ResumeError(
                f"The model's weights are not those of step {step}: {wrong[0].parameter!r} differs by "
                f"{wrong[0].error:.1e} (at most {wrong[0].bound:.1e} is rounding). Load the checkpoint of that step."
            )
    if start.states:
        loose = {name for layer in run.layers.values() if layer.dtype == "int8" for name in layer.parameters.values()}
        for name, rebuilt in states(run, LocalExecutor(), horizon=step).items():
            most = MAX_INT8_STATE_ERROR if name in loose else MAX_STATE_ERROR
            for entry, tensor in start.states.get(name, {}).items():
                expected, now = rebuilt.get(entry, torch.zeros_like(tensor)).double(), tensor.double()
                if name in start.divided and expected.shape == start.divided[name].shape:
                    expected = expected[_rows(start, name)]
                if not float((expected - now).norm()) <= most * max(float(now.norm()), float(expected.norm())):
                    raise ResumeError(
                        f"The optimizer's {entry} of {name!r} is not that of step {step}. "
                        "Load the optimizer's checkpoint of that step too, or start it fresh."
                    )


def _rows(start: Start, name: str) -> slice:
    """Return which rows of a divided parameter this process has."""
    first = start.divided[name].first
    return slice(first, first + len(start.parameters[name]))


def _with_rows(start: Start, name: str, rebuilt: Tensor) -> Tensor:
    """Return a live parameter; of a divided one this process's rows, among rebuilt ones."""
    live = start.parameters[name]
    if name not in start.divided:
        return live
    found = rebuilt.clone()
    found[_rows(start, name)] = live.to(found.dtype)
    return found


def _cut(manifest: Manifest, step: int) -> Manifest:
    manifest = cut_shards(manifest, step)
    files = {name: entry for name, entry in manifest.files.items() if name not in (FINAL, FROZEN, UNCOVERED)}
    shares = manifest.shares
    if shares is not None:
        shares = dataclasses.replace(shares, state=step if step in shares.states else None, earlier_state=None)
        named = {shares_file(horizon) for horizon in shares.horizons}
        named |= {shares_state_file(one) for one in shares.states}
        files = {name: entry for name, entry in files.items() if not name.startswith(SHARES) or name in named}
    return dataclasses.replace(manifest, files=files, closed=False, no_final="", uncovered_state=None, shares=shares)


def _remove_later_files(blobs: Blobs, manifest: Manifest) -> None:
    """Remove files that the manifest does not list: later shards, and files of killed writers."""
    blobs.remove_unpublished()
    listed = {entry.at or name for name, entry in manifest.files.items()}
    listed |= {name for shard in manifest.shards for name in shard.files}
    folders = {name.split("/")[0] for name in shard_files(0).values()}
    remove_unlisted(blobs, listed, [*(f"{folder}/" for folder in folders), "media/", "cache/", SHARES])
    for name in (FINAL, FROZEN, UNCOVERED):
        blobs.remove(name)
