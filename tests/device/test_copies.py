"""Copies between host and device: which ones the host waits for, and when they read."""

from __future__ import annotations

import time

import late
import pytest
import torch


def test_a_copy_reads_pinned_memory_when_its_stream_gets_there() -> None:
    source = torch.ones(10).pin_memory()
    with late.held():
        there = source.to("late", non_blocking=True)
        source.fill_(2)  # too early
    assert there.eq(2).all()
    assert late.counters()["blocking copies"] == 0
    assert late.counters()["sources changed before their copy"] == 1


def test_a_source_that_a_stream_writes_may_change_before_its_copy() -> None:
    source, staging = torch.ones(10, device="late"), torch.zeros(10).pin_memory()
    with late.lazily():
        staging.copy_(source, non_blocking=True)
        there = staging.to("late", non_blocking=True)
        assert there.eq(1).all()
    assert not late.defects()


def test_until_a_copy_to_the_host_is_there_its_memory_is_poison() -> None:
    source, here = torch.ones(10, device="late"), torch.zeros(10).pin_memory()
    torch.accelerator.synchronize()
    with late.delays(0.3, seed=1):
        here.copy_(source, non_blocking=True)
        for _ in range(1000):
            if not here.eq(0).all():
                break
            time.sleep(0.001)
        assert here.isnan().all()
        torch.accelerator.synchronize()
    assert here.eq(1).all()


def test_a_copy_to_pinned_memory_is_there_after_a_wait_only() -> None:
    source = torch.ones(10, device="late")
    with late.held():
        here = source.to("cpu", non_blocking=True)
        assert here.is_pinned()
        assert here.isnan().all()
        done = torch.accelerator.current_stream().record_event()
    done.synchronize()
    assert here.eq(1).all()
    assert late.counters()["blocking copies"] == 0


@pytest.mark.parametrize("way", ["to the device", "to the host"])
def test_copies_of_unpinned_memory_block_and_are_counted(way: str) -> None:
    host, there = torch.ones(10), torch.zeros(10, device="late")
    into, source = (there, host) if way == "to the device" else (host, there)
    into.copy_(source, non_blocking=True)
    assert late.counters()["copies of unpinned memory"] == 1
    assert late.counters()["blocking copies"] == 1


def test_a_blocking_copy_of_pinned_memory_is_no_unpinned_one() -> None:
    torch.ones(10).pin_memory().to("late")
    assert late.counters()["copies of unpinned memory"] == 0
    assert late.counters()["blocking copies"] == 1


def test_a_copy_that_converts_uses_memory_that_is_not_pinned() -> None:
    source = torch.ones(10).pin_memory()
    there = torch.zeros(10, device="late", dtype=torch.float16)
    there.copy_(source, non_blocking=True)
    assert there.eq(1).all()
    assert late.counters()["copies of unpinned memory"] == 1


def test_copies_convert_broadcast_and_stride() -> None:
    host = torch.arange(12.0).reshape(3, 4)
    there = torch.zeros(3, 4, device="late", dtype=torch.int64)
    there.copy_(host)
    assert there.cpu().equal(host.long())
    there.copy_(host[0])
    assert there.cpu().equal(host[0].long().expand(3, 4))
    there.t().copy_(host.reshape(4, 3))
    assert there.cpu().equal(host.reshape(4, 3).long().t())
    into = torch.zeros(4, 3).t()
    into.copy_(there)
    assert into.equal(there.cpu().float())
    assert there.t().cpu().equal(there.cpu().t())
    assert torch.zeros(3, 4, device="late").copy_(there).cpu().equal(there.cpu().float())
