"""Spotlights on a text, against dense attention over a small run."""

import numpy as np
import pytest
import torch

import dualform
from dualform.attend.last_tokens import last_queries
from dualform.attend.passages import AttendedToken, gather
from dualform.attend.prompts import read_prompt
from dualform.errors import QueryError, UnknownLayerError
from helpers.language_models import TEXT, TOKENS, Letters, record_output_model
from helpers.loops import mlp, record, sgd
from helpers.texts import recorded, tiny_corpus

PROMPT = "the wolf sees the"
LAYER = "blocks.1.up"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("text") / "run")


def dense(memory, model, prompt=PROMPT, layer=LAYER):
    """Return every pattern's attention and its place, the obvious way."""
    corpus = memory.corpus()
    tokens = torch.tensor([[corpus.numbers[word] for word in prompt.split()]])
    query = memory.attend(model, tokens, layers=[layer])[layer].attention()[-1]
    table = memory.patterns(layer, columns=["place", "token", "document"])
    return query.double().numpy(), np.asarray(table["place"]), corpus


def test_single_patterns_and_totals_equal_the_dense_ones(run):
    memory, model = run
    attention, places, corpus = dense(memory, model)
    layer = memory.attend_text(model, PROMPT, layers=[LAYER], top=4, around=0)[LAYER]
    size = len(corpus.train)
    best = np.full(size, -np.inf)
    np.maximum.at(best, places, attention)
    sums, counts = np.bincount(places, weights=attention, minlength=size), np.bincount(places, minlength=size)
    for passages, expected in ((layer.by_pattern, best), (layer.by_total, np.where(counts > 0, sums, -np.inf))):
        assert [p.attention for p in passages] == pytest.approx(np.sort(expected)[::-1][:4].tolist(), rel=1e-5)
        for passage in passages:
            place = passage.attended[0].place
            assert passage.attention == pytest.approx(expected[place], rel=1e-5)
            assert passage.occurrences == counts[place]
            assert passage.tokens[place - passage.first] == corpus.vocabulary[corpus.train[place]].replace("<eos>", "⏎")
            assert passage.following == corpus.vocabulary[corpus.train[place + 1]].replace("<eos>", "⏎")
    assert layer.patterns == len(attention)
    for totals, names, groups in (
        (layer.documents, corpus.titles, corpus.documents(places)),
        (layer.tokens, corpus.vocabulary, corpus.train[places]),
    ):
        expected = np.bincount(groups, weights=attention, minlength=len(names))
        assert [t.attention for t in totals] == pytest.approx(np.sort(expected[np.unique(groups)])[::-1][:4], rel=1e-5)
        for total in totals:
            which = names.index(total.name.replace("⏎", "<eos>"))
            assert total.patterns == (groups == which).sum()


def test_totals_and_counts_by_place_equal_the_dense_ones(run):
    memory, model = run
    attention, places, corpus = dense(memory, model)
    tokens = torch.tensor([[corpus.numbers[word] for word in PROMPT.split()]])
    query = last_queries(model, tokens, {LAYER: memory.layers[LAYER]})[LAYER]
    totals = memory.place_totals(LAYER, query)[0]
    expected = np.bincount(places, weights=attention, minlength=len(corpus.train))
    np.testing.assert_allclose(totals.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert memory.place_counts(LAYER).tolist() == np.bincount(places, minlength=len(corpus.train)).tolist()


def test_scores_by_place_are_totals_best_and_counts_of_all_layers_in_one_reading(run):
    memory, corpus = run[0], run[0].corpus()
    queries = {name: torch.randn(3, memory.layers[name].d_in) for name in (LAYER, "softmax")}
    scores = memory.place_scores(queries)
    assert list(scores) == [LAYER, "softmax"]
    for name, query in queries.items():
        size = len(corpus.train)
        found = scores[name]
        torch.testing.assert_close(found.sums[:, :size], memory.place_totals(name, query))
        assert torch.equal(found.counts[:size], memory.place_counts(name))
        best = memory.attend(queries={name: query})[name].top(1)
        torch.testing.assert_close(found.best.max(dim=1).values, best.values[:, 0, 0])
        assert found.best.argmax(dim=1).tolist() == list(best.columns["place"])
    with pytest.raises(UnknownLayerError, match="'head' was not recorded"):
        memory.place_scores({"head": torch.zeros(1, 4)})


def test_a_prompt_whose_scores_are_known_reads_no_pattern(run, monkeypatch):
    memory, model = run
    asked = memory.attend_text(model, "the wolf", layers=[LAYER, "softmax"])
    entries = {name: memory.layers[name] for name in (LAYER, "softmax")}
    tokens = torch.tensor([[memory.corpus().numbers[word] for word in ("the", "wolf")]])
    scores = memory.place_scores(last_queries(model, tokens, entries))
    monkeypatch.setattr(type(memory._table.executor), "run", lambda *_: pytest.fail("patterns were read"))
    assert memory.attend_text(model, "the wolf", layers=[LAYER, "softmax"], scores=scores) == asked


def test_annotations_are_what_the_corpus_says(run):
    memory, _ = run
    corpus = memory.corpus()
    table = memory.patterns("softmax", columns=["token", "place", "document"])
    places = np.asarray(table["place"])
    np.testing.assert_array_equal(np.asarray(table["token"]), corpus.train[places])
    np.testing.assert_array_equal(np.asarray(table["document"]), corpus.documents(places))


def test_keys_lie_at_the_place_they_are_annotated_with(run):
    memory, model = run
    corpus = memory.corpus()
    found = memory.attend_text(model, "the wolf", layers=["embedding"], top=3)["embedding"]
    assert all(p.tokens[p.attended[0].place - p.first] == "wolf" for p in found.by_pattern)
    wolf = corpus.numbers["wolf"]
    seen = int(memory.place_counts("embedding")[torch.from_numpy(corpus.train == wolf)].sum())
    assert (found.tokens[0].name, found.tokens[0].attention) == ("wolf", seen)


def test_a_view_attends_to_its_own_patterns_only(run):
    memory, model = run
    layer = memory.where(document=2).attend_text(model, PROMPT, layers=[LAYER])[LAYER]
    assert {p.document for p in (*layer.by_pattern, *layer.by_total)} == {"Page 2"}
    assert layer.patterns == memory.where(document=2).patterns(LAYER).num_rows
    with pytest.raises(QueryError, match="holds no patterns"):
        memory.where(document=99).attend_text(model, PROMPT, layers=[LAYER])


def bigram(tokens):
    return torch.nn.Sequential(torch.nn.Embedding(tokens, 4), torch.nn.Linear(4, tokens))


def test_patterns_without_a_place_are_left_out(tmp_path):
    model = bigram(len(tiny_corpus().vocabulary))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(6).reshape(2, 3)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        for step in range(3):
            if step:
                recorder.annotate(place=tokens)
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
    memory = dualform.open(tmp_path / "run")
    memory.add_corpus(tiny_corpus())
    layer = memory.attend_text(model, "the wolf", layers=["1"])["1"]
    assert layer.patterns == 12
    with pytest.raises(QueryError, match=r"30 outputs, but the vocabulary of tiny has \d+ tokens"):
        memory.attend_text(torch.nn.Sequential(model[0], model[1], torch.nn.Linear(len(model[1].bias), 30)), "the wolf")
    assert memory.place_counts("1").sum() == 12


def test_places_beyond_the_text_are_an_error(tmp_path):
    model = bigram(len(tiny_corpus().vocabulary))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.annotate(place=torch.full((1, 2), 10_000))
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    with pytest.raises(QueryError, match="2 of 2 annotated places are wrong; for example, place 10000 is outside"):
        memory.add_corpus(tiny_corpus())


@pytest.mark.parametrize("shape", [(3, 4), (4, 4), (1, 3)])
def test_the_query_is_that_of_the_last_token_in_every_kind_of_layer(tmp_path, shape):
    memory, model = recorded(tmp_path / "run", model="lstm", updates=2)
    tokens = torch.arange(shape[0] * shape[1]).reshape(shape) % 10
    with torch.no_grad():
        inputs = model.get_submodule("embedding")(tokens)
        hidden = model.get_submodule("lstm")(inputs)[0]
    found = last_queries(model, tokens, memory.layers)
    assert torch.equal(found["embedding"], tokens[:, -1:])
    torch.testing.assert_close(found["softmax"], hidden[:, -1])
    torch.testing.assert_close(found["lstm.l0"], torch.cat([inputs[:, -1], hidden[:, -2]], dim=1))


def test_a_recurrent_layers_keys_lie_at_their_places(tmp_path):
    memory, model = recorded(tmp_path / "run", model="lstm", updates=1)
    corpus = memory.corpus()
    places = np.asarray(memory.patterns("lstm.l0", columns=["place"])["place"])
    # One update was made, so the recorded keys are those of the first model.
    start = memory.at(step=0).apply(model)
    keys = memory.attend(queries={"lstm.l0": torch.eye(16)})["lstm.l0"].attention().T
    table = start.get_parameter("embedding.weight").detach()
    torch.testing.assert_close(keys[:, :8], table[torch.from_numpy(corpus.train[places])])


# Passages


def places_at(*numbers):
    return [AttendedToken(number, 10.0 - i, 1) for i, number in enumerate(numbers)]


def test_passages_that_overlap_are_one():
    corpus = tiny_corpus()
    found = gather(places_at(50, 54, 90, 46), corpus, count=5, around=2)
    assert [[place.place for place in passage.attended] for passage in found] == [[50, 54, 46], [90]]
    assert (found[0].first, len(found[0].tokens)) == (44, 13)
    assert found[0].attention == 10.0
    apart = gather(places_at(50, 55), corpus, count=5, around=2)
    assert len(apart) == 2


def test_a_place_joins_a_passage_even_when_no_more_are_wanted():
    found = gather(places_at(50, 100, 51), tiny_corpus(), count=1, around=2)
    assert [[place.place for place in passage.attended] for passage in found] == [[50, 51]]


def test_passages_end_where_the_text_does():
    corpus = tiny_corpus()
    last = len(corpus.train) - 1
    first, end = gather(places_at(0, last), corpus, count=2, around=5)
    assert (first.first, len(first.tokens)) == (0, 6)
    assert (end.first, len(end.tokens), end.following) == (last - 5, 6, "")


def test_pieces_join_to_the_text():
    (passage,) = gather(places_at(10, 11), tiny_corpus(), count=1, around=2)
    assert "".join(text for text, _ in passage.pieces()) == " ".join(passage.tokens)
    assert [text for text, attended in passage.pieces() if attended] == list(passage.tokens[2:4])
    assert passage.text().count("**") == 4


# Pieces of a tokenizer


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory):
    memory, model = record_output_model(tmp_path_factory.mktemp("pieces") / "run")
    tokenizer = Letters()
    memory.add_corpus(dualform.Corpus.from_tokens(TOKENS, tokenizer=tokenizer, name="letters"))
    return memory, model, tokenizer


def test_a_prompt_in_pieces_is_read_by_the_tokenizer(in_pieces):
    memory, model, tokenizer = in_pieces
    found = memory.attend_text(model, "the wolf", tokenizer=tokenizer, layers=["head"])
    expected = memory.attend_text(model, tokenizer.encode("the wolf"), layers=["head"])
    assert found["head"] == expected["head"]
    assert (found.prompt, found.unit, len(found.goes_on), found.space) == ("the wolf", "pieces", 20, "")
    passage = found["head"].by_pattern[0]
    assert "".join(text for text, _ in passage.pieces()) in TEXT


def test_pieces_need_their_own_tokenizer(in_pieces):
    memory, model, tokenizer = in_pieces
    with pytest.raises(QueryError, match=r"'letters' is in pieces of a tokenizer.*tokenizer=.*--token-ids"):
        memory.attend_text(model, "the wolf")
    with pytest.raises(QueryError, match=r"not that of letters: its token .* Give the tokenizer that"):
        memory.attend_text(model, "the wolf", tokenizer=Letters(tokenizer.letters[::-1]))
    with pytest.raises(QueryError, match="no token 18 in the vocabulary"):
        memory.attend_text(model, "the wolfX", tokenizer=Letters(tokenizer.letters + "X"))
    with pytest.raises(QueryError, match="type str, without decode"):
        memory.attend_text(model, "the wolf", tokenizer="gpt2")
    with pytest.raises(QueryError, match="could not encode 'Wolf': ValueError"):
        memory.attend_text(model, "Wolf", tokenizer=tokenizer)


def test_characters_of_several_pieces_are_whole_where_all_of_them_are_shown():
    pieces = ["10", " <0xE2>", "<0x82><0xAC>", " each"]
    corpus = dualform.Corpus.from_tokens([0, 1, 2, 3], vocabulary=pieces)
    (whole,) = gather(places_at(3), corpus, count=1, around=3)
    assert whole.text() == "10 €** each**"
    (part,) = gather(places_at(1), corpus, count=1, around=3)
    assert part.text() == "10** <0xE2>**<0x82><0xAC> each"


def test_a_corpus_in_pieces_comes_back_as_it_was(in_pieces):
    memory, _, tokenizer = in_pieces
    found = memory.corpus()
    assert (found.unit, found.vocabulary, found.name) == ("pieces", tuple(tokenizer.letters), "letters")


# Prompts


def test_unknown_words_are_named_and_read_as_unknown():
    corpus = tiny_corpus()
    prompt = read_prompt(corpus, "the zebra. the wolf", context=None)
    words = corpus.words(prompt.tokens.numpy())
    assert words == ["the", "<unk>", ".", "the", "wolf"]  # punctuation is told from the word
    assert prompt.notes == ("not in the vocabulary, and read as <unk>: 'zebra'",)


@pytest.mark.parametrize("text", ["", "  \n "])
def test_an_empty_prompt_is_an_error(text):
    with pytest.raises(QueryError, match="prompt is empty"):
        read_prompt(tiny_corpus(), text, context=None)


def test_a_prompt_of_unknown_words_alone_is_an_error():
    with pytest.raises(QueryError, match="Nothing of 'zebra giraffe' is in the vocabulary of tiny"):
        read_prompt(tiny_corpus(), "zebra giraffe", context=None)


def test_a_prompt_longer_than_the_context_is_cut_and_said_to_be(run):
    memory, model = run
    long = " ".join(["the wolf sees"] * 10)
    spotlight = memory.attend_text(model, long, layers=["softmax"])
    assert spotlight.notes == ("only the last 10 of 30 words fit the model's context",)
    kept = memory.attend_text(model, " ".join(long.split()[-10:]), layers=["softmax"])
    assert kept["softmax"] == spotlight["softmax"]


def test_the_next_words_are_the_models(run):
    memory, model = run
    corpus = memory.corpus()
    spotlight = memory.attend_text(model, PROMPT, layers=["softmax"], goes_on=2)
    tokens = torch.tensor([[corpus.numbers[word] for word in PROMPT.split()]])
    with torch.no_grad():
        probabilities = model(tokens)[0][0, -1].softmax(0)
        first = int(probabilities.argmax())
        second = int(model(torch.cat([tokens, torch.tensor([[first]])], dim=1))[0][0, -1].argmax())
    assert spotlight.next[0].token == corpus.vocabulary[first]
    assert spotlight.next[0].probability == pytest.approx(float(probabilities[first]))
    assert memory.attend_text(model, PROMPT, layers=["softmax"], goes_on=0).goes_on == ""
    assert len(memory.attend_text(model, PROMPT, layers=["softmax"]).goes_on.split()) == 10
    assert spotlight.goes_on.split() == [corpus.vocabulary[first], corpus.vocabulary[second].replace("<eos>", "⏎")]


def test_questions_that_cannot_be_answered(run, tmp_path):
    memory, model = run
    with pytest.raises(UnknownLayerError, match="'lstm' was not recorded"):
        memory.attend_text(model, PROMPT, layers="lstm")
    with pytest.raises(QueryError, match="top is 0"):
        memory.attend_text(model, PROMPT, top=0)
    plain = mlp()
    other = record(tmp_path / "other", plain, sgd(plain))
    with pytest.raises(QueryError, match="keeps no corpus"):
        other.attend_text(plain, PROMPT)


def test_a_notebook_shows_escaped_tables(run):
    memory, model = run
    spotlight = memory.attend_text(model, "the <wolf> wolf", layers=["softmax"])
    page = spotlight._repr_html_()
    assert "&lt;wolf&gt;" in page
    assert "<wolf>" not in page
    passage = spotlight["softmax"].by_pattern[0]
    assert f"<b>{passage.tokens[passage.attended[0].place - passage.first]}</b>" in page
    assert "**" in repr(spotlight)
