"""What training takes of a process's memory, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from rank_models import Wide
from torch import nn

from zinf_compile.runtime.context import _contexts


def training_bytes(rank: int, size: int, backend: str) -> tuple[int, int]:
    """Return by how much two AdamW steps of a model of 50M parameters raise this process's memory; gradients are kept.

    The second number is how much of it is held for gathers.
    A small model is trained first, so that what the compiler itself takes isn't counted.
    """
    _train(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), backend, torch.randn(3, 5))
    before = _own_bytes()
    kept = _train(Wide(), backend, torch.randn(3, 1537))
    after, for_gathers = _own_bytes(), sum(context.memory.gather_memory.held_bytes() for context in _contexts.values())
    del kept
    return after - before, for_gathers


def gather_memory_bytes(rank: int, size: int) -> tuple[int, int]:
    """Return what is held for gathers after two steps, and after the model is gone."""
    kept = _train(nn.Sequential(*[nn.Linear(99, 99) for _ in range(5)]), "zero_infinity", torch.randn(3, 99))
    memory = next(iter(_contexts.values())).memory.gather_memory
    during = memory.held_bytes()
    del kept
    torch._dynamo.reset()
    gc.collect()
    return during, memory.held_bytes()


def _train(model: nn.Module, backend: str, x: torch.Tensor) -> object:
    compiled = torch.compile(model, backend=backend, options=None if backend == "eager" else {"compute": "fx"})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        compiled(x).square().sum().backward()
        optimizer.step()
    return model, optimizer


def _own_bytes() -> int:
    """Return the proportional set size after everything that is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * int(fields["Pss"].removesuffix("kB"))
