"""The language studies on a tiny text: small, whole, and everything that they promise."""

import json
import math
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import dualform
from dualform.errors import DataError, StoreError
from dualform.experiments.language import measure, study
from dualform.experiments.language.language_summary import example_tables, language_section, summarise_language
from dualform.experiments.language.language_training import (
    LanguageTraining,
    fit,
    held_out_loss,
    make_language_model,
    quality,
    repeatable_kernels,
    train_language_model,
    windows,
)
from dualform.experiments.language.measure import (
    HeldOut,
    ask_held_out,
    carried,
    chance,
    replay_scores,
    replayed_agreement,
)
from dualform.experiments.language.plans import DEFAULT, MODELS, PAPER_STUDIES, WIDE_FROM, Storage, plan
from dualform.experiments.language.prompt_examples import choose_prompts
from dualform.experiments.language.storage import Budget, announce, budget, bytes_of
from dualform.experiments.language.study import reproduce_language
from dualform.experiments.page import write_page
from dualform.experiments.reproduction import ReproductionOptions
from dualform.recording.estimate import size_text
from dualform.show.model_loading import load_model
from dualform.show.terminal_tables import plain
from helpers.texts import tiny_corpus, tiny_study

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module", params=["lstm", "transformer"])
def found(request, tmp_path_factory):
    """Findings of a study on the tiny text, its folder, and its plan."""
    folder = tmp_path_factory.mktemp("language") / "study"
    plan = tiny_study(model=request.param, updates=60)
    return reproduce_language(plan, tiny_corpus(), folder, seed=0), folder, plan


# A study, end to end


@pytest.mark.slow
def test_the_study_learns_and_verifies(found):
    findings, folder, _ = found
    assert findings["verified"]
    assert all(layer["relative_error"] < 1e-4 for layer in findings["layers"])
    assert findings["quality"]["measure"] == "perplexity"
    assert findings["quality"]["value"] < 0.5 * findings["corpus"]["vocabulary"]
    names = {layer["layer"] for layer in findings["layers"]}
    wanted = {"lstm": {"embedding", "lstm.l0", "softmax"}, "transformer": {"blocks.0.attention.q", "blocks.1.down"}}
    assert wanted[findings["study"]["model"]] <= names
    assert dualform.open(folder / "run").info().uncovered == {}


def test_every_parameter_of_the_model_is_covered(found):
    _, folder, plan = found
    memory = dualform.open(folder / "run")
    recorded = {name for layer in memory.layers.values() for name in layer.parameters.values()}
    assert recorded == {name for name, _ in make_language_model(plan, tiny_corpus()).named_parameters()}
    assert memory.steps().num_rows


def test_attention_agrees_more_than_chance(found):
    findings, _, _ = found
    rows = findings["agreement"]
    by_chance = {row["by"]: row for row in rows if row["layer"] is None}
    assert set(by_chance) == {"a random pattern", "a random pattern of the same token"}
    softmax = next(row for row in rows if row["layer"] == "softmax" and row["by"] == "most attended pattern")
    assert softmax["predicted"] > by_chance["a random pattern"]["predicted"]
    assert not any(row["layer"] in ("embedding", "positions") for row in rows)


def test_findings_are_stored_and_reused(found, monkeypatch):
    findings, folder, plan = found
    monkeypatch.setattr(study, "train_language_model", lambda *a, **k: pytest.fail("trained again"))
    assert reproduce_language(plan, tiny_corpus(), folder, seed=0) == findings


def test_tables_and_page(found, tmp_path):
    findings, _, _ = found
    for grid in summarise_language([findings, findings]):
        assert all(len(row) == len(grid.columns) for row in grid.rows), grid.title
    write_page(tmp_path / "results.md", [language_section("text", [findings], command="a command")])
    page = (tmp_path / "results.md").read_text()
    assert "`a command`" in page
    assert f"{findings['quality']['value']:.2f}" in page
    assert page.count("The model says next") == len(findings["examples"]) == 3
    assert "<b>" in page
    assert "Every run passed `verify`" in page


@pytest.mark.slow
def test_two_runs_of_one_seed_are_the_same(found, tmp_path):
    findings, _, plan = found
    again = reproduce_language(plan, tiny_corpus(), tmp_path / "again", seed=0, keep=False)
    assert not (tmp_path / "again" / "run").exists()
    for name in ("quality", "agreement", "examples", "carried"):
        assert again[name] == findings[name], name


# A study whose run keeps steps


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Findings of the same study from a run of patterns and from one of steps, and the folder of the second."""
    folder = tmp_path_factory.mktemp("steps")
    plan, corpus = tiny_study(model="lstm", updates=12), tiny_corpus()
    stored = reproduce_language(plan, corpus, folder / "stored", seed=0, keep=False)
    steps = replace(plan, memory="steps")
    return stored, reproduce_language(steps, corpus, folder / "study", seed=0, valid=corpus.test[:60]), folder / "study"


def test_a_run_of_steps_gives_the_findings_of_a_run_of_patterns(replayed):
    stored, steps, folder = replayed
    assert dualform.open(folder / "run").layers["softmax"].store == "steps"
    assert steps["quality"]["value"] == stored["quality"]["value"]
    assert steps["quality"]["validation"] > 0
    assert steps["prompts"] == stored["prompts"]
    assert steps["agreement"] == stored["agreement"]
    assert steps["steps_memory"]["replays"] == 1  # for all layers, the held-out prompts and the examples
    for mine, other in zip(steps["examples"], stored["examples"], strict=True):
        assert (mine["prompt"], mine["next"], mine["goes_on"]) == (other["prompt"], other["next"], other["goes_on"])
        for layer, same in zip(mine["layers"], other["layers"], strict=True):
            for by in ("by_pattern", "by_total"):
                assert [p["attention"] for p in layer[by]] == pytest.approx(
                    [p["attention"] for p in same[by]], rel=1e-4
                )


def test_tables_and_page_of_a_run_of_steps(replayed, tmp_path):
    _, findings, folder = replayed
    for grid in summarise_language([findings, findings]):
        assert all(len(row) == len(grid.columns) for row in grid.rows), grid.title
    write_page(tmp_path / "results.md", [language_section("text", [findings], command="a command")])
    page = (tmp_path / "results.md").read_text()
    assert "perplexity of the validation part" in page
    assert "The training was run again once" in page
    size = sum(
        path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file() and "cache" not in str(path)
    )
    assert f"| the run folder | {size_text(size)} |" in page
    assert page.count("The model says next") == 3


def test_a_replay_that_ended_early_is_said_to_have(replayed):
    found = replayed[1]
    whole = language_section("text", [found], command="a command").text[-1]
    early = {**found, "steps_memory": {**found["steps_memory"], "asked_steps": 5}}
    assert "later patterns are left out" not in whole
    assert "as far as step 5 of 12" in language_section("text", [early], command="a command").text[-1]


def test_a_recipe_that_the_held_out_part_chose_is_said_to_be(replayed):
    found = replayed[1]
    other = {**found, "study": {**found["study"], "name": "aesop", "model": "transformer"}}
    for one, said in ((found, False), (other, True)):
        assert ("by the same held-out part" in language_section("text", [one], command="a command").text[0]) == said


def test_scores_that_do_not_fit_in_memory_take_more_replays(replayed, monkeypatch):
    _, findings, folder = replayed
    corpus, plan = tiny_corpus(), replace(tiny_study(model="lstm", updates=12), memory="steps")
    training = LanguageTraining(plan, corpus, seed=0, device="cpu")
    memory = dualform.open(folder / "run", train=training)
    model = load_model(memory, None).model.eval()
    prompts = ask_held_out(model, corpus, context=10)
    monkeypatch.setattr(measure, "MAX_SCORES_BYTES_CPU", 2 * (len(corpus.train) + 1) * 30 * 40)
    scores = replay_scores(memory, model, prompts, [])
    assert scores.replays == math.ceil(len(prompts.true) / 40) > 1
    assert replayed_agreement(corpus, scores, prompts) == findings["agreement"]


def test_kernels_are_repeatable_inside_the_training_alone(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filling: Any = torch.utils.deterministic
    with repeatable_kernels("cpu"):
        assert not torch.are_deterministic_algorithms_enabled()
    with repeatable_kernels("cuda"):
        assert torch.are_deterministic_algorithms_enabled()
        assert not filling.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert filling.fill_uninitialized_memory


# Training


def test_windows_read_the_text_in_streams():
    corpus, recipe = tiny_corpus(), tiny_study(updates=9).recipe
    read = list(windows(corpus, recipe))
    length = (len(corpus.train) - 1) // recipe.batch
    each = length // recipe.unroll
    assert len(read) == 9
    assert [w.first for w in read] == [i % each == 0 for i in range(9)]
    for row in range(recipe.batch):
        stream = torch.cat([w.places[row] for w in read[:each]])
        assert stream.tolist() == list(range(row * length, row * length + each * recipe.unroll))
    assert max(int(w.places.max()) for w in read) + 1 < len(corpus.train)  # every token has one that follows


def test_shifted_windows_begin_elsewhere_in_each_epoch_and_stay_in_their_streams():
    corpus, plain = tiny_corpus(), tiny_study(updates=60).recipe
    recipe = replace(plain, shifted=True)
    read = list(windows(corpus, recipe))
    assert len(read) == 60
    assert [w.places.tolist() for w in read] == [w.places.tolist() for w in windows(corpus, recipe)]
    shifts = {int(w.places[0, 0]) for w in read if w.first}
    assert len(shifts) > 1
    assert all(0 <= shift < recipe.unroll for shift in shifts)
    length = (len(corpus.train) - 1) // recipe.batch
    for window in read:
        for row, places in enumerate(window.places.tolist()):
            assert row * length <= places[0] == places[-1] - recipe.unroll + 1
            assert places[-1] < (row + 1) * length


def test_a_short_text_gets_fewer_streams_and_a_shorter_one_an_error():
    corpus, recipe = tiny_corpus(), tiny_study().recipe
    assert fit(replace(recipe, batch=1000), corpus).batch == (len(corpus.train) - 1) // recipe.unroll
    few = replace(corpus, train=corpus.train[:10])
    with pytest.raises(DataError, match="training part of tiny has 10 words; one unroll takes 10 and the one that"):
        fit(recipe, few)
    assert fit(recipe, replace(corpus, train=corpus.train[:11])).batch == 1


def test_the_state_is_carried_within_an_epoch(monkeypatch):
    from dualform.experiments.language.language_training import Trainer

    corpus, plan = tiny_corpus(), tiny_study(model="lstm", updates=8)
    trainer = Trainer(plan, corpus, seed=0, device="cpu")
    states = []
    real = trainer.model.forward

    def forward(tokens, state):
        states.append(state)
        return real(tokens, state)

    monkeypatch.setattr(trainer.model, "forward", forward)
    read = list(windows(corpus, plan.recipe))
    for window in read:
        trainer.update(window, None)
    assert [state is None for state in states] == [window.first for window in read]


def test_held_out_loss_is_the_mean_over_all_tokens():
    corpus, plan = tiny_corpus(), tiny_study(model="lstm")
    model = make_language_model(plan, corpus).eval()
    tokens = torch.from_numpy(corpus.test)
    rows = min(10, (len(tokens) - 1) // 10)
    length = (len(tokens) - 1) // rows
    streams = torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(rows)])
    with torch.no_grad():
        logits, _ = model(streams[:, :-1])  # the state carried on is the state of one long pass
    expected = functional.cross_entropy(logits.flatten(0, 1), streams[:, 1:].flatten())
    assert held_out_loss(model, corpus.test, unroll=10) == pytest.approx(float(expected), rel=1e-5)


def test_quality_is_counted_in_the_units_of_the_text():
    corpus = tiny_corpus()
    for text, unit, expected in ((corpus, "perplexity", 8), (replace(corpus, unit="chars"), "bits per character", 3)):
        name, value = quality(math.log(8), text)
        assert name == unit
        assert value == pytest.approx(expected)


# What fits on the disk


def on_a_disk_of(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * free, 9 * free, free))


def test_the_first_storage_that_fits_is_taken(monkeypatch, tmp_path):
    corpus = tiny_corpus()
    plan = replace(tiny_study(model="lstm"), storages=(Storage(), Storage(half=("*",)), Storage({"*": "keys"})))
    sizes = [bytes_of(plan, corpus, option) for option in plan.storages]
    for place, size in enumerate(sizes):
        on_a_disk_of(monkeypatch, int(size / 0.9) + 2)
        chosen = budget(plan, corpus, tmp_path / "not" / "there")
        assert (chosen.storage, chosen.bytes) == (plan.storages[place], size)
        assert chosen.recorded == plan.recipe.updates
    assert sizes == sorted(sizes, reverse=True)
    assert "the values of every layer" in str(chosen)


def test_where_nothing_fits_the_last_updates_are_recorded(monkeypatch, tmp_path):
    corpus, plan = tiny_corpus(), tiny_study(model="lstm")
    size = bytes_of(plan, corpus, Storage())
    on_a_disk_of(monkeypatch, int(size * 5.1 / 12 / 0.9))
    chosen = budget(plan, corpus, tmp_path)
    assert (chosen.recorded, chosen.whole) == (5, size)
    assert "the first 7 of 12 updates" in announce(plan, chosen, 2.0)
    model = train_language_model(plan, corpus, tmp_path / "run", chosen.storage, recorded=5, seed=0, device="cpu")
    memory = dualform.open(tmp_path / "run")
    assert memory.step == 5
    assert memory.verify(model)  # the start is the model as it was, with a warm optimizer
    monkeypatch.undo()
    whole = train_language_model(plan, corpus, tmp_path / "whole", Storage(), recorded=12, seed=0, device="cpu")
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)  # recording changes nothing


def test_a_disk_without_room_for_one_update_is_an_error(monkeypatch, tmp_path):
    on_a_disk_of(monkeypatch, 1000)
    with pytest.raises(StoreError, match=r"1\.0 kB free, and one update takes"):
        budget(tiny_study(), tiny_corpus(), tmp_path)


def test_the_estimate_is_close_to_what_is_stored(found):
    findings, folder, _ = found
    stored = sum(path.stat().st_size for path in (folder / "run" / "shards").iterdir())
    annotated = sum(path.stat().st_size for path in (folder / "run" / "annotations").iterdir())
    assert stored + annotated <= findings["stored"]["bytes"] * 1.2
    assert stored >= findings["stored"]["bytes"] * 0.7


def test_what_is_said_beforehand():
    chosen = Budget(Storage({"softmax": "keys", "*": "keys+values"}, half=("softmax",)), 10, 10**9, 10**12, 10**10, "x")
    said = announce(plan("aesop"), chosen, 0.5)
    assert "300 updates of 64 times 100 tokens, about 2 min (0.5 s an update)" in said
    assert "1.0 GB of 10.0 GB that are free: softmax keys, the rest keys+values (softmax in float16)" in said
    assert "would take 1.0 TB" in said


# Plans


def test_plans_are_the_papers_with_paper():
    assert plan("aesop", paper=True).recipe == PAPER_STUDIES["aesop"]
    assert plan("aesop", paper=True).memory == "steps"
    assert plan("aesop").memory == plan("text", model="transformer").memory == "patterns"
    assert plan("wikitext2").recipe == DEFAULT["wikitext2", "lstm"]
    recipe = plan("wikitext2", paper=True, wide=True).recipe
    assert (recipe.units, recipe.dropout, recipe.batch, recipe.updates) == (200, 0.5, 128, 10_000)
    assert plan("aesop", updates=7, units=16).recipe == replace(DEFAULT["aesop", "lstm"], updates=7, units=16)
    with pytest.raises(DataError, match="paper has no study 'text'"):
        plan("text", paper=True)
    with pytest.raises(DataError, match="with a model 'transformer'; it has LSTMs on aesop and wikitext2"):
        plan("aesop", model="transformer", paper=True)
    with pytest.raises(DataError, match="multiple of its 4 heads"):
        plan("aesop", model="transformer", units=30)


def test_a_wide_softmax_is_stored_keys_only():
    for model in MODELS:
        for option in plan("wikitext2", model=model, wide=True).storages:
            assert next(what for name, what in option.layers.items() if name in ("softmax", "*")) == "keys"


# Measuring


def test_chance_by_hand():
    corpus = replace(tiny_corpus(), train=np.array([0, 1, 0, 2, 0, 1]), vocabulary=("a", "b", "c", "<unk>"))
    counts = np.array([1, 1, 2, 1, 1, 0])  # the last token has none that follows, and so no patterns
    prompts = HeldOut(torch.tensor([[2, 0], [0, 1]]), predicted=torch.tensor([1, 0]), true=torch.tensor([2, 2]))
    everywhere, same = chance(corpus, counts, prompts)
    assert everywhere["predicted"] == pytest.approx((2 / 6 + 2 / 6) / 2)
    assert everywhere["true"] == pytest.approx(2 / 6)
    assert same["predicted"] == pytest.approx((2 / 4 + 1) / 2)
    assert same["true"] == pytest.approx((2 / 4 + 0) / 2)


def test_prompts_are_spread_over_the_held_out_part(found):
    _, folder, _ = found
    memory = dualform.open(folder / "run")
    corpus = memory.corpus()
    model = make_language_model(tiny_study(), corpus).eval()
    prompts = ask_held_out(model, corpus, count=5, context=8)
    test = torch.from_numpy(corpus.test)
    assert prompts.tokens.shape == (5, 8)
    assert torch.equal(prompts.tokens[0], test[:8])
    assert torch.equal(prompts.tokens[-1], test[-9:-1])
    assert (int(prompts.true[0]), int(prompts.true[-1])) == (int(test[8]), int(test[-1]))
    with torch.no_grad():
        assert torch.equal(prompts.predicted, model(prompts.tokens)[0][:, -1].argmax(1))
    assert len(ask_held_out(model, corpus, count=10**6, context=8).true) == len(test) - 8


def test_all_patterns_carry_the_whole_logit(found, monkeypatch):
    findings, folder, _ = found
    memory = dualform.open(folder / "run").at(step=3)
    model = load_model(memory, None).model.eval()
    total = memory.attend(queries={"softmax": torch.zeros(1, memory.layers["softmax"].d_in)})["softmax"].count()
    monkeypatch.setattr(measure, "CARRIED", (1, total))
    prompts = ask_held_out(model, memory.corpus(), count=4, context=10)
    one, everything = carried(memory, model, prompts, "softmax")
    assert everything["share"] == pytest.approx(1.0, abs=1e-3)
    assert everything["of_all_patterns"] == 1.0
    assert one["share"] > 0
    assert [row["patterns"] for row in findings["carried"]] == [1, 10, 100]


def test_examples_differ_and_mean_something():
    corpus = tiny_corpus()
    numbers = [corpus.numbers[word] for word in ("wolf", "wolf", ".", "lamb", "fox", "<eos>")]
    true = torch.tensor(numbers)
    predicted = true.clone()
    predicted[0] = corpus.numbers["lamb"]
    prompts = HeldOut(torch.zeros(6, 4, dtype=torch.int64), predicted, true)
    assert [target for _, target in choose_prompts(corpus, prompts, ())] == ["wolf", "lamb", "fox"]
    assert choose_prompts(corpus, prompts, ("the cat",))[0] == ("the cat", None)


def test_markdown_of_a_passage_is_safe():
    passage = {"attention": 1.0, "occurrences": 2, "document": "A | B", "pieces": [["a * <unk> ", False], ["_c", True]]}
    layer = {"layer": "softmax", "by_pattern": [passage], "by_total": []}
    example = {"prompt": "x", "target": None, "next": [["|", 0.5]], "goes_on": "", "layers": [layer]}
    text = example_tables([example])
    assert "A \\| B" in text
    assert "a \\* &lt;unk&gt; <b>\\_c</b>" in text


def test_no_trial_stays_behind(found):
    _, folder, _ = found
    assert sorted(path.name for path in folder.iterdir()) == ["findings.json", "run"]


def test_no_gpu_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DataError, match="torch sees no GPU"):
        reproduce_language(tiny_study(), tiny_corpus(), tmp_path / "x", seed=0, device="cuda")
    assert not (tmp_path / "x").exists()


# What is published

DOCS = Path(__file__).parents[2] / "docs"
KEPT = sorted((DOCS / "findings").glob("*-0/findings.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_published_section_is_made_of_the_findings_that_are_kept(path, tmp_path):
    found = json.loads(path.read_text())
    made = found["study"]
    options = ReproductionOptions(made["name"], device="cuda", model=made["model"], paper=made["paper"])
    wide = found["corpus"]["vocabulary"] > WIDE_FROM
    assert made == plain(plan(made["name"], model=made["model"], paper=made["paper"], wide=wide))
    name = path.parent.name.removesuffix("-0")
    write_page(tmp_path / "one.md", [language_section(name, [found], command=options.command(made["name"]))])
    begin, end = f"<!-- section {name} -->", f"<!-- end {name} -->"
    of_page, of_findings = (
        text.read_text().partition(begin)[2].partition(end)[0] for text in (DOCS / "results.md", tmp_path / "one.md")
    )
    assert of_findings
    assert of_page == of_findings
