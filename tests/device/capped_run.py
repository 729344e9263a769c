"""Models of `compute_models` on the device under a cap, and what its allocator held at the peak of some steps."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from compute_models import MODELS
from named_cap import named_cap

import zinf_compile
from zinf_compile.errors import BudgetError

NEAR = dict.fromkeys(("params", "grads", "optimizer"), "device")


class Run:
    """A model on the device, compiled under a cap; `step` takes one of two micro-batches."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        torch.compiler.reset()
        zinf_compile.reset()
        gc.collect()
        torch.manual_seed(0)
        model, batch = MODELS[name][0](), MODELS[name][1]()
        self.model = model.to("late")
        self.batch = tuple(part.to("late") for part in batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.call: Any = torch.compile(self.model, backend="zero_infinity", options={"compute": "fx", **NEAR, **options})

    def step(self) -> None:
        for _ in range(2):
            self.call(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self) -> int:
        """Return the bytes held at the peak of three steps, as the allocator rounds them."""
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            self.step()
        zinf_compile.synchronize()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated()


def least_for(name: str, options: dict[str, Any]) -> int:
    """Return the smallest device_memory that a refusal names."""
    with pytest.raises(BudgetError, match=r"are activations .* temporaries of compute") as refused:
        Run(name, {**options, "device_memory": 1}).step()
    return named_cap(refused.value)
