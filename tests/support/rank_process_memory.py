"""Training under many caps, and what the process grew by meanwhile, as the kernel counts it. For a process of its own."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compute_models import Batch, Experts, Gpt, Pictures, Wide
from named_cap import named_cap
from rank_tiling import resident
from torch import nn

import zinf_compile
from zinf_compile.errors import BudgetError, StoreWarning
from zinf_compile.runtime.system.malloc import return_free_memory

TIMES, ROWS = 4, 4096
"""Widths of the small models, so many times; rows of a batch."""
LARGER: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (lambda: Gpt(2000, 64 * TIMES), lambda: (torch.randint(2000, (8, 128)), torch.randint(2000, (8, 128)))),
    "wide": (lambda: Wide(TIMES), lambda: (torch.randn(ROWS, 64 * TIMES),)),
    "pictures": (lambda: Pictures(TIMES), lambda: (torch.randn(16, 3, 48, 48), torch.randint(10, (16,)))),
    "experts": (lambda: Experts(64 * TIMES), lambda: (torch.randn(ROWS // 4, 64 * TIMES),)),
}
"""Models that take 60 to 200 MiB to train: a process grows by some MiB for what no cap is about."""


def growths(rank: int, size: int, folder: str, name: str, budgets: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Train within caps, of so many from the least that works to more than all takes; return those of these numbers.

    With each comes what the process grew by at most.
    """
    warnings.filterwarnings("ignore", category=StoreWarning)
    options = {"nvme": folder, "bucket": "1MiB", "compute_shape": {"piece_numel": 1 << 17}}
    least = _least(name, options)
    most = 9 * _least(name, {**dict.fromkeys(("params", "grads", "optimizer"), "device"), "activations": "keep"}) // 8
    _grown(name, {**options, "device_memory": least})  # compiles for once
    caps = [least + (most - least) * number // (budgets - 1) for number in numbers]
    return [(cap, _grown(name, {**options, "device_memory": cap})) for cap in caps]


def _least(name: str, options: dict[str, Any]) -> int:
    try:
        _grown(name, {**options, "device_memory": 1})
    except BudgetError as error:
        return named_cap(error)
    raise AssertionError("a byte is enough")


def _grown(name: str, options: dict[str, Any]) -> int:
    """Return by how many bytes steps after the first grow the process, against before the model was made."""
    torch.compiler.reset()
    zinf_compile.reset()
    gc.collect()
    return_free_memory()
    before = resident("VmRSS")
    build, draw = LARGER[name]
    torch.manual_seed(0)
    model, batch = build(), draw()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.compile(backend="zero_infinity", options={"compute": "fx", **options})
    for step in range(3):
        if step == 1:  # the model has been whole
            return_free_memory()
            Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    zinf_compile.synchronize()
    return resident("VmHWM") - before
