"""Lanes: what a transfer took is given back, however it ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from zinf_compile.runtime.lanes import lanes
from zinf_compile.runtime.lanes.lanes import ArrivalLane, InlineLane, Job, ThreadLane
from zinf_compile.runtime.system.accelerator import numbered, on_this_device


@pytest.mark.parametrize("forgiving", [False, True])
def test_what_a_transfer_took_is_given_back_also_where_it_is_left_out(forgiving: bool) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def transfer(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise KeyError(number)

    lane = ThreadLane("test", forgiving=forgiving)
    try:
        pending = [lane.submit(lambda n=n: transfer(n), ended=lambda n=n: ended.append(n)) for n in range(4)]  # type: ignore[misc]
        pending[0].wait()
        for failed in pending[1:2] if forgiving else pending[1:]:
            with pytest.raises(KeyError):
                failed.wait()
        pending[-1].wait() if forgiving else None
    finally:
        lane.close()
    assert begun == ([0, 1, 2, 3] if forgiving else [0, 1])
    assert ended == [0, 1, 2, 3]


def test_an_inline_transfer_that_fails_gives_back_what_it_took() -> None:
    ended: list[bool] = []

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        InlineLane().submit(fail, ended=lambda: ended.append(True))
    assert ended == [True]


def test_the_thread_of_a_devices_lane_begins_with_that_device() -> None:
    """Not with number 0, on which CUDA would then take memory for each rank."""
    chosen: list[tuple[torch.device, str]] = []
    there = torch.device("cuda", 3)
    accelerator = SimpleNamespace(set_device_index=lambda device: chosen.append((device, threading.current_thread().name)))
    with patch.object(torch, "accelerator", accelerator):
        lane = ThreadLane("test", device=there)
        lane.submit(lambda: None).wait()
        lane.close()
        ThreadLane("on the host").close()
    assert chosen == [(there, "test")]


@pytest.mark.parametrize("forgiving", [False, True])
def test_a_device_that_its_lane_cannot_enter_is_told_to_who_waits(forgiving: bool) -> None:
    def refuse(device: torch.device) -> None:
        raise ValueError("no such device")

    with patch.object(torch, "accelerator", SimpleNamespace(set_device_index=refuse)):
        lane = ThreadLane("test", device=torch.device("cuda", 3), forgiving=forgiving)
        ended: list[bool] = []
        jobs = [lane.submit(lambda: ended.append(False), ended=lambda: ended.append(True)) for _ in range(2)]
        for job in jobs:
            with pytest.raises(ValueError, match="no such device"):
                job.wait()
        lane.close()
    assert ended == [True, True]


def test_an_accelerator_has_a_number() -> None:
    """As tensors on it say; other devices stay as they are."""
    found = SimpleNamespace(current_accelerator=lambda: torch.device("cuda"), current_device_index=lambda: 2)
    with patch.object(torch, "accelerator", found):
        assert numbered(torch.device("cuda")) == torch.device("cuda", 2)
        assert numbered(torch.device("cuda", 0)) == torch.device("cuda", 0)
        assert numbered(torch.device("cpu")) == torch.device("cpu")
    with patch.object(torch, "accelerator", SimpleNamespace(current_accelerator=lambda: None)):
        assert numbered(torch.device("cuda")) == torch.device("cuda")


def test_another_thread_begins_with_the_device_of_the_one_that_made_it() -> None:
    chosen: list[int] = []
    accelerator = SimpleNamespace(
        current_accelerator=lambda: torch.device("meta"), current_device_index=lambda: 2, set_device_index=chosen.append
    )
    with patch.multiple(torch, accelerator=accelerator, get_device_module=lambda device: SimpleNamespace()):
        run = on_this_device(lambda: chosen.append(-1))
    with patch.object(torch, "accelerator", accelerator):
        run()
    assert chosen == [2, -1]


def test_what_waits_for_copies_is_done_in_the_order_in_which_they_arrive() -> None:
    """Submitted in any order; what waits for more comes behind all that was submitted before it."""
    lane, done = ArrivalLane("zinf-test", most=100), list[str]()
    copies = {number: threading.Event() for number in (1, 2, 3, 4)}

    def submit(number: int, name: str) -> Job:
        copy = copies[number]

        def run() -> None:
            assert copy.wait(20.0), "it never arrives"
            done.append(name)

        return lane.submit_behind(number, run, is_there=copy.is_set)

    with patch.object(lanes, "PATIENCE_S", 20.0):  # however slow this machine is
        for number in (3, 1, 2):
            submit(number, f"of {number}")
        copies[1].set()
        again = submit(2, "of 2 again")
        copies[2].set()
        again.wait()
        assert done == ["of 1", "of 2", "of 2 again"]
        last = lane.submit(lambda: done.append("behind all"))
        copies[4].set()
        behind = submit(4, "of 4")
        assert not last.is_over()
        copies[3].set()
        behind.wait()
    lane.close()
    assert done == ["of 1", "of 2", "of 2 again", "of 3", "behind all", "of 4"]


def test_a_copy_that_arrives_only_once_it_is_waited_for_is_waited_for() -> None:
    """As on a device whose work nobody does before: by itself after a while, and at once where somebody waits for the lane."""
    for patience, waits in ((0.0, False), (20.0, True)):
        lane, done = ArrivalLane("zinf-test", most=100), list[str]()
        with patch.object(lanes, "PATIENCE_S", patience):
            one = lane.submit_behind(1, lambda done=done: done.append("one"), is_there=lambda: False)  # type: ignore[misc]
            if waits:
                lane.submit(lambda: None).wait()
            one.wait()
        lane.close()
        assert done == ["one"]


def test_an_arrival_lane_forgives() -> None:
    lane = ArrivalLane("zinf-test", most=100)

    def fail() -> None:
        raise ValueError("no")

    failed = lane.submit_behind(1, fail, is_there=lambda: True)
    done = lane.submit_behind(2, lambda: None, is_there=lambda: True)
    done.wait()
    with pytest.raises(ValueError, match="no"):
        failed.wait()
    lane.close()
