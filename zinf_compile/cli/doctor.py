"""`zinf doctor`: reports the machine's support for offloading, and obstacles."""

from __future__ import annotations

import argparse
import json
import os
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from zinf_compile.errors import StoreError
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.scratch_file import ScratchFile
from zinf_compile.runtime.system.accelerator import device_names
from zinf_compile.runtime.system.cgroups import find_limits, memory_limit_bytes
from zinf_compile.runtime.system.filesystem import look_up

from . import gpu_selftest
from .measure_machine import measure_machine
from .output_files import check_file, write_file
from .quota import describe_quota

_PROBE_BYTES = 1 << 20


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="report this machine's support for offloading",
        description="Print versions, the I/O engine and why it was chosen, limits, and the properties of a folder's drive.",
    )
    parser.add_argument("--nvme", metavar="DIR", help="the folder for states on a drive")
    parser.add_argument("--json", action="store_true", help="for programs; keys: see zinf_compile/cli/doctor.py")
    parser.add_argument(
        "--gpu-selftest",
        action="store_true",
        help="train and copy on this machine's accelerator: two minutes",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="measure compute, memory, links and, with --nvme, the drive; write them for `zinf plan --machine FILE`; a minute",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the command's output: one row per fact and the concerns below, or all of it as JSON; or the report of the self-test.

    Where one of its checks failed, `options.status` is 1.
    """
    if options.gpu_selftest:
        text, passed = gpu_selftest.report(options.nvme)
        options.status = int(not passed)
        return text
    if options.profile:
        return _write_profile(options)
    found = examine(options.nvme)
    if options.json:
        return json.dumps(found, indent=2)
    sections = {name: facts for name, facts in found.items() if name != "concerns"}
    rows = [(section, name, _text(value)) for section, facts in sections.items() for name, value in facts.items()]
    notes = [f"! {concern}" for concern in found["concerns"]] or ["no concerns"]
    return "\n".join([tabulate(rows, tablefmt="plain", disable_numparse=True), "", *notes])


def _write_profile(options: argparse.Namespace) -> str:
    path = Path(options.profile)
    check_file(path)
    text = measure_machine(path.stem, nvme=options.nvme).to_json()
    write_file(path, text, options)
    return text.rstrip()


def examine(nvme: str | None) -> dict[str, Any]:
    """Return the facts, by section, and the concerns.

    Keys are added in later versions, never renamed. All sizes are in bytes; null: no limit, or not known.

        torch       version, devices (the accelerators' names), cuda (the same, where that is what they are)
        engine      name, reason (why not io_uring; empty if it is)
        limits      memlock, file_size, open_files, cpus, memory (by cgroup), cgroups (each limit by the file that sets it)
        nvme        of the folder given: path, filesystem, source, mount_point, free, total, direct, alignment, preallocates,
                    user_quota, group_quota
        concerns    problems found, one sentence each
    """
    concerns: list[str] = []
    found: dict[str, Any] = {"torch": _examine_torch(), "engine": _examine_engine(concerns), "limits": _examine_limits(concerns)}
    if nvme is not None:
        found[Tier.NVME] = _examine_folder(nvme, concerns)
    return {**found, "concerns": concerns}


def _examine_torch() -> dict[str, Any]:
    names, found = device_names(), torch.accelerator.current_accelerator()
    cuda = names if found is not None and found.type == "cuda" else []
    return {"version": torch.__version__, "cuda": cuda, "devices": names}


def _examine_engine(concerns: list[str]) -> dict[str, Any]:
    with closing(Engine()) as engine:
        if engine.reason:
            concerns.append(f"I/O runs on {engine.name}, about as fast, for more CPU time: {engine.reason}")
        return {"name": engine.name, "reason": engine.reason}


def _examine_limits(concerns: list[str]) -> dict[str, Any]:
    memlock, cgroups = _limit(resource.RLIMIT_MEMLOCK), find_limits()
    if memlock is not None and torch.accelerator.is_available():
        concerns.append(f"{memlock:,} bytes may be locked: pinned buffers may need more (ulimit -l unlimited)")
    file_size = _limit(resource.RLIMIT_FSIZE)
    if file_size is not None:
        concerns.append(f"a file may have {file_size:,} bytes only, and states are kept in one per rank and path (ulimit -f)")
    return {
        "memlock": memlock,
        "file_size": file_size,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": memory_limit_bytes(cgroups),
        "cgroups": cgroups,
    }


def _examine_folder(path: str, concerns: list[str]) -> dict[str, Any]:
    try:
        place = look_up(path)
    except OSError as error:
        raise StoreError(error.errno, f"--nvme {path!r}: {error.strerror}; accepted: a folder that exists") from error
    if place.concern:
        concerns.append(f"{path}: {place.concern}")
    facts: dict[str, Any] = {
        "path": path,
        "filesystem": place.kind,
        "source": place.source,
        "mount_point": place.mount_point,
        "free": place.free_bytes,
        "total": place.total_bytes,
    }
    with closing(ScratchFile(path)) as scratch:
        facts |= {"direct": scratch.file.direct, "alignment": scratch.file.alignment, "preallocates": True}
        if not scratch.file.direct:
            concerns.append(f"{path}: direct I/O is refused; transfers go through the page cache, at the cost of memory and time")
        try:
            scratch.reserve(_PROBE_BYTES)
        except StoreError as error:
            facts["preallocates"] = False
            concerns.append(str(error))
    return {**facts, "user_quota": describe_quota(path, of="user"), "group_quota": describe_quota(path, of="group")}


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _text(value: Any) -> str:
    if value is None:
        return "unlimited"
    if isinstance(value, dict):
        return "; ".join(f"{path}: {text}" for path, text in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
