"""The I/O engine beside fork, DataLoader workers, seccomp filters and the interpreter's end."""

from __future__ import annotations

import errno
import logging
import os
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engines import ENGINES
from programs import run_program
from seccomp import ENTER, make_io_uring_fail_in_this_thread

from zinf_compile.runtime.storage.engine import Engine, File, crc32c


def in_a_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; fail if it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ENGINES)
def test_a_child_gets_an_error_and_its_parent_no_harm(name: str, tmp_path: Path) -> None:
    source = torch.arange(1 << 18, dtype=torch.int64)
    engines = [Engine(name, bandwidth=2e7, chunk_bytes=1 << 16)]
    file = File(tmp_path / "data", write=True)
    request = engines[0].write(file, 0, source, checksum=True)

    def misuse() -> None:
        engine = engines.pop()  # so that it is destroyed when this returns, which must end nothing of the parent's
        uses = [request.wait, request.done, engine.close, lambda: engine.in_flight, lambda: engine.read(file, 0, source)]
        for use in uses:
            with pytest.raises(RuntimeError, match="forked child"):
                use()
        with Engine(name) as own:
            own.write(file, 1 << 22, source, checksum=True).wait()

    in_a_child(misuse)
    assert request.wait() == crc32c(source)
    into = torch.zeros_like(source)
    for offset in (0, 1 << 22):
        engines[0].read(file, offset, into).wait()
        assert torch.equal(into, source)
    engines[0].close()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that need no engine, in workers that inherit one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __len__(self) -> int:
        """Return the number of rows."""
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a row."""
        return torch.full((4,), float(index))


@pytest.mark.parametrize("name", ENGINES)
def test_workers_of_a_data_loader_beside_a_live_engine(name: str, tmp_path: Path) -> None:
    source = torch.arange(1 << 16, dtype=torch.int64)
    with Engine(name, chunk_bytes=1 << 14) as engine, File(tmp_path / "data", write=True) as file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            rows = torch.utils.data.DataLoader(Rows(engine), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for number, batch in enumerate(rows):
                assert batch.shape == (4, 4)
                assert engine.write(file, number * source.nbytes, source, checksum=True).wait() == crc32c(source)
        into = torch.zeros_like(source)
        engine.read(file, 7 * source.nbytes, into).wait()
        assert torch.equal(into, source)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_where_io_uring_is_refused(code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> None:
        make_io_uring_fail_in_this_thread(code)
        with Engine() as engine, File(tmp_path / "data", write=True) as file:
            assert engine.name == "threads"
            assert os.strerror(code) in engine.reason
            assert engine.write(file, 0, b"1234", checksum=True).wait() == crc32c(b"1234")
        with pytest.raises(OSError, match="io_uring_setup") as raised:
            Engine("io_uring")
        assert raised.value.errno == code
        assert Engine("threads").reason == ""

    with caplog.at_level(logging.INFO, "zinf_compile"), ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(refused).result()
    lines = [record.getMessage() for record in caplog.records if record.name == "zinf_compile"]
    assert len(lines) == 1
    assert lines[0].startswith("I/O runs on threads, not on io_uring: io_uring_setup: ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_what_is_in_flight_when_the_interpreter_ends_is_finished(name: str, tmp_path: Path) -> None:
    program = f"""
        import torch
        from zinf_compile.runtime.storage.engine import Engine, File

        engine = Engine({name!r}, bandwidth=1e7, chunk_bytes=1 << 16)
        engine.write(File({str(tmp_path / "data")!r}, write=True), 0, torch.ones(1 << 21, dtype=torch.uint8))
    """
    ended = run_program(textwrap.dedent(program))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "data").read_bytes() == b"\1" * (1 << 21)


@pytest.mark.skipif("io_uring" not in ENGINES, reason="needs io_uring")
def test_a_ring_that_is_forbidden_later_on_gives_way_to_threads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's thread is started by its first transfer, and a filter holds for what a thread starts."""

    def work() -> None:
        engine = Engine("io_uring", chunk_bytes=1 << 16)
        make_io_uring_fail_in_this_thread(errno.EPERM, ENTER)
        source = torch.arange(1 << 17, dtype=torch.int64)
        with File(tmp_path / "data", write=True) as file:
            for _ in range(3):
                requests = [engine.write(file, n << 20, source, checksum=True) for n in range(3)]
                assert {request.wait() for request in requests} == {crc32c(source)}
                into = torch.zeros_like(source)
                engine.read(file, 1 << 20, into).wait()
                assert torch.equal(into, source)
        assert engine.name == "threads"
        assert "io_uring_enter: Operation not permitted" in engine.reason
        assert (engine.bytes_written, engine.bytes_read, engine.in_flight) == (9 * source.nbytes, 3 * source.nbytes, 0)
        engine.close()

    with caplog.at_level(logging.WARNING, "zinf_compile"), ThreadPoolExecutor(1) as one:
        one.submit(work).result(timeout=60)
    assert "I/O goes on on threads, since io_uring failed" in caplog.text
