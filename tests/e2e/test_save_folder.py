"""The folder of checkpoints: one job at a time, leftovers of dead jobs, space, and saves that end at any system call."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_saves import counting, killed_at
from programs import Program
from torch import nn

import zinf_compile
from zinf_compile.checkpoint import rank_files, reserved_space
from zinf_compile.checkpoint.save_folder import SaveFolder
from zinf_compile.errors import CheckpointError


def model(value: float) -> nn.Module:
    built = nn.Linear(3, 4)
    for parameter in built.parameters():
        nn.init.constant_(parameter, value)
    return built


def value_in(folder: Path) -> float:
    found = model(0.0)
    zinf_compile.load(folder, found)
    (value,) = {float(value) for parameter in found.parameters() for value in parameter.detach().reshape(-1)}
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_keeps_as_many_as_it_is_told(tmp_path: Path) -> None:
    for number in range(1, 6):
        assert zinf_compile.save(tmp_path / "new" / "runs", model(number), keep=3).name == f"save-{number:08}"
    assert names(tmp_path / "new" / "runs") == [f"save-{number:08}" for number in (3, 4, 5)]
    assert value_in(tmp_path / "new" / "runs") == 5
    assert value_in(tmp_path / "new" / "runs" / "save-00000003") == 3
    with pytest.raises(ValueError, match=r"keep=0; accepted: .* 1 or more"):
        zinf_compile.save(tmp_path, model(1), keep=0)


def test_links_and_other_things_with_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    zinf_compile.save(folder, model(1))
    (folder / "save-00000001").rename(elsewhere)
    (folder / "save-00000001").symlink_to(elsewhere)  # moved to another drive
    (folder / "save-00000004").symlink_to(tmp_path / "nowhere")
    (folder / "save-00000006").write_bytes(b"")
    (folder / f".reserved-77-{'a' * 16}").write_bytes(b"")  # of a job that was killed just then
    assert value_in(folder) == 1
    assert zinf_compile.save(folder, model(2), keep=2).name == "save-00000007"
    assert names(folder) == ["save-00000001", "save-00000004", "save-00000006", "save-00000007"]
    zinf_compile.save(folder, model(3))
    assert names(folder) == ["save-00000004", "save-00000006", "save-00000008"]
    assert value_in(elsewhere) == 1, "the link has gone, not what it points at"


def test_ever_new_folders_and_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found, descriptors = [], []
    for number in range(40):
        found.append(zinf_compile.save(f"step-{number}", model(number)))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] == descriptors[19], "locks of folders of long ago are given back"
    assert found[7] == tmp_path / "step-7" / "save-00000001"
    monkeypatch.setattr(SaveFolder, "begin", _from_another_folder(SaveFolder.begin, tmp_path / "step-9"))
    assert zinf_compile.save("step-7", model(50)).parent == tmp_path / "step-7"
    assert value_in(tmp_path / "step-7") == 50


def _from_another_folder(begin: Callable[[SaveFolder], Any], folder: Path) -> Callable[[SaveFolder], Any]:
    """Change the working folder once a save has begun, as a loop may that goes on beside it."""

    def call(place: SaveFolder) -> Any:
        begun = begin(place)
        os.chdir(folder)
        return begun

    return call


def test_killed_at_each_system_call_it_is_whole_or_absent(tmp_path: Path) -> None:
    seen = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        zinf_compile.save(folder, model(1))
        zinf_compile.reset()  # another process goes on
        killed = killed_at(number, functools.partial(zinf_compile.save, folder, model(2)))
        seen.append(value_in(folder))
        zinf_compile.save(folder, model(3))
        assert names(folder) == ["save-00000003"] if seen[-1] == 2 else ["save-00000002"]
        assert value_in(folder) == 3
        shutil.rmtree(folder)
        if not killed:
            break
    assert len(seen) > 20
    turn = seen.index(2)
    assert 10 < turn < len(seen) - 2, "it is killed before and after the new one counts"
    assert seen == [1] * turn + [2] * (len(seen) - turn)


def test_each_call_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    for number in itertools.count():
        zinf_compile.save(tmp_path, model(1))
        before = names(tmp_path)
        reached = []

        def fail(at: int, name: str, args: tuple[Any, ...], number: int = number, reached: list[int] = reached) -> None:
            reached.append(at)
            if at == number and name != "close":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), args[0] if isinstance(args[0], Path) else None)

        error: OSError | None = None
        with counting(fail):
            try:
                zinf_compile.save(tmp_path, model(2))
            except OSError as raised:
                error = raised
        if error is not None:
            assert error.errno == errno.ENOSPC
        saved = value_in(tmp_path) == 2
        assert saved or names(tmp_path) == before or error is not None
        assert value_in(tmp_path) in (1, 2)
        if error is None:
            assert saved
        if len(reached) <= number:
            break
    assert number > 20


def test_what_is_renamed_has_reached_the_drive(tmp_path: Path) -> None:
    synced: set[str] = set()

    def follow(_: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync":
            synced.add(os.readlink(f"/proc/self/fd/{args[0]}"))
        elif name == "rename" and str(args[0]) in synced and not Path(args[0]).is_dir():
            synced.add(str(args[1]))
        elif name == "rename":
            there = {str(path) for path in Path(args[0]).iterdir()}
            assert {*there, str(args[0])} <= synced
            assert any(path.endswith("manifest.json") for path in there)

    with counting(follow):
        folder = zinf_compile.save(tmp_path, model(1))
    assert folder.is_dir()
    assert str(tmp_path) in synced


def test_another_job_that_saves_there_is_an_error(tmp_path: Path) -> None:
    script = (
        "import sys, torch, zinf_compile\n"
        "zinf_compile.save(sys.argv[1], torch.nn.Linear(3, 4)); print('saved', flush=True); input()"
    )
    with Program(script, str(tmp_path)) as other:
        assert other.stdout.readline() == "saved\n"
        (tmp_path / f".save-00000002-{'0' * 16}.partial").mkdir()  # that it might be writing
        with pytest.raises(CheckpointError, match=r"another process saves its checkpoints in .*one job for each folder"):
            zinf_compile.save(tmp_path, model(1))
        assert len(names(tmp_path)) == 2
    zinf_compile.save(tmp_path, model(1))
    assert names(tmp_path) == ["save-00000002"]


def test_space_is_checked_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zinf_compile.save(tmp_path, model(1))
    really = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_blocks, f_frsize = 3, really.f_blocks, really.f_frsize

    monkeypatch.setattr(rank_files.os, "statvfs", lambda folder: Full)
    with pytest.raises(OSError, match=r"No space left on device: a checkpoint of [0-9,]+ bytes, and 12,288 are free") as raised:
        zinf_compile.save(tmp_path, model(2))
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert names(tmp_path) == ["save-00000001"]
    monkeypatch.undo()
    monkeypatch.setattr(reserved_space, "fallocate", lambda fd, size: errno.EDQUOT)
    with pytest.raises(OSError, match="quota") as raised:
        zinf_compile.save(tmp_path, model(2))
    assert "rank-00000-0000.safetensors" in str(raised.value.filename)
    assert names(tmp_path) == ["save-00000001"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(OSError, match="file") as raised:
        zinf_compile.save(tmp_path / "file", model(1))
    assert raised.value.errno in (errno.EEXIST, errno.ENOTDIR)
    assert torch.equal(torch.tensor(list((tmp_path / "file").read_bytes())), torch.tensor(list(b"precious")))
