"""Which steps are checked in full, and what becomes of gradients that are edited in the steps between."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dualform
from dualform.errors import RefusedError
from dualform.recording.check_schedule import FIRST_STEPS, ONE_IN, Check, CheckSchedule
from dualform.recording.gradient_samples import SAMPLE_ELEMENTS
from dualform.recording.watch import Dtype, Layers, What
from helpers.loops import gradient_of

WIDTH, LATE = 64, FIRST_STEPS + 5


def full_steps(schedule: CheckSchedule, steps: int, kind: str = "usual") -> list[int]:
    return [step for step in range(steps) if schedule.is_full(step, kind)]


def test_the_first_steps_and_about_one_in_sixteen_are_full() -> None:
    found = full_steps(CheckSchedule("sampled", 0), 16_000)
    assert found[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert len(found) == pytest.approx(16_000 / ONE_IN, rel=0.1)
    gaps = [later - earlier for earlier, later in zip(found[FIRST_STEPS:], found[FIRST_STEPS + 1 :], strict=False)]
    assert max(gaps) > ONE_IN  # random, so that nothing periodic in a training can hide between them
    assert full_steps(CheckSchedule("sampled", 1), 16_000) != found
    assert full_steps(CheckSchedule("every", 0), 50) == list(range(50))


def test_what_is_known_beforehand_is_what_is_done() -> None:
    schedule = CheckSchedule("sampled", 3)
    expected, found = [], []
    for step in range(2000):
        expected.append(schedule.next_is_full)
        found.append(schedule.is_full(step, "usual"))
        schedule.is_full(step, "usual")  # a second optimizer of the same step
    assert expected == found


def test_an_unusual_step_and_those_after_it_are_full() -> None:
    schedule = CheckSchedule("sampled", 0)
    full_steps(schedule, 100)
    assert [schedule.is_full(step, "clipped") for step in range(100, 100 + FIRST_STEPS)] == [True] * FIRST_STEPS
    assert not all(schedule.is_full(step, "usual") for step in range(120, 160))


# Planted edits -----------------------------------------------------------------------------------------------------


def drawn_after(step: int) -> int:
    """Return the first step from this one on that is checked in full, in a training of the seed below."""
    schedule = CheckSchedule("sampled", 0)
    return next(one for one in full_steps(schedule, step + 500) if one >= step)


def train(
    path: Path,
    edit: Callable[[int, nn.Linear], Tensor | None],
    *,
    steps: int = 500,
    check: Check = "sampled",
    dtype: Dtype = None,
    layers: Layers = None,
) -> tuple[nn.Linear, int]:
    """Record a training whose gradients are edited before each step; return the model, and the steps that it made."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = 0
    with dualform.record(model, optimizer, path, check=check, dtype=dtype, layers=layers):
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDTH, dtype=torch.float64)).square().mean()
            term = edit(step, model)
            (loss if term is None else loss + term).backward()
            edit(-step, model)
            optimizer.step()
            made += 1
    return model, made


def one_element(begin: int, end: int = 10_000) -> Callable[[int, nn.Linear], None]:
    """Return an edit of an element outside of the sample, in the steps from `begin` to before `end`."""
    assert WIDTH * WIDTH // SAMPLE_ELEMENTS > 1, "the second element is not in the sample"

    def edit(step: int, model: nn.Linear) -> None:
        if begin <= -step < end:
            gradient_of(model.weight)[0, 1] += 1.0

    return edit


def regulariser(begin: int) -> Callable[[int, nn.Linear], Tensor | None]:
    return lambda step, model: 1e-2 * model.weight.square().sum() if step >= begin else None


def clipping_by_value(begin: int) -> Callable[[int, nn.Linear], None]:
    def edit(step: int, model: nn.Linear) -> None:
        if -step >= begin:
            gradient_of(model.weight).clamp_(-1e-3, 1e-3)

    return edit


def steps_of(path: Path) -> int:
    return dualform.open(path).step


@pytest.mark.parametrize("begin", [3, LATE])
def test_a_change_of_all_elements_is_refused_at_once(run: Path, begin: int) -> None:
    with pytest.raises(RefusedError, match="other than one factor"):
        train(run, clipping_by_value(begin))
    assert steps_of(run) == begin


@pytest.mark.parametrize("edit", [one_element, regulariser], ids=["one element", "regulariser"])
@pytest.mark.parametrize("begin", [3, LATE])
def test_what_a_sample_does_not_show_is_refused_at_the_next_full_check(
    run: Path, edit: Callable[[int], Callable[[int, nn.Linear], Tensor | None]], begin: int
) -> None:
    with pytest.raises(RefusedError, match=r"weight.*cannot be recorded exactly"):
        train(run, edit(begin))
    assert steps_of(run) == drawn_after(begin)


@pytest.mark.parametrize("edit", [one_element, regulariser], ids=["one element", "regulariser"])
def test_with_every_step_checked_it_is_refused_at_once(
    run: Path, edit: Callable[[int], Callable[[int, nn.Linear], Tensor | None]]
) -> None:
    with pytest.raises(RefusedError, match=r"weight.*cannot be recorded exactly"):
        train(run, edit(LATE), check="every")
    assert steps_of(run) == LATE


@pytest.mark.parametrize("layers", [None, {"": "keys"}], ids=["values", "keys only"])
def test_values_in_int8_have_every_step_checked(run: Path, layers: dict[str, What] | None) -> None:
    """An edit that verify could not tell from rounding; keys alone are compared with no gradient in any step."""
    begin = next(step for step in range(LATE, 500) if drawn_after(step) > step)

    def attempt() -> int:
        return train(run, one_element(begin), steps=begin + 1, dtype="int8", layers=layers)[1]

    if layers is not None:
        assert attempt() == begin + 1
        return
    with pytest.raises(RefusedError, match=r"weight.*cannot be recorded exactly"):
        attempt()
    assert steps_of(run) == begin


def test_an_edit_between_two_full_checks_is_found_by_verify(run: Path) -> None:
    begin = next(step for step in range(LATE, 500) if drawn_after(step) > step)
    model, made = train(run, one_element(begin, begin + 1), steps=begin + 10)
    assert made == begin + 10
    assert not dualform.open(run).verify(model).passed


def infinite_element(at: int) -> Callable[[int, nn.Linear], None]:
    """Return an edit of one step that makes an element outside of the sample infinite."""

    def edit(step: int, model: nn.Linear) -> None:
        if -step == at:
            gradient_of(model.weight)[0, 1] = float("inf")

    return edit


def test_a_gradient_that_is_not_finite_is_refused_at_once_in_a_full_check(run: Path) -> None:
    with pytest.raises(RefusedError, match=r"weight.*not finite"):
        train(run, infinite_element(3))
    assert steps_of(run) == 3


def test_a_gradient_that_is_not_finite_outside_its_sample_is_noticed_in_the_next_step(run: Path) -> None:
    """Between full checks its step is recorded; the weight that it leaves makes every later gradient not finite."""
    begin = next(step for step in range(LATE, 500) if drawn_after(step) > step + 1)
    with pytest.raises(RefusedError, match=r"not finite"):
        train(run, infinite_element(begin))
    assert steps_of(run) == begin + 1


def test_a_last_gradient_that_is_not_finite_outside_its_sample_is_found_by_verify(run: Path) -> None:
    begin = next(step for step in range(LATE, 500) if drawn_after(step) > step)
    model, made = train(run, infinite_element(begin), steps=begin + 1)
    assert made == begin + 1
    assert not dualform.open(run).verify(model).passed


def test_a_factor_that_is_new_begins_full_checks(run: Path) -> None:
    begin = next(step for step in range(LATE, 500) if drawn_after(step) > step)

    def edit(step: int, model: nn.Linear) -> None:
        if -step == begin:
            model.weight.grad = gradient_of(model.weight) * 0.5
            gradient_of(model.weight)[0, 1] += 1.0

    with pytest.raises(RefusedError, match=r"weight.*cannot be recorded exactly"):
        train(run, edit)
    assert steps_of(run) == begin


def test_another_word_is_refused(run: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match='expected "sampled" or "every"'):
        dualform.record(model, torch.optim.SGD(model.parameters(), lr=0.1), run, check="never")  # type: ignore[arg-type]
