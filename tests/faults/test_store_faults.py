"""Bad requests, full disks and drives that lie: always an exception that says what and where, never a wrong byte."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults import tamper
from programs import run_program

from zinf_compile.errors import StoreError, StoreRequestError, StoreWarning
from zinf_compile.runtime.storage import scratch_file
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.runtime.system.filesystem import Filesystem

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

BLOCK = 8192
KEY = ("h.0.weight", "exp_avg")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store of two extents: KEY of 3 blocks and a bit, written; "new", not written."""
    with Store(tmp_path, [(KEY, 3 * BLOCK + 100), ("new", 2 * BLOCK)], block_bytes=BLOCK) as made:
        made.write(KEY, content(0)).wait()
        yield made


def content(seed: int, size: int = 3 * BLOCK + 100) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def fd_of(store: Store) -> int:
    """Find the store's file as anyone could: by its link in /proc."""
    links = {
        fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    }
    return max(int(fd) for fd, link in links.items() if link.startswith(store.folders[0]) and link.endswith("(deleted)"))


def read(store: Store, key: object = KEY, size: int = 3 * BLOCK + 100) -> torch.Tensor:
    into = torch.zeros(size, dtype=torch.uint8)
    store.read(key, into).wait()
    return into


@pytest.mark.parametrize("at", [0, BLOCK - 1, 2 * BLOCK + 17, 3 * BLOCK + 99])
def test_a_flipped_bit_is_noticed(store: Store, at: int) -> None:
    was = content(0)[at].item()
    tamper(fd_of(store), bytes([was ^ 4]), at)
    start = at // BLOCK * BLOCK
    with pytest.raises(StoreError, match=rf"bytes \[{start:,}, .*'exp_avg'.*offset {start:,} of the store's file in") as raised:
        read(store)
    assert raised.value.errno == errno.EBADMSG
    tamper(fd_of(store), bytes([was]), at)
    assert read(store).equal(content(0))


def test_a_lost_write_is_named(store: Store) -> None:
    old = bytes(content(0)[:BLOCK])
    store.write(KEY, content(1)).wait()
    tamper(fd_of(store), old, 0)
    with pytest.raises(StoreError, match="generation 2; these are the bytes of the generation before: the last write was lost"):
        read(store)


def test_a_misdirected_block_is_named(store: Store) -> None:
    tamper(fd_of(store), bytes(content(0)[BLOCK : 2 * BLOCK]), 0)
    with pytest.raises(StoreError, match=r"these are the bytes \[8,192, 16,384\).*went to the wrong place"):
        read(store)


def test_a_damaged_block_can_be_written_again(store: Store) -> None:
    tamper(fd_of(store), b"\0" * BLOCK, 0)
    with pytest.raises(StoreError):
        read(store)
    store.write(KEY, content(2)).wait()
    assert read(store).equal(content(2))


def test_a_truncated_file_is_noticed(store: Store) -> None:
    os.ftruncate(fd_of(store), BLOCK + 4096)
    with pytest.raises(StoreError, match=rf"cannot read bytes \[{BLOCK:,}, {2 * BLOCK:,}\) of extent .*'exp_avg'"):
        read(store)
    into = torch.zeros(BLOCK, dtype=torch.uint8)
    store.read(KEY, into, offset=0).wait()
    assert into.equal(content(0)[:BLOCK])


def test_the_first_error_does_not_hide_behind_others(store: Store) -> None:
    os.ftruncate(fd_of(store), 0)
    transfer = store.read(KEY, torch.zeros(3 * BLOCK + 100, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cannot read bytes \[0, "):
            transfer.wait()
    assert transfer.done()


def run_in_process(program: str, folder: Path) -> None:
    """Run it in a process of its own, for what changes the limits of one."""
    done = run_program(program, str(folder))
    assert done.returncode == 0, done.stderr


FILLS_UP = """
import errno, resource, sys, torch
from zinf_compile.errors import StoreError
from zinf_compile.runtime.storage.extent_store import Store

store = Store(sys.argv[1], [("x", 1 << 20), ("y", 1 << 20)], block_bytes=1 << 16)
store.write("x", torch.ones(1 << 20, dtype=torch.uint8)).wait()
resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + 4096, resource.RLIM_INFINITY))
try:
    store.write("y", torch.ones(1 << 20, dtype=torch.uint8)).wait()
except StoreError as error:
    assert error.errno in (errno.EFBIG, errno.EIO), error.errno
    assert "cannot write bytes [" in str(error), error
    assert "extent 'y'" in str(error), error
else:
    raise AssertionError("a write past the limit was taken for done")
try:
    store.read("y", torch.ones(1 << 20, dtype=torch.uint8)).wait()
except StoreError as error:
    assert "its last write failed" in str(error), error
else:
    raise AssertionError("half a write was read")
into = torch.zeros(1 << 20, dtype=torch.uint8)
store.read("x", into).wait()
assert into.all()
store.close()
"""


def test_a_limit_reached_while_running(tmp_path: Path) -> None:
    run_in_process(FILLS_UP, tmp_path)


TOO_LARGE = """
import errno, resource, sys
from zinf_compile.errors import StoreError
from zinf_compile.runtime.storage.extent_store import Store

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    Store(sys.argv[1], [("x", 2 << 20)])
except StoreError as error:
    assert error.errno == errno.EFBIG
    assert "2,097,152 bytes needed" in str(error)
    assert "ulimit -f" in str(error)
else:
    raise AssertionError("more than the limit was reserved")
"""


def test_a_file_size_limit_is_an_error_before_any_work(tmp_path: Path) -> None:
    run_in_process(TOO_LARGE, tmp_path)


def test_a_full_disk_is_an_error_before_any_work(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError, match=r"': 1,125,899,906,842,624 bytes needed, [\d,]+ bytes free: the disk") as raised:
        Store(tmp_path, [("x", 1 << 50)])
    assert raised.value.errno == errno.ENOSPC
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EOPNOTSUPP, "cannot reserve space; choose one that can"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_fallocate_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    answers = iter([errno.EINTR, code])
    monkeypatch.setattr(scratch_file, "fallocate", lambda fd, size: next(answers))
    with pytest.raises(StoreError, match=rf"8,192 bytes needed, [\d,]+ bytes free: .*{says}") as raised:
        Store(tmp_path, [("x", 8000)])
    assert raised.value.errno == code


def test_a_small_disk_in_truth(tmp_path: Path) -> None:
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", tmp_path], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount")
    try:
        with pytest.raises(StoreError, match="1,048,577 bytes needed, 1,048,576 bytes free") as raised:
            Store(tmp_path, [("x", (1 << 20) + 1)])
        assert raised.value.errno == errno.ENOSPC
        with Store(tmp_path, [("x", 1 << 19)]) as store:
            store.write("x", content(0, 1 << 19)).wait()
            assert read(store, "x", 1 << 19).equal(content(0, 1 << 19))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("path", ["missing", "file", "file/below", "missing/below"])
def test_a_path_that_is_no_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot keep states in .*accepted: a folder you may write to") as raised:
        Store(tmp_path / path, [("x", 1)])
    assert raised.value.errno in (errno.ENOENT, errno.ENOTDIR)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_path_that_is_not_writable() -> None:
    with pytest.raises(StoreError, match="cannot keep states in '/proc/self'") as raised:
        Store("/proc/self", [("x", 1)])
    assert raised.value.errno in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS)


def test_where_nameless_files_are_unknown_the_name_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_tmpfile(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported", path)
        return real(path, flags, mode)

    monkeypatch.setattr(scratch_file.os, "open", without_tmpfile)
    with Store(tmp_path, [(KEY, 5)]) as store:
        assert os.listdir(tmp_path) == []
        store.write(KEY, content(0, 5)).wait()
        assert read(store, KEY, 5).equal(content(0, 5))


@pytest.mark.parametrize(
    ("kind", "says"), [("nfs4", "over a network"), ("overlay", "container's own layer"), ("tmpfs", "is memory"), ("ext4", "")]
)
def test_what_a_filesystem_means(kind: str, says: str) -> None:
    found = Filesystem(path="/x", kind=kind, source="s", mount_point="/", options="rw", free_bytes=1, total_bytes=1)
    assert says in found.concern
    assert bool(says) == bool(found.concern)


def test_unknown_extents(store: Store) -> None:
    for key in ["absent", ("h.0.weight", "exp_avg_sq"), None, ["unhashable"]]:
        with pytest.raises(StoreRequestError, match=r"unknown extent .*laid out with 2: .*'exp_avg'"):
            store.read(key, content(0))  # type: ignore[arg-type]


def test_an_extent_never_written(store: Store) -> None:
    with pytest.raises(StoreRequestError, match=r"bytes \[0, 8,192\) of extent 'new' .* was never written"):
        read(store, "new", 2 * BLOCK)
    store.write("new", content(1, BLOCK), offset=BLOCK).wait()
    with pytest.raises(StoreRequestError, match=r"bytes \[0, 8,192\) of extent 'new' .* was never written"):
        read(store, "new", 2 * BLOCK)


@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * BLOCK + 99, 3 * BLOCK + 101])
def test_tensors_of_another_size(store: Store, size: int) -> None:
    for transfer in (store.read, store.write):
        with pytest.raises(StoreRequestError, match=rf"a tensor of {size:,} bytes for extent .* of 24,676"):
            transfer(KEY, torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize(("offset", "size"), [(-BLOCK, BLOCK), (4 * BLOCK, 1), (3 * BLOCK, 101), (0, 4 * BLOCK), (1 << 70, 5)])
def test_ranges_outside(store: Store, offset: int, size: int) -> None:
    for transfer in (store.read, store.write):
        with pytest.raises(StoreRequestError, match=r"range \[.*\) of extent .*'exp_avg'.* is outside its 24,676 bytes"):
            transfer(KEY, torch.zeros(size, dtype=torch.uint8), offset=offset)


@pytest.mark.parametrize(("offset", "size"), [(1, BLOCK), (0, 5), (BLOCK, BLOCK + 4096), (3 * BLOCK, 99)])
def test_ranges_that_cut_a_block(store: Store, offset: int, size: int) -> None:
    for transfer in (store.read, store.write):
        with pytest.raises(StoreRequestError, match="cuts through a block: it must begin at a multiple of 8,192 bytes"):
            transfer(KEY, torch.zeros(size, dtype=torch.uint8), offset=offset)


@pytest.mark.parametrize("offset", [1.0, "0", True])
def test_offsets_that_are_no_number_of_bytes(store: Store, offset: object) -> None:
    with pytest.raises(StoreRequestError, match="offset"):
        store.read(KEY, torch.zeros(BLOCK, dtype=torch.uint8), offset=offset)  # type: ignore[arg-type]


def test_tensors_that_are_not_plain_memory(store: Store) -> None:
    size = 3 * BLOCK + 100
    strided = torch.zeros(2 * size, dtype=torch.uint8)[::2]
    for tensor, says in [
        (strided, "not contiguous"),
        (torch.zeros(size, dtype=torch.uint8, device="meta"), "tensor on meta"),
        (torch.zeros(size, dtype=torch.uint8).to_sparse(), "sparse_coo"),
        (b"bytes", "from bytes"),
    ]:
        with pytest.raises(StoreRequestError, match=says):
            store.write(KEY, tensor)  # type: ignore[arg-type]


def test_layouts_that_cannot_be(tmp_path: Path) -> None:
    for extents, says in [
        ([("x", 1), ("x", 2)], "'x' is laid out twice"),
        ([("x", -1)], "extent 'x' of -1 bytes"),
        ([("x", 1.5)], "extent 'x' of 1.5 bytes"),
    ]:
        with pytest.raises(StoreRequestError, match=says):
            Store(tmp_path, extents)  # type: ignore[arg-type]
    for block_bytes in (0, -4096, 1000):
        with pytest.raises(StoreRequestError, match=r"block_bytes=.*multiple of the alignment"):
            Store(tmp_path, [("x", 1)], block_bytes=block_bytes)
    for shares in ([], [1, 2], [0], [-1], [float("nan")], [float("inf")]):
        with pytest.raises(StoreRequestError, match="shares="):
            Store(tmp_path, [("x", 1)], shares=shares)
    with pytest.raises(StoreRequestError, match="paths="):
        Store([], [("x", 1)])


def test_a_closed_store(store: Store) -> None:
    store.close()
    for transfer in (store.read, store.write):
        with pytest.raises(StoreRequestError, match=r"exp_avg.*: the store is closed"):
            transfer(KEY, content(0))


def test_a_closed_engine(tmp_path: Path) -> None:
    engine = Engine()
    with Store(tmp_path, [("x", 100)], engine=engine) as store:
        engine.close()
        with pytest.raises(StoreRequestError, match=r"cannot write bytes \[0, 100\) of extent 'x' .*closed"):
            store.write("x", content(0, 100)).wait()


def test_each_path_that_is_no_drive_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Filesystem, "concern", "somewhere else")
    with pytest.warns(StoreWarning, match="somewhere else") as warned, Store(tmp_path, [("x", 5)]):
        pass
    assert len(warned) == 1
    assert warned[0].filename == __file__
