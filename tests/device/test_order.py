"""Accesses that nothing orders are found in each run, whatever the delays were."""

from __future__ import annotations

import late
import torch


def _streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(device="late"), torch.Stream(device="late")


def _unordered() -> list[str]:
    return [defect.detail for defect in late.defects() if defect.kind == "unordered accesses"]


def test_a_missing_event_is_found() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    with first:
        tensor.add_(1)
    assert not _unordered()
    with second:
        total = tensor.sum()
    assert _unordered() == [
        f"aten::sum.IntList_out on stream {second.stream_id} reads what aten::add.out on stream {first.stream_id} writes"
    ]
    assert late.counters()["unordered accesses"] == 1
    del total


def test_an_event_orders_and_so_does_what_waited_for_it() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    with first:
        tensor.add_(1)
    second.wait_event(first.record_event())
    torch.accelerator.current_stream().wait_event(second.record_event())
    tensor.add_(1)
    assert not _unordered()


def test_a_wait_before_the_record_orders_nothing() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    recorded = first.record_event()
    with first:
        tensor.add_(1)
    second.wait_event(recorded)
    with second:
        tensor.add_(1)
    assert len(_unordered()) == 1


def test_a_wait_on_the_wrong_stream_orders_nothing() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    with first:
        tensor.add_(1)
    torch.accelerator.current_stream().wait_event(first.record_event())
    with second:
        tensor.add_(1)
    assert len(_unordered()) == 1


def test_a_host_wait_orders() -> None:
    first, second = _streams()
    for wait in (first.synchronize, torch.accelerator.synchronize, lambda: first.record_event().synchronize()):
        tensor = torch.zeros(10, device="late")
        torch.accelerator.synchronize()
        with first:
            tensor.add_(1)
        wait()
        with second:
            tensor.add_(1)
        second.synchronize()
    assert not _unordered()


def test_two_streams_may_read_and_may_write_beside_each_other() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, 10, device="late")
    torch.accelerator.synchronize()
    with first:
        one = tensor + 1
        tensor.sum()
    with second:
        two = tensor + 1
    torch.accelerator.synchronize()
    with first:
        tensor[:, :5].add_(1)
    with second:
        tensor[:, 5:].add_(1)
    assert not _unordered()
    with second:
        tensor[:, 4:6].add_(1)
    assert len(_unordered()) == 1
    del one, two


def test_freeing_is_a_write_in_the_order_of_the_stream_of_the_allocation() -> None:
    first, second = _streams()
    with first:
        tensor = torch.zeros(10, device="late")
    second.wait_event(first.record_event())
    with second:
        tensor.add_(1)
        tensor.sum()
    first.wait_event(second.record_event())
    del tensor
    assert not _unordered()
    with first:
        tensor = torch.zeros(10, device="late")
    second.wait_event(first.record_event())
    with second:
        tensor.add_(1)
    del tensor
    assert _unordered() == [
        f"freeing memory on stream {first.stream_id} writes what aten::add.out on stream {second.stream_id} writes"
    ]


def test_record_stream_keeps_memory_and_is_counted() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    with second:
        doubled = tensor * 2
    tensor.record_stream(second)
    del tensor
    assert not _unordered()
    assert late.counters()["record_stream"] == 1
    del doubled, first


def test_host_memory_is_watched_between_streams() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    staging = torch.zeros(10).pin_memory()
    torch.accelerator.synchronize()
    with first:
        staging.copy_(tensor, non_blocking=True)
    with second:
        back = staging.to("late", non_blocking=True)
    assert _unordered() == [
        f"copy to device on stream {second.stream_id} reads what copy to host on stream {first.stream_id} writes"
    ]
    del back


def test_detection_can_be_left_off() -> None:
    first, second = _streams()
    tensor = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    with late.detection(False):
        for stream in (first, second):
            with stream:
                tensor.add_(1)
    assert not _unordered()


def test_what_a_drive_moves_is_ordered_by_waits_of_the_host() -> None:
    tensor = torch.zeros(10, device="late")
    staging = torch.zeros(10).pin_memory()
    torch.accelerator.synchronize()
    staging.copy_(tensor, non_blocking=True)
    late.drive_begins("write to a drive", staging.data_ptr(), 40, writes=False)
    (found,) = _unordered()
    assert found.startswith("write to a drive on stream ")
    assert found.endswith("reads what copy to host on stream 0 writes")
    torch.accelerator.synchronize()
    reading = late.drive_begins("read from a drive", staging.data_ptr(), 40, writes=True)
    late.drive_ended(reading)
    tensor.copy_(staging, non_blocking=True)
    torch.accelerator.synchronize()
    assert len(_unordered()) == 2, "a write was still under way there"
    late.clear()
    late.drive_ended(late.drive_begins("read from a drive", staging.data_ptr(), 40, writes=True))
    tensor.copy_(staging, non_blocking=True)
    assert not _unordered()
    late.drive_begins("read from a drive", staging.data_ptr(), 40, writes=True)
    assert len(_unordered()) == 1


def test_what_the_host_does_to_pinned_memory_is_ordered_by_its_waits() -> None:
    tensor = torch.zeros(10, device="late")
    staging = torch.zeros(10).pin_memory()
    torch.accelerator.synchronize()
    tensor.copy_(staging, non_blocking=True)
    staging[:5].sum()  # as the copy does
    assert not _unordered()
    staging[:5].add_(1)
    assert _unordered() == ["aten::add_.Tensor on the host writes what copy to device on stream 0 reads"]
    torch.accelerator.synchronize()
    staging.add_(1)
    late.clear()
    staging.copy_(tensor, non_blocking=True)
    staging.view(2, 5).t().detach()  # reads nothing
    assert not _unordered()
    staging.sum()
    assert _unordered()[0] == "aten::sum on the host reads what copy to host on stream 0 writes"
    torch.accelerator.synchronize()
    late.clear()
    staging.sum()
    assert not _unordered()
