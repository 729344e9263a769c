"""Bad input of saves and loads, on one rank and on two: an error on each, which says what was found and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rank_bad_checkpoints import loads, partitioned_in_extra, replicas, saves, two_jobs, under_a_cap, wrong_on_one_rank
from ranks import run_ranks
from small_drives import MIB, mounted, small_drive

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
FETCH = r"(Load an older checkpoint, or fetch (it|this one) again|Fetch it again)"

LOADS = {
    "truncated": (rf"has [\d,]+ bytes, its manifest says [\d,]+: it was cut off\. {FETCH}", "as before"),
    "a bit": (rf"is damaged: the checksum of \S+\.exp_avg differs in its bytes 0 to [\d,]+\. {FETCH}", "refused"),
    "swapped": (rf"is damaged: the checksum of \S+ differs in its bytes [\d,]+ to [\d,]+\. {FETCH}", None),
    "edited": (r"rank-00000\.json is not the file that was saved: its checksum differs\. Fetch it again", "as before"),
    "outside": (r"names the file '\.\./save-00000001/rank-\S+', which is no name of a file in its folder", "as before"),
    "a link": (r"\.safetensors is a symbolic link; accepted: a file", "as before"),
    "missing": (r"of the checkpoint cannot be read: No such file or directory\. Fetch it again", "as before"),
    "no manifest": (r"has no checkpoint: neither manifest\.json nor a folder such as save-00000001", "as before"),
    "another model": (
        r"doesn't fit; nothing was changed\. missing: more; "
        r"shape of down\.weight: \[13, 37\] in the checkpoint, \[13, 41\] in the model; "
        r"shape of words\.weight: \[61, 37\] in the checkpoint, \[61, 41\] in the model; "
        r"type of scale: torch\.float32 in the checkpoint, torch\.float64 in the model; unexpected: conv\.bias; .*"
        "group 0 of optimizer has more besides", "as before",
    ),
    "another class": ("optimizer is a AdamW in the checkpoint, SGD is given", "as before"),
    "fewer parameters": (r"doesn't fit; nothing was changed\. group 0 of optimizer lacks words\.weight", "as before"),
    "more parameters": ("doesn't fit; nothing was changed. group 0 of optimizer has frozen.weight besides", "as before"),
    "more optimizers": ("1 optimizers in the checkpoint, 2 given", "as before"),
    "nothing there": ("none does not exist; accepted: a folder in which save", "as before"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("size", "place"),
    [(2, "memory"), (1, "drive"), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(1, "memory"), (2, "drive")])],
)
def test_loads(size: int, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout_s": 60} | ({**AWAY, "nvme": str(tmp_path)} if place == "drive" else {})
    for rank, found in enumerate(run_ranks(loads, size, str(tmp_path), options)):
        assert list(found) == list(LOADS)
        for name, (said, after) in LOADS.items():
            message, state = found[name]
            assert message.startswith("CheckpointError: "), (rank, name, message)
            assert re.search(said, message), (rank, name, message)
            assert state == after or after is None, (rank, name, state)


SAVES = {
    "full drive": r"No space left on device: a checkpoint of [\d,]+ bytes, and 4,096 are free\. Nothing was written; free [\d,]+",
    "quota": r"Disk quota exceeded.*rank-0000\d-0000\.safetensors",
    "read-only": r"Read-only file system.*saves",
    "a file": r"(a file has this name|Not a directory).*file",
    "another job": r"another process saves its checkpoints in \S+; accepted: one job for each folder\. End that job, or save to",
}


@pytest.mark.parametrize("size", [1, 2])
def test_saves(size: int, tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    with (
        small_drive(tmp_path / "small", 4 * MIB) as small,
        mounted(tmp_path / "read-only", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs") as read_only,
    ):
        drives = {"small": str(small), "read-only": str(read_only), "ordinary": str(ordinary)}
        results = run_ranks(saves, size, drives, {"timeout_s": 60}, alone=True)  # lets go of the drives at once
    for rank, (found, left) in enumerate(results):
        assert list(found) == list(SAVES)
        for name, said in SAVES.items():
            assert re.search(said, found[name]), (rank, name, found[name])
            where = {"quota": size - 1}.get(name, 0)
            kind = (
                "CheckpointError" if rank != where or name == "another job" else r"(OSError|FileExistsError|NotADirectoryError)"
            )
            assert re.match(kind, found[name]), (rank, name, found[name])
            if rank != where:
                assert re.search(rf"no checkpoint is saved in \S+: named on rank {where}: ", found[name])
        assert left == ["save-00000001"]


def test_two_jobs_of_several_ranks_in_one_folder(tmp_path: Path) -> None:
    results = run_ranks(two_jobs, 4, str(tmp_path / "saved"))
    errors = [error for error, _ in results]
    jobs = errors[:2], errors[2:]
    assert sorted(bool(job[0]) for job in jobs) == [False, True], "one of them saves"
    for job in jobs:
        assert bool(job[0]) == bool(job[1]), "its ranks agree"
        for error in job if job[0] else ():
            assert re.search(r"CheckpointError: .*another process saves its checkpoints in .*one job for each folder", error)
    assert all(names == ["save-00000001", "save-00000002", "save-00000003"] for _, names in results)


def test_a_cap_that_is_too_small(tmp_path: Path) -> None:
    results = run_ranks(under_a_cap, 2, str(tmp_path), 100_000)
    assert results[0] == results[1], "all ranks name one cap"
    assert "load" in [where for where, _ in results[0]], results[0]
    assert len(results[0]) < 5, "what is named works in the end"


def test_a_plain_model_on_all_ranks_is_saved_by_one(tmp_path: Path) -> None:
    results = run_ranks(replicas, 2, str(tmp_path))
    (error,) = [error for error, _ in results if error]
    assert re.search(
        r"another process saves its checkpoints in \S+/all; .*Nothing of this model is partitioned, so that each of the 2 ranks "
        r"saves all of it: where they are the same job, call save on one of them", error,
    )  # fmt: skip
    assert [names for _, names in results] == [["save-00000001"]] * 2


@pytest.mark.parametrize(("size", "place"), [(2, "memory"), (1, "drive")])
def test_averages_are_saved_as_a_part_of_the_model(size: int, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout_s": 60} | ({**AWAY, "nvme": str(tmp_path)} if place == "drive" else {})
    for found in run_ranks(partitioned_in_extra, size, str(tmp_path / "saved"), options):
        for name in ("parameters", "state_dict", "tensor"):
            if size > 1 and name == "state_dict":
                assert re.search(r"full_state_dict\(model\)", found[name]), found[name]
                continue
            assert re.match(r"CheckpointError: extra\.", found[name]), (name, found[name])
            assert "It is partitioned: save what it belongs to as a part of the model, as an average by" in found[name]


WRONG = {
    "save, folder": "TypeError: a NoneType is given as the folder; accepted: a str or a pathlib.Path",
    "save, keep": "ValueError: keep=0; accepted: the number of checkpoints to keep, 1 or more",
    "save, optimizer": "TypeError: a str is given as an optimizer; accepted: ",
    "save, another folder": "RankMismatchError: .* rank 0, saving a checkpoint, has 'folder .*'; rank 1, .* 'folder .*/other'",
    "load, folder": "TypeError: a NoneType is given as the folder; accepted: a str or a pathlib.Path",
    "load, optimizer": "TypeError: a str is given as an optimizer; accepted: ",
}


def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all_and_training_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(wrong_on_one_rank, 2, str(tmp_path))
    assert list(first) == list(second) == list(WRONG)
    for name, said in WRONG.items():
        assert re.match(said, second[name]), (name, second[name])
        if name == "save, another folder":
            assert first[name] == second[name]
        else:
            _, told = second[name].split(": ", 1)
            assert re.match(r"CheckpointError: (no checkpoint is saved in|loading) \S+", first[name]), (name, first[name])
            assert first[name].endswith(f"named on rank 1: {told}"), (name, first[name])
