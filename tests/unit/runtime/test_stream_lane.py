"""Lanes of an accelerator: what the host waits for, and what only streams wait for. Streams are lists of calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.lanes.stream_lane import StreamLane, TransferToHost


class FakeEvent:
    def __init__(self, name: str) -> None:
        self.name, self.over, self.synchronized = name, False, 0

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.synchronized += 1
        self.over = True


class FakeStream:
    """A stream of a device that does nothing until it is told: a list of calls."""

    def __init__(self, name: str = "lane") -> None:
        self.name, self.calls, self.recorded = name, list[str](), list[FakeEvent]()
        self.before: list[FakeStream] = []

    def __enter__(self) -> None:
        self.before.append(CURRENT.stream)
        CURRENT.stream = self

    def __exit__(self, *error: object) -> None:
        CURRENT.stream = self.before.pop()

    def record_event(self) -> FakeEvent:
        self.recorded.append(FakeEvent(f"{self.name} {len(self.recorded)}"))
        self.calls.append(f"record {self.recorded[-1].name}")
        return self.recorded[-1]

    def wait_event(self, event: FakeEvent) -> None:
        self.calls.append(f"wait {event.name}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class _Current(threading.local):
    stream = FakeStream("compute")


CURRENT = _Current()
DEVICE = torch.device("cpu")


@pytest.fixture
def streams() -> Iterator[list[FakeStream]]:
    made: list[FakeStream] = []

    def make(device: torch.device) -> FakeStream:
        made.append(FakeStream(f"lane {len(made)}"))
        return made[-1]

    CURRENT.stream = FakeStream("compute")
    accelerator = SimpleNamespace(current_stream=lambda device: CURRENT.stream)
    with patch.multiple(torch, Stream=make, accelerator=accelerator):
        yield made


def note(calls: list[str], what: str) -> Callable[[], None]:
    return lambda: calls.append(what)


def test_a_transfer_is_ordered_by_events_and_keeps_nobody_waiting(streams: list[FakeStream]) -> None:
    lane = StreamLane(DEVICE, "test")
    job = lane.submit(lambda: streams[0].calls.append("copy"))
    assert streams[0].calls == ["wait compute 0", "copy", "record lane 0 0"]
    job.wait()
    assert CURRENT.stream.calls == ["record compute 0", "wait lane 0 0"]
    assert not streams[0].recorded[0].synchronized


def test_one_lane_comes_after_another_by_its_event(streams: list[FakeStream]) -> None:
    first, second = StreamLane(DEVICE, "first"), StreamLane(DEVICE, "second")
    copied = first.submit(lambda: None)
    second.submit(lambda: streams[1].calls.append("gather"), after=[TransferToHost(copied), Done()])
    assert streams[1].calls == ["wait compute 1", "wait lane 0 0", "gather", "record lane 1 0"]


def test_another_lane_that_comes_after_it_does_not_free_what_it_reads(streams: list[FakeStream]) -> None:
    """That memory belongs to the stream of compute: freed there, it may be handed out before the lane has read it."""
    first, second = StreamLane(DEVICE, "first"), StreamLane(DEVICE, "second")
    reads = torch.zeros(1)
    held = weakref.ref(reads)
    reducing = first.submit(lambda reads=reads: None)
    del reads
    second.submit(lambda: None, after=[TransferToHost(reducing)])
    assert held() is not None
    reducing.wait()
    assert held() is None


def test_what_is_over_holds_nothing(streams: list[FakeStream]) -> None:
    lane = StreamLane(DEVICE, "test")
    reads = torch.zeros(1)
    held = weakref.ref(reads)
    job = lane.submit(lambda reads=reads: None)
    del reads
    streams[0].recorded[0].over = True
    lane.settle()
    assert held() is None
    job.wait()


def test_what_comes_after_a_drive_is_issued_by_a_thread_and_the_rest_queues_behind_it(streams: list[FakeStream]) -> None:
    lane = StreamLane(DEVICE, "test")
    arrived, order = threading.Event(), list[str]()
    reading: Any = SimpleNamespace(wait=lambda: arrived.wait(60))
    jobs = [lane.submit(note(order, "late"), after=[reading]), lane.submit(note(order, "early"))]
    assert not any(job.is_issued() for job in jobs)
    assert order == []
    arrived.set()
    for job in jobs:
        job.wait()
    assert order == ["late", "early"]
    lane.submit(note(order, "at once"))
    assert order[-1] == "at once"
    lane.close()


def test_host_memory_is_held_until_the_device_is_done_with_it(streams: list[FakeStream]) -> None:
    lane, host = StreamLane(DEVICE, "test"), torch.zeros(8)
    job = lane.submit(lambda: None, host_memory=[host])
    job.wait()
    assert lane.readers([host[2:3]]) == [job]
    assert lane.readers([torch.zeros(8)]) == []
    streams[0].recorded[0].over = True
    assert lane.readers([host]) == []


def test_readers_of_several_ranges_are_those_of_each(streams: list[FakeStream]) -> None:
    lane, host = StreamLane(DEVICE, "test"), torch.zeros(64)
    held = [[host[4:8], host[20:24]], [host[8:9]], [host[40:64]], [host[30:30]]]
    jobs = [lane.submit(lambda: None, host_memory=each) for each in held]
    ranges = [host[start:end] for start in range(0, 64, 3) for end in (start, start + 1, start + 5, start + 30) if end <= 64]
    for one in ranges:
        for other in ranges:
            each = [job for job in jobs if job in lane.readers([one]) or job in lane.readers([other])]
            assert lane.readers([one, other]) == each
    assert lane.readers([host[0:4], host[9:20], host[24:30]]) == []
    assert lane.readers([host[0:64], host[1:2], host[5:6]])[:3] == jobs[:3]


def test_the_host_waits_for_the_oldest_where_too_many_hold_host_memory_that_comes_from_drives(streams: list[FakeStream]) -> None:
    drive: Any = SimpleNamespace(wait=lambda: None)
    for after, waits in (([], [0, 0, 0]), ([drive], [1, 0, 0])):
        lane = StreamLane(DEVICE, "test", most=2)
        jobs = [lane.submit(lambda: None, after=after, host_memory=[torch.zeros(1)]) for _ in range(3)]
        for job in jobs:
            job.wait()
        assert [event.synchronized for event in streams[-1].recorded] == waits
        lane.close()


def test_only_streams_wait_where_too_many_hold_memory_of_the_device(streams: list[FakeStream]) -> None:
    lane = StreamLane(DEVICE, "test", most=2)
    for _ in range(3):
        lane.submit(lambda: None)
    assert [event.synchronized for event in streams[0].recorded] == [0, 0, 0]
    assert "wait lane 0 0" in CURRENT.stream.calls


@pytest.mark.parametrize("forgiving", [False, True])
def test_after_one_that_was_not_issued_the_later_ones_fail(streams: list[FakeStream], forgiving: bool) -> None:
    def fail() -> None:
        raise KeyError("transfer")

    lane, ended, order = StreamLane(DEVICE, "test", forgiving=forgiving), list[int](), list[str]()
    jobs = [
        lane.submit(fail, ended=lambda: ended.append(0)),
        lane.submit(note(order, "second"), ended=lambda: ended.append(1)),
    ]
    with pytest.raises(KeyError):
        jobs[0].wait()
    if forgiving:
        jobs[1].wait()
    else:
        with pytest.raises(KeyError):
            jobs[1].wait()
    assert ended == [0, 1]
    assert order == (["second"] if forgiving else [])


def test_a_drive_that_fails_is_told_to_whoever_waits(streams: list[FakeStream]) -> None:
    def fail() -> None:
        raise OSError(5, "drive")

    lane = StreamLane(DEVICE, "test", forgiving=True)
    job = lane.submit(lambda: None, after=[SimpleNamespace(wait=fail)])
    with pytest.raises(OSError, match="drive"):
        job.wait()
    lane.close()


def test_a_device_that_the_lanes_thread_cannot_enter_is_told_to_whoever_waits(streams: list[FakeStream]) -> None:
    def refuse(device: torch.device) -> None:
        raise ValueError("no such device")

    ended, order = list[int](), list[str]()
    with patch.object(torch.accelerator, "set_device_index", refuse, create=True):
        lane = StreamLane(torch.device("meta"), "test", forgiving=True)
        after = [SimpleNamespace(wait=lambda: None)]
        jobs = [lane.submit(note(order, "copy"), after=after, ended=lambda n=n: ended.append(n)) for n in range(2)]
        for job in jobs:
            with pytest.raises(ValueError, match="no such device"):
                job.wait()
        lane.close()
    assert ended == [0, 1]
    assert order == []
