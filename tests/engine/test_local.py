"""Bounded memory: no pass ever holds more than a chunk, whatever is asked."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import dualform
from dualform import threads as threads_module
from dualform.attend import layer_plans
from dualform.attend.conditions import Condition
from dualform.attend.groups import Table
from dualform.engine import local, measures, reading, reducers
from dualform.engine.block import Block
from dualform.engine.jobs import Pass, WholeView
from dualform.engine.plain import PlainExecutor
from dualform.engine.racing import RacingBest
from dualform.engine.reading import PatternRange
from dualform.identity import products
from dualform.identity.products import attend
from dualform.store import reader
from dualform.store import stored_rows as rows_module
from dualform.store.reader import Run
from helpers.small import sgd

PATTERNS = 3000
WIDTH = 16


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Linear]:
    """A run of 3000 patterns in three shards."""
    path = tmp_path_factory.mktemp("engine") / "run"
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, path, shard_bytes=0) as recorder:
        for _ in range(3):
            recorder.annotate(sample=torch.arange(1000))
            optimizer.zero_grad()
            model(torch.randn(1000, WIDTH)).square().mean().backward()
            optimizer.step()
    return path, model


class Watch:
    """Counts the rows that are decoded at a time, and the chunks that are alive at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        real = reading.decode

        def decode(stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
            self.rows.append(len(stored))
            return real(stored, scales, dtype)

        patch.setattr(reading, "decode", decode)


QUESTIONS: dict[str, Any] = {
    "totals": lambda layer: layer.totals(by="sample"),
    "magnitudes": lambda layer: layer.totals(by="sample", of="magnitude"),
    "contributions": lambda layer: layer.totals(by="step", of="contribution"),
    "output": lambda layer: layer.output(),
    "top": lambda layer: layer.top(3),
    "top by step": lambda layer: layer.top(3, by="step"),
    "top samples": lambda layer: layer.top(3, per="sample"),
    "top contributions": lambda layer: layer.top(3, of="contribution", unit=1),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_reads_the_patterns_chunk_by_chunk(
    wide: tuple[Path, nn.Linear], question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = wide
    monkeypatch.setattr(local, "BLOCK_PATTERNS", 64)  # of passes without queries
    monkeypatch.setattr("dualform.engine.answer_cache.AnswerCache.find", lambda self, what: None)
    watch = Watch(monkeypatch)
    layer = dualform.open(path).attend(model, torch.randn(20, WIDTH), chunk_size=64)[""]
    QUESTIONS[question](layer)
    assert sum(watch.rows) >= PATTERNS
    assert max(watch.rows) <= 64


def test_the_weights_are_rebuilt_chunk_by_chunk(wide: tuple[Path, nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = wide
    watch = Watch(monkeypatch)
    monkeypatch.setattr(local, "BLOCK_PATTERNS", 50)
    memory = dualform.open(path)
    for name, weight in memory.weights().items():
        torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    assert sum(watch.rows) == 2 * PATTERNS  # keys and values
    assert max(watch.rows) <= 50


def test_many_queries_make_the_chunks_smaller(wide: tuple[Path, nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = wide
    sizes = []

    def counting_attend(queries: Tensor, keys: Tensor, out: Tensor | None) -> Tensor:
        sizes.append(queries.shape[0] * keys.shape[0])
        return attend(queries, keys, out)

    monkeypatch.setattr(measures, "attend", counting_attend)
    monkeypatch.setattr(local, "MAX_BLOCK_MEASURES", 300_000)
    monkeypatch.setattr(layer_plans, "MAX_PASS_QUERIES", 1000)
    layer = dualform.open(path).attend(queries={"": torch.randn(2500, WIDTH)})[""]
    top = layer.top(2)
    assert top.values.shape == (2500, 1, 2)
    assert max(sizes) <= 300_000
    assert sum(sizes) == 2500 * PATTERNS


def test_a_stream_holds_one_chunk_at_a_time(wide: tuple[Path, nn.Linear]) -> None:
    """The tensors of a chunk are free before the next but one is read."""
    import weakref

    run = Run(wide[0])
    alive: list[weakref.ref[Tensor]] = []
    for chunk in reading.read_blocks(run, "", horizon=3, values=True, size=100):
        alive.append(weakref.ref(chunk.keys))
        assert sum(reference() is not None for reference in alive) <= 2
    assert len(alive) == 30


def test_top_samples_hold_a_block_of_sums_at_a_time(
    wide: tuple[Path, nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = wide
    held: list[int] = []
    real = reducers.BestMembers.result

    def watched(self: reducers.BestMembers, state: Tensor) -> reducers.BestState:
        held.append(state.numel())
        return real(self, state)

    monkeypatch.setattr(reducers.BestMembers, "result", watched)
    monkeypatch.setattr(layer_plans, "MAX_PASS_QUERIES", 7)
    queries = torch.randn(30, WIDTH)
    top = dualform.open(path).attend(queries={"": queries})[""].top(2, per="sample")
    assert held == [7000, 7000, 7000, 7000, 2000]
    monkeypatch.undo()
    whole = dualform.open(path).attend(queries={"": queries})[""].top(2, per="sample")
    torch.testing.assert_close(top.values, whole.values, rtol=1e-6, atol=1e-5)
    assert model is wide[1]


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("masked", [False, True])
def test_scales_multiply_attention_as_they_would_the_keys(tmp_path: Path, masked: bool, dtype: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(model)
    with dualform.record(model, optimizer, tmp_path / "run", dtype=dtype, shard_bytes=0) as recorder:
        for step in range(3):
            recorder.annotate(sample=torch.arange(50))
            optimizer.zero_grad()
            model(10.0 ** (step - 3) * torch.randn(50, WIDTH)).square().mean().backward()
            optimizer.step()
    memory = dualform.open(tmp_path / "run")
    memory = memory.without(sample=[3, 7]) if masked else memory
    queries = torch.randn(4, WIDTH)
    found = memory.attend(queries={"": queries})[""].attention()
    table = memory._table
    keys = torch.cat([chunk.keys for chunk in reading.read_blocks(table.run, "", horizon=3, mask=table.mask)])
    assert found.shape == (4, 3 * (48 if masked else 50))
    # A scale of int8 is no power of two, so that where it is multiplied decides how a product is rounded.
    size = queries.norm(dim=1)[:, None] * keys.norm(dim=1)
    torch.testing.assert_close(found / size, queries @ keys.T / size, rtol=1e-6, atol=0 if dtype == "float16" else 2e-7)
    job = Pass(
        "", WholeView(table.run, 3), reducers.Everything(), queries, queries, measures.PatternMeasure("attention")
    )
    if not masked:
        (plain,) = PlainExecutor().run(table.run, [job])
        torch.testing.assert_close(found / size, plain / size, rtol=1e-6, atol=2e-7)


def test_blocks_fit_a_cpus_cache_and_memory(wide: tuple[Path, nn.Linear]) -> None:
    view = WholeView(Run(wide[0]), 3)

    def patterns(*shape: int) -> int:
        queries = torch.empty(shape)
        return local.block_patterns(Pass("", view, reducers.Everything(), queries, queries))

    assert patterns(40, 8) == reading.BLOCK_PATTERNS
    assert patterns(40, 400) == 20 * local.BLOCK_PATTERNS_MULTIPLE  # of 1 << 21 elements, 5242
    assert patterns(5, 800) == 20 * local.BLOCK_PATTERNS_MULTIPLE  # of twice as many, 5242
    assert patterns(1, 800) == 40 * local.BLOCK_PATTERNS_MULTIPLE  # of four times as many, 10485
    assert patterns(5, 1 << 20) == local.BLOCK_PATTERNS_MULTIPLE
    assert patterns(1 << 14, 8) == local.MAX_BLOCK_MEASURES >> 14


@pytest.mark.parametrize("view", ["whole", "masked", "early"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_keys_that_stay_on_a_device_give_the_same_answers(
    wide: tuple[Path, nn.Linear], question: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU keeps them, here in the CPU's memory: pieces go across shards, and may leave patterns out."""
    path, model = wide
    inputs = torch.randn(20, WIDTH)

    def ask() -> Any:
        memory = dualform.open(path)
        memory = memory.without(sample=[3, 5]) if view == "masked" else memory
        memory = memory.at(step=2) if view == "early" else memory
        memory = memory.where("sample % 3 = 0") if view == "masked" else memory
        found = QUESTIONS[question](memory.attend(model, inputs, chunk_size=700, other_model=True)[""])
        return found if isinstance(found, Tensor) else found.values

    monkeypatch.setattr("dualform.engine.answer_cache.AnswerCache.find", lambda self, what: None)
    plain = ask()
    monkeypatch.setattr("dualform.engine.local.fits_on_device", lambda size, device: True)
    torch.testing.assert_close(ask(), plain, rtol=1e-5, atol=1e-5)


def test_queries_that_have_the_number_of_others_get_their_own_answer_by_one_product(
    wide: tuple[Path, nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python numbers objects by their place in memory, which is used again when an object is gone."""
    memory = dualform.open(wide[0])
    asked = [{"": torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(seed))} for seed in (1, 2)]
    plain = [memory.attend(queries=queries)[""].attention() for queries in asked]
    monkeypatch.setattr("dualform.engine.local.fits_on_device", lambda size, device: True)
    memory.attend(queries=asked[0])[""].attention()  # from here on the keys lie there
    products = 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal products
        products += 1
        return attend(*arguments)

    monkeypatch.setattr(local, "attend", counted)
    monkeypatch.setattr(local, "id", lambda _: 7, raising=False)
    spotlights = [memory.attend(queries=queries)[""] for queries in asked]
    for spotlight, expected in zip(spotlights, plain, strict=True):
        torch.testing.assert_close(spotlight.attention(), expected, rtol=1e-5, atol=1e-5)
    assert products == 2


@pytest.mark.parametrize("view", ["whole", "masked", "early"])
def test_all_attention_to_keys_on_a_device_is_one_product(
    wide: tuple[Path, nn.Linear], view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU keeps them; of a view that leaves patterns out the kept ones are read as ever."""
    path, _ = wide
    memory = dualform.open(path)
    memory = memory.without(sample=[3, 5]) if view == "masked" else memory
    memory = memory.at(step=2) if view == "early" else memory
    queries = {"": torch.randn(20, WIDTH)}
    plain = memory.attend(queries=queries)[""].attention()
    monkeypatch.setattr("dualform.engine.local.fits_on_device", lambda size, device: True)
    products = 0

    def counted(*arguments: Any) -> Tensor:
        nonlocal products
        products += 1
        return attend(*arguments)

    memory.attend(queries=queries)[""].attention()  # from here on the keys lie there
    monkeypatch.setattr(local, "attend", counted)
    spotlight = memory.attend(queries=queries)[""]
    for _ in range(2):  # known the second time
        found = spotlight.attention()
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
        found.zero_()  # nobody else's
    assert products == (1 if view == "whole" else 0)
    magnitude = spotlight.totals(by="step", of="magnitude").values.sum(1)
    torch.testing.assert_close(magnitude, plain.abs().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", [range(5), [0, 4], [0, 2, 4], [1, 2, 3], [2], [0, 1, 2, 4]])
def test_ranges_are_cut_out_of_keys_on_a_device(numbers: Sequence[int]) -> None:
    """Also where the first and the last pattern are wanted, and not all between them."""
    keys, rows = torch.arange(10.0).view(5, 2), np.array(numbers)
    block = local._ReadsDevice(keys)(PatternRange(None, rows, 0, 0))
    assert torch.equal(block.keys, keys[list(numbers)])
    assert np.array_equal(block.patterns, rows)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_are_the_best_however_they_come(threads: int, largest: bool, groups: int, ties: bool) -> None:
    """Against one sort of all scores."""
    torch.manual_seed(0)
    queries, patterns, k = 7, 4000, 13
    scores = torch.randn(queries, patterns)
    scores = scores.round() if ties else scores
    scores[2] = torch.linspace(-1, 1, patterns)  # every chunk beats the ones before
    codes = torch.randint(groups, (patterns,))
    reducer = reducers.Best(groups, k, largest)
    best = RacingBest(reducer, reducer.new(scores))
    starts = list(range(0, patterns, 150))

    def prepare(start: int) -> Any:
        part = slice(start, start + 150)
        numbers = torch.arange(patterns)[part].numpy()
        return best.prepare(Block(numbers, torch.zeros(len(numbers), 1)), scores[:, part], codes[part])

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        threads_module.side_by_side(starts, prepare, best.take)
    finally:
        torch.set_num_threads(before)
    values, found = best.result()
    for group in range(groups):
        mine = scores.masked_fill(codes != group, -torch.inf if largest else torch.inf)
        expected = mine.topk(k, dim=1, largest=largest)
        torch.testing.assert_close(values[:, group], expected.values.double())
        first = mine.sort(dim=1, descending=largest, stable=True).indices[:, :k]
        assert torch.equal(found[:, group], first), "of equal scores the first, whatever the threads"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_answered_in_inference_mode_and_under_autocast(
    wide: tuple[Path, nn.Linear], question: str, threads: int
) -> None:
    path, _ = wide
    queries = {"": torch.randn(20, WIDTH)}

    def ask() -> Tensor:
        found = QUESTIONS[question](dualform.open(path).attend(queries=queries, chunk_size=100)[""])
        return found if isinstance(found, Tensor) else found.values

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        plain = ask()
        with torch.inference_mode():
            torch.testing.assert_close(ask(), plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same = ask()
        if question in ("magnitudes", "top", "top by step", "top samples"):
            torch.testing.assert_close(same, plain)
    finally:
        torch.set_num_threads(before)


@given(
    count=st.one_of(st.integers(1, 6), st.integers(7, 70)),
    keys=st.integers(0, 140),
    width=st.integers(0, 9),
    strided=st.booleans(),
    into=st.booleans(),
    own=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(count=7, keys=5, width=0, strided=False, into=False, own=False, dtype=torch.float32)
@example(count=7, keys=0, width=5, strided=False, into=False, own=False, dtype=torch.float32)
def test_attention_is_the_product_however_it_is_computed(
    count: int, keys: int, width: int, strided: bool, into: bool, own: bool, dtype: torch.dtype
) -> None:
    """Few queries are multiplied in a batch, others by oneDNN or into memory that is given; odd numbers of keys too."""
    queries = torch.randn(count, width, dtype=dtype)
    rows = torch.randn(2 * keys, width, dtype=dtype)[::2] if strided else torch.randn(keys, width, dtype=dtype)
    out = torch.empty(count * keys + 5, dtype=dtype) if into else None
    with pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setattr("dualform.identity.products._product", lambda: None)
        found = attend(queries, rows, out)
    assert found.shape == (count, keys)
    torch.testing.assert_close(found, (queries.double() @ rows.double().T).to(dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("question", QUESTIONS)
def test_torch_and_onednn_give_the_same(
    wide: tuple[Path, nn.Linear], question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = wide
    inputs = torch.randn(20, WIDTH)
    monkeypatch.setattr("dualform.engine.answer_cache.AnswerCache.find", lambda self, what: None)

    here = numbers_of(QUESTIONS[question](dualform.open(path).attend(model, inputs)[""]))
    monkeypatch.setattr("dualform.identity.products._product", lambda: None)
    again = numbers_of(QUESTIONS[question](dualform.open(path).attend(model, inputs)[""]))
    torch.testing.assert_close(again, here, rtol=1e-4, atol=1e-4)


def numbers_of(answer: Any) -> Tensor:
    """Return an answer's numbers."""
    found: Tensor = answer if isinstance(answer, Tensor) else answer.values
    return found


def test_equal_keys_have_equal_scores_in_a_short_last_chunk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which product is used goes by the pass, not by the chunk."""
    monkeypatch.setattr(products, "MAX_REUSED_SCORES", 2000)
    keys, queries = torch.randn(100, 800), torch.randn(30, 800)
    out = torch.empty(30 * 100)
    whole = attend(queries, keys, out).clone()
    assert torch.equal(attend(queries, keys[:50], out), whole[:, :50])


def test_only_wide_processors_of_others_use_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = products._product.__wrapped__
    monkeypatch.setattr("dualform.identity.products._is_intel", lambda: True)
    assert choose() is None
    monkeypatch.setattr("dualform.identity.products._is_intel", lambda: False)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert choose() is None
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        product = choose()
        assert product is not None
        rows, columns = torch.randn(30, 7), torch.randn(20, 7, requires_grad=True)
        torch.testing.assert_close(product(rows, columns), (rows @ columns.T).detach())


@pytest.mark.parametrize("question", QUESTIONS)
def test_files_that_are_read_give_what_files_that_are_mapped_give(
    wide: tuple[Path, nn.Linear], question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = wide
    inputs = torch.randn(20, WIDTH)
    monkeypatch.setattr("dualform.engine.answer_cache.AnswerCache.find", lambda self, what: None)

    def ask(masked: bool) -> Tensor:
        memory = dualform.open(path)
        memory = memory.where(sample=list(range(0, 1000, 7))) if masked else memory
        return numbers_of(QUESTIONS[question](memory.attend(model, inputs)[""]))

    mapped = [ask(False), ask(True)]
    monkeypatch.setattr(reader, "MAPPED_RUN_BYTES", 0)
    monkeypatch.setattr(reader, "MAX_OPEN_FILES", 1)
    monkeypatch.setattr(rows_module, "MAX_MEAN_GAP", 2)  # so that the masked ones are scattered, and taken from a map
    for one, other in zip([ask(False), ask(True)], mapped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 5, 100])
def test_sums_of_many_scores_are_taken_in_parts(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    scores, codes = torch.randn(4, 1000), torch.randint(groups, (1000,))
    chunk = Block(torch.arange(1000).numpy(), torch.randn(1000, 3))
    expected = torch.zeros(4, groups, dtype=torch.float64).index_add_(1, codes, scores.double())
    keys = torch.zeros(groups, 3, dtype=torch.float64).index_add_(0, codes, chunk.keys.double())
    for long in (1 << 19, 64):
        monkeypatch.setattr(reducers, "FLOAT32_SUM_MEASURES", long)
        monkeypatch.setattr(reducers, "FLOAT32_SUM_KEYS", long)
        sums = reducers.GroupSums(groups)
        found = sums.add(sums.new(scores), chunk, scores, codes)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        of_keys = reducers.KeySums(groups, 3)
        found = of_keys.add(of_keys.new(scores), chunk, scores[:0], codes)
        torch.testing.assert_close(found, keys, rtol=1e-5, atol=1e-5)


def test_several_threads_ask_one_executor(wide: tuple[Path, nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the viewer does: what is remembered for one thread is not torn by another."""
    monkeypatch.setattr(local, "MAX_REMEMBERED_BYTES", 40_000)  # of which each answer takes 24,000
    path, _ = wide
    memory = dualform.open(path)

    def ask(seed: int) -> bool:
        queries = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        layer = memory.attend(queries={"": queries})[""]
        keys = torch.cat([part.rows("", "keys").take(slice(None))[0] for part in Run(path).parts()])
        best = layer.top(3).values[:, 0]
        return torch.allclose(best, (queries @ keys.T).topk(3, dim=1).values, rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(40)))


def test_views_whose_conditions_only_python_takes_for_equal(wide: tuple[Path, nn.Linear]) -> None:
    one, other = (Table(Run(wide[0]), (Condition(None, (("task", value),)),), 3) for value in (1, True))
    assert one.conditions == other.conditions
    assert one.key != other.key


def test_a_reducer_that_looks_at_values_gets_them_beside_a_measure(wide: tuple[Path, nn.Linear]) -> None:
    """Measures that are remembered are not enough for it."""
    source, queries = Run(wide[0]), torch.randn(2, WIDTH)
    measure = measures.PatternMeasure("attention")
    job = Pass("", WholeView(source, 3), reducers.Outputs(1, WIDTH), queries, queries, measure, values=True)
    found, plain = (executor.run(source, [job])[0] for executor in (local.LocalExecutor(), PlainExecutor()))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
