"""The kernel questions of zinf_compile._csrc, asked of the machine that runs the tests."""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from seccomp import make_io_uring_fail_in_this_thread

from zinf_compile import _csrc


def test_a_ring_is_available_or_its_absence_explained() -> None:
    support = _csrc.io_uring_support()
    assert support.available == (support.errno == 0)
    assert support.available == (support.reason == "")
    assert repr(support).startswith(f"IoUringSupport(available={support.available}, errno={support.errno}, ")


def test_asking_for_a_ring_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        _csrc.io_uring_support()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.EPERM, "seccomp"), (errno.ENOSYS, "Linux 5.1"), (errno.ENOMEM, "ulimit -l"), (errno.EMFILE, "open files")],
)
def test_a_refusal_is_a_value_that_says_why(code: int, advice: str) -> None:
    def ask() -> _csrc.IoUringSupport:
        make_io_uring_fail_in_this_thread(code)
        return _csrc.io_uring_support()

    with ThreadPoolExecutor(max_workers=1) as pool:
        support = pool.submit(ask).result()

    assert not support.available
    assert support.errno == code
    assert support.reason.startswith(f"io_uring_setup: {os.strerror(code)}")
    assert advice in support.reason


def test_direct_reads_succeed_at_the_alignment_found(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1 << 16))
    alignment = _csrc.direct_io_alignment(path)
    assert repr(alignment) == f"DirectIoAlignment(memory={alignment.memory}, offset={alignment.offset})"
    if alignment.offset == 0:
        assert alignment.memory == 0
        return

    assert alignment.memory <= mmap.PAGESIZE, "the buffer below is aligned to a page only"
    buffer = mmap.mmap(-1, alignment.offset)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(fd, [buffer], alignment.offset) == alignment.offset
    finally:
        os.close(fd)
    assert buffer[:] == path.read_bytes()[alignment.offset : 2 * alignment.offset]


def test_a_filesystem_that_does_not_say_gives_zeros() -> None:
    alignment = _csrc.direct_io_alignment("/proc/self/status")
    assert (alignment.memory, alignment.offset) == (0, 0)


@pytest.mark.parametrize("spell", [str, os.fsencode, Path])
def test_a_missing_path_raises_with_errno_and_path(tmp_path: Path, spell: type) -> None:
    path = tmp_path / "nönexistent"
    with pytest.raises(FileNotFoundError) as raised:
        _csrc.direct_io_alignment(spell(path))
    assert raised.value.errno == errno.ENOENT
    assert raised.value.filename == str(path)
