"""Streams that only events order, and what the host waits for."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import late
import pytest
import torch


def _streams(count: int) -> list[torch.Stream]:
    return [torch.Stream(device="late") for _ in range(count)]


def test_the_accelerator_is_late() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("late")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.get_device_module("late") is torch.get_device_module(torch.device("late:0"))


def test_the_current_stream() -> None:
    default = torch.accelerator.current_stream()
    assert default == torch.late.default_stream()
    (other,) = _streams(1)
    with other:
        assert torch.accelerator.current_stream() == other
    assert torch.accelerator.current_stream() == default
    torch.accelerator.set_stream(other)
    assert torch.late.current_stream() == other
    torch.accelerator.set_stream(default)


def test_work_of_one_stream_runs_in_its_order() -> None:
    with late.delays(0.001, seed=3):
        total = torch.zeros((), device="late")
        for i in range(20):
            total.mul_(2).add_(i)
        expected = 0
        for i in range(20):
            expected = expected * 2 + i
        assert total.item() == expected


def test_nothing_but_an_event_orders_two_streams() -> None:
    first, second = _streams(2)
    source = torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    with late.held(first):
        with first:
            source.fill_(1)
            recorded = first.record_event()
        with second:
            early = source.clone()
        second.synchronize()
        assert early.eq(0).all().item()
        second.wait_event(recorded)
        with second:
            ordered = source.clone()
        assert not second.query()
    second.synchronize()
    assert ordered.eq(1).all()


def test_delays_follow_their_seed() -> None:
    def drawn(seed: int, **how: Any) -> list[float]:
        late.clear()
        with late.delays(0.004, seed=seed, **how):
            tensor = torch.zeros(10, device="late")
            for _ in range(9):
                tensor.add_(1)
            torch.accelerator.synchronize()
        works = late.log()
        assert all(b.start > a.end + b.late_by - 1e-6 for a, b in itertools.pairwise(works))
        return [work.late_by for work in works]

    first = drawn(1)
    assert len(first) == 10
    assert all(0 < delay <= 0.004 for delay in first)
    assert len(set(first)) == 10
    assert drawn(1) == first
    assert not set(drawn(2)) & set(first)
    some = drawn(1, chance=0.5)
    assert 0 < some.count(0) < 10
    assert drawn(1, chance=0.5) == some
    assert drawn(1, exponential=True) != first


def test_lazy_streams_run_when_the_host_waits() -> None:
    with late.lazily():
        tensor = torch.zeros(10, device="late")
        done = tensor.add_(1).sum()
        time.sleep(0.05)
        assert late.log() == []
        assert done.item() == 10
        assert len(late.log()) == 4
        tensor.add_(1)
        event = torch.accelerator.current_stream().record_event()
        while not event.query():
            time.sleep(0.001)
        assert len(late.log()) == 5


def test_the_host_goes_on() -> None:
    tensor = torch.zeros(10, device="late")
    with late.held():
        for _ in range(100):
            tensor = tensor + 1
        assert not torch.accelerator.current_stream().query()
    assert tensor.eq(100).all()


def test_the_log_says_what_ran_when() -> None:
    (other,) = _streams(1)
    with late.delays(0.001):
        tensor = torch.zeros(1000, device="late")
        with other:
            torch.zeros(1000, device="late")
        tensor.add_(1)
        torch.accelerator.synchronize()
    log = late.log()
    assert [work.name for work in log] == ["aten::zero_", "aten::add.out"]
    assert log[1].bytes == 8000
    assert log[0].start <= log[0].end <= log[1].start
    assert [work.name for work in late.log(other)] == ["aten::zero_"]
    assert late.overlap(log, log) > 0


def test_events() -> None:
    begin, end = (torch.Event(device="late", enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream()
    assert begin.query()  # as on CUDA: nothing was recorded, so nothing is waited for
    with late.held():
        begin.record(stream)
        torch.zeros(10, device="late").add_(1)
        end.record(stream)
        assert not end.query()
        with pytest.raises(RuntimeError, match="Both events must be completed"):
            begin.elapsed_time(end)
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
    assert late.counters()["synchronized events"] == 1


@pytest.mark.parametrize("way", ["event.wait", "stream.wait_event", "event.synchronize"])
def test_waiting_for_an_event_that_was_never_recorded_is_a_defect(way: str) -> None:
    (stream,) = _streams(1)
    event = torch.Event(device="late")
    {
        "event.wait": lambda: event.wait(stream),
        "stream.wait_event": lambda: stream.wait_event(event),
        "event.synchronize": event.synchronize,
    }[way]()
    assert late.counters()["waits for unrecorded events"] == 1
    event.record(stream)
    event.wait(stream)
    assert late.counters()["waits for unrecorded events"] == 1


def test_host_waits_are_counted_by_reason() -> None:
    tensor = torch.arange(10, device="late")
    assert late.counters()["host waits"] == 0
    torch.accelerator.synchronize()
    torch.accelerator.current_stream().synchronize()
    tensor.sum().item()
    tensor.cpu()
    tensor.nonzero()
    tensor.equal(tensor)
    assert {name: count for name, count in late.counters().items() if ":" not in name} == {
        "host waits": 6,
        "synchronized device": 1,
        "synchronized streams": 1,
        "operators that the host waits for": 3,
        "blocking copies": 1,
    }
    assert late.counters()["operators that the host waits for: aten::nonzero"] == 1


def test_forbidden_waits_raise_where_they_are() -> None:
    tensor = torch.arange(10, device="late")
    with late.waits_forbidden():
        tensor.add_(1)
        with pytest.raises(
            RuntimeError, match=r"the host waits for device late .operators that the host waits for: aten::_local_scalar_dense"
        ):
            tensor.sum().item()


def test_what_fails_on_a_stream_is_raised_at_the_next_wait() -> None:
    table = torch.zeros(3, 2, device="late")
    row = table[torch.full((1,), 5, device="late")]
    with pytest.raises(RuntimeError, match=r"aten::index.* failed on stream 0 of device late: index 5 is out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    del row
    assert late.counters()["failures on streams"] == 1


def test_a_model_of_time_depends_on_the_order_of_calls_alone() -> None:
    (other,) = _streams(1)
    first, second = torch.zeros(10, device="late"), torch.zeros(10, device="late")
    torch.accelerator.synchronize()
    logs = []
    for seed in (1, 2):
        late.clear()
        with late.delays(0.001, seed=seed), late.durations({"aten::add.out": 2.0}, otherwise=1.0):
            first.add_(1)
            done = torch.accelerator.current_stream().record_event()
            with other:
                second.mul_(2)
                other.wait_event(done)
                second.mul_(2)
            assert not done.query()
            done.synchronize()
            assert done.query()
            first.mul_(2)
            torch.accelerator.synchronize()
        logs.append([[(work.start, work.end) for work in log] for log in late.logs().values()])
    assert logs[0] == logs[1] == [[(0, 2), (2, 3)], [(0, 1), (2, 3)]]


def test_host_waits_are_counted_by_thread() -> None:
    waited, counted = threading.Event(), threading.Event()

    def wait() -> None:
        torch.accelerator.synchronize()
        waited.set()
        counted.wait()

    thread = threading.Thread(target=wait, name="another")
    thread.start()
    waited.wait()
    torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert late.waits_by_thread() == {"another": 1, "MainThread": 2}
    counted.set()
    thread.join()
