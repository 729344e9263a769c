"""Host memory that is locked, and a system that refuses to lock it."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.system import page_locked


class _Runtime:
    """In the place of CUDA's: keeps what is registered, or refuses."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.mapped: list[bool] = []
        """Whether memory was still there when it was unregistered."""

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = length
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        self.mapped.append(any(start <= address < end for start, end in spans))
        return 0


def _on_cuda(runtime: _Runtime) -> object:
    return patch.multiple(
        torch, accelerator=SimpleNamespace(current_accelerator=lambda: torch.device("cuda")),
        cuda=SimpleNamespace(cudart=lambda: runtime),
    )  # fmt: skip


def test_memory_is_registered_as_long_as_there_is_a_tensor_on_it() -> None:
    runtime = _Runtime()
    with _on_cuda(runtime):
        buffer = aligned_buffer(64 * mmap.PAGESIZE - 1, pinned=True)
    assert runtime.registered == {buffer.data_ptr(): 64 * mmap.PAGESIZE}
    part = buffer[5:]
    del buffer
    assert runtime.registered
    del part
    assert not runtime.registered
    assert runtime.mapped == [True], "else another thread may have mapped, and registered, the same addresses meanwhile"


def test_a_refusal_costs_speed_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    runtime = _Runtime(code=2)
    page_locked._told.clear()
    told = Mock(side_effect=RuntimeError("out of memory"))  # as the first kernel is
    with _on_cuda(runtime), patch.object(torch, "zeros", told), caplog.at_level("WARNING", "zinf_compile"):
        buffers = [aligned_buffer(4 << 20, pinned=True) for _ in range(2)]
    assert told.call_count == 2
    assert all((buffer == 0).all() for buffer in buffers)
    assert [record.getMessage().split(" bytes")[0] for record in caplog.records] == ["the system refuses to lock 6,291,456"]
    assert "ulimit -l" in caplog.text
    assert "cudaHostRegister returned 2" in caplog.text


def test_without_an_accelerator_nothing_is_locked() -> None:
    assert page_locked.locked_memory(mmap.PAGESIZE) is None


def test_pages_are_touched_in_parts() -> None:
    with patch.object(page_locked, "_TOUCHED_BYTES", 2 * mmap.PAGESIZE):
        memory = torch.ones(5 * mmap.PAGESIZE, dtype=torch.uint8)
        page_locked.touch(memory)
    assert memory.nonzero().numel() == memory.numel() - 5
