"""The pages of refusals and messages leave none out, and each refusal says what to do."""

import ast
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import dualform
from dualform import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dualform"
PASS_ON = {
    "recording/changes.py": 2,
    "recording/joint_preparation.py": 1,
    "recording/parameter_facts.py": 1,
    "recording/share_fold.py": 1,
    "recording/step_recorder.py": 1,
    "replaying/replay_sink.py": 2,
}
"""How many errors of a module only repeat a text that is listed where it is written: `RefusedError(str(error))`."""


@pytest.fixture(scope="module")
def registry() -> ModuleType:
    """scripts/messages.py, which is no part of a package."""
    found = importlib.util.spec_from_file_location("messages", ROOT / "scripts" / "messages.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["messages"] = module
    found.loader.exec_module(module)
    return module


def raised(names: set[str]) -> set[tuple[str, int]]:
    """Return where errors are made, found in the simplest way: by their names before a bracket."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names and node.args:
                found.add((path.relative_to(SOURCE).as_posix(), node.lineno))
    return found


def test_no_message_is_left_out(registry: ModuleType) -> None:
    classes = {name for name, one in vars(errors).items() if isinstance(one, type)}
    listed = {(message.module, message.line) for message in registry.messages()}
    assert Counter(module for module, _ in raised(classes) - listed) == PASS_ON
    assert registry.error_classes().keys() == classes


def test_every_refusal_says_what_to_do(registry: ModuleType) -> None:
    refusals = [message for message in registry.messages() if message.error in registry.REFUSALS]
    assert len(refusals) > 50
    assert [message.text for message in refusals if not message.remedy] == []
    page = registry.refusal_sections()
    assert page.count("\n- **") + page.startswith("- **") >= 50


def test_a_remedy_stands_for_some_message(registry: ModuleType) -> None:
    texts = [message.text for message in registry.messages()]
    assert [words for words in registry.REMEDIES if not any(words in text for text in texts)] == []


def test_what_is_listed_is_what_is_raised(registry: ModuleType, tmp_path: Path) -> None:
    from torch import nn

    model = nn.Linear(2, 2)
    with pytest.raises(errors.OptimizerError) as caught:
        dualform.record(model, model.parameters(), tmp_path / "run")  # type: ignore[arg-type]
    said = re.sub(r"\s+", " ", str(caught.value))
    assert any(re.fullmatch(_pattern(message.text), said) for message in registry.messages())


def _pattern(text: str) -> str:
    return ".*".join(map(re.escape, re.split(r"‹[^›]*›", text)))
