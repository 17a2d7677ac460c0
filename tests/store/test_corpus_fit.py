"""A text that does not fit the recorded places and tokens is refused, when it is kept and when it is asked."""

import dataclasses

import pytest
import torch
from torch import nn

import dualform
from dualform.errors import QueryError
from dualform.store.corpus_fit import check_fit
from dualform.store.reader import Run
from dualform.store.shard_reading import Shard
from helpers.language_models import CHARACTERS, SIZE, TOKENS, characters, record_output_model

SHIFTED = torch.roll(TOKENS, 7)


@pytest.fixture
def recorded(run):
    return record_output_model(run)


def test_a_text_that_fits_is_kept(recorded):
    memory, model = recorded
    memory.add_corpus(characters())
    assert memory.attend_text(model, "the wolf", layers=["head"])


def test_a_shifted_text_is_refused_when_it_is_kept(recorded):
    memory, _ = recorded
    places = torch.tensor(memory.patterns("head", columns=["place"])["place"].to_pylist())
    wrong = int((SHIFTED[places] != TOKENS[places]).sum())
    first = next(place for place in places if SHIFTED[place] != TOKENS[place])
    with pytest.raises(QueryError) as caught:
        memory.add_corpus(characters(SHIFTED))
    assert f"{wrong} of {len(places)} annotated places are wrong" in str(caught.value)
    assert f"at place {first} it has token {SHIFTED[first]}, but token {TOKENS[first]} was" in str(caught.value)
    assert "memory.add_corpus" in str(caught.value)
    with pytest.raises(QueryError, match="keeps no corpus"):
        memory.corpus()
    with pytest.raises(QueryError, match="annotated places are wrong"):
        memory.add_media(tokens=SHIFTED, vocabulary=CHARACTERS)


def test_a_shifted_text_of_the_recorder_is_refused_when_it_is_asked(run):
    memory, model = record_text(run, SHIFTED)
    for ask in (
        lambda: memory.attend_text(model, "the wolf"),
        lambda: memory.place_counts("1"),
        lambda: memory.place_totals("1", torch.zeros(1, 4)),
        lambda: memory.media.text,
    ):
        with pytest.raises(QueryError, match="annotated places are wrong"):
            ask()
    assert memory.corpus().train.tolist() == SHIFTED.tolist()  # to look at what is wrong
    memory.add_corpus(characters())
    assert memory.attend_text(model, "the wolf")


def record_text(folder, text, columns=lambda step, places: {"place": places, "token": TOKENS[places]}, steps=3):
    """Record a bigram model with a text given to the recorder, and columns made of each step's places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(SIZE, 4), nn.Linear(4, SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, folder, shard_bytes=1) as recorder:
        recorder.media(tokens=text, vocabulary=CHARACTERS)
        for step in range(steps):
            places = torch.arange(12).reshape(2, 6) + 20 * step
            if found := columns(step, places):
                recorder.annotate(**found)
            optimizer.zero_grad()
            model(TOKENS[places]).square().mean().backward()
            optimizer.step()
    return dualform.open(folder), model


def test_places_of_the_targets_are_refused_with_a_hint(run):
    memory, model = record_text(run, TOKENS, lambda step, p: {"place": p, "token": TOKENS[p + 1]})
    with pytest.raises(QueryError, match="It would fit if every place were one more"):
        memory.attend_text(model, "the wolf")


def test_one_wrong_place_in_the_last_shard_is_found(run):
    def columns(step, places):
        token = TOKENS[places].clone()
        if step == 2:
            token[1, 5] = (token[1, 5] + 1) % SIZE
        return {"place": places, "token": token}

    memory, model = record_text(run, TOKENS, columns)
    assert len(memory._run.shards) == 3
    with pytest.raises(QueryError, match="1 of 36 annotated places are wrong; for example, at place 51"):
        memory.attend_text(model, "the wolf")


@pytest.mark.parametrize("place", [-1, len(TOKENS), 10**12])
def test_places_outside_of_the_text_are_wrong(run, place):
    def columns(step, places):
        return {"place": torch.where(places == 3, place, places)}

    memory, model = record_text(run, TOKENS, columns)
    with pytest.raises(QueryError, match=f"1 of 36 annotated places are wrong; for example, place {place} is outside"):
        memory.attend_text(model, "the wolf")


def test_patterns_without_place_or_token_are_not_compared(run):
    def columns(step, places):
        return ({}, {"place": places}, {"place": places, "token": TOKENS[places]})[step]

    memory, model = record_text(run, TOKENS, columns)
    assert memory.attend_text(model, "the wolf")
    with pytest.raises(QueryError, match="of 12 annotated places"):
        memory.add_corpus(characters(SHIFTED))


@pytest.mark.parametrize("columns", [{}, {"token": "wolf"}, {"sample": 3}], ids=["none", "text", "other"])
def test_a_run_without_whole_numbers_to_compare_takes_any_text(run, columns):
    memory, _ = record_text(run, SHIFTED, lambda step, p: {**columns, **({"place": p} if columns else {})})
    memory.add_corpus(characters(SHIFTED))


def test_an_outcome_is_remembered(run, monkeypatch):
    memory, _ = record_text(run, TOKENS)
    memory.place_counts("1")
    read = []
    plain = Shard.annotation

    def annotation(shard, name, **how):
        read.append(name)
        return plain(shard, name, **how)

    monkeypatch.setattr(Shard, "annotation", annotation)
    dualform.open(run).place_counts("1")
    assert read == ["place"] * 3  # to count, and not to compare again
    with pytest.raises(QueryError, match="annotated places are wrong"):
        check_fit(memory._run, SHIFTED.numpy(), digest="another text")


def test_steps_that_were_cut_off_are_not_compared(run):
    def columns(step, places):
        return {"place": places, "token": TOKENS[places] if step < 2 else (TOKENS[places] + 1) % SIZE}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(SIZE, 4), nn.Linear(4, SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, run) as recorder:
        for step in range(3):
            places = torch.arange(12).reshape(2, 6) + 20 * step
            recorder.annotate(**columns(step, places))
            optimizer.zero_grad()
            model(TOKENS[places]).square().mean().backward()
            optimizer.step()
    opened = Run(run)
    with pytest.raises(QueryError, match="12 of 36 annotated places"):
        check_fit(opened, TOKENS.numpy())
    opened = Run(run)
    (shard,) = opened.shards
    shard.entry = dataclasses.replace(shard.entry, stop=2)
    check_fit(opened, TOKENS.numpy())
