"""Host memory of ours that CUDA locks, and unlocks before the system has it back."""

from __future__ import annotations

import concurrent.futures
import mmap

import pytest
import torch

from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.system import page_locked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_memory_of_the_same_addresses_is_locked_again_by_other_threads(caplog: pytest.LogCaptureFixture) -> None:
    """Were it unlocked after it is unmapped, who maps those addresses meanwhile would be refused, or lose the lock."""
    page_locked._told.clear()

    def lock_and_drop(seed: int) -> bool:
        sizes = torch.randint(1, 64, (50,), generator=torch.Generator().manual_seed(seed)).tolist()
        return all(aligned_buffer(size * mmap.PAGESIZE, pinned=True).is_pinned() for size in sizes)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lock_and_drop, range(32)))
    assert not caplog.records


def test_a_copy_from_locked_memory_runs_beside_the_host() -> None:
    source = aligned_buffer(256 << 20, pinned=True)
    into = torch.empty(source.numel(), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the copy comes after it
    into.copy_(source, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not event.query(), "the host has gone on"
    event.synchronize()
    assert not into.any()
