"""Processes of torch.distributed as a world: what they tell each other, and how long they wait."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed

from dualform.errors import RefusedError
from dualform.recording import process_group
from dualform.recording.process_group import ProcessGroup
from helpers.together import run_together


def test_processes_that_come_for_different_purposes_are_refused_and_meet_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "ARRIVAL_SECONDS", 1.0)

    def work(rank: int) -> list[str]:
        told: list[str] = []
        for purposes in (("asks", None), ("records", "asks"), ("asks", "asks"), ("records", "records")):
            torch.distributed.barrier()
            if (purpose := purposes[rank]) is None:
                continue
            try:
                told.append(str(ProcessGroup(purpose=purpose, remedy="").gather(rank)))
            except RefusedError as error:
                told.append(str(error))
        return told

    first, second = run_together(tmp_path, work)
    assert first[:2] == [
        f"Process 0 {word}, and processes [1] did not come to it within 1 s. " for word in ("asks", "records")
    ]
    assert second[:1] == ["Process 1 asks, and processes [0] did not come to it within 1 s. "]
    assert first[2:] == second[1:] == ["[0, 1]", "[0, 1]"]


def test_three_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "CLOSING_SECONDS", 0.2)
    monkeypatch.setattr(process_group, "ARRIVAL_SECONDS", 0.2)

    def work(rank: int) -> str:
        world = ProcessGroup()
        assert (world.rank, world.size) == (rank, 3)
        mine = torch.tensor([1.0, rank])
        assert world.sum(mine).tolist() == [3.0, 3.0]
        assert mine.tolist() == [1.0, rank]
        assert (world.any(rank == 2), world.any(False)) == (True, False)
        assert world.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        world.barrier()
        groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1])]
        if rank == 1:
            return ""
        two = ProcessGroup(groups[0])
        assert (two.rank, two.size) == (rank // 2, 2)
        assert two.sum(torch.ones(1)).item() == 2.0
        if rank == 2:
            return ""
        begin = time.monotonic()
        two.barrier()  # the other one does not come
        assert time.monotonic() - begin < 30.0
        with pytest.raises(RefusedError) as refused:
            ProcessGroup(groups[0])
        return str(refused.value)

    told = run_together(tmp_path, work, size=3)
    assert told[1:] == ["", ""]
    assert told[0].startswith("Process 0 records, and processes [2] did not come to it within")
