"""The memory of a rank by itself, without a context, a device or a drive."""

from __future__ import annotations

import contextlib

import torch

from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.memory.rank_memory import Memory


def plain_memory(*, host_apart: bool = False) -> Memory:
    """Return a rank's memory in which nothing is held yet."""
    return Memory(
        torch.device("cpu"),
        GatherMemory(),
        topology=Topology(host_apart=host_apart),
        staging_bytes=0,
        host_buffer=lambda numel, dtype: torch.empty(numel, dtype=dtype),
        waiting=contextlib.nullcontext,
        drives_used=lambda: False,
        free_host=lambda enough: None,
    )
