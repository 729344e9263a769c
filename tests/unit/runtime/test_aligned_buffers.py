"""Aligned memory, and the pool that counts it."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from zinf_compile.runtime.memory.aligned_buffers import BufferPool, aligned_buffer


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_buffers_begin_at_a_page_and_are_zeroed(size: int) -> None:
    buffer = aligned_buffer(size)
    assert buffer.numel() == size
    assert not buffer.any()
    assert size == 0 or buffer.data_ptr() % mmap.PAGESIZE == 0
    buffer.fill_(3)


def test_buffers_outlive_their_parent_tensors() -> None:
    part = aligned_buffer(4 << 20)[1 << 20 :]
    gc.collect()
    assert part.fill_(1).all()


def test_what_pins_memory_can_watch_it_end() -> None:
    memory, ended = mmap.mmap(-1, 4096), []
    weakref.finalize(memory, ended.append, 1)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)[7:]
    del memory
    gc.collect()
    assert ended == []
    del buffer
    gc.collect()
    assert ended == [1]


def test_the_smallest_that_fits_is_reused() -> None:
    pool = BufferPool(100_000)
    large, small = pool.take(50_000), pool.take(10_000)
    assert large is not None
    assert small is not None
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(9_000) is small
    assert pool.take(9_000) is large
    assert pool.bytes == 60_000


def test_the_cap_holds() -> None:
    pool = BufferPool(100_000)
    first = pool.take(60_000)
    assert first is not None
    assert pool.take(60_000) is None
    pool.give_back(first)
    assert pool.take(80_000) is not None, "an idle buffer that is too small makes room"
    assert (pool.bytes, pool.peak_bytes) == (80_000, 80_000)
    assert pool.take(10_000_000) is None
    assert BufferPool(100).take(101) is not None, "one alone is never too large"


def test_clearing_drops_what_is_idle() -> None:
    pool = BufferPool(100_000)
    held, idle = pool.take(1_000), pool.take(2_000)
    assert held is not None
    assert idle is not None
    pool.give_back(idle)
    pool.clear()
    assert pool.bytes == 1_000
