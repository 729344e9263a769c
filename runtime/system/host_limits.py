"""The memory that this process may use: of the host, within control groups and rlimits, and of a device."""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path

import torch

from zinf_compile.config import Config
from zinf_compile.ir.sizes import parse_bytes

from .accelerator import free_and_total_bytes
from .cgroups import available_memory_bytes, find_limits, memory_limit_bytes
from .node import ranks_of_node
from .process_wide import process_wide

RESERVE = 0.1
"""The part of what is there that is left alone where no cap was declared: for the interpreter, for what users add."""

_told: set[str] = process_wide(set())
"""Warnings that this process was given."""


def usable_host_bytes() -> int:
    """Return the host memory that this process could take now: its share of the node's, within control groups and rlimits.

    Less the reserve.
    """
    usable = available_memory_bytes() // ranks_of_node()
    used = _used_bytes()
    for limit, held in ((resource.RLIMIT_AS, used[0]), (resource.RLIMIT_DATA, used[1])):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            usable = min(usable, max(0, soft - held))
    return int(usable * (1 - RESERVE))


def usable_bytes(device: torch.device) -> tuple[int, int]:
    """Return the memory of a device and of the host that this process could take now, less the reserve."""
    host = usable_host_bytes()
    if device.type == "cpu":
        return host, host
    return int(free_and_total_bytes(device)[0] * (1 - RESERVE)), host


def most_host_bytes() -> tuple[int, str]:
    """Return the host memory that this process could ever have, its share of the node's, and what limits it."""
    ranks = ranks_of_node()
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    machine = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    found = [(machine // ranks, f"the machine's memory{shared}")]
    if (group := memory_limit_bytes(find_limits())) is not None:
        found.append((group // ranks, f"the limit of this process's control group{shared}"))
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            found.append((soft, name))
    return min(found)


def most_device_bytes(device: torch.device) -> tuple[int, str]:
    """Return the memory of a device that this process could ever have, and what limits it."""
    if device.type == "cpu":
        return most_host_bytes()
    return free_and_total_bytes(device)[1], f"the memory of {device}"


def warn_of_caps(config: Config, device: torch.device) -> None:
    """Warn, once, of a declared cap that is more than there is: nothing keeps the process within it."""
    for option, ranks, find_most in (
        ("device_memory", 1, lambda: most_device_bytes(device)),
        ("host_memory", ranks_of_node(), most_host_bytes),
    ):
        declared = getattr(config, option)
        if declared is None:
            continue
        size, (most, what) = parse_bytes(declared, option=option) // ranks, find_most()
        if size > most:
            _warn_once(
                f"option {option}={declared!r} lets each rank hold {size:,} bytes, and {what} is {most:,}: the process would run "
                "out of memory before it meets this cap. Declare less, or omit the option: the cap is then what may really "
                "be used"
            )


def _warn_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        warnings.warn(message, stacklevel=2)


def _used_bytes() -> tuple[int, int]:
    """Return the bytes of address space and of data that this process has."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[5]) * resource.getpagesize()
