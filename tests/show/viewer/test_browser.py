"""The page, in a real browser: what it shows, what it asks for, how it is used, and how it fails."""

import json
import re

import pytest

from helpers.served import Running

pytestmark = pytest.mark.browser
NOTE = "removes recorded updates; the model is not retrained"


class Watched:
    """A page whose errors and requests are kept."""

    def __init__(self, browser, server, *, width=1400, scheme="light", state="", wait=True):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(server.address + state)
        if wait:
            self.page.wait_for_selector("body[data-ready=all]")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def quiet(self):
        """Wait until no panel is busy."""
        self.page.wait_for_selector("[aria-busy=true]", state="detached")


@pytest.fixture(scope="module")
def opened(chromium, running):
    """One page that the tests of what it shows share."""
    with Watched(chromium, running, state="&test=5") as watched:
        yield watched


def text(page, selector):
    return page.inner_text(selector)


def test_it_shows_every_panel_and_asks_nobody_else(opened, running):
    page = opened.page
    for panel in (
        "prediction",
        "path",
        "layers",
        "curves",
        "time",
        "top",
        "mask",
        "pins",
        "history",
        "browser",
        "free",
    ):
        assert page.is_visible(f"#{panel} h2"), panel
    assert "exact: rebuild error" in page.wait_for_selector(".badge.good").inner_text()
    assert opened.errors == []
    others = [url for url in opened.requests if not url.startswith((running.base, "data:", "blob:"))]
    assert opened.requests
    assert others == []
    assert "token" not in page.url


def test_the_numbers_are_those_of_the_answers(opened, client):
    page = opened.page
    found = client.get("/api/layers", params={"test": 5, "by": "label"}).json()
    page.click("#layers .layer:nth-of-type(2) summary")
    page.wait_for_selector("#layers .layer:nth-of-type(2) tbody td")
    shown = page.locator("#layers .layer:nth-of-type(2) tbody td").all_inner_texts()
    assert [float(one) for one in shown] == pytest.approx(found["layers"][1]["totals"])
    top = client.get("/api/top", params={"test": 5, "by": "label", "per": "sample"}).json()
    page.wait_for_selector("#top .value")  # patterns come after the layers
    values = [float(v) for v in page.eval_on_selector_all("#top .value", "e => e.map(x => x.title)")]
    assert values == pytest.approx([card["value"] for card in top["cards"]])
    prediction = client.get("/api/prediction", params={"test": 5}).json()
    assert prediction["before_name"] in text(page, ".verdict")


def test_a_mask_by_a_click_and_back(opened, client):
    page = opened.page
    page.click("#mask .chip[data-group='9']")
    page.wait_for_selector(".note >> nth=1")
    found = client.get("/api/prediction", params={"test": 5, "by": "label", "g": "9"}).json()
    page.wait_for_selector(".fact:has-text('says, masked')")
    assert found["after_name"] in text(page, ".fact:has-text('says, masked')")
    if found["flipped"]:
        assert f"FLIPPED {found['before_name']} → {found['after_name']}" in text(page, ".verdict")
    assert NOTE in text(page, "#prediction")
    assert NOTE in text(page, "#mask")
    assert "g=9" in page.url
    whole = client.get("/api/mask", params={"by": "label", "g": "9"}).json()
    page.wait_for_selector(f"#mask-outcome:has-text('{whole['changed']} of 360 predictions change')")
    page.wait_for_selector("#history li")
    assert "label 9" in page.text_content("#status")
    page.go_back()
    page.wait_for_selector("#mask .chip[aria-pressed=true]", state="detached")
    assert "g=9" not in page.url


def test_hovering_a_group_marks_it_everywhere(opened):
    page = opened.page
    page.hover("#layers .bar-row[data-group='4'] >> nth=0")
    marked = page.eval_on_selector_all(".linked", "e => [...new Set(e.map(x => x.closest('section[id]').id))]")
    assert {"layers", "curves", "time", "mask"} <= set(marked)
    assert page.eval_on_selector_all(".linked", "e => e.every(x => x.dataset.group === '4')")
    page.hover("h1")
    assert page.query_selector(".linked") is None


def test_filters_and_the_confusion_matrix(opened, client):
    page = opened.page
    tests = client.get("/api/tests").json()
    pairs = [(t, p) for t, p in zip(tests["targets"], tests["predictions"], strict=True) if t != p]
    page.select_option("label.choice:has-text('verdict') select", "wrong")
    assert f"{len(pairs)} of 360" in text(page, "#browser")
    target, output = pairs[0]
    page.click(f"button[aria-label$='target {target}, output {output}']")
    assert f"{pairs.count((target, output))} of 360" in text(page, "#browser")
    page.fill("#search", "99999")
    assert "0 of 360" in text(page, "#browser")
    page.click("#browser button:has-text('Clear filters')")
    assert "360 of 360" in text(page, "#browser")
    assert page.locator("#browser [role=option]").count() < 120, "only what is in sight is in the page"


def test_a_brush_over_time_filters_the_patterns_and_masks(opened):
    page = opened.page
    box = page.locator("#time svg").bounding_box()
    page.locator("#time svg").scroll_into_view_if_needed()
    box = page.locator("#time svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 90, steps=4)
    page.mouse.up()
    page.click("#top button:has-text('each')")
    page.click("#time button:has-text('Show them in D')")
    page.wait_for_selector("#top .filters")
    steps_in_address = re.search(r"steps=(\d+)-(\d+)", page.url)
    assert steps_in_address is not None
    first, last = map(int, steps_in_address.groups())
    assert 0 < first < last < 80
    opened.quiet()
    steps = [int(s) for s in re.findall(r"step (\d+)", text(page, "#top .cards"))]
    assert steps
    assert all(first <= step < last for step in steps)
    page.click("#time button:has-text('Mask them')")
    page.wait_for_selector(f".chip:has-text('steps {first}-{last}')")
    page.click("#mask button:has-text('Reset')")
    page.click("#top button:has-text('Clear filters')")
    page.click("#top button:has-text('summed')")
    opened.quiet()


def test_ranks_from_the_curves(opened):
    page = opened.page
    page.fill("#curves input >> nth=0", "21")
    page.fill("#curves input >> nth=1", "30")
    page.click("#curves button:has-text('Show them in D')")
    page.wait_for_selector("#top .filters:has-text('from rank 21')")
    assert page.locator("#top .card").count() == 10
    page.click("#top button:has-text('Clear filters')")


def test_pins_are_compared_and_masked(opened):
    page = opened.page
    opened.quiet()
    page.click("#top .card:nth-child(1) button")
    page.wait_for_selector("#pins .pin")
    opened.quiet()
    page.click("#top .card:nth-child(2) button")
    page.wait_for_selector("#pins .pin:nth-child(2)")
    assert page.locator("#pins tbody tr").count() == 3
    page.click("#pins .pin:nth-child(1) button:has-text('Mask it')")
    page.wait_for_selector("#mask .chip:has-text('sample')")
    assert "p=" in page.url
    page.click("#mask button:has-text('Undo')")
    page.wait_for_selector("#mask .chip:has-text('sample')", state="detached")


def test_drawing_asks(opened):
    page = opened.page
    canvas = page.locator("canvas.draw")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 20, steps=12)
    page.mouse.up()
    page.wait_for_selector("#prediction canvas")
    assert "drawn=" in page.url
    page.wait_for_selector(".verdict:has-text('unknown')")
    page.click("#free button:has-text('Clear')")
    page.wait_for_selector("#prediction img")
    assert opened.errors == []


def test_the_parts_of_an_answer_are_found_when_asked_for(chromium, running, client, axe):
    with Watched(chromium, running, state="&test=5&references=0") as watched:
        page = watched.page
        assert "account of this training" in text(page, "#path .note")
        page.click("#path button:has-text('Find the parts')")
        page.wait_for_selector("#path .waterfall")
        found = client.get("/api/path", params={"test": 5, "by": "label", "references": 0}).json()["account"]
        assert found["question"] in text(page, "#path strong")
        page.click("#path summary >> nth=0")
        page.wait_for_selector("#path tbody td")
        shown = [float(one) for one in page.locator("#path figure:nth-of-type(1) tbody td").all_inner_texts()]
        assert shown == pytest.approx([*(bar["value"] for bar in found["bars"]), found["output"]])
        assert {"start", "residual"} <= {bar["kind"] for bar in found["bars"]}
        assert page.locator("#path .growth polyline").count() == 12
        assert "no prediction of what another training would give" in text(page, "#path .note")
        page.evaluate(axe)
        assert page.evaluate("axe.run('#path').then(r => r.violations.map(v => v.id))") == []
        page.click("#path .fall-group[data-group='9'] .bar-label")
        page.wait_for_selector("#mask .chip[data-group='9'][aria-pressed=true]")
        page.select_option("#path label:has-text('rather than') select", "itself")
        page.wait_for_selector("#path button:has-text('Find the parts')")
        assert "than=itself" in page.url
        assert watched.errors == []


def test_masking_by_the_keyboard_alone(chromium, running, client):
    with Watched(chromium, running, state="&test=5") as watched:
        page = watched.page
        page.keyboard.press("j")
        page.wait_for_selector("#prediction[data-shown*='\"6\"']")
        assert "test=6" in page.url
        page.keyboard.press("k")
        page.keyboard.press("[")
        page.wait_for_selector(".layer.active:has-text('layers.1')")
        page.keyboard.press("4")
        page.wait_for_selector(".chip[data-group='3'][aria-pressed=true]")
        page.wait_for_selector(".fact:has-text('says, masked')")
        page.keyboard.press("0")
        page.wait_for_selector(".fact:has-text('says, masked')", state="detached")
        page.keyboard.press("u")
        page.wait_for_selector(".chip[data-group='3'][aria-pressed=true]")
        page.keyboard.press("/")
        page.keyboard.type("12")
        assert page.input_value("#search") == "12", "keys do nothing else while somebody types"
        assert page.locator(".chip[data-group='0'][aria-pressed=true]").count() == 0
        page.keyboard.press("Tab")
        page.locator("h1").click()
        page.keyboard.press("?")
        assert page.is_visible("dialog.help")
        page.keyboard.press("Escape")
        assert not page.is_visible("dialog.help")
        page.focus("#mask .chip >> nth=0")
        page.keyboard.press("Enter")
        page.wait_for_selector(".chip[data-group='0'][aria-pressed=true]")
        page.focus("#browser [role=listbox]")
        page.keyboard.press("ArrowDown")
        assert watched.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium, running, axe, scheme):
    with Watched(chromium, running, scheme=scheme, state="&test=5&g=3&tab=group") as watched:
        page = watched.page
        page.wait_for_selector("#history li")
        page.click("#curves summary")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.evaluate(axe)
        found = page.evaluate("axe.run({resultTypes: ['violations']}).then(r => r.violations)")
        assert [(one["id"], [node["html"][:160] for node in one["nodes"][:3]]) for one in found] == []


def test_axe_can_find_something(chromium, running, axe):
    with Watched(chromium, running) as watched:
        watched.page.evaluate("document.querySelector('#prediction img').removeAttribute('alt')")
        watched.page.evaluate(axe)
        assert "image-alt" in watched.page.evaluate("axe.run().then(r => r.violations.map(v => v.id))")


@pytest.mark.parametrize("width", [360, 900, 1400])
def test_it_fits_every_width(chromium, running, width, tmp_path):
    with Watched(chromium, running, width=width, state="&test=5&g=3") as watched:
        page = watched.page
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing runs out of the page"
        small = page.evaluate(
            "[...document.querySelectorAll('button, select, summary, a.button')].filter(e => e.offsetParent && "
            "e.getBoundingClientRect().height < 24).map(e => e.outerHTML.slice(0, 80))"
        )
        assert small == [], "targets of at least 24 px"
        if width == 900:
            assert not page.is_visible("#browser")
            page.click("header button:has-text('Tests')")
            assert page.is_visible("#browser")
            page.keyboard.press("Escape")
            assert not page.is_visible("#browser")
        page.screenshot(path=tmp_path / f"{width}.png", full_page=True)


def test_the_theme_is_remembered(chromium, running):
    with Watched(chromium, running) as watched:
        page = watched.page
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("header button:has-text('Theme')")
        after = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert before != after
        page.reload()
        page.wait_for_selector("#prediction .verdict")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


def test_the_server_is_killed_in_mid_use_and_comes_back(chromium, digits):
    server = Running(digits.folder, token="fixed-token")
    port = server.socket.getsockname()[1]
    with Watched(chromium, server) as watched:
        page = watched.page
        server.stop()
        page.keyboard.press("j")
        page.wait_for_selector("#banner:has-text('The server has gone')")
        page.wait_for_selector("#prediction .failure:has-text('dualform view')")
        again = Running(digits.folder, token="fixed-token", port=port)
        try:
            page.click("#prediction .failure button")
            page.wait_for_selector("#prediction .verdict")
            assert page.is_hidden("#banner")
        finally:
            again.stop()


def test_a_failing_panel_says_why_and_can_be_tried_again(chromium, running):
    with Watched(chromium, running, state="&test=99999", wait=False) as watched:
        page = watched.page
        page.wait_for_selector("#prediction .failure:has-text('no test 99999')")
        assert page.is_visible("#prediction .failure button")
        assert page.is_visible("#browser [role=listbox]"), "the other panels go on"


def test_no_run(chromium, tmp_path):
    server = Running(tmp_path / "nothing")
    try:
        with Watched(chromium, server, wait=False) as watched:
            watched.page.wait_for_selector("pre:has-text('dualform demo')")
    finally:
        server.stop()


def test_a_slow_answer_shows_its_progress_and_can_be_cancelled(chromium, digits, monkeypatch):
    import time as clock

    from dualform.progress import bar
    from dualform.show.panels.curves import sorted_attention
    from dualform.show.viewer import routes

    slow = {"on": False}

    def wait(*arguments, **options):
        if slow["on"]:
            with bar("attending layers.2", total=400) as advance:
                for _ in range(400):
                    clock.sleep(0.02)
                    advance(1)
        return sorted_attention(*arguments, **options)

    monkeypatch.setattr(routes, "sorted_attention", wait)
    server = Running(digits.folder)
    try:
        with Watched(chromium, server) as watched:
            page = watched.page
            slow["on"] = True
            page.keyboard.press("j")
            page.wait_for_selector("#curves .stale")
            page.wait_for_selector("#curves progress[value]")
            assert "attending layers.2" in text(page, "#curves")
            page.click("#curves button:has-text('Cancel')")
            page.wait_for_selector("#curves:has-text('Cancelled')")
            slow["on"] = False
            page.click("#curves button:has-text('Ask again')")
            page.wait_for_selector("#curves svg")
    finally:
        server.stop()


def test_a_run_of_text_shows_passages_and_runs_no_script(chromium, reading):
    with Watched(chromium, reading, state="&test=2") as watched:
        page = watched.page
        page.wait_for_selector("#top .passage mark")
        assert "<script>" in text(page, "#top"), "the corpus is shown as it is"
        assert "onerror" in text(page, "#top .passage-box .muted >> nth=0"), "and so is the title of a document"
        assert page.locator("#browser .snippet").count() > 3
        page.click("#top button:has-text('More context') >> nth=0")
        page.fill("#free textarea", "the fox saw the ")
        page.click("#free button:has-text('Ask')")
        page.wait_for_selector("#prediction .passage:has-text('the fox saw the')")
        assert "prompt=" in page.url
        page.fill("#free textarea", "the ü")
        page.click("#free button:has-text('Ask')")
        page.wait_for_selector("#prediction .failure:has-text('Not in the vocabulary')")
        assert page.evaluate("window.hacked") is None
        assert [e for e in watched.errors if "400" not in e] == []


def test_a_script_in_a_label_is_shown_and_not_run(chromium, digits, tmp_path):
    import shutil

    import dualform

    nasty = "<img src=x onerror='window.hacked=1'>"
    shutil.copytree(digits.folder, tmp_path / "run", ignore=shutil.ignore_patterns("cache"))
    dualform.open(tmp_path / "run").add_media(labels=[f"{nasty}{i}" for i in range(10)])
    server = Running(tmp_path / "run")
    try:
        with Watched(chromium, server, state="&test=5") as watched:
            page = watched.page
            assert nasty in text(page, ".verdict")
            assert nasty in text(page, "#mask .chips")
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
            assert watched.errors == []
    finally:
        server.stop()


def test_the_address_is_the_state(chromium, running):
    state = "&test=7&layer=layers.0&of=magnitude&g=3&g=4&only=1&tab=negative&per=pattern&k=24"
    with Watched(chromium, running, state=state) as watched:
        page = watched.page
        assert page.locator("#top .card").count() == 24
        assert page.get_attribute("#mask button:has-text('all but these')", "aria-pressed") == "true"
        assert "only label 3, 4" in page.wait_for_selector("#mask-outcome strong").inner_text()
        shown = json.loads(page.get_attribute("#top", "data-shown"))
        assert shown == [{"test": "7"}, "layers.0"]
