"""Saves that go on beside training: what they hold, whom they keep waiting, and where their errors are raised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from rank_background_save import (
    allocated_beside,
    failed,
    failed_with_a_step,
    saved_during_updates,
    trained_beside,
    without_space,
)
from ranks import run_ranks
from same_leaves import assert_equal

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def placed(folder: Path) -> dict[str, Any]:
    return {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": str(folder), "timeout_s": 60}


@pytest.mark.parametrize(
    ("size", "away"),
    [(1, ()), (2, ("params", "grads", "optimizer")), (2, ()), pytest.param(3, ("optimizer",), marks=pytest.mark.thorough)],
)
def test_it_holds_what_was_there_when_it_began(size: int, away: tuple[str, ...], tmp_path: Path) -> None:
    options = {key: value for key, value in placed(tmp_path).items() if value != "nvme" or key in away}
    options = options if away else {key: value for key, value in options.items() if key != "nvme"}
    for saved, loaded, there_before, there_after in run_ranks(trained_beside, size, str(tmp_path / "saved"), options):
        assert_equal(loaded, saved)
        assert not there_before, "steps don't wait for its thread"
        assert there_after


@pytest.mark.parametrize("size", [1, 2])
def test_its_error_is_raised_once_on_all_ranks_and_costs_nothing(size: int, tmp_path: Path) -> None:
    results = run_ranks(failed, size, str(tmp_path / "saved"), placed(tmp_path))
    for rank, (errors, states, expected, saves) in enumerate(results):
        assert len(errors) == 4, "at the step, with and without optimizers, and at wait_for_save"
        for number, error in enumerate(errors):
            kind, said = (
                ("OSError", "Input/output error.*the drive") if number < 3 else ("RuntimeError", "can't start new thread")
            )
            assert re.search(said, error)
            assert error.startswith(kind if rank == size - 1 else "CheckpointError: no checkpoint is saved in")
        assert_equal(states, expected)
        assert saves == [1]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["save-00000001"]


def test_nothing_is_written_before_all_ranks_have_their_space(tmp_path: Path) -> None:
    for before, written, saved, loaded in run_ranks(allocated_beside, 2, str(tmp_path / "saved"), placed(tmp_path)):
        assert before == [], "and save doesn't wait for it"
        assert written
        assert_equal(loaded, saved)


@pytest.mark.parametrize("size", [1, 2])
def test_too_little_space_found_beside_training_is_raised_once_and_costs_nothing(size: int, tmp_path: Path) -> None:
    results = run_ranks(without_space, size, str(tmp_path / "saved"), placed(tmp_path))
    for rank, (errors, written, states, expected) in enumerate(results):
        quota = r"Disk quota exceeded: the quota is used up.*rank-0000\d-0000\.safetensors"
        for error, said in zip(errors, [quota, quota, "can't start new thread"], strict=True):
            kind = "RuntimeError" if "thread" in said else "OSError"
            assert re.search(said, error), error
            assert error.startswith(kind if rank == size - 1 else "CheckpointError: no checkpoint is saved in")
        assert written == []
        assert_equal(states, expected)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["save-00000001"]


def in_chunks(folder: Path) -> dict[str, Any]:
    return {**placed(folder), "compute_shape": {"piece_numel": 64}}


def test_it_holds_what_one_rank_has_still_to_update(tmp_path: Path) -> None:
    results = run_ranks(saved_during_updates, 2, str(tmp_path / "saved"), in_chunks(tmp_path))
    assert [updating for _, _, updating in results] == [False, True]
    for saved, loaded, _ in results:
        assert_equal(loaded, saved)


def test_it_fails_on_all_ranks_with_a_step_of_one(tmp_path: Path) -> None:
    results = run_ranks(failed_with_a_step, 2, str(tmp_path / "saved"), in_chunks(tmp_path))
    for rank, (error, before, after, saves) in enumerate(results):
        said = (
            "StepFailedError: a step of .* ended in the middle" if rank else "CheckpointError: no checkpoint is saved in .*rank 1"
        )
        assert re.match(said, error), error
        assert_equal(after, before)
        assert saves == [1]


SCRIPT = """
import sys, torch, zinf_compile
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
deferred = {"params": "nvme", "grads": "nvme", "compute_shape": {"piece_numel": 512}} if sys.argv[3] == "deferred" else {}
options = {"compute": "fx", "optimizer": "nvme", "nvme": sys.argv[1], **deferred}
compiled = torch.compile(model, backend="zero_infinity", options=options)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    compiled(torch.randn(3, 64)).sum().backward()
    optimizer.step()
zinf_compile.save(sys.argv[1] + "/saved", model, optimizer)
if sys.argv[2] == "reset":
    zinf_compile.reset()
    sys.stdout.write(str(len(list(__import__("pathlib").Path(sys.argv[1], "saved").glob("save-*/manifest.json")))))
"""


@pytest.mark.parametrize("step", ["at once", "deferred"])
@pytest.mark.parametrize("end", ["exit", "reset"])
def test_the_end_of_the_process_and_reset_wait(end: str, step: str, tmp_path: Path) -> None:
    done = run_program(SCRIPT, str(tmp_path), end, step)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("1" if end == "reset" else "")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["save-00000001"]
    assert (tmp_path / "saved" / "save-00000001" / "manifest.json").exists()
