"""The page on models that a newcomer trains: a CNN, and language models whose texts are in a tokenizer's pieces."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dualform
from dualform.errors import QueryError
from dualform.show.panels.examples import example_snippets
from dualform.show.panels.hints import annotation_hints
from dualform.show.panels.overview import run_overview
from dualform.show.session import Session
from dualform.show.session_media import as_images
from dualform.show.tokenizers import load_tokenizer
from dualform.show.viewer.parameters import BadQuestion, RequestParameters
from helpers.served import Running
from helpers.small_models import letters, record_pictures

STORY = "the fox saw the grapes and the crow saw the fox and the crow was sad " * 4
SLOW_MACHINE_MS = 120_000.0  # to wait for something on a page; 30 s are the browser's own
OUT_OF_SIGHT = """() => [...document.querySelectorAll('main *, aside *, nav *, header *')].filter((one) =>
  one.getClientRects().length && !one.closest('.table-box, pre, .visually-hidden, .tests-inner, .skip')
  && getComputedStyle(one).clipPath === 'none' && one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 90))"""


class Opened:
    """A page in a browser whose errors are kept."""

    def __init__(self, browser: Any, server: Running, width: int, state: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, reduced_motion="reduce")
        self.context.set_default_timeout(SLOW_MACHINE_MS)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("response", lambda one: self.errors.append(one.url) if one.status >= 400 else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(server.address + state)
        self.page.wait_for_selector("body[data-ready=all]")

    def fits(self, width: int) -> bool:
        """Say whether nothing has to be scrolled for sideways, and nothing is cut."""
        assert self.page.evaluate(OUT_OF_SIGHT) == []
        found: int = self.page.evaluate("document.documentElement.scrollWidth")
        return found <= width


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:  # tmp_path first: its run goes after server and page
    servers: list[Running] = []

    def serve(folder: Path, **options: Any) -> Running:
        servers.append(Running(folder, **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.stop()


@pytest.fixture
def look(chromium: Any, serve: Callable[..., Running]) -> Iterator[Callable[..., Opened]]:
    """Open pages, which are closed before their server ends, and before the server's run is removed."""
    opened: list[Opened] = []

    def look(server: Running, *, width: int = 1400, state: str = "") -> Opened:
        opened.append(Opened(chromium, server, width, state))
        return opened[-1]

    yield look
    found = [error for one in opened for error in one.errors]  # a page that is closed may tell of what it still asked
    for one in opened:
        one.context.close()
    assert found == []


@pytest.fixture(scope="module")
def pictures_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server on a run of a CNN that keeps no images."""
    folder = tmp_path_factory.mktemp("cnn") / "run"
    record_pictures(folder)
    server = Running(folder)
    yield server
    server.stop()


def test_inputs_that_look_like_images_are_shown_as_such() -> None:
    grey = torch.linspace(-2, 2, 2 * 16).reshape(2, 1, 4, 4)
    shown = as_images(grey)
    assert shown is not None
    assert shown.dtype == torch.uint8
    assert (int(shown[0, 0, 0]), int(shown[1, 3, 3])) == (0, 255)
    colours = as_images(torch.rand(3, 3, 5, 6))
    assert colours is not None
    assert colours.shape == (3, 5, 6, 3)
    assert as_images(torch.zeros(2, 1, 4, 4)) is not None, "also where all pixels are the same"
    for other in ((2, 16), (2, 2, 8, 8), (2, 1, 2, 8), (2, 1, 8, 600), (0, 1, 8, 8), (2, 8, 8)):
        assert as_images(torch.zeros(*other)) is None, other


def test_the_run_says_what_it_lacks(tmp_path: Path, pictures_run: Running, serve: Callable[..., Running]) -> None:
    with pictures_run.client() as client:
        run = client.get("/api/run").json()
        assert (run["kind"], run["shows_inputs"], run["shape"]) == ("image", True, [6, 6])
        assert "recorder.media(images=pixels)" in run["hints"]["top"]["code"]
        assert client.get("/media/test/2.png").headers["content-type"] == "image/png"
    model = record_pictures(tmp_path / "bare", annotate=False)
    memory = dualform.open(tmp_path / "bare")
    memory.add_tests(torch.randn(3, 1, 6, 6))
    with serve(tmp_path / "bare", model="helpers.small_models:pictures").client() as client:
        hints = client.get("/api/run").json()["hints"]
    assert "annotate(sample=ids, label=labels)" in hints["layers"]["code"]
    assert "annotate(sample=ids)" in hints["top"]["code"]
    assert "recorder.tests(inputs, targets)" in hints["tests"]["code"]
    assert "prediction" not in hints
    assert Session(memory, model, budget=1 << 20).shows_inputs


class Pieces:
    """A tokenizer of two signs each."""

    signs = sorted({STORY[i : i + 2] for i in range(len(STORY) - 1)})

    def __len__(self) -> int:
        return len(self.signs)

    def encode(self, text: str) -> list[int]:
        return [self.signs.index(text[i : i + 2]) for i in range(0, len(text) - 1, 2)]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.signs[token] for token in tokens)


def test_a_tokenizer_says_what_tokens_are_where_no_text_is_kept(tmp_path: Path) -> None:
    tokenizer = Pieces()
    tokens = torch.tensor(tokenizer.encode(STORY))
    model = letters(len(tokenizer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.tests(tokens[:24].reshape(3, 8))
        recorder.annotate(token=tokens[:24].reshape(3, 8))
        torch.nn.functional.cross_entropy(model(tokens[:24].reshape(3, 8)).flatten(0, 1), tokens[1:25]).backward()
        optimizer.step()
    session = Session(dualform.open(tmp_path / "run"), model, budget=1 << 20, tokenizer=tokenizer)
    run = run_overview(session)
    assert (run.kind, run.prompt) == ("text", True)
    assert example_snippets(session, 1, 1).texts == [tokenizer.decode(tokens[8:16].tolist())]
    assert session.name(3) == Pieces.signs[3]
    asked = RequestParameters([("prompt", "the fox saw ")]).subject(session)
    assert asked.inputs.tolist() == [tokenizer.encode("the fox saw ")]
    assert "place" in run.hints["top"].code
    without = Session(dualform.open(tmp_path / "run"), model, budget=1 << 20)
    assert "--tokenizer" in annotation_hints(without)["top"].code
    with pytest.raises(BadQuestion, match="--tokenizer"):
        RequestParameters([("prompt", "the fox saw ")]).subject(without)


def test_tokenizers_are_loaded_by_name_only_if_they_are_some() -> None:
    assert load_tokenizer(f"{__name__}:Pieces").encode("the ") == Pieces().encode("the ")
    with pytest.raises(QueryError, match=r"expected package\.module:name, a file tokenizer\.json, or a folder"):
        load_tokenizer("letters")
    with pytest.raises(QueryError, match="cannot be loaded"):
        load_tokenizer(__file__)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 390])
def test_a_cnn(look: Callable[..., Opened], pictures_run: Running, width: int) -> None:
    opened = look(pictures_run, width=width, state="&test=2&references=2")
    page = opened.page
    assert page.evaluate("document.querySelector('#prediction img').naturalWidth") == 6
    assert "the input itself" in page.inner_text("#prediction")
    assert page.locator("#browser [role=option] img").count() == 9
    assert "recorder.media(images=pixels)" in page.inner_text("#top .hint")
    assert page.locator("#layers .layer").count() == 3
    if page.query_selector("#path .start") is not None:
        page.click("#path .start")
    page.wait_for_selector("#path .waterfall")
    page.click("#mask .chip[data-group='1']")
    page.wait_for_selector("#mask-outcome:has-text('predictions change')")
    assert opened.fits(width)


@pytest.mark.browser
def test_the_tour_has_four_steps_and_does_not_come_back(
    look: Callable[..., Opened], pictures_run: Running, axe: str
) -> None:
    opened = look(pictures_run, width=390, state="&tour=1")
    page = opened.page
    page.wait_for_selector("dialog.tour")
    page.evaluate(axe)
    titles = []
    for step in range(4):
        titles.append(page.inner_text("dialog.tour h2"))
        assert f"{step + 1} of 4" in page.inner_text("dialog.tour")
        assert page.evaluate("document.activeElement.id") == "tour-title", "a screen reader reads the new step"
        assert page.locator(".touring").count() == 1
        assert page.evaluate("axe.run('dialog.tour').then(r => r.violations.map(v => v.id))") == []
        assert opened.fits(390)
        page.keyboard.press("Tab")
        if step:
            page.keyboard.press("Tab")  # past the button that goes back
        page.keyboard.press("Enter")
    assert len(set(titles)) == 4
    page.wait_for_selector("dialog.tour", state="detached")
    assert page.query_selector(".touring") is None
    assert page.evaluate("localStorage.getItem('dualform-tour')") == "seen"
    page.keyboard.press("?")
    page.click("dialog.help button:has-text('Show the tour')")
    page.wait_for_selector("dialog.tour")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.tour", state="detached")


@pytest.mark.browser
def test_a_first_visit_has_a_tour_and_a_second_has_none(chromium: Any, pictures_run: Running) -> None:
    context = chromium.new_context()
    context.add_init_script("Object.defineProperty(navigator, 'webdriver', { get: () => false })")
    page = context.new_page()
    page.goto(pictures_run.address)
    page.click("dialog.tour button:has-text('Skip the tour')")
    page.goto(pictures_run.address)
    page.wait_for_selector("body[data-ready=all]")
    assert page.query_selector("dialog.tour") is None
    context.close()


# Language models of transformers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of transformers with 24 pieces, made of the story."""
    transformers = pytest.importorskip("transformers", reason="pip install -c constraints.txt '.[transformers]'")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator([STORY], tokenizers.trainers.BpeTrainer(vocab_size=24, show_progress=False))
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def record_language(folder: Path, model: str, tokenizer: Any, *, text: bool) -> None:
    """Record a small language model of transformers, with or without its text."""
    from helpers import hugging_face

    torch.manual_seed(0)
    tokens = torch.tensor(tokenizer.encode(STORY))
    made = getattr(hugging_face, model)()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    with dualform.record(made, optimizer, folder, factory=f"helpers.hugging_face:{model}") as recorder:
        starts = torch.arange(4) * 9
        recorder.tests(torch.stack([tokens[start : start + 8] for start in starts.tolist()]), tokens[starts + 8])
        for step in range(6):
            places = (torch.arange(4)[:, None] * 11 + step * 5 + torch.arange(8)) % (len(tokens) - 1)
            recorder.annotate(token=tokens[places], **({"place": places} if text else {}))
            optimizer.zero_grad()
            positions = torch.arange(8).repeat(4, 1)  # a row for each, or positions would belong to no row
            made(input_ids=tokens[places], position_ids=positions, labels=tokens[places]).loss.backward()
            optimizer.step()
    if text:
        corpus = dualform.Corpus.from_tokens(tokens, tokenizer=tokenizer, documents=[(0, "A fox")])
        dualform.open(folder).add_corpus(corpus)


@pytest.mark.browser
@pytest.mark.parametrize(("model", "text", "width"), [("llama", True, 1400), ("gpt2", False, 390), ("gpt2", True, 390)])
def test_a_language_model_by_its_tokenizer(
    serve: Callable[..., Running],
    look: Callable[..., Opened],
    tmp_path: Path,
    tokenizer_folder: Path,
    model: str,
    text: bool,
    width: int,
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    record_language(tmp_path / "run", model, tokenizer, text=text)
    opened = look(serve(tmp_path / "run", tokenizer=str(tokenizer_folder)), width=width, state="&test=1")
    page = opened.page
    wanted = tokenizer.decode(tokenizer.encode(STORY)[9:17])
    page.wait_for_selector("#prediction .passage")
    assert page.inner_text("#prediction .passage").strip() == wanted.strip()
    assert page.locator("#layers .layer").count() == 6, "the last layers of many"
    page.click("#layers button:has-text('Show all')")
    assert page.locator("#layers .layer").count() > 12
    if text:
        assert page.locator("#top .passage mark").count() > 0
        assert "A fox" in page.inner_text("#top")
    else:
        assert "recorder.annotate(place=places" in page.inner_text("#top .hint")
    if not page.is_visible("#free textarea"):
        page.click("#free summary")
    page.fill("#free textarea", "the crow saw")
    page.click("#free button:has-text('Ask')")
    page.wait_for_selector("#prediction .passage:has-text('the crow saw')")
    page.wait_for_selector("[aria-busy=true]", state="detached")
    assert opened.fits(width)
