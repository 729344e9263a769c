"""Stretches of files read from the page cache where they are in it, and past it where not."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.direct_file import File
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.file_read import FileRead, is_cached

SIZE = 300_001
CONTENT = random.Random(1).randbytes(SIZE)


class Opened:
    """A file of SIZE bytes, opened in all ways."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(CONTENT)
        self.fd = os.open(path, os.O_RDWR)
        self.file, self.engine, self.pool = File(path), Engine(), BufferPool(sys.maxsize)

    def drop(self) -> None:
        """Take it out of the page cache."""
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def begin(self, offset: int, size: int) -> FileRead:
        return FileRead(self.engine, self.file, self.fd, offset, size, self.pool)

    def read(self, offset: int, size: int) -> bytes:
        into = torch.zeros(size, dtype=torch.uint8)
        got = self.begin(offset, size).finish(into)
        return bytes(into[:got].tolist())


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    found = Opened(tmp_path_factory.mktemp("files") / "file")
    yield found
    found.engine.close()
    os.close(found.fd)


def direct(opened: Opened) -> Opened:
    if not opened.file.direct:
        pytest.skip("this filesystem has no way past the page cache")
    return opened


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 60_000), st.booleans()), min_size=1, max_size=6))
def test_any_stretch_is_what_the_file_has(opened: Opened, stretches: list[tuple[int, int, bool]]) -> None:
    for offset, size, cold in stretches:
        if cold:
            opened.drop()
        assert opened.read(offset, size) == CONTENT[offset : offset + size]
    assert opened.pool.bytes == sum(buffer.numel() for buffer in opened.pool._idle), "every buffer came back"


def test_several_may_be_under_way(opened: Opened) -> None:
    opened.drop()
    reads = [(offset, opened.begin(offset, 20_000)) for offset in range(3, 250_000, 20_001)]
    for offset, read in reads:
        into = torch.zeros(20_000, dtype=torch.uint8)
        assert read.finish(into) == 20_000
        assert bytes(into.tolist()) == CONTENT[offset : offset + 20_000]


def test_what_is_not_in_the_page_cache_stays_out_of_it(opened: Opened) -> None:
    direct(opened).drop()
    assert not is_cached(opened.fd, 0, SIZE)
    opened.read(5000, 200_000)
    assert not is_cached(opened.fd, 5000, 200_000)


def test_what_is_in_it_stays_there_and_is_not_read_from_the_drive(opened: Opened) -> None:
    os.pread(direct(opened).fd, SIZE, 0)
    assert is_cached(opened.fd, 1, SIZE - 1)
    before = opened.engine.bytes_read
    assert opened.read(5000, 200_000) == CONTENT[5000:205_000]
    assert opened.engine.bytes_read == before
    assert is_cached(opened.fd, 0, SIZE)


def test_of_somebody_elses_file_nothing_is_taken_to_be_cached(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(direct(opened).fd, SIZE, 0)
    monkeypatch.setattr(os, "geteuid", lambda: os.fstat(opened.fd).st_uid + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not is_cached(opened.fd, 0, SIZE)
    assert opened.read(5000, 200_000) == CONTENT[5000:205_000]


def test_without_a_way_past_the_page_cache_nothing_stays_in_it_that_was_not_there(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "file")
    with File(tmp_path / "file", direct=False) as buffered:
        opened.file = buffered
        opened.drop()
        assert opened.read(3, 200_000) == CONTENT[3:200_003]
        assert opened.engine.bytes_read == 0
    assert not is_cached(opened.fd, 8192, 100_000)
    opened.engine.close()
    os.close(opened.fd)


def test_of_a_file_that_became_shorter_there_is_what_is_left(tmp_path: Path) -> None:
    for length in (0, 5000, 100_000, 8192):
        opened = Opened(tmp_path / f"{length}")
        opened.drop()
        for offset, size in ((3, 200_000), (150_000, 1000)):
            os.ftruncate(opened.fd, length)
            into = torch.zeros(size, dtype=torch.uint8)
            got = opened.begin(offset, size).finish(into)
            assert bytes(into[:got].tolist()) == CONTENT[offset:length][:size]
            os.pwrite(opened.fd, CONTENT, 0)
        opened.drop()
        read = opened.begin(3, 200_000)
        os.ftruncate(opened.fd, length)  # while it is being read
        assert read.finish(torch.zeros(200_000, dtype=torch.uint8)) in (200_000, max(0, length - 3))
        opened.engine.close()
        os.close(opened.fd)


def test_an_error_of_the_drive_is_raised(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    direct(opened).drop()
    read = opened.begin(3, 100_000)
    assert read._direct is not None

    def fail() -> None:
        raise OSError(5, "Input/output error", opened.file.path)

    monkeypatch.setattr(read._direct, "wait", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read.finish(torch.zeros(100_000, dtype=torch.uint8))
