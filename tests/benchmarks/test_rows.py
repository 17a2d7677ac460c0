"""Every row of the benchmark suite works, at tiny sizes; what it measures then means nothing and is not looked at."""

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXTRAS = ("duckdb", "matplotlib", "sklearn", "starlette")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Let `benchmarks` be found, whose folder is beside `tests`, and leave the path as it was."""
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What `scripts/bench --quick` writes; what needs a Python of its own is left out."""
    from benchmarks.__main__ import import_families, main
    from benchmarks.rows import ordered

    import_families()
    folder = tmp_path_factory.mktemp("bench")
    slow = ("memory", "help", "import", "recurrent")
    names = [row.name for row in ordered() if "cpu" in row.goals and not row.name.startswith(slow)]
    only = [part for name in names for part in ("--only", name)]
    with pytest.MonkeyPatch.context() as patch:
        for extra in EXTRAS:  # a GPU machine may have none of these
            patch.setitem(sys.modules, extra, None)
        assert main(["--quick", *only, "--folder", str(folder), "--json", str(folder / "quick.json")]) == 0
    assert [path.name for path in folder.iterdir()] == ["quick.json"]  # every run that was made is gone
    found: dict[str, dict[str, object]] = json.loads((folder / "quick.json").read_text())["rows"]
    assert list(found) == names
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # layers that are left out on purpose
def test_every_row_is_measured(measured: dict[str, dict[str, object]]) -> None:
    for name, result in measured.items():
        if result["skipped"]:
            assert "peers.txt" in str(result["skipped"]), name
        else:
            assert math.isfinite(float(str(result["value"]))), name
            assert result["failure"] == "", name


def test_the_page_names_every_row_and_every_miss(tmp_path: Path) -> None:
    from benchmarks.__main__ import import_families
    from benchmarks.report import Result, machine, merged, page
    from benchmarks.rows import ordered

    import_families()
    rows = [row for row in ordered() if "cpu" in row.goals]
    results = [Result(row.name, value=-1.0) for row in rows]
    found = merged(tmp_path / "cpu.json", machine(torch.device("cpu")), results, keep=False)
    (tmp_path / "cpu.json").write_text(json.dumps(found))
    text = page(tmp_path, ordered())
    for row in rows:
        assert f"| `{row.name}` |" in text
        missed = row.goals["cpu"].met(-1.0) is False
        assert bool(re.search(rf"^- `{row.name}`: \S", text, re.MULTILINE)) == missed


def test_rows_that_were_not_measured_again_are_kept(tmp_path: Path) -> None:
    from benchmarks.report import Result, merged

    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(merged(path, {}, [Result("a", 1.0), Result("b", 2.0)], keep=True)))
    again = merged(path, {}, [Result("b", 3.0)], keep=True)["rows"]
    assert (again["a"]["value"], again["b"]["value"]) == (1.0, 3.0)
    assert list(merged(path, {}, [Result("b", 3.0)], keep=False)["rows"]) == ["b"]


def test_rows_that_are_kept_from_another_machine_say_so(tmp_path: Path) -> None:
    from benchmarks.report import Result, merged

    path = tmp_path / "cpu.json"
    one, other = ({"processor": name, "gpu": None, "torch": "2.13", "date": "2026"} for name in ("one", "other"))
    path.write_text(json.dumps(merged(path, one, [Result("a", 1.0), Result("b", 2.0)], keep=True)))
    assert "measured on" not in merged(path, one, [], keep=True)["rows"]["a"]["detail"]
    path.write_text(json.dumps(merged(path, other, [Result("b", 3.0)], keep=True)))
    assert merged(path, other, [], keep=True)["rows"]["a"]["detail"] == {"measured on": "one, torch 2.13, 2026"}
    again = merged(path, one, [], keep=True)["rows"]
    assert again["a"]["detail"] == {"measured on": "one, torch 2.13, 2026"}
    assert again["b"]["detail"] == {"measured on": "other, torch 2.13, 2026"}


def test_top_patterns_that_are_no_ties_are_told_apart() -> None:
    from benchmarks.families.topk import compare

    keys, queries = torch.eye(3), torch.tensor([[3.0, 2.0, 2.0]])
    scores = torch.tensor([[3.0, 2.0]])
    assert compare(torch.tensor([[0, 1]]), scores, torch.tensor([[0, 2]]), queries=queries, keys=keys) == 2
    with pytest.raises(AssertionError, match="no ties"):
        compare(torch.tensor([[1, 2]]), scores, torch.tensor([[0, 1]]), queries=queries, keys=keys)
