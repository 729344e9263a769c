"""Space for checkpoints to come: allocated, without a name, and the files of a save once it begins."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zinf_compile.checkpoint.reserved_space import ReservedFile, ReservedSpace, Slot


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def save(folder: Path, count: int) -> None:
    """Let so many checkpoints be there."""
    for number in range(count):
        (folder / f"save-{number:08}").mkdir(exist_ok=True)


def test_a_file_gets_its_name_with_its_space(tmp_path: Path) -> None:
    file, path = ReservedFile(tmp_path, 100_000), tmp_path / "named"
    assert allocated(file._fd) >= 100_000
    assert os.listdir(tmp_path) == []
    inode = os.fstat(file._fd).st_ino
    with file.named(path) as fd:
        os.write(fd, b"abc")
    assert (path.stat().st_ino, path.stat().st_size, path.read_bytes()[:4]) == (inode, 100_000, b"abc\0")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    file.close()
    with pytest.raises(FileExistsError), ReservedFile(tmp_path, 10).named(path):
        pass
    assert path.read_bytes()[:3] == b"abc"


def test_as_many_slots_as_there_are_checkpoints_to_come(tmp_path: Path) -> None:
    space = ReservedSpace(tmp_path, keep=3)
    space.grow([5000, 300], 1000)
    assert (space.wanted, space.bytes, space.lacking) == (4, 6300, 4 * 6300)
    space.fill()
    assert (len(space._slots), space.lacking) == (4, 0)
    save(tmp_path, 2)
    assert space.wanted == 2
    space.fill()
    assert len(space._slots) == 2, "those that are there have taken theirs"
    save(tmp_path, 6)
    assert space.wanted == 1
    slot = space.take()
    assert slot is not None
    assert [file.size for file in slot.files] == [5000, 300]
    slot.close()
    space.close()
    assert space.take() is None


def test_slots_grow_and_never_shrink(tmp_path: Path) -> None:
    space = ReservedSpace(tmp_path, keep=1)
    space.grow([5000, 300])
    space.fill()
    space.grow([4000, 9000, 70])
    assert space.lacking == 2 * (9000 - 300 + 70)
    space.fill()
    assert space.lacking == 0
    for slot in space._slots:
        assert [file.size for file in slot.files] == [5000, 9000, 70]
        assert allocated(slot.files[1]._fd) >= 9000
    space.grow([1])
    assert space._sizes == [5000, 9000, 70]
    space.close()


def test_what_a_slot_lacks(tmp_path: Path) -> None:
    slot = Slot(tmp_path, [100, 200], 40)
    assert slot.bytes == 340
    assert [slot.lacks(sizes) for sizes in ([], [100], [90, 230], [100, 200, 50], [101])] == [0, 0, 30, 50, 1]
    slot.free_rest()
    assert slot.bytes == 330
    for _ in range(3):
        slot.free_rest()
    assert slot.bytes == 300
    slot.close()
    assert slot.bytes == 0
