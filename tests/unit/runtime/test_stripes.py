"""How blocks are dealt to several folders: by speed, and by what is free there."""

from __future__ import annotations

import dataclasses
import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.errors import StoreError
from zinf_compile.runtime.storage import drive_speed, scratch_file
from zinf_compile.runtime.storage.drive_speed import measure_shares
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.runtime.storage.extents import Layout
from zinf_compile.runtime.storage.scratch_file import ScratchFile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
BLOCK = 4096


def dealt(blocks: int, shares: list[float], rooms: list[tuple[str, int]] | None) -> list[int]:
    """Return how many blocks each device gets."""
    layout = Layout([("x", blocks * BLOCK)], block_bytes=BLOCK, alignment=BLOCK, shares=shares, free=rooms)
    return [size // BLOCK for size in layout.file_bytes]


def test_a_folder_with_less_space_gets_fewer_blocks() -> None:
    assert dealt(100, [1, 1], [("a", 1000 * BLOCK), ("b", 1000 * BLOCK)]) == [50, 50]
    assert dealt(100, [1, 1], [("a", 20 * BLOCK), ("b", 1000 * BLOCK)]) == [19, 81]  # one in twenty is spared
    assert dealt(100, [3, 1], [("a", sys.maxsize), ("b", sys.maxsize)]) == dealt(100, [3, 1], None) == [75, 25]
    assert dealt(100, [3, 1], [("a", 40 * BLOCK), ("b", sys.maxsize)]) == [38, 62]
    assert dealt(100, [1, 1], [("a", 20 * BLOCK), ("b", 80 * BLOCK)]) == [20, 80], "what is spared is used where it must be"
    assert dealt(60, [1, 1, 1], [("a", 30 * BLOCK), ("a", 30 * BLOCK), ("b", 40 * BLOCK)]) in ([11, 11, 38], [14, 14, 32])


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.sampled_from("abc")), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 60), min_size=3),
    st.integers(1, 120),
)
def test_what_fits_in_all_of_them_together_fits(devices: list[tuple[float, str]], free: dict[str, int], blocks: int) -> None:
    shares, filesystems = [share for share, _ in devices], [name for _, name in devices]
    counts = dealt(blocks, shares, [(name, free[name] * BLOCK) for name in filesystems])
    assert sum(counts) == blocks
    if blocks <= sum(free[name] for name in set(filesystems)):
        for name in set(filesystems):
            assert sum(count for count, each in zip(counts, filesystems, strict=True) if each == name) <= free[name]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Two folders on filesystems of their own, whose free bytes the test says; what is beyond is refused as by a full drive."""
    free = {str(tmp_path / name): 1 << 30 for name in "ab"}
    reserved: dict[ScratchFile, int] = {}
    for folder in free:
        Path(folder).mkdir()
    really = scratch_file.look_up

    def look_up(path: str) -> Any:
        taken = sum(size for scratch, size in reserved.items() if scratch.folder == str(path))
        return dataclasses.replace(really(path), mount_point=str(path), free_bytes=free[str(path)] - taken, total_bytes=1 << 40)

    def reserve(self: ScratchFile, size: int) -> None:
        if size > look_up(self.folder).free_bytes:
            raise StoreError(errno.ENOSPC, f"cannot reserve space in {self.folder!r}", self.folder)
        reserved[self] = size
        scratch_file.fallocate(self.file.fd, size)

    def release(self: ScratchFile) -> None:
        reserved.pop(self, None)

    for module in (scratch_file, drive_speed):
        monkeypatch.setattr(module, "look_up", look_up)
    monkeypatch.setattr(ScratchFile, "reserve", reserve)
    monkeypatch.setattr(ScratchFile, "release", release)
    monkeypatch.setattr(ScratchFile, "close", lambda self: (release(self), self.file.close()))
    return free


def test_a_store_takes_from_each_folder_what_is_there(folders: dict[str, int]) -> None:
    first, second = folders
    folders[first] = 40 * BLOCK
    value = torch.randint(256, (200 * BLOCK,), dtype=torch.uint8)
    with Store(list(folders), [("x", value.numel())], shares=[1, 1], block_bytes=BLOCK) as store:
        assert store.layout.file_bytes == [38 * BLOCK, 162 * BLOCK]
        store.write("x", value).wait()
        into = torch.empty_like(value)
        store.read("x", into).wait()
        assert torch.equal(into, value)
    folders[second] = 10 * BLOCK
    with pytest.raises(StoreError, match=r"bytes needed, .* bytes free: the disk is full") as raised:
        Store(list(folders), [("x", value.numel())], shares=[1, 1], block_bytes=BLOCK)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == first


def test_what_another_process_takes_meanwhile_is_laid_out_anew(folders: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = folders
    really = ScratchFile.reserve

    def reserve(self: ScratchFile, size: int) -> None:
        if folders[first] == 1 << 30:
            folders[first] = 20 * BLOCK  # somebody was faster
        really(self, size)

    monkeypatch.setattr(ScratchFile, "reserve", reserve)
    with Store(list(folders), [("x", 100 * BLOCK)], shares=[1, 1], block_bytes=BLOCK) as store:
        assert store.layout.file_bytes == [19 * BLOCK, 81 * BLOCK]


def test_a_folder_without_space_to_measure_in_counts_as_the_slowest(folders: dict[str, int]) -> None:
    first, second = folders
    folders[first] = 1 << 20
    with Engine() as engine:
        slow, fast = measure_shares(engine, [first, second])
        assert slow == fast > 0
        folders[second] = 1 << 20
        assert measure_shares(engine, [first, second]) == [1.0, 1.0]
        assert measure_shares(engine, [first]) == [1.0]


def test_folders_of_one_filesystem_share_it_equally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured one after the other, folders of one drive would differ by what else it is doing, up to one that gets no blocks."""
    monkeypatch.setattr(drive_speed, "_measure", lambda engine, folder: pytest.fail(f"{folder} is measured"))
    for name in "ab":
        (tmp_path / name).mkdir()
    with Engine() as engine:
        assert measure_shares(engine, [str(tmp_path / name) for name in "ab"]) == [1.0, 1.0]


def test_a_filesystem_is_measured_once_for_all_its_folders(folders: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = folders
    measured = []
    monkeypatch.setattr(drive_speed, "_measure", lambda engine, folder: measured.append(folder) or 6.0)
    with Engine() as engine:
        assert measure_shares(engine, [first, second, first]) == [3.0, 6.0, 3.0]
    assert measured == [first, second]
