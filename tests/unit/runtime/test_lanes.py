"""Lanes: what a transfer took is given back, however it ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from zinf_compile.runtime.lanes.lanes import InlineLane, ThreadLane
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
