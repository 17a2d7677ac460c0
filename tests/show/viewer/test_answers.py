"""The viewer's answers are the library's, and those of `dualform attend --json` and `mask --json`."""

import base64
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import dualform
from dualform import cli
from dualform.progress import bar
from dualform.show.predictions import predict_units
from dualform.show.viewer.running_jobs import MAX_RUNNING_JOBS
from helpers.served import Running


def command(capsys, monkeypatch, *arguments):
    """Run the command line with --json in this process."""
    monkeypatch.setattr(sys, "argv", ["dualform", *map(str, arguments), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    return json.loads(capsys.readouterr().out)


def ask(client, path, **parameters):
    response = client.get(path, params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_run(client, digits):
    found = ask(client, "/api/run")
    assert found["patterns"] == 3 * 80 * 64
    assert [layer["name"] for layer in found["layers"]] == ["layers.0", "layers.1", "layers.2"]
    assert {"by": "label", "groups": 10} in found["groupings"]
    assert found["output_layer"] == "layers.2"
    assert found["draw"] is True
    assert "not retrained" in found["note"]


def test_predictions_of_all_tests(client, digits):
    found = ask(client, "/api/tests")
    assert found["predictions"] == predict_units(digits.model, digits.task.test).tolist()
    assert found["targets"] == digits.task.test_labels.tolist()


@pytest.mark.parametrize("of", ["attention", "magnitude", "contribution"])
def test_totals_are_those_of_the_command(client, digits, capsys, monkeypatch, of):
    found = ask(client, "/api/layers", test=5, by="label", of=of)
    answers = command(capsys, monkeypatch, "attend", digits.folder, "--test", 5, "--by", "label", "--of", of)
    by_layer = {answer["layer"]: answer["totals"] for answer in answers}
    for layer in found["layers"]:
        rows = by_layer[layer["layer"]]
        if of == "contribution":
            if layer["layer"] != "layers.2":
                continue  # the others are projected on the gradient; tested below
            rows = [row for row in rows if row["unit"] == found["unit"]]
        assert found["groups"] == [row["label"] for row in rows]
        assert layer["totals"] == pytest.approx([row[of] for row in rows], rel=1e-5, abs=1e-5)


def test_contributions_and_the_start_add_up_to_the_output(client, digits, memory):
    """In every layer: start + contributions = output, along the gradient of that output."""
    found = ask(client, "/api/layers", test=5, by="label", of="contribution")
    inputs = digits.task.test[5:6]
    spotlight = memory.attend(digits.model, inputs)
    hidden = inputs
    outputs = []
    for layer in digits.model.layers[:-1]:
        z = layer(hidden)
        outputs.append(z.detach().requires_grad_())
        hidden = torch.relu(z)
    for name, z in zip(("layers.0", "layers.1"), outputs, strict=True):
        rest = list(digits.model.layers)[int(name[-1]) + 1 :]
        x = torch.relu(z)
        for layer in rest[:-1]:
            x = torch.relu(layer(x))
        logit = rest[-1](x)[0, found["unit"]]
        slope = torch.autograd.grad(logit, z)[0]
        expected = float((slope * (spotlight[name].output() - spotlight[name].start())).sum())
        shown = next(layer for layer in found["layers"] if layer["layer"] == name)
        assert shown["sum"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("per", ["pattern", "sample"])
@pytest.mark.parametrize("tab", ["positive", "negative"])
def test_top_patterns_are_those_of_the_command(client, digits, capsys, monkeypatch, per, tab):
    found = ask(client, "/api/top", test=5, by="label", layer="layers.1", per=per, tab=tab, k=7)
    smallest = ["--smallest"] if tab == "negative" else []
    answers = command(
        capsys, monkeypatch, "attend", digits.folder, "-t", 5, "-l", "layers.1", "--top", 7, "--per", per, *smallest
    )
    rows = answers[0]["top"]
    assert [card["pattern"] for card in found["cards"]] == [row["pattern"] for row in rows]
    assert [card["value"] for card in found["cards"]] == pytest.approx([row["attention"] for row in rows], rel=1e-6)
    assert [card["label"] for card in found["cards"]] == [row["label"] for row in rows]


def test_shares_are_of_all_magnitude(client, digits, memory):
    found = ask(client, "/api/top", test=5, by="label", layer="layers.0", per="pattern", k=3)
    attention = memory.attend(digits.model, digits.task.test[5:6])["layers.0"].attention()
    assert found["magnitude"] == pytest.approx(float(attention.abs().double().sum()), rel=1e-5)
    assert found["cards"][0]["share"] == pytest.approx(float(attention.max()) / found["magnitude"], rel=1e-5)


def test_effects_are_those_of_the_memory(client, digits, memory):
    said = int(digits.model(digits.task.test[5:6]).argmax())
    asked = memory.attend(digits.model, digits.task.test[5:6], targets=torch.tensor([said]), quantity="margin")
    found = ask(client, "/api/layers", test=5, by="label", of="effect")
    assert found["of"] == "effect"
    for layer in found["layers"]:
        expected = asked[layer["layer"]].effects(by="label")
        assert found["groups"] == list(expected.groups)
        assert layer["totals"] == pytest.approx(expected.values[0].tolist(), rel=1e-6)
    cards = ask(client, "/api/top", test=5, by="label", layer="layers.1", per="sample", of="effect", k=4)
    top = asked["layers.1"].top(4, per="sample", of="effect")
    assert cards["of"] == "effect"
    assert [card["value"] for card in cards["cards"]] == pytest.approx(top.values[0, 0].tolist(), rel=1e-6)
    assert (
        ask(client, "/api/top", test=5, by="label", layer="layers.1", of="effect", steps="10-20")["of"] == "attention"
    )


def test_later_ranks_steps_and_groups(client, digits, memory):
    whole = ask(client, "/api/top", test=5, by="label", per="pattern", k=20)["cards"]
    part = ask(client, "/api/top", test=5, by="label", per="pattern", first=11, k=5)["cards"]
    assert [card["pattern"] for card in part] == [card["pattern"] for card in whole[10:15]]
    early = ask(client, "/api/top", test=5, by="label", per="pattern", steps="10-20")["cards"]
    assert early
    assert all(10 <= card["step"] < 20 for card in early)
    groups = ask(client, "/api/top", test=5, by="label", tab="group", per="pattern")["cards"]
    assert sorted({card["group"] for card in groups}) == list(range(10))
    assert all(card["group"] == card["label"] for card in groups)


def test_curves_and_the_strip_of_time(client, digits, memory):
    layer = memory.attend(digits.model, digits.task.test[5:6])["layers.2"]
    found = ask(client, "/api/curves", test=5, by="label", k=50)
    expected = layer.top(50, by="label").values[0]
    torch.testing.assert_close(torch.tensor(found["curves"]), expected, rtol=1e-6, atol=1e-6)
    strip = ask(client, "/api/time", test=5, by="label")
    totals = layer.totals("label").values[0]
    torch.testing.assert_close(torch.tensor(strip["grid"]).sum(dim=1), totals, rtol=1e-4, atol=1e-3)
    assert strip["edges"][-1] == 80
    assert strip["epochs"][0] == 1437 // 64
    assert strip["errors"][0] > strip["errors"][-1], "training reduced the errors"


MASKS = [
    ({"g": ["3"]}, ["--without", "label = 3"], []),
    ({"g": ["3", "5"]}, ["--without", "label in (3, 5)"], []),
    ({"g": ["3"], "s": ["10-37"]}, ["--without", "label = 3 or (step >= 10 and step < 37)"], []),
    ({"s": ["0-80"]}, ["--without", "step >= 0"], []),
    ({"p": ["7", "8"]}, ["--without", "sample in (7, 8)"], []),
    ({"p": ["7"], "g": ["3"]}, ["--without", "sample = 7 or label = 3"], []),
    ({"g": ["3"], "only": "1"}, ["--where", "label = 3"], []),
    ({"g": ["3"], "in": "active", "layer": "layers.1"}, ["--without", "label = 3"], ["-l", "layers.1"]),
]


@pytest.mark.parametrize(("mask", "arguments", "layers"), MASKS)
@pytest.mark.parametrize("ready", [False, True])
def test_masks_are_those_of_the_command(digits, capsys, monkeypatch, mask, arguments, layers, ready):
    """Whether the group weights are kept or every mask takes a pass."""
    server = Running(digits.folder, budget=4_000_000 if ready else 1000)
    try:
        with server.client() as client:
            while ask(client, "/api/badge", by="label")["state"] == "preparing":
                time.sleep(0.05)
            assert bool(ask(client, "/api/badge", by="label")["plan"]["bins"]) is ready
            found = ask(client, "/api/mask", by="label", **mask)
            expected = command(capsys, monkeypatch, "mask", digits.folder, *arguments, *layers)
            assert found["changed"] == expected["changed"]
            assert found["accuracy_before"] == pytest.approx(expected["accuracy_before"])
            assert found["accuracy_after"] == pytest.approx(expected["accuracy_after"])
            assert found["flips"] == [flip["test"] for flip in expected["flips"]]
            for flip in expected["flips"][:3]:
                one = ask(client, "/api/prediction", test=flip["test"], by="label", **mask)
                assert (one["before"], one["after"], one["flipped"]) == (flip["before"], flip["after"], True)
    finally:
        server.stop()


def test_the_outputs_under_a_mask_are_those_of_the_masked_model(client, digits, memory):
    found = ask(client, "/api/prediction", test=5, by="label", g="3", start="dropped")
    masked = memory.without(label=3)
    start = {name: part - masked.shares()[name] for name, part in masked.weights().items()}
    model = masked.apply(digits.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= start[name]
        expected = model(digits.task.test[5:6])[0]
    for output in found["outputs"]:
        assert output["after"]["output"] == pytest.approx(float(expected[output["unit"]]), rel=1e-3, abs=1e-4)


def test_a_random_control_has_about_the_size_that_was_asked_for(client):
    found = ask(client, "/api/mask", by="label", r=100_000, seed=5)
    assert 0.06 < found["removed"] / found["patterns"] < 0.14
    assert ask(client, "/api/mask", by="label", r=100_000, seed=5)["changed"] == found["changed"]


def test_a_drawn_image_is_asked_about_like_a_test(client, digits):
    pixels = (digits.task.images.test_images[5] * 15).tobytes()
    drawn = base64.urlsafe_b64encode(pixels).decode()
    found = ask(client, "/api/prediction", drawn=drawn)
    test = ask(client, "/api/prediction", test=5)
    assert found["before"] == test["before"]
    assert found["target"] is None
    assert found["outputs"][0]["before"]["output"] == pytest.approx(test["outputs"][0]["before"]["output"], rel=1e-4)


def test_a_sample_as_an_input_sees_it(client, digits, memory):
    found = ask(client, "/api/sample", test=5, sample=17)
    view = memory.where(sample=17)
    attention = view.attend(digits.model, digits.task.test[5:6])["layers.1"].attention()[0]
    assert found["layers"][1]["attention"] == pytest.approx(attention.tolist(), rel=1e-5)
    assert found["label"] == int(digits.task.train_labels[17])


def test_the_badge_is_the_rebuild_error_of_verify(client, memory):
    while (found := ask(client, "/api/badge", by="label"))["state"] == "preparing":
        time.sleep(0.05)
    assert found["state"] == "passed"
    for row, check in zip(found["layers"], memory.verify().layers, strict=True):
        assert row["relative_error"] == pytest.approx(check.error, rel=0.5, abs=1e-6)
    assert found["plan"]["bins"] >= 2


def test_twenty_clients_at_once(running, digits):
    """Everybody gets the answer of a single client, and nobody an error."""
    tests = range(20)
    paths: list[tuple[str, dict[str, Any]]] = [
        ("/api/prediction", {"g": "3"}),
        ("/api/top", {}),
        ("/api/curves", {"k": 20}),
    ]
    paths += [("/api/layers", {}), ("/api/time", {})]

    def everything(test: int) -> list[Any]:
        with running.client() as client:
            return [ask(client, path, test=test, by="label", **more) for path, more in paths]

    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(everything, tests))
    alone = [everything(test) for test in tests]
    assert together == alone


def test_a_second_viewer_of_the_same_run_works(digits):
    first, second = Running(digits.folder), Running(digits.folder)
    try:
        with first.client() as one, second.client() as two:
            assert ask(one, "/api/tests") == ask(two, "/api/tests")
            assert one.get(f"{second.base}/api/run").status_code == 403, "tokens are each viewer's own"
    finally:
        first.stop()
        second.stop()


def test_whoever_goes_away_stops_the_work(digits, monkeypatch):
    """A client that closes the connection cancels its question at the next step of progress."""
    seen = threading.Event()
    stopped = threading.Event()

    def slow(self, **options):
        try:
            with bar("counting", total=1000) as advance:
                for _ in range(1000):
                    time.sleep(0.01)
                    seen.set()
                    advance(1)
        except BaseException:
            stopped.set()
            raise

    monkeypatch.setattr(dualform.Memory, "training_history", slow)
    server = Running(digits.folder)
    try:
        with server.client() as client, server.client() as other:
            thread = threading.Thread(target=lambda: _abandon(client))
            thread.start()
            assert seen.wait(20)
            found = ask(other, "/api/progress", job="mine")
            assert found["title"] == "counting"
            assert found["total"] == 1000
            client.close()
            thread.join(10)
            assert stopped.wait(5), "the thread went on working for nobody"
            for _ in range(100):
                if ask(other, "/api/progress", job="mine") == {"running": False}:
                    break
                time.sleep(0.05)
            else:
                pytest.fail("the job is still listed")
    finally:
        server.stop()
    assert MAX_RUNNING_JOBS > 1


def _abandon(client):
    import httpx

    with pytest.raises((httpx.HTTPError, RuntimeError, OSError)):
        client.get("/api/time", params={"test": 1, "by": "label", "job": "mine"}, timeout=0.5)


def test_a_run_that_is_still_being_recorded_is_shown_up_to_its_last_published_step(tmp_path, digits):
    from dualform.experiments.models import mlp

    model = mlp([64, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, labels = digits.task.train, digits.task.train_labels
    with dualform.record(
        model, optimizer, tmp_path / "live", factory="dualform.experiments.models:mlp",
        factory_arguments={"widths": [64, 10]},
    ) as recorder:  # fmt: skip
        recorder.tests(digits.task.test, digits.task.test_labels)

        def step(at):
            recorder.annotate(label=labels[at : at + 32])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(train[at : at + 32]), labels[at : at + 32]).backward()
            optimizer.step()

        for at in range(0, 160, 32):
            step(at)
        recorder.flush()
        server = Running(tmp_path / "live")
        try:
            with server.client() as client:
                found = ask(client, "/api/run")
                assert (found["steps"], found["closed"], found["tests"]) == (5, False, 360)
                shown = ask(client, "/api/prediction", test=0, by="label", g="1")
                step(160)
                recorder.flush()
                assert ask(client, "/api/run")["steps"] == 6, "what was published since is seen"
                assert ask(client, "/api/prediction", test=0, by="label", g="1") != shown
        finally:
            server.stop()


def test_no_run_says_how_to_record_one(tmp_path):
    server = Running(tmp_path / "nothing")
    try:
        with server.client() as client:
            response = client.get("/api/run")
            assert response.status_code == 404
            assert response.json()["empty"] is True
            assert client.get("/").status_code == 200
    finally:
        server.stop()
