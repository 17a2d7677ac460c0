"""The command line, run as a user runs it: stdout is the result, stderr the rest, exit status 0, 1 or 2."""

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import dualform
from dualform import cli
from dualform.experiments.datasets import load
from dualform.experiments.image_training import ClassifierRecipe, Phase, make_tasks, train_classifier
from dualform.show.predictions import predict_units
from helpers.object_storage import serving
from helpers.programs import run_program
from helpers.served import Running
from helpers.small import network


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small recorded run of digits that keeps its tests, and its model."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    tasks = make_tasks([load("digits")])
    recipe = ClassifierRecipe(hidden=(16,), learning_rate=0.05, batch=64)
    model = train_classifier(tasks, [Phase(("digits",), 60)], recipe, folder, seed=0)
    dualform.open(folder).add_tests(tasks[0].test[:40], tasks[0].test_labels[:40])
    return folder, model, tasks[0]


def call(monkeypatch, capsys, *arguments):
    """Run the command line in this process; return (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["dualform", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def test_help_is_instant_and_imports_nothing_heavy():
    code = (
        "import sys; from dualform.cli import app; from typer.testing import CliRunner; "
        "r = CliRunner().invoke(app, ['--help']); assert r.exit_code == 0, r.output; "
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'duckdb', 'matplotlib', 'sklearn') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_condition_ends_without_a_list_of_what_duckdb_had(trained):
    folder, _, _ = trained
    options = ["--without", "label = 3", "--model", "no.such:model"]
    found = run_program("from dualform.cli import main; main()", "mask", folder, *options)
    assert found.stderr.startswith("dualform: no.such:model cannot be imported")
    assert found.stderr.count("\n") == 1


def test_every_command_has_help():
    for command in (
        "demo",
        "gallery",
        "reproduce",
        "estimate",
        "info",
        "verify",
        "cp",
        "attend",
        "evaluate",
        "mask",
        "report",
        "view",
        "data",
    ):
        result = CliRunner().invoke(cli.app, [command, "--help"])
        assert result.exit_code == 0, command
        assert "Usage" in result.output


def test_info(trained, monkeypatch, capsys):
    folder, _, _ = trained
    status, out, err = call(monkeypatch, capsys, "info", folder)
    assert (status, err) == (0, "")
    assert "60 steps" in out
    assert "layers.1: Linear 16 -> 10, 3,840 patterns" in out
    status, out, _ = call(monkeypatch, capsys, "info", folder, "--json")
    assert json.loads(out)["layers"]["layers.0"]["patterns"] == 3840


def test_verify_passes_and_says_so(trained, monkeypatch, capsys):
    folder, _, _ = trained
    status, out, _ = call(monkeypatch, capsys, "verify", folder, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["passed"] is True
    assert all(layer["relative_error"] < 1e-5 for layer in found["layers"])
    assert all(layer["relative_error"] <= layer["bound"] < 1e-4 for layer in found["layers"])
    assert all(one["error"] <= one["bound"] for layer in found["layers"] for one in layer["parameters"])
    assert (found["uncovered"], found["uncovered_share"], found["verdict"]) == ({}, 0.0, "passed")
    status, out, _ = call(monkeypatch, capsys, "verify", folder)
    assert "passed" in out


def test_verify_says_what_muon_rounded(monkeypatch, capsys, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    with dualform.record(model, optimizer, tmp_path / "run"):
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    status, out, _ = call(monkeypatch, capsys, "verify", tmp_path / "run", "--json")
    assert status == 0
    layer = json.loads(out)["layers"][0]
    assert 0 < layer["rounding"] < 5e-2
    assert layer["replay_equal"] is True
    status, out, _ = call(monkeypatch, capsys, "verify", tmp_path / "run")
    assert out.splitlines()[1].split()[-2:] == ["equal", "passed"]


def test_verify_fails_with_status_1_on_another_model(trained, monkeypatch, capsys, tmp_path):
    folder, _, _ = trained
    (tmp_path / "other_model.py").write_text(
        "from dualform.experiments.models import mlp\ndef make():\n    return mlp([64, 16, 10])\n"
    )
    monkeypatch.chdir(tmp_path)
    status, out, _ = call(monkeypatch, capsys, "verify", folder, "--model", "other_model:make")
    assert status == 1
    assert "FAILED" in out
    assert "other_model:make makes are not the trained ones. Leave --model out" in " ".join(out.split())
    status, out, _ = call(monkeypatch, capsys, "verify", folder, "--model", "other_model:make", "--json")
    assert status == 1
    assert "let the factory load your checkpoint" in json.loads(out)["hint"]


def test_verify_says_of_which_step_a_checkpoint_is(trained, monkeypatch, capsys, tmp_path):
    folder, _, _ = trained
    weights = dict(dualform.open(folder)._run.initial)
    safetensors.torch.save_file(weights, tmp_path / "checkpoint.safetensors")
    (tmp_path / "early_model.py").write_text(
        "from safetensors.torch import load_file\nfrom dualform.experiments.models import mlp\n"
        "def make():\n    model = mlp([64, 16, 10])\n"
        f"    model.load_state_dict(load_file({str(tmp_path / 'checkpoint.safetensors')!r}))\n    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    status, out, _ = call(monkeypatch, capsys, "verify", folder, "--model", "early_model:make")
    assert status == 1
    assert "the weights before the first step" in out
    assert "dualform verify --at 0" in out
    status, out, _ = call(monkeypatch, capsys, "verify", folder, "--model", "early_model:make", "--at", 0)
    assert status == 0
    assert "not the trained ones" not in out


def test_attend_equals_the_library(trained, monkeypatch, capsys):
    folder, model, task = trained
    status, out, err = call(
        monkeypatch,
        capsys,
        "attend",
        folder,
        "--test",
        2,
        "--by",
        "label",
        "--top",
        3,
        "--of",
        "contribution",
        "--json",
    )
    assert (status, err) == (0, "")
    answers = {answer["layer"]: answer for answer in json.loads(out)}
    layer = dualform.open(folder).attend(model, task.test[2:3])["layers.1"]
    expected = layer.top(3, of="contribution").values.reshape(-1)
    shown = torch.tensor([row["contribution"] for row in answers["layers.1"]["top"]])
    torch.testing.assert_close(shown, expected, rtol=1e-5, atol=1e-7)
    totals = layer.totals("label", of="contribution").values.reshape(-1)
    shown = torch.tensor([row["contribution"] for row in answers["layers.1"]["totals"]])
    torch.testing.assert_close(shown, totals, rtol=1e-4, atol=1e-6)


def test_attend_prints_tables(trained, monkeypatch, capsys):
    folder, _, _ = trained
    status, out, _ = call(monkeypatch, capsys, "attend", folder, "--by", "step:20", "--per", "sample", "-l", "layers.0")
    assert status == 0
    assert "step:20" in out
    assert "occurrences" in out
    assert "layers.1" not in out


def test_attend_takes_inputs_from_files(trained, monkeypatch, capsys, tmp_path):
    folder, _, task = trained
    np.save(tmp_path / "inputs.npy", task.test[:2].numpy())
    safetensors.torch.save_file({"inputs": task.test[:2].contiguous()}, tmp_path / "inputs.safetensors")
    shown = [
        call(monkeypatch, capsys, "attend", folder, "--inputs", tmp_path / name, "-t", 1, "--json")
        for name in ("inputs.npy", "inputs.safetensors")
    ]
    assert shown[0] == shown[1]
    assert shown[0][0] == 0


def test_mask_equals_the_library(trained, monkeypatch, capsys):
    folder, model, task = trained
    status, out, _ = call(monkeypatch, capsys, "mask", folder, "--without", "label = 3", "--json")
    assert status == 0
    found = json.loads(out)
    masked = dualform.open(folder).without("label = 3").apply(model)
    before, after = predict_units(model, task.test[:40]), predict_units(masked, task.test[:40])
    assert found["changed"] == int((before != after).sum()) > 0
    assert found["accuracy_after"] == pytest.approx(float((after == task.test_labels[:40]).double().mean()))
    assert "not retrained" in found["note"]
    status, out, _ = call(monkeypatch, capsys, "mask", folder, "--at", 5, "-l", "layers.1")
    assert status == 0
    assert "predictions change" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "nowhere"], "nowhere is not a folder"),
        (["attend", "RUN", "--by", "colour"], "no column 'colour'"),
        (["attend", "RUN", "--by", "step:wide"], "column:width"),
        (["attend", "RUN", "--where", "label >"], "cannot be evaluated"),
        (["attend", "RUN", "--test", "999"], "no input 999"),
        (["attend", "RUN", "-l", "layers.9"], "'layers.9'"),
        (["attend", "RUN", "--of", "influence"], "'influence'"),
        (["attend", "RUN", "--inputs", "missing.npy"], "missing.npy is not a file"),
        (["attend", "RUN", "--model", "no.such.module:make"], "cannot be imported"),
        (["attend", "RUN", "--model", "nonsense"], "package.module:factory"),
        (["mask", "RUN"], "Nothing is masked"),
        (["mask", "RUN", "--at", "61"], "Step 61 is outside"),
        (["data", "get", "imagenet"], "imagenet"),
        (["reproduce", "everything"], "'everything'"),
        (["reproduce", "joint", "--data", "cifar-10"], "mnist or digits"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_1(trained, monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    arguments = [str(trained[0]) if part == "RUN" else part for part in arguments]
    status, out, err = call(monkeypatch, capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("dualform: ")
    assert words in err
    assert "Traceback" not in err


def test_wrong_usage_is_status_2(monkeypatch, capsys):
    status, _, err = call(monkeypatch, capsys, "attend")
    assert status == 2
    assert "RUN" in err


def test_data_ls(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "data", "ls", "--json")
    assert status == 0
    assert {"digits", "mnist", "fashion-mnist", "cifar-10"} <= {row["name"] for row in json.loads(out)}


def test_a_run_without_a_factory_says_what_to_give(monkeypatch, capsys, tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run"):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    np.save(tmp_path / "inputs.npy", np.zeros((1, 3), dtype=np.float32))
    status, _, err = call(monkeypatch, capsys, "attend", tmp_path / "run", "--inputs", tmp_path / "inputs.npy")
    assert status == 1
    assert "--model package.module:factory" in err


@pytest.mark.slow
def test_demo_end_to_end(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("dualform.experiments.demo.DEMO_STEPS", 60)
    folder = tmp_path / "demo"
    status, out, _ = call(monkeypatch, capsys, "demo", "--folder", folder)
    assert status == 0
    assert "rebuild error" in out
    assert "█" in out
    assert "dualform view" in out
    assert '<section class="test"' in (folder / "report.html").read_text()
    figures = sorted(path.name for path in (folder / "figures").glob("*.png"))
    assert len(figures) == 9
    monkeypatch.setattr("dualform.experiments.demo.draw_figures", lambda *_, **__: [])
    status, out, _ = call(monkeypatch, capsys, "demo", "--folder", folder, "--json")  # replaces its own folder
    assert not (folder / "figures").exists()
    assert status == 0
    assert json.loads(out)["verified"] is True


def test_demo_touches_no_folder_but_its_own(monkeypatch, capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    status, _, err = call(monkeypatch, capsys, "demo", "--folder", tmp_path)
    assert status == 1
    assert "a folder of its own" in err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_script_is_installed():
    script = Path(sys.executable).with_name("dualform")
    for command in ([script], [sys.executable, "-m", "dualform"]):
        found = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == dualform.__version__


def test_the_support_page_is_what_the_registries_say(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "support")
    assert status == 0
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert out == page.read_text(), "run: dualform support > docs/support.md"
    for name in ("`Linear`", "`Conv2d`", "`Embedding`", "`LayerNorm`", "`SGD`", "`AdamW`"):
        assert name in out


def test_the_table_of_costs_is_what_the_estimates_say(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "estimate")
    assert status == 0
    page = Path(__file__).parents[2] / "docs" / "keep.md"
    assert out in page.read_text(), "put what `dualform estimate` prints into docs/keep.md"


def test_estimate_of_a_model_of_ones_own(monkeypatch, capsys):
    own = ("estimate", "--model", "helpers.small:network", "--steps", 10)
    status, out, _ = call(monkeypatch, capsys, *own, "--shape", "4,5", "--groups", 2)
    assert (status, out.count("\n"), "Shares(by=...) of 2 groups" in out) == (0, 6, True)
    status, out, _ = call(monkeypatch, capsys, *own, "--shape", "4,5", "--json")
    assert json.loads(out)[0]["bytes"] == dualform.estimate(network(), torch.zeros(4, 5), steps=10).total
    for shape, said in (("4,6", "takes no inputs of shape [4, 6]"), ("4x5", "--shape is '4x5'")):
        status, _, err = call(monkeypatch, capsys, *own, "--shape", shape)
        assert status == 1
        assert said in err


def test_attend_by_effect(trained, monkeypatch, capsys):
    folder, model, task = trained
    question = ("attend", folder, "--of", "effect", "--by", "label", "--top", 2, "--per", "sample", "-t", 3)
    status, out, err = call(monkeypatch, capsys, *question, "--json")
    assert (status, err) == (0, "")
    answers = json.loads(out)
    assert [answer["layer"] for answer in answers] == ["*", "layers.0", "layers.1"]
    assert all("prediction of retraining, not a share of the output" in answer["note"] for answer in answers)
    memory = dualform.open(folder)
    spot = memory.attend(model, task.test[3:4], targets=task.test_labels[3:4], quantity="margin")
    expected = spot.effects(by="label").values[0].tolist()
    assert [row["effect"] for row in answers[0]["totals"]] == pytest.approx(expected, rel=1e-4)
    by_sample = spot.effects()
    best = [by_sample.groups[i] for i in by_sample.values[0].topk(2).indices.tolist()]
    assert [row["sample"] for row in answers[0]["top"]] == best
    assert [row["rank"] for row in answers[0]["top"]] == [1, 2]
    status, out, _ = call(monkeypatch, capsys, *question, "--quantity", "loss")
    assert status == 0
    assert "input 3, all layers: top effect" in out
    assert "prediction of retraining" in " ".join(out.split())
    status, _, err = call(monkeypatch, capsys, *question, "--quantity", "logits")
    assert status == 1
    assert "expected one of" in err


def test_report_writes_one_file(trained, monkeypatch, capsys, tmp_path):
    path = tmp_path / "out" / "report.html"
    status, out, err = call(monkeypatch, capsys, "report", trained[0], "-o", path, "-t", 2, "-t", 7, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"path": str(path), "tests": 2, "bytes": path.stat().st_size, "warnings": []}
    status, out, _ = call(monkeypatch, capsys, "report", trained[0], "-o", path, "--tests", 3, "--no-media")
    assert status == 0
    assert "3 tests" in out
    assert "<img" not in path.read_text()


def test_report_of_a_test_that_is_not_there(trained, monkeypatch, capsys, tmp_path):
    status, _, err = call(monkeypatch, capsys, "report", trained[0], "-o", tmp_path / "r.html", "-t", 999)
    assert status == 1
    assert "no test 999" in err
    assert not (tmp_path / "r.html").exists()


def test_view_listens_elsewhere_only_when_told_to(trained, monkeypatch, capsys):
    status, out, err = call(monkeypatch, capsys, "view", trained[0], "--host", "0.0.0.0")
    assert (status, out) == (1, "")
    assert "--expose" in err


@pytest.mark.slow
def test_view_says_where_it_is_and_ends_quietly(trained):
    command = [sys.executable, "-c", "from dualform.cli import main; main()", "view", str(trained[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        port = address.split(":")[2].split("/")[0]
        import httpx

        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/api/run").status_code == 403
            assert client.get(address).status_code == 200
            assert client.get("/api/run").json()["steps"] == 60
            assert client.get("/api/badge", params={"by": "label"}).status_code == 200
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=30)
    assert address.startswith("http://127.0.0.1:")
    assert f"ssh -N -L {port}:127.0.0.1:{port}" in err
    assert "Traceback" not in err
    assert "terminate" not in err


def test_the_wheel_has_the_pages_of_viewer_and_report(tmp_path):
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        root,
    ]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    here = {
        path.relative_to(root / "src").as_posix()
        for folder in ("viewer/static", "report/assets")
        for path in (root / "src" / "dualform" / "show" / folder).rglob("*")
        if path.is_file()
    }
    assert "dualform/show/viewer/static/panels/mask.js" in here
    assert here <= names


def test_runs_in_object_storage_are_copied_and_asked_by_their_address(trained, monkeypatch, capsys, tmp_path):
    folder = trained[0]
    monkeypatch.setenv("DUALFORM_CACHE", str(tmp_path / "cache"))
    with serving() as server:
        address = server.address()
        status, out, _ = call(monkeypatch, capsys, "cp", folder, address, "--json")
        assert (status, json.loads(out)["location"]) == (0, address)
        status, _, err = call(monkeypatch, capsys, "cp", folder, address)
        assert status == 1
        assert "holds a recorded run already" in err
        for command in (["info"], ["verify"], ["attend", "--by", "label"], ["mask", "--without", "label = 3"]):
            pages = []
            for place in (folder, address):
                status, out, _ = call(monkeypatch, capsys, command[0], place, *command[1:], "--json")
                assert status == 0
                pages.append(out.replace(str(place), "RUN"))
            assert pages[0] == pages[1]
        page = tmp_path / "report.html"
        assert call(monkeypatch, capsys, "report", address, "-o", page, "--tests", "2")[0] == 0
        assert page.stat().st_size > 10_000
        viewer = Running(address)
        try:
            with viewer.client() as client:
                assert client.get("/api/run").json()["path"] == address
        finally:
            viewer.stop()
        status, _, err = call(monkeypatch, capsys, "info", f"{address}-none")
        assert status == 1
        assert "holds no manifest.json" in err
