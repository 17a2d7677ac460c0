"""Run a language study, from text to findings, which are stored as JSON beside the run."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import dualform
from dualform.attend.memory import Memory
from dualform.corpus import Corpus
from dualform.errors import DataError
from dualform.experiments.datasets import load_text, names
from dualform.experiments.datasets.textfile import read_text_file
from dualform.experiments.findings import Clock, Row, finish_study, make_room, verified_findings
from dualform.experiments.language.corpora import make_corpus
from dualform.experiments.language.language_training import fit, held_out_loss, quality, train_language_model
from dualform.experiments.language.measure import ask_held_out, carried, token_agreement
from dualform.experiments.language.plans import MODELS, LanguageStudy
from dualform.experiments.language.prompt_examples import attend_prompts, choose_prompts
from dualform.experiments.language.storage import Budget, announce, budget, trial
from dualform.show.terminal_tables import plain
from dualform.tokens import Unit


def load_corpus(data: str, unit: Unit | None) -> Corpus:
    """Return a data set's text, or a user's file's, as tokens."""
    if data in names():
        return make_corpus(load_text(data), unit)
    return make_corpus(read_text_file(Path(data), unit or "words"), unit)


def reproduce_language(
    study: LanguageStudy, corpus: Corpus, folder: Path, *, seed: int, device: str = "cpu", keep: bool = True
) -> Row:
    """Run a study with one seed and return its findings.

    Args:
        study: what to do.
        corpus: the text.
        folder: gets `run/` and the findings; findings that are there already are returned as they are.
        seed: of the model and its dropout.
        device: where to train and attend.
        keep: keep the recorded patterns (gigabytes) after the findings are drawn from them.
    """
    study = replace(study, recipe=fit(study.recipe, corpus))
    found = make_room(folder, study, seed=seed, keep=keep)
    if found is not None:
        return found
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DataError(f"--device is {device}, but torch sees no GPU here. Leave it out, or use cpu.")
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
        **_findings(study, corpus, memory, model, chosen, clock),
    }
    return finish_study(folder, findings, clock, device=device, keep=keep)


def _findings(
    study: LanguageStudy, corpus: Corpus, memory: Memory, model: nn.Module, chosen: Budget, clock: Clock
) -> Row:
    unroll = study.recipe.unroll
    loss = clock("held-out loss", lambda: held_out_loss(model, corpus, unroll=unroll))
    measure, value = quality(loss, corpus)
    prompts = ask_held_out(model, corpus, context=unroll)
    has_values = memory.layers["softmax"].has_values
    whole = has_values and chosen.recorded == study.recipe.updates
    shown = MODELS[study.model].shown
    return {
        "quality": {"measure": measure, "value": value},
        "prompts": {"count": len(prompts.true), "accuracy": float((prompts.predicted == prompts.true).double().mean())},
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
