"""Drives that are full, read-only or can't reserve space, under a folder that was announced for checkpoints."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from small_drives import MIB, fill, free_bytes, mounted, small_drive
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint import parts_writer, reserved_space
from zinf_compile.checkpoint.reserved_space import reserved_in
from zinf_compile.errors import CheckpointError

BYTES = 3 * 4 * 64 * 512 + 4 * 64 * 512  # of values, two states and a gradient


class Training:
    """A model of 128 KiB, whose checkpoint takes four times as much and 1 MiB for what is not known before."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model = nn.Linear(512, 64, bias=False)
        self.compiled = torch.compile(self.model, backend=BACKEND, options={"checkpoint": folder, **options})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.compiled(torch.ones(3, 512)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, **options: Any) -> Path:
        return zinf_compile.save(folder, self.model, self.optimizer, wait=True, **options)

    def whole(self) -> Any:
        return zinf_compile.full_state_dict(self.model)["weight"].clone()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_drive(tmp_path / "drive", 8 * MIB) as drive:
        yield drive


def test_no_save_finds_the_drive_full(small: Path) -> None:
    """Others take every free byte; saves go on, one after the other, with what was reserved and what the oldest one leaves."""
    training = Training(small / "saves", checkpoint_keep=2)
    training.step()
    other = fill(small)
    assert free_bytes(small) == 0
    for number in range(1, 6):
        training.step()
        saved = training.save(small / "saves")
        assert saved.name == f"save-{number:08}"
        if free_bytes(small):  # of gradients, which were not saved
            with other.open("ab") as file:
                os.posix_fallocate(file.fileno(), file.tell(), free_bytes(small))
        assert free_bytes(small) == 0
    assert names(small / "saves") == ["save-00000004", "save-00000005"]
    expected = training.whole()
    training.step()
    zinf_compile.load(small / "saves", training.model, training.optimizer)
    assert torch.equal(training.whole(), expected)


def test_too_little_space_is_an_error_before_the_first_step(small: Path) -> None:
    other = fill(small, leave=3 * MIB)
    training = Training(small / "saves", checkpoint_keep=2)
    before = training.whole()
    form = (
        r"No space left on device: 2 checkpoints to keep and one that is written, ([\d,]+) bytes each, need "
        r"([\d,]+) bytes more, and ([\d,]+) are free\. Nothing is updated yet: free ([\d,]+) bytes more, "
        r"lower option checkpoint_keep, or name a folder"
    )
    for _ in range(2):
        with pytest.raises(OSError, match=form) as raised:
            training.step()
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(small / "saves"))
        found = re.search(form, str(raised.value))
        assert found is not None
        each, needed, free, more = (int(text.replace(",", "")) for text in found.groups())
        assert (needed, more, free) == (3 * each, needed - free, free_bytes(small))
        assert BYTES + MIB < each < BYTES + MIB + 70_000
        assert names(small / "saves") == []
        assert torch.equal(training.whole(), before)
        training.optimizer.zero_grad()
    other.unlink()
    training.step()
    assert not torch.equal(training.whole(), before)
    assert training.save(small / "saves").exists()


def test_space_that_others_took_is_a_warning_and_then_the_error_of_the_save(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(small / "saves")
    training.step()
    training.save(small / "saves")
    space = reserved_in(small / "saves")
    assert space is not None
    space.close()
    other = fill(small)
    before = training.whole()
    with pytest.raises(OSError, match=r"a checkpoint of [\d,]+ bytes, and 0 are free\. Nothing was written; free") as raised:
        training.save(small / "saves")
    assert raised.value.errno == errno.ENOSPC
    (said,) = [r.getMessage() for r in caplog.records if "could not be reserved" in r.getMessage()]
    assert re.search(r"No space left on device.*Training goes on; free [\d,]+ bytes before the next save", said)
    assert names(small / "saves") == ["save-00000001"]
    assert torch.equal(training.whole(), before)
    other.unlink()
    training.step()
    assert training.save(small / "saves").name == "save-00000002"
    assert space._slots


def test_a_failed_save_gives_its_space_back(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(small / "saves")
    training.step()
    free = free_bytes(small)
    with monkeypatch.context() as patch:
        patch.setattr(parts_writer, "allocate", _input_output_error)
        with pytest.raises(OSError, match="Input/output"):
            training.save(small / "saves")
    assert names(small / "saves") == []
    assert free_bytes(small) == free, "it is reserved again"
    fill(small)
    assert training.save(small / "saves").exists()


def _input_output_error(fd: int, path: Path, size: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_memory_without_a_limit(tmp_path: Path) -> None:
    """A filesystem that says of all sizes that they are 0."""
    with mounted(tmp_path / "drive", "-t", "tmpfs", "-o", "size=0", "tmpfs") as drive:
        assert free_bytes(drive) == 0
        zinf_compile.save(drive / "before", nn.Linear(3, 3))
        training = Training(drive / "saves")
        training.step()
        assert training.save(drive / "saves").exists()
        zinf_compile.reset()


def test_a_file_size_limit(tmp_path: Path) -> None:
    training = Training(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="a file may not be that large here") as raised:
            training.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path))
    training.step()


def test_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(reserved_space, "fallocate", lambda fd, size: errno.EDQUOT)
        with pytest.raises(OSError, match="Disk quota exceeded: the quota is used up") as raised:
            training.step()
    assert (raised.value.errno, raised.value.filename) == (errno.EDQUOT, str(tmp_path))
    training.step()


@pytest.mark.parametrize("lacks", ["fallocate", "nameless files", "names for them"])
def test_filesystems_that_can_do_less(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zinf_compile")
    training, really = Training(tmp_path), os.open

    def without_nameless(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return really(path, flags, *rest, **more)

    def without_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    if lacks == "fallocate":
        monkeypatch.setattr(reserved_space, "fallocate", lambda fd, size: errno.EOPNOTSUPP)
    elif lacks == "nameless files":
        monkeypatch.setattr(os, "open", without_nameless)
    else:
        monkeypatch.setattr(os, "link", without_links)
    training.step()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("checkpoints of")]
    assert ("this filesystem can't reserve space: leave" in line) == (lacks == "fallocate"), line
    assert names(tmp_path) == []
    for number in (1, 2):
        training.step()
        assert training.save(tmp_path).name == f"save-{number:08}"
    expected = training.whole()
    training.step()
    zinf_compile.load(tmp_path, training.model, training.optimizer)
    assert torch.equal(training.whole(), expected)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with mounted(tmp_path / "drive", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs") as drive:
        for folder in (drive, drive / "new"):
            training = Training(folder)
            before = training.whole()
            with pytest.raises(OSError, match="Read-only file system") as raised:
                training.step()
            assert raised.value.errno == errno.EROFS
            assert str(drive) in str(raised.value.filename)
            assert torch.equal(training.whole(), before)
        zinf_compile.reset()
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(OSError, match="file"):
        Training(tmp_path / "file").step()
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_folder_that_another_job_saves_to(tmp_path: Path) -> None:
    script = (
        "import sys, torch, zinf_compile\n"
        "zinf_compile.save(sys.argv[1], torch.nn.Linear(3, 4)); print('saved', flush=True); input()"
    )
    with Program(script, str(tmp_path)) as other:
        assert other.stdout.readline() == "saved\n"
        training = Training(tmp_path)
        with pytest.raises(CheckpointError, match=r"another process saves its checkpoints in .*one job for each folder"):
            training.step()
        assert names(tmp_path) == ["save-00000001"]
    training.step()


def test_space_on_a_drive_whose_folders_take_space(tmp_path: Path) -> None:
    """On ext4 a folder's names have a block of their own, which has to be there when the drive is full."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs e2fsprogs")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
    with mounted(tmp_path / "drive", "-o", "loop", str(image)) as drive:
        training = Training(drive / "saves")
        training.step()
        for number, size in enumerate((4096, 512)):
            with contextlib.suppress(OSError), (drive / f"other-{number}").open("wb", buffering=0) as file:
                while file.write(b"x" * size):
                    pass
        assert free_bytes(drive) == 0
        for _ in range(3):
            training.step()
            training.save(drive / "saves")
        assert names(drive / "saves") == ["save-00000003"]
        zinf_compile.reset()
