"""The package without any of its extras: it imports, records, verifies and answers; what needs an extra names it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL", "pytest-xdist": "xdist"}
"""The module of a distribution that is not called like it."""

BLOCKED = """
import sys
from pathlib import Path

class Others:
    def __init__(self, finders):
        self.finders = finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)

    def find_distributions(self, *context):
        for finder in self.finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(*context)

sys.meta_path[:] = [Others([*sys.meta_path])]
folder = Path(sys.argv[1])
"""
"""The beginning of a program in which the modules of extras are not found, as where they are not installed."""

CORE = """
import dualform, torch
from dualform.cli import main
for name in dualform.__all__:
    getattr(dualform, name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
for kept in ("patterns", "shares"):
    keep = dualform.Shares(by="label") if kept == "shares" else None
    with dualform.record(model, optimizer, folder / kept, keep=keep) as recorder:
        for step in range(3):
            labels = torch.arange(6) % 2
            recorder.annotate(sample=torch.arange(6), label=labels)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(6, 4)), labels).backward()
            optimizer.step()
    memory = dualform.open(folder / kept)
    assert memory.verify(model).passed
    spotlight = memory.attend(model, torch.randn(1, 4))
    print(spotlight["2"].totals(by="label"))
    if kept == "patterns":
        print(spotlight["2"].top(3))
        print(memory.where("label = 1 AND sample > 2"))

def refused(act):
    try:
        act()
    except dualform.errors.DualformError as error:
        print(error)
    except SystemExit as end:
        print("ended with", end.code)

def command(*words):
    sys.argv = ["dualform", *map(str, words)]
    refused(main)

refused(lambda: dualform.open("s3://bucket/run"))
refused(lambda: dualform.open(folder / "patterns", executor="ray").attend(model, torch.randn(1, 4))["2"].top(3))
command("view", folder / "patterns")
command("verify", folder / "patterns")
"""


def extras() -> set[str]:
    """Return the modules that the package's extras bring, and no module that it needs itself."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    needed = {_module(requirement) for requirement in project["dependencies"]}
    given = {_module(one) for extra in project["optional-dependencies"].values() for one in extra}
    return given - needed - {"dualform"}


def _module(requirement: str) -> str:
    distribution = re.split(r"[^\w.-]", requirement)[0]
    return MODULES.get(distribution, distribution.replace("-", "_"))


def run_without_extras(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = f"BLOCKED = {extras()!r}{BLOCKED}{script}"
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=False, capture_output=True, text=True, timeout=120
    )


def test_extras_are_blocked(tmp_path: Path) -> None:
    assert {"transformers", "starlette", "matplotlib", "sklearn", "PIL", "obstore", "ray", "lightning"} <= extras()
    assert not {"torch", "duckdb", "numpy", "dualform"} & extras()
    outcome = run_without_extras("import sklearn.datasets", tmp_path)
    assert "ModuleNotFoundError: No module named 'sklearn'" in outcome.stderr


def test_the_core_needs_no_extra_and_the_rest_names_its_own(tmp_path: Path) -> None:
    outcome = run_without_extras(CORE, tmp_path)
    told = outcome.stdout + outcome.stderr
    assert outcome.returncode == 0, told
    assert "passed" in outcome.stdout
    for extra in ("cloud", "ray", "viewer"):
        assert f"pip install 'dualform[{extra}]'" in told, told
