"""Language models on the command line, run as a user runs them."""

import json
import sys

import pytest

import dualform
from dualform import cli
from dualform.show.model_loading import load_model
from helpers.language_models import TEXT, TOKENS, Letters, letters, record_last_position_model
from helpers.texts import recorded, tiny_text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    recorded(folder, model="lstm")
    return folder


def call(monkeypatch, capsys, *arguments):
    """Run the command line in this process, trusting our own runs; return (status, stdout, stderr)."""
    trust = ["--trust"] if arguments[0] in ("attend", "report") else []
    monkeypatch.setattr(sys, "argv", ["dualform", *map(str, arguments), *trust])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def test_attend_text_equals_the_library(run, monkeypatch, capsys):
    status, out, err = call(monkeypatch, capsys, "attend", run, "--text", "the wolf sees", "--top", 2, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    memory = dualform.open(run)
    expected = memory.attend_text(load_model(memory, None).model, "the wolf sees", top=2)
    assert set(found["layers"]) == {"embedding", "lstm.l0", "softmax"}
    for name, layer in found["layers"].items():
        for ranking in ("by_pattern", "by_total"):
            shown = [passage["attended"][0]["attention"] for passage in layer[ranking]]
            assert shown == pytest.approx([passage.attention for passage in getattr(expected[name], ranking)])
    assert found["next"][0]["token"] == expected.next[0].token


def test_attend_text_prints_passages(run, monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "attend", run, "--text", "the wolf zebra", "-l", "softmax", "--top", 2)
    assert status == 0
    assert "note: not in the vocabulary, and read as <unk>: 'zebra'" in out
    assert "by single pattern" in out
    assert "by total over a token's occurrences" in out
    assert "total attention by document" in out
    assert "**" in out  # no terminal, no bold letters
    assert "lstm" not in out


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A run of a model with a limit by assertion and a head at the last position only, its text in pieces."""
    folder = tmp_path_factory.mktemp("foreign") / "run"
    memory, _ = record_last_position_model(folder, factory="helpers.language_models:LastPositionModel")
    memory.add_corpus(dualform.Corpus.from_tokens(TOKENS, tokenizer=Letters(), test=TOKENS[:200], name="letters"))
    return folder


LONG = TEXT[:60]


def test_a_tokenizer_and_tokens_on_the_command_line(foreign, monkeypatch, capsys):
    numbers = " ".join(map(str, letters.encode("the wolf")))
    answers = []
    for prompt in (
        ["--text", "the wolf", "--tokenizer", "helpers.language_models:letters"],
        ["--text", "the wolf", "--tokenizer", "helpers.language_models:Letters"],
        ["--token-ids", numbers],
        ["--token-ids", numbers.replace(" ", ",")],
    ):
        status, out, _ = call(monkeypatch, capsys, "attend", foreign, *prompt, "--json")
        assert status == 0
        answers.append(json.loads(out))
    assert all(answer == answers[0] for answer in answers)
    assert set(answers[0]["layers"]) == {"wte", "body.up", "body.down", "lm_head"}
    assert "left out: 'wpe'" in answers[0]["notes"][0]


def test_a_context_on_the_command_line(foreign, monkeypatch, capsys):
    given = ["attend", foreign, "--text", LONG, "--tokenizer", "helpers.language_models:letters", "-l", "lm_head"]
    _, out, _ = call(monkeypatch, capsys, *given)
    assert "note: only the last 12 of 60 pieces fit the model's context" in out
    _, out, _ = call(monkeypatch, capsys, *given, "--context", 6)
    assert "note: only the last 6 of 60 pieces fit the model's context" in out
    status, out, err = call(monkeypatch, capsys, *given, "--context", 30)
    assert (status, out) == (1, "")
    assert "30 tokens: AssertionError: Cannot forward sequence of length 30" in err
    assert "--context" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "the wolf"], "Give it: tokenizer=... (--tokenizer package.module:name)"),
        (["--text", "the wolf", "--tokenizer", "letters"], "--tokenizer is 'letters'; expected package.module:name"),
        (["--text", "the wolf", "--tokenizer", "nowhere:letters"], "nowhere:letters cannot be loaded: ModuleNotFound"),
        (["--text", "the wolf", "--tokenizer", "helpers.language_models:TEXT"], "type str, without decode"),
        (["--text", "the wolf", "--token-ids", "1"], "Both --text and --token-ids"),
        (["--token-ids", "1", "--tokenizer", "helpers.language_models:letters"], "--tokenizer goes with --text"),
        (["--token-ids", "one two"], "--token-ids is 'one two'; expected whole numbers"),
        (["--token-ids", "99"], "There is no token 99 in the vocabulary of letters"),
        (["--token-ids", ""], "it has no tokens"),
        (["--context", "5"], "--tokenizer and --context go with a prompt"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_clear_line(foreign, monkeypatch, capsys, arguments, words):
    status, out, err = call(monkeypatch, capsys, "attend", foreign, *arguments)
    assert (status, out) == (1, "")
    assert words in err


def test_a_report_of_a_model_with_a_limit(foreign, monkeypatch, capsys, tmp_path):
    given = ["report", foreign, "--test", 0, "-o", tmp_path / "report.html"]
    status, out, err = call(monkeypatch, capsys, *given)
    assert (status, err) == (0, "")
    assert "report.html: 1 tests" in out
    assert "the model says" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attend", "RUN", "--text", ""], "The prompt is empty"),
        (["attend", "RUN", "--text", "zebra"], "Nothing of 'zebra' is in the vocabulary"),
        (["attend", "RUN", "--text", "the", "-l", "gru"], "'gru' was not recorded"),
        (["reproduce", "text", "--file", "missing.txt"], "missing.txt cannot be read"),
        (["reproduce", "text", "--file", "latin.txt"], "latin.txt is not UTF-8"),
        (["reproduce", "text", "--file", "empty.txt"], "empty.txt is empty"),
        (["reproduce", "text", "--file", "short.txt"], "one unroll takes 100"),
        (["reproduce", "text", "--file", "latin.txt", "--tokens", "bytes"], "'bytes'; expected chars or words"),
        (["reproduce", "text", "--model", "gru"], "'gru'; expected lstm or transformer"),
        (["reproduce", "aesop", "--tokens", "words"], "--file and --tokens go with the study text"),
        (["reproduce", "text", "--file", "book.txt", "--paper"], "The paper has no study 'text'"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_1(run, monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 300)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("only a few words, and no more of them")
    (tmp_path / "book.txt").write_text("a b " * 300)
    arguments = [str(run) if part == "RUN" else part for part in arguments]
    status, out, err = call(monkeypatch, capsys, *arguments)
    assert (status, out) == (1, "")
    assert words in err
    assert "Traceback" not in err


def test_a_text_of_ones_own_end_to_end(monkeypatch, capsys, tmp_path):
    (tmp_path / "book.txt").write_text(tiny_text(pages=40).train)
    monkeypatch.chdir(tmp_path)
    options = ("--file", "book.txt", "--tokens", "chars", "--units", 16, "--updates", 3)
    status, out, err = call(monkeypatch, capsys, "reproduce", "text", *options, "--page", "page.md")
    assert status == 0, err
    assert "bits per character" in out
    assert "3 updates of" in err  # said beforehand
    assert "Disk: " in err
    page = (tmp_path / "page.md").read_text()
    assert "`dualform reproduce text --file book.txt --tokens chars --updates 3 --units 16`" in page
    assert "Every run passed `verify`" in page
    folder = tmp_path / "runs" / "reproduce" / "text-book-0" / "run"
    status, out, _ = call(monkeypatch, capsys, "attend", folder, "--text", "the wo", "--json")
    assert status == 0
    assert set(json.loads(out)["layers"]) == {"embedding", "lstm.l0", "softmax"}
    status, _, _ = call(monkeypatch, capsys, "verify", folder)
    assert status == 0
