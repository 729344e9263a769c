"""Host memory that is locked, and a system that refuses to lock it."""

from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize("pages", [1, 511, 512, 513, 5000])
def test_no_more_is_registered_than_was_asked_for(pages: int) -> None:
    """Also where a buffer begins at a huge page, for which more addresses are mapped."""
    runtime, size = _Runtime(), pages * mmap.PAGESIZE
    with _on_cuda(runtime):
        buffer = aligned_buffer(size, pinned=True)
        assert runtime.registered == {buffer.data_ptr(): size}
        assert size < 2 << 20 or buffer.data_ptr() % (2 << 20) == 0
        del buffer
        assert not runtime.registered


@pytest.mark.parametrize("shift", [0, 512])
def test_an_accelerator_s_own_memory_is_no_more_than_was_asked_for(shift: int) -> None:
    """Unless its allocator begins in the middle of a page."""
    asked: list[int] = []
    plain = torch.empty

    def empty(numel: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append(numel)
        whole = plain(numel + 2 * mmap.PAGESIZE, dtype=dtype)
        start = -whole.data_ptr() % mmap.PAGESIZE + shift
        return whole[start : start + numel]

    with patch.object(torch, "empty", empty):
        memory = page_locked.locked_memory(8192)
    assert memory is not None
    assert len(memory) == 8192
    assert asked == ([8192] if shift == 0 else [8192, 8192 + mmap.PAGESIZE])
    assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % mmap.PAGESIZE == 0


def test_a_refusal_costs_speed_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    runtime = _Runtime(code=2)
    page_locked._told.clear()
    told = Mock(side_effect=RuntimeError("out of memory"))  # as the first kernel is
    with _on_cuda(runtime), patch.object(torch, "zeros", told), caplog.at_level("WARNING", "zinf_compile"):
        buffers = [aligned_buffer(4 << 20, pinned=True) for _ in range(2)]
    assert told.call_count == 2
    assert all((buffer == 0).all() for buffer in buffers)
    assert [record.getMessage().split(" bytes")[0] for record in caplog.records] == ["the system refuses to lock 4,194,304"]
    assert "ulimit -l" in caplog.text
    assert "cudaHostRegister returned 2" in caplog.text


def test_without_an_accelerator_nothing_is_locked() -> None:
    """Where this process has one, as on a machine with a GPU or behind tests/device, PyTorch refuses as it does without."""
    without = Mock(side_effect=RuntimeError("Cannot access accelerator device when none is available."))
    with patch.object(torch, "empty", without) if torch.accelerator.is_available() else contextlib.nullcontext():
        assert page_locked.locked_memory(mmap.PAGESIZE) is None


def test_pages_are_touched_in_parts() -> None:
    with patch.object(page_locked, "_TOUCHED_BYTES", 2 * mmap.PAGESIZE):
        memory = torch.ones(5 * mmap.PAGESIZE, dtype=torch.uint8)
        page_locked.touch(memory)
    assert memory.nonzero().numel() == memory.numel() - 5
