"""fio on an open file: one run, its rate and its CPU time; and fio that moves as many bytes as something else did."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

ENGINES = ("io_uring", "libaio")
BLOCK, DEPTH = 1 << 20, 32
"""Bytes of a transfer and transfers under way, as this package's I/O engine has them."""


class Sample(NamedTuple):
    """One run."""

    bytes_per_s: float
    cpu_s_per_gb: float


def version() -> str:
    """Return fio's version; say how to get it where there is none."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: it is what this benchmark compares with (apt-get install fio)")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def engine() -> str:
    """Return the faster engine, where fio may use it: io_uring. A kernel or a container may forbid that."""
    version()
    probe = ["fio", "--name=probe", "--ioengine=io_uring", "--rw=read", "--size=4k", "--filename=/proc/self/exe", "--readonly"]
    return ENGINES[subprocess.run(probe, capture_output=True, check=False).returncode != 0]


def job(path: Path, size: int, mode: str, *more: str) -> list[str]:
    """Return the options of a job: whole blocks of a file of so many bytes are read, or written, past the page cache."""
    size = max(BLOCK, size // BLOCK * BLOCK)
    how = [f"--ioengine={engine()}", f"--iodepth={DEPTH}", "--direct=1", f"--bs={BLOCK}", "--output-format=json"]
    return [f"--name={mode}", f"--filename={path}", f"--size={size}", f"--rw={mode}", *how, *more]


def fresh(path: Path, size: int) -> list[str]:
    """Return the options of a job that writes a fresh file, not preallocated, and syncs it."""
    return job(path, size, "write", "--end_fsync=1", "--fallocate=none")


def seconds(*jobs: list[str]) -> float:
    """Run jobs at once, each a process; return the seconds that the longest took, without its start."""
    running = [subprocess.Popen(["fio", *each], stdout=subprocess.PIPE, text=True) for each in jobs]
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"fio failed: {said}")
    found = [json.loads(text[text.index("{") :])["jobs"][0] for text in said]
    return float(max(each[way]["runtime"] for each in found for way in ("read", "write"))) / 1e3


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
