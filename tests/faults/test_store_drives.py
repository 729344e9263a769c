"""The store on filesystems that are mounted for the test, and do what others only simulate."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from small_drives import MIB, mounted

from zinf_compile.errors import StoreError, StoreWarning
from zinf_compile.runtime.storage.extent_store import Store


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[list[Path]]:
    """Two btrfs of 300 MiB: a filesystem with quotas that by itself never overwrites a block in place."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs btrfs-progs")
    with ExitStack() as stack:
        folders = []
        for name in ("a", "b"):
            image = tmp_path / f"{name}.img"
            with image.open("wb") as file:
                file.truncate(300 * MIB)
            subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
            folders.append(stack.enter_context(mounted(tmp_path / name, "-o", "loop", str(image))))
        yield folders


def test_a_quota_is_an_error_before_any_work(drives: list[Path]) -> None:
    part = drives[0] / "part"
    for command in (["quota", "enable", drives[0]], ["subvolume", "create", part], ["qgroup", "limit", "64M", part]):
        subprocess.run(["btrfs", *command], check=True, capture_output=True)
    with pytest.raises(StoreError, match=r"104,857,600 bytes needed, [\d,]+ bytes free: the disk quota is used up") as raised:
        Store(part, [("x", 100 * MIB)])
    assert raised.value.errno == errno.EDQUOT
    with Store(part, [("x", 32 * MIB)]) as store:
        store.write("x", torch.ones(32 * MIB, dtype=torch.uint8)).wait()


def test_a_nearly_full_drive_can_be_written_again_and_again(drives: list[Path]) -> None:
    value = torch.randint(256, (5 * MIB,), dtype=torch.uint8)
    with Store(drives[0], [(n, value.numel()) for n in range(38)]) as store:
        for _ in range(3):
            for transfer in [store.write(n, value) for n in range(38)]:
                transfer.wait()
        into = torch.empty_like(value)
        store.read(37, into).wait()
    assert into.equal(value)


def test_two_drives_hold_more_than_one(drives: list[Path]) -> None:
    value = torch.randint(256, (300 * MIB,), dtype=torch.uint8)
    with pytest.raises(StoreError, match="the disk is full"):
        Store(drives[0], [("x", value.numel())])
    with Store(drives, [("x", value.numel())], shares=[1, 1]) as store:
        assert all(file.direct for file in store.files)
        store.write("x", value).wait()
        into = torch.empty_like(value)
        store.read("x", into).wait()
    assert into.equal(value)


@pytest.mark.filterwarnings("ignore:.* is memory")
def test_a_filesystem_without_direct_transfers(tmp_path: Path) -> None:
    """It refuses to reserve space as well."""
    with mounted(tmp_path / "r", "-t", "ramfs", "none") as folder:
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
        with pytest.raises(StoreError, match=r"8,192 bytes needed, .* cannot reserve space; choose one that can"):
            Store(folder, [("x", 8000)])


def test_direct_transfers_refused_where_space_can_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No filesystem here does only that: what opens files refuses it in its stead."""
    really_open = os.open

    def open_buffered(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return really_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_buffered)
    value = torch.randint(256, (3 * MIB + 5,), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, "zinf_compile"), pytest.warns(StoreWarning, match="refuses direct I/O"):
        store = Store(tmp_path, [("x", value.numel())])
    with store:
        assert not store.files[0].direct
        store.write("x", value).wait()
        into = torch.empty_like(value)
        store.read("x", into).wait()
        assert into.equal(value)
        os.pwrite(store.files[0].fd, b"\0\1\2\3", 1000)
        with pytest.raises(StoreError, match="x"):
            store.read("x", into).wait()
    assert "its filesystem refuses O_DIRECT" in caplog.text


@pytest.mark.filterwarnings("ignore:.* is memory")
def test_memory_without_a_limit(tmp_path: Path) -> None:
    """Of such a filesystem the kernel says that it has 0 bytes, and 0 are free."""
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=0", "none") as folder:
        value = torch.randint(256, (3 * MIB,), dtype=torch.uint8)
        with Store(folder, [("x", value.numel())]) as store:
            store.write("x", value).wait()
            into = torch.empty_like(value)
            store.read("x", into).wait()
        assert into.equal(value)
