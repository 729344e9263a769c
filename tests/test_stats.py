"""What a user is told: the first step's line, and the account of links and memory."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from models import TiedWords, loss_of, tokens
from torch import nn
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.runtime.bridge import FakeDevice, played_by

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
    with caplog.at_level(logging.INFO, logger="zinf_compile"), played_by(FakeDevice()):
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
    with played_by(FakeDevice()) as device:
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
