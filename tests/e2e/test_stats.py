"""What a user is told: the first step's line, and the account of links and memory."""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from models import TiedWords, loss_of, tokens
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.runtime import context
from zinf_compile.runtime.device.link import HostIsDevice
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.lanes.lanes import Done, ThreadLane
from zinf_compile.runtime.lanes.link_meter import LINKS, Meter
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.memory.ledger import KINDS, Ledger
from zinf_compile.runtime.storage.engine import Engine

ALL_AWAY = {"compute": "fx", "params": "nvme", "grads": "nvme", "optimizer": "nvme"}


def train(options: dict[str, object], steps: int) -> nn.Module:
    model = TiedWords()
    model.compile(backend=BACKEND, options=options)
    optimizer = adamw(model.parameters())
    for number in range(steps):
        loss_of(model(*tokens(number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_first_step_says_what_lives_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zinf_compile"), simulating(SimulatedDevice()):
        model = train({**ALL_AWAY, "nvme": tmp_path}, 3)
    lines = [record.message for record in caplog.records if "keeps" in record.message]
    count = sum(p.numel() for p in model.parameters())
    assert len(lines) == 1, "one line, at the first step"
    size = rf"\({4 * count:,} B\)"
    assert re.match(
        rf"each of 1 rank\(s\) keeps parameters on NVMe {size}, gradients on NVMe {size}, states of AdamW on NVMe \([\d,]+ B\); "
        rf"updated on host memory\. A step writes [\d,]+ B to {tmp_path}: at this one's .* s a drive rated for 600 TBW lasts "
        r"[\d,]+ days of training",
        lines[0],
    )


def test_without_drives_there_is_nothing_to_wear_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zinf_compile"):
        train({"compute": "fx"}, 1)
    (line,) = [record.message for record in caplog.records if "keeps" in record.message]
    assert "parameters on the device" in line
    assert "TBW" not in line


def test_the_days_follow_from_bytes_and_seconds() -> None:
    from zinf_compile.stats import first_line  # noqa: PLC0415

    model = train({"compute": "fx"}, 1)
    units = [p._zinf_unit for p in model.parameters()]  # type: ignore[attr-defined]
    assert "lasts 69 days" in first_line(units, "AdamW", 0, (10**9, 10.0)), "600e12 / 1e9 * 10 s"


def test_stats_of_a_step(tmp_path: Path) -> None:
    assert zinf_compile.stats(TiedWords()) == {}
    with simulating(SimulatedDevice()) as device:
        model = train({**ALL_AWAY, "nvme": tmp_path}, 3)
        found = zinf_compile.stats(model)
    count = 4 * sum(p.numel() for p in model.parameters())
    assert found["steps"] == 3
    links = found["links"]
    assert links["host to nvme"]["bytes_last_step"] >= 4 * count, "gradients, parameters and two states"
    assert links["nvme to host"]["bytes_last_step"] >= 3 * count
    assert links["host to nvme"]["bytes"] >= 3 * links["host to nvme"]["bytes_last_step"]
    assert links["host to device"]["bytes"] == device.links["to device"].bytes > 0
    assert links["device to host"]["bytes"] == device.links["to host"].bytes > 0
    assert links["from ranks"]["bytes"] == 0
    assert all(link["waited_s"] >= link["waited_s_last_step"] >= 0 for link in links.values())
    assert found["memory"]["device"]["peak"]["all"] <= found["caps"]["device_memory"]
    assert found["memory"]["host"]["peak"]["all"] <= found["caps"]["host_memory"]
    assert found["memory"]["device"]["now"]["params"] == 0
    for link in LINKS[:4]:
        assert links[link]["bytes_last_step"] >= links[link]["peak_bytes_last_step"] > 0
        assert links[link]["peak_bytes"] >= links[link]["peak_bytes_last_step"]
    for side in found["memory"].values():
        assert side["peak"]["all"] >= side["peak_last_step"]["all"] > 0


def waited(found: dict[str, Any], which: str = "waited_s_last_step") -> dict[str, float]:
    """Return the links waited for longest, and how long: on a busy machine any wait takes its time, but not a third of theirs."""
    times = {link: numbers[which] for link, numbers in found["links"].items()}
    longest = max(times.values())
    return {link: time for link, time in times.items() if time > longest / 3}


@pytest.mark.parametrize("slow", ["to device", "to host"])
def test_a_slow_link_is_the_one_waited_for(slow: str, tmp_path: Path) -> None:
    with simulating(SimulatedDevice()) as device:
        device.links[slow]._latency_s = 0.05  # type: ignore[attr-defined]
        found = zinf_compile.stats(train({**ALL_AWAY, "nvme": tmp_path}, 3))
    assert list(waited(found)) == [device.links[slow].name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("own_memory", [True, False])
def test_a_slow_drive_is_the_one_waited_for(own_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "Engine", functools.partial(Engine, bandwidth=1e6))
    with simulating(SimulatedDevice() if own_memory else HostIsDevice(GatherMemory())):
        model = train({**ALL_AWAY, "nvme": tmp_path}, 3)
        found = zinf_compile.stats(model)
    assert {"nvme to host"} <= waited(found).keys() <= {"nvme to host", "host to nvme"}


@pytest.mark.parametrize("update", ["host", "device"])
def test_waits_of_a_step_are_those_of_its_states(update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from a drive, whatever is near it waits for."""
    monkeypatch.setattr(context, "Engine", functools.partial(Engine, bandwidth=2e5))  # so that no compute is as slow
    with simulating(SimulatedDevice()):
        found = zinf_compile.stats(train({"compute": "fx", "optimizer": "nvme", "update": update, "nvme": tmp_path}, 3))
    assert waited(found).keys() <= {"nvme to host", "host to nvme"}
    assert waited(found)


def test_who_waits_for_a_waiting_lane_waits_for_its_cause() -> None:
    meter, drive, copies = Meter(), ThreadLane("drive", link="nvme to host"), ThreadLane("copies", link="host to device")
    reading = drive.submit(lambda: time.sleep(0.2))

    def copy() -> None:
        reading.wait()
        time.sleep(0.1)

    copying = copies.submit(copy)
    with meter.waiting():
        copying.wait()
        copying.wait()
    found = {link: numbers["waited_s"] for link, numbers in meter.report().items() if numbers["waited_s"]}
    assert found == {"nvme to host": pytest.approx(0.2, abs=0.05), "host to device": pytest.approx(0.1, abs=0.05)}
    for lane in (drive, copies):
        lane.close()


def test_who_waits_for_room_on_a_lane_waits_for_its_link() -> None:
    meter, lane, over = Meter(), ThreadLane("lane", link="to ranks", most=1), threading.Event()
    lane.submit(lambda: time.sleep(0.1))
    with meter.waiting():
        lane.submit(over.set)
    lane.submit(lambda: time.sleep(0.1)).wait()
    assert over.is_set()
    assert meter.report()["to ranks"]["waited_s"] == pytest.approx(0.1, abs=0.05), "what no compute waits for doesn't count"
    lane.close()


def test_peaks_of_the_last_step() -> None:
    ledger, meter = Ledger(), Meter()
    for most in (7, 5, 3):
        ledger.add("grads", most)
        ledger.add("grads", -most)
        one, other = (meter.follow("nvme to host", most, Done()) for _ in range(2))
        one.wait()
        one.wait()
        del other
        ledger.end_step()
        meter.end_step()
    assert ledger.peak()["grads"] == ledger.total()[1] == 7
    assert ledger.peak_of_last_step() == {**dict.fromkeys(KINDS, 0), "grads": 3, "all": 3}
    drive = meter.report()["nvme to host"]
    assert (drive["bytes"], drive["peak_bytes"], drive["peak_bytes_last_step"]) == (30, 14, 6)


def test_memory_of_a_device_that_is_host_memory_is_one_account() -> None:
    model = train({"compute": "fx"}, 1)
    before = zinf_compile.stats(model)
    loss_of(model(*tokens(0))).backward()
    after = zinf_compile.stats(model)
    assert list(after["memory"]) == ["device"]
    assert after["memory"]["device"]["now"]["params"] > 0
    assert {name: link["bytes"] for name, link in after["links"].items()} == {
        name: link["bytes"] for name, link in before["links"].items()
    }, "nothing moves"
