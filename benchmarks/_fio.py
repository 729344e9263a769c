"""fio on an open file: one run, its rate and its CPU time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any, NamedTuple

ENGINES = ("io_uring", "libaio")


class Sample(NamedTuple):
    """One run."""

    bytes_per_s: float
    cpu_s_per_gb: float


def version() -> str:
    """Return fio's version; say how to get it where there is none."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: it is what this benchmark compares with (apt-get install fio)")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run(engine: str, mode: str, *, fd: int, size: int, block: int, depth: int, verify: bool = False) -> Sample:
    """Move `size` bytes of the file open as `fd`, from its start to its end; "both": read the first half, write the second.

    For "both" fio runs two processes of half the depth each. CPU time is that of fio's jobs, without its start.
    `verify`: a CRC32C in each block, computed as it is written and checked as it is read; what is read must have been written so.
    """
    common = [f"--filename=/proc/{os.getpid()}/fd/{fd}", f"--bs={block}", f"--ioengine={engine}", "--direct=1"]
    command = ["fio", "--output-format=json", *common, "--allow_file_create=0", "--invalidate=0"]
    checks = ["--verify=crc32c", "--verify_state_save=0", "--do_verify=0"] if verify else []  # no second reading after writes
    if verify and mode != "read":
        checks.append("--verify_pattern=7")  # making blocks of random numbers would count as its CPU time
    if mode == "both":
        half = [f"--size={size // 2}", f"--iodepth={max(1, depth // 2)}"]
        command += ["--name=reads", "--rw=read", *half, *checks]
        command += ["--name=writes", "--rw=write", f"--offset={size // 2}", *half, *checks, *common]
    else:
        command += ["--name=job", f"--rw={mode}", f"--size={size}", f"--iodepth={depth}", *checks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fio failed: {' '.join(command)}\n{done.stderr}{done.stdout}")
    return _sample(json.loads(done.stdout[done.stdout.index("{") :])["jobs"])


def _sample(jobs: list[dict[str, Any]]) -> Sample:
    moved = sum(job[way]["io_bytes"] for job in jobs for way in ("read", "write"))
    seconds = max(job[way]["runtime"] for job in jobs for way in ("read", "write")) / 1e3
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    return Sample(moved / seconds, cpu / (moved / 1e9))
