"""Device memory: out of the host's reach, poisoned when freed, counted exactly; pinned memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import late
import pytest
import torch

_HERE = Path(__file__).parent


def _in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import ctypes, os, torch, late\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False, timeout=120)


def test_a_touch_by_host_code_ends_the_process_with_a_message() -> None:
    done = _in_a_process("t = torch.ones(4, device='late'); torch.accelerator.synchronize(); ctypes.string_at(t.data_ptr(), 4)")
    assert done.returncode == -11
    assert "host code touched memory of the device late, at address 0x" in done.stderr


def test_only_streams_see_the_writable_side() -> None:
    with pytest.raises(RuntimeError, match="is for the threads of streams"):
        torch.ops.late.host_view(torch.ones(4, device="late"))


def test_system_calls_refuse_device_memory() -> None:
    done = _in_a_process(
        "t = torch.ones(4, device='late')\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "fd = os.open('/dev/zero', os.O_RDONLY)\n"
        "print(libc.read(fd, ctypes.c_void_p(t.data_ptr()), 4), ctypes.get_errno())"
    )
    assert done.stdout.split() == ["-1", "14"]  # EFAULT


def test_a_forked_process_is_refused() -> None:
    done = _in_a_process(
        "t = torch.ones(4, device='late')\n"
        "if os.fork() == 0:\n"
        "    try: t + 1\n"
        "    except RuntimeError as error: print(error)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    assert "device late cannot be used in a forked process" in done.stdout


def test_new_memory_is_poison() -> None:
    assert torch.empty(1000, device="late").isnan().all()
    assert torch.empty(1000, device="late", dtype=torch.int32).eq(-1).all()


def test_freed_memory_is_handed_out_again_and_is_poison() -> None:
    freed = torch.ones(1000, device="late")
    address = freed.data_ptr()
    del freed
    again = torch.empty(1000, device="late")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_reuse_on_one_stream_needs_no_order() -> None:
    with late.delays(0.002, seed=1):
        first = torch.ones(1000, device="late")
        doubled = first * 2
        del first
        second = torch.zeros(1000, device="late")
        assert doubled.eq(2).all()
        assert second.eq(0).all()
    assert not late.defects()


def test_another_stream_reads_poison_in_memory_freed_too_early() -> None:
    other = torch.Stream(device="late")
    source = torch.ones(1000, device="late")
    torch.accelerator.synchronize()
    with late.held(other):
        with other:
            doubled = source * 2
        del source  # the compute stream has not waited for the other one
        torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert doubled.isnan().all()
    assert [defect.detail for defect in late.defects()] == [
        f"freeing memory on stream 0 writes what aten::mul.out on stream {other.stream_id} reads"
    ]


def test_the_account_is_exact() -> None:
    start = late.account()
    kept = torch.empty(1000, device="late")
    freed = torch.empty(3, dtype=torch.uint8, device="late")
    del freed
    account = late.account()
    assert account.now - start.now == 4000
    assert account.peak - start.now == 4003
    assert account.allocations - start.allocations == 2
    assert account.frees - start.frees == 1
    late.reset_peak()
    assert late.account().peak == late.account().now
    del kept
    assert late.account().now == start.now


def test_accelerator_statistics_round_up_as_pytorch_does() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    one = torch.empty(1, device="late")
    assert torch.accelerator.memory_allocated() - before == 512
    del one
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 512
    assert torch.accelerator.memory_stats()["num_ooms"] == 0


def test_memory_ends_where_it_is_told_to() -> None:
    torch.accelerator.empty_cache()
    used = torch.accelerator.memory_reserved()
    with late.memory_limit(used + (1 << 20)):
        assert torch.accelerator.get_memory_info() == (1 << 20, used + (1 << 20))
        kept = torch.empty(1 << 19, dtype=torch.uint8, device="late")
        with pytest.raises(torch.OutOfMemoryError, match=r"late out of memory. Tried to allocate 1048576 bytes"):
            torch.empty(1 << 20, dtype=torch.uint8, device="late")
        del kept
        torch.empty(1 << 20, dtype=torch.uint8, device="late")  # what was cached is given back for it


def test_pinned_memory() -> None:
    plain = torch.ones(1000)
    assert not plain.is_pinned()
    pinned = plain.pin_memory()
    assert pinned.is_pinned()
    assert pinned[10:].is_pinned()
    assert pinned.eq(1).all()
    assert torch.empty(10, pin_memory=True).is_pinned()
    with (
        late.pinned_limit(100),
        pytest.raises(RuntimeError, match="pinning 4000 bytes for device late: more than the limit of 100 bytes"),
    ):
        plain.pin_memory()


def test_host_memory_can_be_registered() -> None:
    plain = torch.ones(1000)
    start, length = plain.data_ptr(), plain.nbytes
    assert torch.late.register_host_memory(start, length)
    assert plain.is_pinned()
    assert not torch.late.register_host_memory(start + 40, 40)  # it is already
    assert torch.late.unregister_host_memory(start)
    assert not plain.is_pinned()
    assert not torch.late.unregister_host_memory(start)
    with late.pinned_limit(100):
        assert not torch.late.register_host_memory(start, length)


def test_pinned_memory_stays_until_its_copy_is_over() -> None:
    pinned = torch.ones(1000).pin_memory()
    with late.held():
        there = pinned.to("late", non_blocking=True)
        del pinned
    assert there.eq(1).all()


def test_storages_grow_and_shrink() -> None:
    tensor = torch.ones(10, device="late")
    tensor.resize_(20)
    assert tensor[:10].eq(1).all()
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    tensor.untyped_storage().resize_(80)
    assert tensor.isnan().all()
