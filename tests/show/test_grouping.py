"""Groupings: read from the text of an option or a parameter, offered by a run, and named as people read them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dualform
from dualform.engine.source import ADDRESS
from dualform.errors import DualformError, QueryError
from dualform.show.grouping import annotated_columns, group_name, offered_groupings, parse_by, unit_name
from dualform.show.viewer.parameters import BadQuestion, RequestParameters

NOT_A_GROUPING = "Cannot group by 'step:x'; expected a column, or column:width with a positive width"
SESSION: Any = SimpleNamespace(memory=SimpleNamespace(columns=(*ADDRESS, "label")))


def test_columns_and_bins_are_read():
    assert parse_by("task, label") == ("task", "label")
    assert parse_by("label,step:500") == ("label", dualform.bins("step", width=500))


@pytest.mark.parametrize("text", ["step:x", "step:", "step:0", "step:-1", "step:nan", "label,step:x"])
def test_a_width_that_is_no_positive_number_is_refused(text):
    with pytest.raises(QueryError, match="positive width"):
        parse_by(text)


def test_the_viewer_reads_groupings_as_the_command_line_does():
    assert RequestParameters([("by", "label,step:5")]).by(SESSION) == parse_by("label,step:5")
    for read in (lambda: parse_by("step:x"), lambda: RequestParameters([("by", "step:x")]).by(SESSION)):
        with pytest.raises(QueryError, match=re.escape(NOT_A_GROUPING)):
            read()
    with pytest.raises(BadQuestion, match="There is no column 'nothing'; there are pattern, step"):
        RequestParameters([("by", "nothing:5")]).by(SESSION)


def test_addresses_samples_and_places_are_no_groupings():
    assert annotated_columns([*ADDRESS, "label", "sample", "place", "task"]) == ["label", "task"]


def test_names_of_units_and_groups():
    corpus = SimpleNamespace(vocabulary=("a", "\n"), titles=("First",))
    named: Any = SimpleNamespace(labels=("cat", "dog"), text=None)
    text: Any = SimpleNamespace(labels=None, text=corpus)
    assert [unit_name(named, unit) for unit in (0, 1, 2, -1)] == ["cat", "dog", "2", "-1"]
    assert unit_name(text, 0) == "a"
    assert group_name(named, ("task", "label"), ("digits", 1)) == "digits · dog"
    assert group_name(named, ("label",), None) == "(none)"
    assert group_name(text, ("document",), 0) == "First"


def test_a_missing_file_is_no_reason_to_offer_less(tmp_path: Path) -> None:
    """A file that is away for a moment must end in its error, not in a run without columns."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dualform.record(model, optimizer, tmp_path / "run") as recorder:
        recorder.annotate(label=[0, 1])
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    memory = dualform.open(tmp_path / "run")
    name = next((tmp_path / "run" / "annotations").iterdir())
    kept = name.read_bytes()
    name.unlink()
    with pytest.raises(DualformError, match="annotations"):
        offered_groupings(memory, "")
    name.write_bytes(kept)
    assert [entry.by for entry in offered_groupings(memory, "")] == ["label"]
