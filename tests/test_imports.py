"""Imports go one way, record -> store -> attend -> show, with pure mathematics beside them; and torch comes late."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import dualform

SOURCE = Path(dualform.__file__).parent
PURE = {
    "algebra",
    "coefficients",
    "errors",
    "forms",
    "lazy",
    "modes",
    "printable",
    "progress",
    "threads",
    "tokens",
    "torch_modes",
    "_version",
}
STAGES = ("record", "store", "attend", "show", "experiments")
MAY_IMPORT: Mapping[str, set[str]] = {
    "algebra": set(),
    "forms": {"errors"},
    "errors": set(),
    "lazy": set(),
    "modes": {"torch_modes"},
    "printable": set(),
    "progress": {"printable"},
    "threads": {"torch_modes"},
    "tokens": set(),
    "torch_modes": set(),
    "_version": set(),
    "coefficients": {"errors", "algebra", "forms", "torch_modes"},
    "record": PURE,
    "store": PURE | {"record"},
    "attend": PURE | {"record", "store"},
    "experiments": PURE | {"record", "store", "attend", "show"},  # beside show: each uses the other
    "show": PURE | {"record", "store", "attend", "experiments"},
    "__main__": {"show"},
    "__init__": PURE | {"record", "store", "attend"},  # by name, when asked for
}


def part_of(module: str) -> str:
    """Return the part of the house that a module of ours belongs to: "dualform.store.writer" -> "store"."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(source: str, package: str) -> set[str]:
    """Return the parts of the house that a file imports, at any depth, type checking included.

    Args:
        source: the file's text.
        package: the dotted package that the file is in, to resolve relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            # `from dualform import store` imports a part by its name.
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "dualform" else {base}
    ours = {name for name in found if name.startswith("dualform.") and not name.endswith("__version__")}
    return {part_of(name) for name in ours}


def violations(files: Mapping[str, str]) -> list[str]:
    """Return which files import what they may not, by dotted module name."""
    wrong = []
    for module, source in files.items():
        part = part_of(module)
        package = module.rpartition(".")[0] or module
        wrong += [f"{module} imports {other}" for other in imported(source, package) - MAY_IMPORT[part] - {part}]
    return sorted(wrong)


def our_files() -> dict[str, str]:
    files = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)
        files["dualform" if module == "dualform.__init__" else module] = path.read_text(encoding="utf-8")
    return files


def test_imports_go_one_way() -> None:
    files = our_files()
    assert {part_of(module) for module in files} >= {*STAGES, "algebra", "coefficients", "errors"}
    assert violations(files) == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("dualform.record.hooks", "from dualform.store.writer import DiskWriter", "store"),
        ("dualform.record.hooks", "import dualform.attend.memory", "attend"),
        ("dualform.record.hooks", "def late():\n    from dualform.show import cli", "show"),
        ("dualform.record.hooks", "from dualform import store", "store"),
        ("dualform.record.hooks", "from ..store import writer", "store"),
        ("dualform.record.layers.linear", "from ...store import writer", "store"),
        ("dualform.store.writer", "if TYPE_CHECKING:\n    from dualform.attend.memory import Memory", "attend"),
        ("dualform.attend.memory", "from dualform.experiments import images", "experiments"),
        ("dualform.coefficients.scalar", "from dualform.record import optimizers", "record"),
        ("dualform.algebra", "from dualform.coefficients import derive", "coefficients"),
        ("dualform.store.writer", "from dualform.experiments import images", "experiments"),
    ],
)
def test_the_check_can_fail(module: str, source: str, wrong: str) -> None:
    assert violations({module: source}) == [f"{module} imports {wrong}"]


def test_the_check_lets_the_right_direction_pass() -> None:
    files = {
        "dualform.store.writer": "from dualform.record.sinks import Sink\nfrom dualform.store import format",
        "dualform.show.cli": "from dualform import attend, experiments\nfrom . import tables",
        "dualform.record.hooks": "from dualform import __version__\nimport dualformer.store",
    }
    assert violations(files) == []


def test_importing_dualform_imports_no_torch() -> None:
    script = "import dualform, sys; assert dualform.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    seen = "import dualform, sys; dualform.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen], check=False).returncode == 1  # the check can fail


def test_public_names_are_few_and_there() -> None:
    assert len(dualform.__all__) < 15
    for name in dualform.__all__:
        assert getattr(dualform, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        _ = dualform.recrod
