"""Write a report of a memory to a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dualform.attend.memory import Memory
from dualform.errors import QueryError, StoreError
from dualform.show.grouping import GroupingColumns, default_by
from dualform.show.model_loading import Loaded, load_model
from dualform.show.panels.path_account import account_tests
from dualform.show.report.build import build_report, choose_tests
from dualform.show.session import Session


@dataclass(frozen=True, slots=True)
class Written:
    """A report that was written."""

    path: str
    tests: int
    bytes: int
    warnings: tuple[str, ...] = ()  # which parts of the model are not those of the recording


def write_report(
    memory: Memory,
    path: Path,
    *,
    tests: int | Sequence[int] = 12,
    by: GroupingColumns | None = None,
    media: bool = True,
    most_mb: float = 3.0,
    model: str | nn.Module | None = None,
    budget: int = 512 << 20,
    accept_untrained: bool = False,
    trust: bool = False,
    path_contributions: bool = True,
) -> Written:
    """Write a report on a number of tests that are chosen, or on the tests with these numbers.

    Where answers come from (`path_contributions`) takes a pass over all steps with the gradients of all tests.
    """
    if isinstance(model, nn.Module):
        differs = memory.other_model_text(model)
        loaded = Loaded(model, (f"WARNING: {differs}",) if differs else ())
    else:
        loaded = load_model(memory, model, accept_untrained=accept_untrained, trust=trust)
    session = Session(memory, loaded.model, budget=budget, warnings=loaded.warnings)
    if not len(session.tests):
        raise QueryError(f"{memory.location} keeps no test examples to report on. Add some with memory.add_tests.")
    chosen = choose_tests(session, tests) if isinstance(tests, int) else list(tests)
    for test in chosen:
        session.test(test)  # raises if there is no test of this number
    columns = by or default_by(memory)
    paths = account_tests(session, chosen, columns) if path_contributions else None
    most_bytes = int(most_mb * 1_000_000)
    page = build_report(session, tests=chosen, by=columns, media=media, most_bytes=most_bytes, paths=paths)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}.") from error
    return Written(str(path), page.count('<section class="test"'), len(page.encode()), loaded.warnings)
