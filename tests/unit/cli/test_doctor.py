"""What `zinf doctor` finds, and what it makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zinf_compile.cli import doctor, quota, selftest_training
from zinf_compile.cli.main import main
from zinf_compile.cli.selftest_check import Finding, NotHere
from zinf_compile.runtime.storage import scratch_file
from zinf_compile.runtime.system import filesystem
from zinf_compile.runtime.system.cgroups import available_memory_bytes, find_limits, memory_limit_bytes


def examine(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["doctor", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = examine(capsys, "--nvme", str(tmp_path))
    documented = doctor.examine.__doc__ or ""
    assert set(found) == {"torch", "engine", "limits", "nvme", "concerns"}
    for section in ("torch", "engine", "limits", "nvme"):
        assert all(key in documented for key in found[section])
    assert found["torch"]["version"] == torch.__version__
    assert found["engine"]["name"] in ("io_uring", "threads")
    assert found["nvme"]["path"] == str(tmp_path)
    assert found["nvme"]["preallocates"] is True
    assert os.listdir(tmp_path) == []


def test_without_a_folder_none_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nvme" not in examine(capsys)


def test_the_table_names_each_fact_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--nvme", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = [tuple(line.split()[:2]) for line in printed.partition("\n\n")[0].splitlines()]
    assert len(set(rows)) == len(rows)
    assert {("torch", "version"), ("engine", "name"), ("limits", "memlock"), ("nvme", "free")} <= set(rows)


def test_a_concern_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(filesystem.Filesystem, "concern", "it is made of paper")
    assert main(["doctor", "--nvme", str(tmp_path)]) == 0
    assert f"! {tmp_path}: it is made of paper" in capsys.readouterr().out


def test_a_refusal_to_reserve_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratch_file, "fallocate", lambda fd, size: 95)
    found = examine(capsys, "--nvme", str(tmp_path))
    assert found["nvme"]["preallocates"] is False
    assert any("cannot reserve space" in concern for concern in found["concerns"])


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_folder_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--nvme", str(tmp_path / path)]) == 2
    assert "accepted: a folder that exists" in capsys.readouterr().err


def test_quotas_are_answered_for_any_folder(tmp_path: Path) -> None:
    for of in ("user", "group"):
        assert quota.describe_quota(str(tmp_path), of=of)
        assert quota.describe_quota("/proc", of=of) == "none"


def test_limits_of_version_two_groups(tmp_path: Path) -> None:
    group = tmp_path / "user.slice" / "job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.high").write_text("max\n")
    (group.parent / "memory.max").write_text("500000\n")
    (group / "io.max").write_text("259:0 rbps=1048576 wbps=max\n")
    (group / "cpu.max").write_text("max 100000\n")
    (tmp_path / "groups").write_text("0::/user.slice/job\n")
    found = find_limits(tmp_path / "groups", tmp_path)
    assert found == {
        str(group / "memory.max"): "1000000",
        str(group.parent / "memory.max"): "500000",
        str(group / "io.max"): "259:0 rbps=1048576 wbps=max",
    }
    assert memory_limit_bytes(found) == 500000


def test_memory_is_what_is_left_of_the_tightest_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    (tmp_path / "groups").write_text("0::/user.slice/job\n")
    assert available_memory_bytes(tmp_path / "groups", tmp_path, tmp_path / "meminfo") == 8000 * 1024
    for folder, limit, used, cache in (
        ("user.slice/job", "1000000", "900000", "300000"),
        ("user.slice", "500000", "450000", "0"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(limit)
        (tmp_path / folder / "memory.current").write_text(used)
        (tmp_path / folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert available_memory_bytes(tmp_path / "groups", tmp_path, tmp_path / "meminfo") == 50000
    (tmp_path / "user.slice" / "memory.current").write_text("600000")
    assert available_memory_bytes(tmp_path / "groups", tmp_path, tmp_path / "meminfo") == 0


def test_limits_of_version_one_groups(tmp_path: Path) -> None:
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("4096\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (tmp_path / "cpu,cpuacct").mkdir()
    (tmp_path / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "blkio").mkdir()
    (tmp_path / "blkio" / "blkio.throttle.read_bps_device").write_text("8:0 1048576\n")
    (tmp_path / "groups").write_text("5:memory:/job\n4:cpu,cpuacct:/elsewhere\n3:blkio:/\n1:name=systemd:/\n")
    found = find_limits(tmp_path / "groups", tmp_path)
    assert {Path(path).name: text for path, text in found.items()} == {
        "memory.limit_in_bytes": "4096",
        "cpu.cfs_quota_us": "200000",
        "blkio.throttle.read_bps_device": "8:0 1048576",
    }
    assert memory_limit_bytes(found) == 4096


def test_memory_is_what_is_left_of_version_one_limits(tmp_path: Path) -> None:
    """The groups above count too, with the caches that the kernel counts for the whole of each."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    (tmp_path / "groups").write_text("5:cpu,cpuacct:/batch/job\n4:memory:/batch/job\n1:name=systemd:/\n")
    top, job = tmp_path / "memory" / "batch", tmp_path / "memory" / "batch" / "job"

    def available(folder: Path, limit: int, used: int, cache: int) -> int:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 7\nrss 5\ntotal_inactive_file {cache}\n")
        return available_memory_bytes(tmp_path / "groups", tmp_path, tmp_path / "meminfo")

    assert available(tmp_path / "memory", 2**63 - 4096, 10**9, 0) == 8000 * 1024, "no limit at all"
    assert available(job, 1000000, 900000, 300000) == 400000
    assert available(top, 500000, 450000, 20000) == 70000
    assert available(top, 2**63 - 4096, 450000, 0) == 400000
    assert available(job, 1000000, 1200000, 100000) == 0, "used beyond a limit that was lowered"
    (job / "memory.usage_in_bytes").unlink()
    assert available(top, 500000, 450000, 0) == 50000, "what can't be read limits nothing"


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert find_limits(tmp_path / "absent", tmp_path) == {}
    assert memory_limit_bytes({}) is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator: tests/gpu runs on it")
def test_a_self_test_without_an_accelerator_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu-selftest"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zinf: --gpu-selftest needs an accelerator, and there is none here: PyTorch")
    assert "Run it where training will run" in error


def test_segments_that_did_not_expand_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trains with them says whether there were any."""
    commands: list[Any] = []

    def run(command: list[str], env: dict[str, str], **others: object) -> SimpleNamespace:
        commands.append((command[-1], env["PYTORCH_ALLOC_CONF"], env["PYTORCH_CUDA_ALLOC_CONF"]))
        return SimpleNamespace(returncode=0, stdout=f"a log\n{said}\n")

    monkeypatch.setattr(selftest_training, "digest", lambda device: "0a1b")
    monkeypatch.setattr(selftest_training, "subprocess", SimpleNamespace(run=run))
    for said, passed in (("0a1b True", True), ("2c3d True", False)):
        found = selftest_training.expandable_segments(torch.device("cuda", 1))
        assert found == Finding(passed, f"{said.split()[0]} with them, 0a1b without")
    said = "0a1b False"
    with pytest.raises(NotHere, match="has none"):
        selftest_training.expandable_segments(torch.device("cuda", 1))
    assert commands == [("cuda:1", "expandable_segments:True", "expandable_segments:True")] * 3
