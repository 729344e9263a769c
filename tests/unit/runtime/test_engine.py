"""The I/O engine as Python sees it: every test on each engine, direct and buffered."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zinf_compile import _csrc
from zinf_compile.runtime.storage.engine import Engine, File, crc32c, crc32c_combine

ENGINES = ["threads", "io_uring"] if _csrc.io_uring_support().available else ["threads"]
LARGEST = 1 << 18


@pytest.fixture(params=ENGINES, scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(request.param, depth=8, chunk_bytes=1 << 14) as engine:
        yield engine


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File]:
    with File(tmp_path / "data", direct=request.param, write=True) as file:
        yield file


def aligned(size: int, alignment: int = 4096) -> torch.Tensor:
    room = torch.zeros(size + alignment, dtype=torch.uint8)
    return room[-room.data_ptr() % alignment :][:size]


def random_tensor(size: int, seed: int = 0) -> torch.Tensor:
    tensor = aligned(size)
    tensor.random_(generator=torch.Generator().manual_seed(seed))
    return tensor


def test_a_tensor_comes_back_bit_for_bit(engine: Engine, file: File) -> None:
    source = random_tensor(1 << 20)
    into = aligned(1 << 20)
    written = engine.write(file, 8192, source, checksum=True)
    assert written.wait() == crc32c(source)
    assert written.done()
    assert engine.read(file, 8192, into, checksum=True).wait() == crc32c(source)
    assert torch.equal(into, source)
    assert engine.read(file, 8192, into).wait() is None


pieces = st.lists(st.tuples(st.integers(0, LARGEST), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=pieces, seed=st.integers(0, 1 << 30), at=st.integers(0, 3))
def test_pieces_of_any_size_in_any_order(engine: Engine, file: File, cuts: list[tuple[int, bool]], seed: int, at: int) -> None:
    dice = random.Random(seed)
    places = sorted({0, LARGEST} | {place - place % 4096 if rounded else place for place, rounded in cuts})
    spans = [slice(begin, end) for begin, end in itertools.pairwise(places)]
    source = random_tensor(LARGEST + 4096, seed)[at : at + LARGEST]
    into = aligned(LARGEST + 4096)[at : at + LARGEST]
    for write, memory in [(True, source), (False, into)]:
        dice.shuffle(spans)
        if file.direct and write:  # transfers in flight together may not share a page, if one goes through the page cache
            sums = [engine.write(file, span.start, memory[span], checksum=True).wait() for span in spans]
        else:
            move = engine.write if write else engine.read
            requests = [move(file, span.start, memory[span], checksum=True) for span in spans]
            sums = [request.wait() for request in requests]
        assert sums == [crc32c(source[span]) for span in spans]
    assert torch.equal(into, source)
    assert Path(file.path).read_bytes() == source.numpy().tobytes()


def test_many_requests_leave_memory_threads_and_descriptors_level(engine: Engine, file: File) -> None:
    source = random_tensor(1 << 16)
    engine.write(file, 0, source).wait()

    def many(count: int) -> None:
        requests = []
        for number in range(count):
            requests.append(engine.read(file, number % 16 * 4096, aligned(4096)))
            if len(requests) == 100:
                requests = [request for request in requests if request.wait() is not None]

    many(2_000)
    before = resident(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    many(10_000)
    gc.collect()
    after = resident(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    assert after[0] - before[0] < 8 << 20
    assert after[1] <= before[1]  # fewer where what an earlier test left is collected meanwhile
    assert after[2] <= before[2]
    assert engine.in_flight == 0


def test_dropped_memory_requests_and_files_live_as_long_as_they_are_needed(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "dropped"
    size = 1 << 16
    for number in range(64):
        file = File(path, write=True)
        engine.write(file, number * size, random_tensor(size, number))
        file.close()
        file = File(path)
        engine.read(file, 0, bytearray(size))
        del file
    assert engine.in_flight >= 0
    with File(path) as file:
        deadline = time.monotonic() + 60
        while engine.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        for number in range(64):
            into = aligned(size)
            engine.read(file, number * size, into).wait()
            assert torch.equal(into, random_tensor(size, number))


def test_memory_under_way_cannot_be_resized(tmp_path: Path) -> None:
    memory = bytearray(1 << 16)
    with Engine("threads", bandwidth=1e5, chunk_bytes=4096) as engine, File(tmp_path / "data", write=True) as file:
        request = engine.write(file, 0, memory)
        with pytest.raises(BufferError):
            memory.append(0)
        request.wait()
    memory.append(0)


def test_any_contiguous_buffer(engine: Engine, file: File) -> None:
    numbers = torch.arange(3000, dtype=torch.float32)
    engine.write(file, 12, memoryview(numbers.numpy())).wait()
    engine.write(file, 4, b"12345678").wait()
    into = memoryview(bytearray(12008))
    engine.read(file, 4, into).wait()
    assert into == b"12345678" + numbers.numpy().tobytes()
    assert engine.write(file, 0, b"", checksum=True).wait() == 0
    assert engine.read(file, 1 << 40, torch.empty(0), checksum=True).wait() == 0


@pytest.mark.parametrize("size", [10_000, 8192, 1])
def test_a_file_that_ends_early(engine: Engine, file: File, size: int) -> None:
    os.truncate(file.path, size)
    with pytest.raises(OSError, match=f"read of 65536 bytes at offset 0 got {size}: the file ended") as raised:
        engine.read(file, 0, aligned(1 << 16)).wait()
    assert raised.value.errno == errno.EIO
    assert raised.value.filename == file.path


def test_an_error_can_be_waited_for_twice_and_leaves_the_engine_usable(engine: Engine, file: File) -> None:
    request = engine.read(file, 0, aligned(4096))
    for _ in range(2):
        with pytest.raises(OSError, match="got 0"):
            request.wait()
    engine.write(file, 0, aligned(4096)).wait()


def test_a_write_past_the_limit_is_an_error_not_a_short_file(engine: Engine, file: File) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="write of 131072 bytes at offset 0 got") as raised:
            engine.write(file, 0, aligned(1 << 17)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device(engine: Engine) -> None:
    with File("/dev/full", direct=False, write=True) as file, pytest.raises(OSError, match="got 0") as raised:
        engine.write(file, 0, aligned(4096)).wait()
    assert raised.value.errno == errno.ENOSPC


def test_bad_input(engine: Engine, file: File, tmp_path: Path) -> None:
    memory = aligned(4096)
    with pytest.raises(ValueError, match="offset is negative"):
        engine.read(file, -4096, memory)
    with pytest.raises(ValueError, match="beyond the largest file"):
        engine.read(file, 1 << 63, memory)
    with pytest.raises(ValueError, match="contiguous"):
        engine.read(file, 0, torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="contiguous"):
        engine.read(file, 0, memoryview(bytearray(16))[::2])
    with pytest.raises(TypeError, match="can't be written"):
        engine.read(file, 0, b"1234")
    with pytest.raises(TypeError, match="CPU"):
        engine.read(file, 0, torch.empty(4, device="meta"))
    with File(file.path) as read_only, pytest.raises(OSError, match="write=True"):
        engine.write(read_only, 0, memory)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        File(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        File(tmp_path / "nowhere" / "file", write=True)
    with pytest.raises(IsADirectoryError):
        File(tmp_path, write=True)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        engine.read(file, 0, memory)
    with pytest.raises(ValueError, match="closed file"):
        _ = file.fd


@pytest.mark.parametrize("name", ENGINES)
def test_a_closed_engine(name: str, tmp_path: Path) -> None:
    engine = Engine(name)
    with File(tmp_path / "data", write=True) as file:
        request = engine.write(file, 0, aligned(1 << 20), checksum=True)
        engine.close()
        engine.close()
        assert request.done()
        assert request.wait() == crc32c(bytes(1 << 20))
        with pytest.raises(ValueError, match="closed"):
            engine.read(file, 0, aligned(4096))
    assert engine.bytes_written == 1 << 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "uring"}, "uring"),
        ({"depth": 0}, "depth"),
        ({"chunk_bytes": 5000}, "multiple of 4096"),
        ({"bandwidth": 0}, "bandwidth"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ENGINES)
def test_bandwidth_is_a_cap(name: str, tmp_path: Path) -> None:
    with Engine(name, bandwidth=8e6, chunk_bytes=1 << 16) as engine, File(tmp_path / "data", write=True) as file:
        begin = time.monotonic()
        requests = [engine.write(file, number << 20, aligned(1 << 20)) for number in range(4)]
        for request in requests:
            request.wait()
        assert time.monotonic() - begin > 0.5


def test_the_gil_is_released_and_signals_arrive_while_waiting(tmp_path: Path) -> None:
    class Rang(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rang

    with Engine("threads", bandwidth=1e5, chunk_bytes=4096) as engine, File(tmp_path / "data", write=True) as file:
        request = engine.write(file, 0, aligned(1 << 17))
        handler = signal.signal(signal.SIGUSR1, ring)
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(Rang):
                request.wait()
        finally:
            signal.signal(signal.SIGUSR1, handler)
        assert not request.done()


def test_files_without_a_name_and_of_an_open_descriptor(engine: Engine, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    with File(fd, write=True) as file:
        os.close(fd)
        engine.write(file, 0, random_tensor(8192)).wait()
        into = aligned(8192)
        engine.read(file, 0, into).wait()
    assert torch.equal(into, random_tensor(8192))
    assert os.listdir(tmp_path) == []


def test_a_filesystem_without_direct_transfers_is_said_to_be_one(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zinf_compile"), File("/proc/self/cmdline") as file:
        assert not file.direct
        assert file.alignment == 1
        into = bytearray(4)
        engine.read(file, 0, into).wait()
    assert into == Path("/proc/self/cmdline").read_bytes()[:4]
    assert "O_DIRECT" in caplog.text


def test_new_files_are_the_users_own(tmp_path: Path) -> None:
    with File(tmp_path / "data", write=True):
        assert (tmp_path / "data").stat().st_mode & 0o777 == 0o600


def test_checksums() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    a, b = b"some bytes", bytes(range(256)) * 300
    assert crc32c(b, crc32c(a)) == crc32c_combine(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
