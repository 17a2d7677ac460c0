"""Run a language study, from text to findings, which are stored as JSON beside the run."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import dualform
from dualform.attend.memory import Memory
from dualform.corpus import Corpus, Ids
from dualform.errors import DataError
from dualform.experiments.datasets import load_text, names
from dualform.experiments.datasets.textfile import read_text_file
from dualform.experiments.findings import Clock, Row, finish_study, make_room, verified_findings
from dualform.experiments.language.corpora import encode_part, make_corpus
from dualform.experiments.language.language_training import (
    LanguageTraining,
    fit,
    held_out_loss,
    quality,
    record_language_training,
    train_language_model,
)
from dualform.experiments.language.measure import (
    HeldOut,
    ask_held_out,
    carried,
    replay_scores,
    replayed_agreement,
    token_agreement,
)
from dualform.experiments.language.plans import EVERYTHING, MODELS, LanguageStudy
from dualform.experiments.language.prompt_examples import (
    attend_prompts,
    choose_prompts,
    read_examples,
    show_scored_prompts,
)
from dualform.experiments.language.storage import (
    Budget,
    announce,
    announce_steps,
    budget,
    bytes_of,
    plain_update_seconds,
    trial,
)
from dualform.show.terminal_tables import plain
from dualform.tokens import Unit


def load_corpus(data: str, unit: Unit | None) -> Corpus:
    """Return a data set's text, or a user's file's, as tokens."""
    if data in names():
        return make_corpus(load_text(data), unit)
    return make_corpus(read_text_file(Path(data), unit or "words"), unit)


def load_validation(data: str, corpus: Corpus) -> Ids | None:
    """Return the validation part of a data set's text in the tokens of its corpus, where the set has such a part."""
    text = load_text(data) if data in names() else None
    return None if text is None or not text.valid else encode_part(text.valid, corpus)


def reproduce_language(
    study: LanguageStudy,
    corpus: Corpus,
    folder: Path,
    *,
    seed: int,
    device: str = "cpu",
    keep: bool = True,
    valid: Ids | None = None,
) -> Row:
    """Run a study with one seed and return its findings.

    Args:
        study: what to do.
        corpus: the text.
        folder: gets `run/` and the findings; findings that are there already are returned as they are.
        seed: of the model and its dropout.
        device: where to train and attend.
        keep: keep the recorded patterns (gigabytes) after the findings are drawn from them.
        valid: (V,) the tokens of the validation part, where the text has one.
    """
    study = replace(study, recipe=fit(study.recipe, corpus))
    found = make_room(folder, study, seed=seed, keep=keep)
    if found is not None:
        return found
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DataError(f"--device is {device}, but torch sees no GPU here. Leave it out, or use cpu.")
    if study.memory == "steps":
        return _reproduce_by_replay(study, corpus, valid, folder, seed=seed, device=device, keep=keep)
    clock = Clock({})
    chosen = budget(study, corpus, folder)
    sys.stderr.write(f"{announce(study, chosen, trial(study, corpus, chosen, folder, device=device))}\n")
    run = folder / "run"
    model = clock(
        "training",
        lambda: train_language_model(
            study, corpus, run, chosen.storage, recorded=chosen.recorded, seed=seed, device=device
        ),
    )
    memory = dualform.open(run)
    verified = verified_findings(memory, model, study, clock, seed=seed)
    findings: Row = {
        **verified,
        "layers": _stored(memory, verified["layers"]),
        "stored": plain(chosen),
        "corpus": _describe_corpus(corpus),
        **_findings(study, corpus, valid, memory, model, chosen, clock),
    }
    return finish_study(folder, findings, clock, device=device, keep=keep)


def _reproduce_by_replay(
    study: LanguageStudy, corpus: Corpus, valid: Ids | None, folder: Path, *, seed: int, device: str, keep: bool
) -> Row:
    """Run a study whose run keeps steps: everything that is asked about its patterns is asked in replays."""
    clock = Clock({})
    update_seconds = plain_update_seconds(study, corpus, seed=seed, device=device)
    sys.stderr.write(f"{announce_steps(study, update_seconds)}\n")
    run = folder / "run"
    run.parent.mkdir(parents=True, exist_ok=True)
    training = LanguageTraining(study, corpus, seed, device)
    model = clock("training, recorded", lambda: record_language_training(training, run))
    predicted = clock("held-out loss", lambda: _quality_row(model, corpus, valid, unroll=study.recipe.unroll))
    memory = dualform.open(run, train=training)
    prompts = ask_held_out(model, corpus, context=study.recipe.unroll)
    examples = choose_prompts(corpus, prompts, study.prompts)
    tokens = read_examples(corpus, model, examples)
    scores = clock("replays", lambda: replay_scores(memory, model, prompts, tokens))
    shown = MODELS[study.model].shown
    findings: Row = {
        "study": plain(study),
        "seed": seed,
        "corpus": _describe_corpus(corpus),
        "quality": predicted,
        "prompts": _prompts_row(prompts),
        "agreement": replayed_agreement(corpus, scores, prompts),
        "examples": clock("examples", lambda: show_scored_prompts(memory, model, examples, scores.examples, shown)),
        "steps_memory": {
            "bytes": _sizes(run),
            "patterns_bytes": bytes_of(study, corpus, EVERYTHING),
            "layers": [{"layer": name, "patterns": info["patterns"]} for name, info in memory.info().layers.items()],
            "steps": study.recipe.updates,
            "asked_steps": scores.steps,
            "replays": scores.replays,
            "plain_update_seconds": update_seconds,
        },
    }
    return finish_study(folder, findings, clock, device=device, keep=keep)


def _sizes(run: Path) -> dict[str, int]:
    """Return the bytes of a run's files, by the folder or the file that they are in."""
    sizes: dict[str, int] = {}
    for path in sorted(run.rglob("*")):
        if path.is_file():
            part = path.relative_to(run).parts[0]
            sizes[part] = sizes.get(part, 0) + path.stat().st_size
    return sizes


def _quality_row(model: nn.Module, corpus: Corpus, valid: Ids | None, *, unroll: int) -> Row:
    """Return how well a model predicts the held-out part, and the validation part where there is one."""
    measure, value = quality(held_out_loss(model, corpus.test, unroll=unroll), corpus)
    row: Row = {"measure": measure, "value": value}
    if valid is not None:
        row["validation"] = quality(held_out_loss(model, valid, unroll=unroll), corpus)[1]
    return row


def _prompts_row(prompts: HeldOut) -> Row:
    return {"count": len(prompts.true), "accuracy": float((prompts.predicted == prompts.true).double().mean())}


def _findings(
    study: LanguageStudy,
    corpus: Corpus,
    valid: Ids | None,
    memory: Memory,
    model: nn.Module,
    chosen: Budget,
    clock: Clock,
) -> Row:
    unroll = study.recipe.unroll
    predicted = clock("held-out loss", lambda: _quality_row(model, corpus, valid, unroll=unroll))
    prompts = ask_held_out(model, corpus, context=unroll)
    has_values = memory.layers["softmax"].has_values
    whole = has_values and chosen.recorded == study.recipe.updates
    shown = MODELS[study.model].shown
    return {
        "quality": predicted,
        "prompts": _prompts_row(prompts),
        "agreement": clock("agreement", lambda: token_agreement(memory, model, prompts)),
        "carried": clock("logits", lambda: carried(memory, model, prompts, "softmax")) if whole else None,
        "examples": clock(
            "examples", lambda: attend_prompts(memory, model, choose_prompts(corpus, prompts, study.prompts), shown)
        ),
        "one_prompt": {layer: _one_prompt(memory, model, corpus, layer) for layer in shown},
    }


def _one_prompt(memory: Memory, model: nn.Module, corpus: Corpus, layer: str) -> float:
    """Return the seconds that attending to one prompt takes in a layer."""
    prompt = ("" if corpus.unit == "chars" else " ").join(corpus.words(corpus.test[:20]))
    start = time.perf_counter()
    memory.attend_text(model, prompt, layers=[layer], goes_on=0)
    return time.perf_counter() - start


def _stored(memory: Memory, layers: list[Row]) -> list[Row]:
    return [
        {**row, "store": memory.layers[row["layer"]].store, "dtype": memory.layers[row["layer"]].dtype}
        for row in layers
    ]


def _describe_corpus(corpus: Corpus) -> Row:
    return {
        "name": corpus.name,
        "unit": corpus.unit,
        "train": len(corpus.train),
        "test": len(corpus.test),
        "vocabulary": len(corpus.vocabulary),
        "documents": len(corpus.titles),
    }
