"""The report: one file, small, whole without a server, without scripts and on paper; and the notebook's section."""

import base64
import json
import re
import zlib

import pytest
import torch

import dualform
from dualform.errors import QueryError
from dualform.show.report.write import write_report
from helpers.small_models import NASTY, record_letters


@pytest.fixture(scope="module")
def written(digits, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    outcome = write_report(dualform.open(digits.folder), path, tests=12, path_contributions=False)
    return path, outcome


def test_twelve_tests_fit_into_three_megabytes(written):
    path, outcome = written
    assert outcome.tests == 12
    assert outcome.bytes == path.stat().st_size <= 3_000_000


def test_nothing_is_fetched_from_anywhere(written):
    page = written[0].read_text()
    addresses = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"@import|url\(|https?://", page)


def test_its_numbers_are_those_of_the_memory(written, digits):
    page = written[0].read_text()
    packed = re.search(r'id="data">([^<]+)<', page)
    assert packed is not None
    facts = json.loads(zlib.decompress(base64.b64decode(packed.group(1))))
    assert len(facts) == 12
    memory = dualform.open(digits.folder)
    for one in facts[:3]:
        layer = memory.attend(digits.model, digits.task.test[one["test"] : one["test"] + 1])["layers.1"]
        expected = layer.totals("label").values[0]
        torch.testing.assert_close(torch.tensor(one["layers"]["layers"][1]["totals"]), expected, rtol=1e-5, atol=1e-4)
    wrong = [one for one in facts if one["prediction"]["target"] != one["prediction"]["before"]]
    assert 1 <= len(wrong) <= 6


def test_it_says_what_it_holds_and_what_it_cannot_say(written):
    page = written[0].read_text()
    for words in (
        "Training samples are embedded",
        "rebuild error",
        "The model is not retrained",
        "xxh3",
        "Without each group",
    ):
        assert words in page, words


def test_without_media_there_are_no_samples(digits, tmp_path):
    write_report(dualform.open(digits.folder), tmp_path / "r.html", tests=[5], media=False)
    page = (tmp_path / "r.html").read_text()
    assert "<img" not in page
    assert "No training samples are embedded" in page


@pytest.mark.slow
def test_a_smaller_limit_leaves_tests_out_and_says_so(digits, tmp_path, written):
    memory = dualform.open(digits.folder)
    outcome = write_report(memory, tmp_path / "r.html", tests=12, most_mb=0.4, path_contributions=False)
    assert 0 < outcome.tests < 12
    assert outcome.bytes <= 400_000
    assert "Left out to keep the file small" in (tmp_path / "r.html").read_text()
    with pytest.raises(QueryError, match="--max-mb"):
        write_report(memory, tmp_path / "r.html", tests=1, most_mb=0.01, path_contributions=False)


def test_a_text_is_escaped(tmp_path):
    record_letters(tmp_path / "run")
    write_report(dualform.open(tmp_path / "run"), tmp_path / "r.html", tests=2, trust=True)
    page = (tmp_path / "r.html").read_text()
    assert NASTY not in page
    assert "&lt;script&gt;" in page
    assert page.count("<script") == 2, "our own two"


@pytest.mark.browser
@pytest.mark.parametrize("scripts", [True, False])
def test_it_opens_from_a_file_with_and_without_scripts(chromium, written, scripts):
    context = chromium.new_context(java_script_enabled=scripts)
    page = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(written[0].as_uri())
    assert page.locator("section.test").count() == 12
    assert page.locator("section.test svg").first.is_visible()
    assert page.is_visible("#tools") is scripts
    if scripts:
        page.click("button:has-text('Show wrong')")
        shown = page.locator("section.test:visible").count()
        assert shown == page.locator("section.test[data-verdict=wrong]").count() < 12
        with page.expect_download() as download:
            page.click("button:has-text('Save the numbers')")
        assert len(json.loads(download.value.path().read_text())) == 12
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
    context.close()


@pytest.mark.browser
def test_it_prints(chromium, written, tmp_path):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(written[0].as_uri())
    page.emulate_media(media="print")
    assert not page.is_visible("#tools")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
    context.close()


@pytest.mark.browser
def test_axe_finds_nothing_in_the_report(chromium, written, axe):
    page = chromium.new_page(reduced_motion="reduce")
    page.goto(written[0].as_uri())
    page.evaluate(axe)
    found = page.evaluate("axe.run({resultTypes: ['violations']}).then(r => r.violations)")
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:2]]) for one in found] == []
    page.close()


def test_a_spotlight_draws_itself_in_a_notebook(digits):
    memory = dualform.open(digits.folder)
    html = memory.attend(digits.model, digits.task.test[:5])._repr_html_()
    assert html is not None
    assert html.count("<section") == 3
    assert "2 more queries" in html
    assert html.count("data:image/png") == 3 * 3 * 5, "five samples for each of three queries and layers"
    best = memory.attend(digits.model, digits.task.test[:1])["layers.2"].top(1, per="sample").columns["sample"][0]
    assert f"#{best}," in html
    assert "<script" not in html


def test_a_spotlight_on_a_text_draws_passages(tmp_path):
    model = record_letters(tmp_path / "run")
    html = dualform.open(tmp_path / "run").attend(model, torch.tensor([[1, 2, 3]]))._repr_html_()
    assert html is not None
    assert "<mark>" in html
    assert NASTY not in html


def test_a_report_may_load_nothing_from_elsewhere(digits, tmp_path):
    write_report(dualform.open(digits.folder), tmp_path / "r.html", tests=[5])
    head = (tmp_path / "r.html").read_text().split("<title>")[0]
    assert "Content-Security-Policy" in head
    assert "default-src 'none'" in head
