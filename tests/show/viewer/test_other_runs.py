"""Runs of other kinds: convolutions, without annotations, with keys only, of text. Every panel has an answer."""

import time

import pytest
import torch

import dualform
from helpers.served import Running
from helpers.small_models import pictures, record_pictures

PANELS = ("prediction", "layers", "curves", "time", "top")


def ask(client, path, **parameters):
    response = client.get(path, params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def served(tmp_path):
    servers = []

    def serve(folder):
        servers.append(Running(folder))
        return servers[-1]

    yield serve
    for server in servers:
        server.stop()


def test_convolutions_are_asked_at_one_place_and_contribute_at_all(tmp_path, served):
    model = record_pictures(tmp_path / "run")
    memory = dualform.open(tmp_path / "run")
    inputs = memory.tests()[0][2:3]
    with served(tmp_path / "run").client() as client:
        for panel in PANELS:
            ask(client, f"/api/{panel}", test=2, by="label", layer="first")
        found = ask(client, "/api/layers", test=2, by="label", row=3)
        assert [(layer["row"], layer["rows"]) for layer in found["layers"]] == [(3, 16), (3, 9), (0, 1)]
        expected = memory.attend(model, inputs)["first"].totals("label").values[3]
        assert found["layers"][0]["totals"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)
        shown = ask(client, "/api/layers", test=2, by="label", of="contribution")
        # The output moves linearly with the first layer's, while no unit switches: take a small part of it away.
        spotlight = memory.attend(model, inputs)
        change = spotlight["first"].output() - spotlight["first"].start().reshape(spotlight["first"].output().shape)
        delta = change.reshape(1, 4, 4, 3).permute(0, 3, 1, 2)
        outputs = []
        for part in (0.0, 1e-3):
            z = model.first(inputs).detach() - part * delta
            hidden = torch.relu(model.second(torch.relu(z)))
            outputs.append(float(model.last(hidden.flatten(1))[0, shown["unit"]].detach()))
        assert shown["layers"][0]["sum"] == pytest.approx((outputs[0] - outputs[1]) / 1e-3, rel=0.05, abs=0.02)


def test_a_run_without_annotations_is_grouped_by_steps(tmp_path, served):
    record_pictures(tmp_path / "run", annotate=False)
    with served(tmp_path / "run").client() as client:
        run = ask(client, "/api/run")
        assert run["groupings"] == []
        for panel in PANELS:
            ask(client, f"/api/{panel}", test=2, by="step:4")
        while ask(client, "/api/badge", by="step:4")["state"] == "preparing":
            time.sleep(0.05)
        masked = ask(client, "/api/mask", by="step:4", g="8")
        memory = dualform.open(tmp_path / "run")
        assert masked["removed"] == memory.where("step >= 8").patterns("last").num_rows
        assert client.get("/api/top", params={"test": 1, "by": "step:4", "per": "sample"}).status_code == 400


def test_keys_only_shows_attention_and_says_what_is_missing(tmp_path, served):
    record_pictures(tmp_path / "run", layers={"*": "keys"})
    with served(tmp_path / "run").client() as client:
        assert ask(client, "/api/run")["exact"] is False
        assert ask(client, "/api/badge", by="label")["state"] == "keys only"
        for panel in PANELS:
            ask(client, f"/api/{panel}", test=2, by="label")
        found = ask(client, "/api/layers", test=2, by="label", of="contribution")
        assert all(layer["totals"] is None and "keys only" in layer["reason"] for layer in found["layers"])
        refused = client.get("/api/prediction", params={"test": 2, "by": "label", "g": "1"})
        assert refused.status_code == 400
        assert "keys only" in refused.json()["error"]


def test_a_text_is_searched_and_prompted(reading):
    with reading.client() as client:
        run = ask(client, "/api/run")
        assert (run["kind"], run["prompt"], run["draw"]) == ("text", True, False)
        assert {"by": "token", "groups": run["groupings"][0]["groups"]} in run["groupings"]
        found = ask(client, "/api/search", text="FOX")["tests"]
        assert found
        assert all(
            "fox" in text for text in (ask(client, "/api/snippets", first=n, count=1)["texts"][0] for n in found)
        )
        said = ask(client, "/api/prediction", prompt="the fox")
        same = ask(client, "/api/prediction", prompt="a x")
        chances = [[output["before"]["probability"] for output in one["outputs"]] for one in (said, same)]
        assert chances[0] == pytest.approx(chances[1], rel=1e-5), "this model sees the last letter only"
        cards = ask(client, "/api/top", prompt="the fox", by="token", per="pattern", layer="table")["cards"]
        assert {card["passage"]["token"] for card in cards} == {"x"}, "an embedding attends to its own token"
        wide = ask(client, "/api/passage", place=cards[0]["passage"]["place"], context=40)
        assert len(wide["before"]) > len(cards[0]["passage"]["before"]) or wide["place"] < 80
        names = ask(client, "/api/layers", prompt="the fox", by="token")["names"]
        assert "x" in names


@pytest.mark.parametrize("targets", [torch.rand(9), torch.rand(9, 3)], ids=["numbers", "rows of numbers"])
def test_targets_that_are_no_classes_are_left_out(tmp_path, served, targets):
    record_pictures(tmp_path / "run")
    memory = dualform.open(tmp_path / "run")
    memory.add_media(labels=["a", "b", "c"])
    memory.add_tests(memory.tests()[0], targets)
    with served(tmp_path / "run").client() as client:
        assert ask(client, "/api/tests")["targets"] is None
        assert ask(client, "/api/mask", by="label", g="1")["accuracy_after"] is None
        for panel in PANELS:
            ask(client, f"/api/{panel}", test=2, by="label")
        assert client.get("/report.html").status_code == 200


def test_tests_that_the_model_does_not_take_are_400_with_a_reason(tmp_path, served):
    record_pictures(tmp_path / "run")
    dualform.open(tmp_path / "run").add_tests(torch.randn(4, 7))
    with served(tmp_path / "run").client() as client:
        for panel in (*PANELS, "layers?of=contribution", "layers?of=effect", "sample?sample=3"):
            refused = client.get(f"/api/{panel}{'&' if '?' in panel else '?'}test=2&by=label")
            assert refused.status_code == 400, panel
            assert "The model failed on inputs (1, 7)" in refused.json()["error"]


def test_samples_may_be_named_by_texts(tmp_path, served):
    """Nine samples, twice over; one step has no names."""
    model = pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(9, 1, 6, 6)
    with dualform.record(model, optimizer, tmp_path / "run", factory="helpers.small_models:pictures") as recorder:
        recorder.tests(inputs, torch.arange(9) % 3)
        for step in range(7):
            rows = (torch.arange(3) + 3 * step) % 9
            if step != 6:
                recorder.annotate(sample=[f"image {row}" for row in rows.tolist()], label=rows % 3)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), rows % 3).backward()
            optimizer.step()
    assert dualform.open(tmp_path / "run").training_history(width=1).epochs == (3,)
    with served(tmp_path / "run").client() as client:
        assert ask(client, "/api/time", test=2, by="label")["epochs"] == [3]
