"""Many small steps with everything on a drive: memory, threads and descriptors stay level, peaks within the caps."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from pathlib import Path

import torch
from models import TiedWords, loss_of, tokens
from tiers import in_pieces
from torch import nn
from training import BACKEND, adamw

import zinf_compile

SLACK_KIB = 4096
"""The allocator's own noise; of a thousand steps, a leak of 5 KiB each would exceed it."""


def anonymous_kib() -> int:
    """Return the memory of this process that isn't of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def take_many_steps(rank: int, size: int, folder: str, steps: int) -> None:
    """Do it and look at memory, threads and descriptors meanwhile; in a process of its own, where nothing else is held."""
    warnings.simplefilter("ignore", zinf_compile.StoreWarning)
    options = {
        "compute": "fx",
        "params": "nvme",
        "grads": "nvme",
        "optimizer": "nvme",
        "nvme": folder,
        "device_memory": "1MiB",
    } | in_pieces(128)
    model = TiedWords()
    model.compile(backend=BACKEND, options=options)
    optimizer = adamw(model.parameters())
    levels: list[tuple[int, int]] = []
    memory: list[int] = []
    for number in range(steps):
        for part in range(2):
            (loss_of(model(*tokens(2 * number + part))) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found = zinf_compile.stats(model)
        assert found["memory"]["device"]["peak"]["all"] <= found["caps"]["device_memory"]
        if number >= steps // 5 and number % (steps // 10) == 0:
            gc.collect()
            levels.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
            memory.append(anonymous_kib())
    assert len(set(levels)) == 1, levels
    assert memory[-1] - memory[0] < SLACK_KIB, memory
    assert os.listdir(folder) == []
    assert torch.isfinite(loss_of(model(*tokens(0))))
