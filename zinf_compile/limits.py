"""How much memory this process may really use."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .runtime.cgroups import available_memory_bytes

if TYPE_CHECKING:
    from .runtime.context import Context

RESERVE = 0.1
"""The part of what is there that is left alone where no cap was declared: for the interpreter, for what users add."""


def ranks_of_node() -> int:
    """Return how many ranks share this node, as torchrun says."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or "1"))


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


def host_room_bytes(context: Context) -> int:
    """Return the host memory that this rank could take now beside what it holds, within the caps that were declared."""
    claims, room = context.claims, usable_host_bytes()
    if claims.declared_host is not None:
        room = min(room, claims.declared_host - context.host_ledger.total()[0])
    if context.bridge.unified and claims.declared_device is not None:
        room = min(room, claims.declared_device - context.ledger.total()[0])
    return max(0, room)


def usable_device_bytes(device: torch.device) -> int:
    """Return the memory of a device that this process could take now, less the reserve."""
    if device.type == "cpu":
        return usable_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + idle) * (1 - RESERVE))


def _used_bytes() -> tuple[int, int]:
    """Return the bytes of address space and of data that this process has."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[5]) * resource.getpagesize()
