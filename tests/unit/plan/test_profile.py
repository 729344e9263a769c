"""Profiles of machines: those that are shipped, and files with nonsense."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from zinf_compile.errors import PlanError
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.on_paper import life_days, place
from zinf_compile.plan.profile import Profile, find_profile, shipped


def test_common_machines_are_shipped_with_the_sources_of_their_figures() -> None:
    assert shipped() == [
        "a100", "b200", "gh200", "h100", "h200", "rtx4090-pcie4", "rtx4090-pcie5", "rtx5090-pcie4", "rtx5090-pcie5"
    ]  # fmt: skip
    for name in shipped():
        profile = find_profile(name)
        assert profile.name == name
        assert Profile.from_json(profile.to_json()) == profile
        assert {"flops_per_second, device memory", "reached", "to_device, from_device", "drive"} <= profile.source.keys()
        for world in (1, 64):
            where = place(profile, world=world, device_memory=1 << 30, host_memory=None, drives=4)
            assert [memory.tier for memory in where.memories] == [Tier.DEVICE, Tier.HOST, Tier.NVME]
            assert len(where.links) == (4 if world == 1 else 6)


def test_ranks_of_a_node_share_host_memory_and_drives() -> None:
    where = place(find_profile("h100"), world=64, device_memory=1 << 30, host_memory=800, drives=4)
    assert [memory.sharers for memory in where.memories] == [1, 8, 8]
    assert where.memories[1].room == 100
    (read,) = (link for link in where.links if link.source is Tier.NVME)
    assert read.seconds(4 * 6_900_000_000) == pytest.approx(8.0, rel=1e-3)
    gather = where.links[-2]
    assert gather.bytes_per_second == find_profile("h100").network_bytes_per_second
    inside = place(find_profile("h100"), world=8, device_memory=1 << 30, host_memory=800, drives=0)
    assert inside.links[-2].bytes_per_second == find_profile("h100").ranks_bytes_per_second


def test_a_drive_counts_with_what_it_keeps_up() -> None:
    profile = find_profile("rtx5090-pcie5")
    where = place(profile, world=1, device_memory=1 << 30, host_memory=None, drives=1)
    (write,) = (link for link in where.links if link.destination is Tier.NVME)
    assert write.bytes_per_second == 3e9
    assert profile.drive is not None
    assert life_days(profile.drive, drives=1, written=1.2e9, seconds=1.0) == pytest.approx(1e6 / 86400)
    assert life_days(profile.drive, drives=1, written=0, seconds=1.0) is None


def nonsense() -> list[tuple[dict[str, Any], str]]:
    rate = {"read_bytes_per_second": 2e9, "write_bytes_per_second": 1e9}
    return [
        ({"device_memory_bytes": 0}, "device_memory_bytes is 0; accepted: 1 to"),
        ({"device_memory_bytes": "80GiB"}, "device_memory_bytes: '80GiB' is no int"),
        ({"flops_per_second": {}}, "flops_per_second is empty; accepted: a rate for float32"),
        ({"flops_per_second": {"bfloat16": -1.0}}, "flops_per_second of bfloat16 is -1; accepted: 1000 to 1e+18"),
        ({"reached": 1.5}, "reached is 1.5; accepted: more than 0, and at most 1"),
        ({"to_device_bytes_per_second": 50.0}, "to_device_bytes_per_second is 50; accepted: 1000"),
        ({"host_memory_bytes": -5}, "host_memory_bytes is -5; accepted: 0 to"),
        ({"host_memory_bytes": 10**40}, "accepted: 0 to"),
        ({"latency_seconds": 10.0}, "latency_seconds is 10.0; accepted: 0 to 1"),
        ({"drives": 0}, "drives is 0; accepted: 1 to"),
        ({"drive": {"rates": []}}, "the drive has no rates"),
        ({"drive": {"rates": [{**rate, "both_bytes_per_second": 9e9}]}}, "more than reads and writes alone move together, 3e+09"),
        ({"drive": {"rates": [{**rate, "extent_bytes": -4}]}}, "drive.rates[0].extent_bytes is -4; accepted: 0 or more"),
        ({"drive": {"rates": [{**rate, "seconds": -4.0}]}}, "drive.rates[0].seconds is -4.0; accepted: 0 or more"),
        ({"drive": {"rates": [rate], "capacity_bytes": -1}}, "drive.capacity_bytes is -1; accepted: 0 (not known) or more"),
        ({"gpus": 8}, "has no field 'gpus'"),
    ]


@pytest.mark.parametrize(("changed", "message"), nonsense())
def test_nonsense_is_refused_with_what_is_accepted(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    body = json.loads(find_profile("h100").to_json())
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**body, **changed}))
    with pytest.raises(PlanError, match=re.escape(message)) as found:
        find_profile(str(file))
    assert "zinf doctor --profile FILE" in str(found.value)


def test_files_that_are_no_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'h1000' is no shipped profile, and no file that can be read .* accepted: a100, b200"):
        find_profile("h1000")
    (tmp_path / "x").write_text("{}")
    with pytest.raises(PlanError, match="begins with format None"):
        find_profile(str(tmp_path / "x"))


def test_what_a_machine_lacks_is_named() -> None:
    bare = dataclasses.replace(find_profile("h100"), drive=None, ranks_bytes_per_second=0.0, network_bytes_per_second=0.0)
    with pytest.raises(PlanError, match=r"has no drive; leave --nvme out"):
        place(bare, world=1, device_memory=1, host_memory=None, drives=1)
    with pytest.raises(PlanError, match="no rate between ranks, and 2 ranks"):
        place(bare, world=2, device_memory=1, host_memory=None, drives=0)
