"""Imports go one way, recording -> engine -> effects -> attend -> show -> experiments -> cli; mathematics is beside.

The store stands beside the engine: it writes what a recording hands over and gives it to the engine as a source. Only
`opening.py`, which puts a store and a memory together, `replaying`, which records a training and runs it again, and the
public names import it.

Names of modules in strings count as imports: a module that is loaded by its name is imported all the same. And torch
comes late.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import dualform

SOURCE = Path(dualform.__file__).parent
PURE = {
    "binning",
    "corpus",
    "drawing",
    "errors",
    "identity",
    "indexing",
    "lazy",
    "logits",
    "modes",
    "named_code",
    "pieces",
    "printable",
    "progress",
    "threads",
    "tokens",
    "torch_modes",
    "_version",
}
STAGES = ("recording", "store", "engine", "replaying", "effects", "attend", "show", "experiments", "cli")
MAY_IMPORT: Mapping[str, set[str]] = {
    "binning": {"errors", "lazy"},
    "corpus": {"errors", "pieces", "tokens"},
    "drawing": set(),
    "identity": {"errors", "torch_modes"},
    "indexing": {"errors"},
    "errors": set(),
    "lazy": set(),
    "logits": {"errors"},
    "modes": {"torch_modes"},
    "named_code": {"errors", "printable"},
    "pieces": {"errors", "tokens"},
    "printable": set(),
    "progress": {"printable"},
    "threads": {"torch_modes"},
    "tokens": set(),
    "torch_modes": set(),
    "_version": set(),
    "recording": PURE,
    "engine": PURE | {"recording"},
    "store": PURE | {"recording", "engine"},
    "replaying": PURE | {"recording", "engine", "store"},
    "effects": PURE | {"recording", "engine"},
    "attend": PURE | {"recording", "engine", "effects"},
    "opening": {"errors", "recording", "store", "engine", "replaying", "attend"},
    "show": PURE | {"recording", "engine", "effects", "attend", "opening"},
    "experiments": PURE | {"recording", "engine", "effects", "attend", "opening", "show"},
    "integrations": {"errors", "recording"},  # and the public names, as a user's program has them
    "cli": PURE | {"recording", "engine", "effects", "attend", "opening", "show", "experiments"},
    "__main__": {"cli"},
    "__init__": PURE
    | {
        "recording",
        "store",
        "replaying",
        "effects",
        "attend",
        "show",
        "opening",
    },  # when asked for; show registers itself
}
COMPARED = {"dualform.show.model_loading": {"dualform.experiments.models"}}
"""Names of modules that a file only compares with: a run may name a factory of that package without being trusted."""


def part_of(module: str) -> str:
    """Return the part of the house that a module of ours belongs to: "dualform.store.writer" -> "store"."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(source: str, package: str) -> set[str]:
    """Return the modules of ours that a file imports, at any depth, type checking and imports by name included.

    Args:
        source: the file's text.
        package: the dotted package that the file is in, to resolve relative imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"(dualform(\.\w+)*\.?)(:\w*)?", node.value)  # also the beginning of an f-string
            found |= {named[1].rstrip(".")} if named else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            found |= {f"{base}.{alias.name}" for alias in node.names}  # the module may be the last name
    return {name for name in found if name.startswith("dualform.") and not name.endswith("__version__")}


def violations(files: Mapping[str, str]) -> list[str]:
    """Return which files import what they may not, by dotted module name."""
    wrong = []
    for module, source in files.items():
        part = part_of(module)
        package = module.rpartition(".")[0] or module
        others = {part_of(name) for name in imported(source, package) - COMPARED.get(module, set())}
        wrong += [f"{module} imports {other}" for other in others - MAY_IMPORT[part] - {part}]
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
    assert {part_of(module) for module in files} >= {*STAGES, "identity", "errors"}
    assert violations(files) == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("dualform.recording.hooks", "from dualform.store.writer import DiskWriter", "store"),
        ("dualform.recording.hooks", "import dualform.attend.memory", "attend"),
        ("dualform.recording.hooks", "def late():\n    from dualform import cli", "cli"),
        ("dualform.recording.hooks", "from dualform import store", "store"),
        ("dualform.recording.hooks", "from ..store import writer", "store"),
        ("dualform.recording.layers.linear", "from ...store import writer", "store"),
        ("dualform.store.writer", "if TYPE_CHECKING:\n    from dualform.attend.memory import Memory", "attend"),
        ("dualform.attend.memory", "from dualform.experiments import images", "experiments"),
        ("dualform.attend.memory", "from dualform.store.reader import Run", "store"),
        ("dualform.attend.text", 'import_module("dualform.store.corpus_files")', "store"),
        ("dualform.engine.local", "def late():\n    from dualform.store import reader", "store"),
        ("dualform.attend.memory", "from dualform.replaying.replay_executor import ReplayExecutor", "replaying"),
        ("dualform.show.viewer.opened", "from dualform.store.manifest import Manifest", "store"),
        ("dualform.experiments.demo", "from dualform.store.format import MANIFEST", "store"),
        ("dualform.cli.run_commands", "from ..store.reader import Run", "store"),
        ("dualform.identity.families.scalar", "from dualform.recording import optimizers", "recording"),
        ("dualform.logits", "from dualform.identity.families import derive", "identity"),
        ("dualform.identity.parameter_use", "from dualform.recording.layers import LayerKind", "recording"),
        ("dualform.store.writer", "from dualform.experiments import images", "experiments"),
        (
            "dualform.show.input_answers",
            "from dualform.experiments.image_training import train_classifier",
            "experiments",
        ),
        ("dualform.experiments.demo", "from dualform.cli import main", "cli"),
        ("dualform.integrations.lightning", "from dualform.store.reader import Run", "store"),
        ("dualform.recording.unwrap", "from dualform.integrations import accelerate", "integrations"),
        ("dualform.attend.spotlight", 'import_module("dualform.show.report.notebook").spotlight_html', "show"),
        ("dualform.attend.spotlight", 'NOTEBOOK = "dualform.show.report.notebook"', "show"),
        ("dualform.attend.spotlight", 'import_module(f"dualform.show.{name}")', "show"),
        ("dualform.store.writer", 'FACTORY = "dualform.experiments.models:mlp"', "experiments"),
        ("dualform.show.terminal_tables", 'OWN = "dualform.experiments.models"', "experiments"),
    ],
)
def test_the_check_can_fail(module: str, source: str, wrong: str) -> None:
    assert violations({module: source}) == [f"{module} imports {wrong}"]


def test_the_check_lets_the_right_direction_pass() -> None:
    files = {
        "dualform.store.writer": "from dualform.recording.sinks import Sink\nfrom dualform.store import format",
        "dualform.cli.questions": "from dualform import attend, experiments, show\nfrom . import options",
        "dualform.recording.hooks": "from dualform import __version__\nimport dualformer.store",
        "dualform.recording.layers": "raise ValueError('dualform.show is a folder')",
        "dualform.show.model_loading": "OWN = 'dualform.experiments.models'",
    }
    assert violations(files) == []


def web_importers(files: Mapping[str, str]) -> list[str]:
    """Return the modules outside of the viewer that import it."""
    outside = {module: source for module, source in files.items() if not module.startswith("dualform.show.viewer")}
    found = {module: imported(source, module.rpartition(".")[0]) for module, source in outside.items()}
    return sorted(m for m, names in found.items() if any(n.startswith("dualform.show.viewer") for n in names))


def test_only_the_command_line_imports_the_web_application() -> None:
    assert web_importers(our_files()) == ["dualform.cli.page_commands"]


@pytest.mark.parametrize(
    "line", ["from dualform.show.viewer.routes import questions", "from dualform.show import viewer"]
)
def test_the_check_of_the_web_application_can_fail(line: str) -> None:
    assert web_importers({"dualform.show.report.section": line}) == ["dualform.show.report.section"]


def test_importing_dualform_imports_no_torch() -> None:
    script = "import dualform, sys; assert dualform.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    seen = "import dualform, sys; dualform.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen], check=False).returncode == 1  # the check can fail


def test_no_framework_is_imported_unless_its_integration_is() -> None:
    frameworks = "{'transformers', 'lightning', 'pytorch_lightning', 'accelerate', 'datasets', 'peft', 'trl'}"
    names = "; ".join(f"dualform.{name}" for name in dualform.__all__)
    script = f"import dualform, dualform.integrations, sys; {names}; sys.exit(bool({frameworks} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_public_names_are_few_and_there() -> None:
    assert len(dualform.__all__) < 26
    for name in dualform.__all__:
        assert getattr(dualform, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        _ = dualform.recrod
