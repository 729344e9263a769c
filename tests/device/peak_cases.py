"""Steps of many kinds under a cap, on one rank or several, and the most that the device's allocator held beside it.

Called on each rank. Each step has micro-batches of its own number: what one leaves behind lies beside what the next one needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import sys
from pathlib import Path
from typing import Any

import late
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from compute_models import MODELS
from late.memory_watch import memory_watch
from named_cap import named_cap

import zinf_compile
from zinf_compile.errors import BudgetError

SIZES: dict[str, Any] = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}, "tile": "1MiB", "timeout_s": 60}


@dataclasses.dataclass(frozen=True)
class Case:
    model: str = "experts"
    words: tuple[str, str, str, str] = ("auto",) * 4
    """Of parameters, gradients, optimizer and activations."""
    batches: tuple[int, ...] = (2, 2, 2)
    """Micro-batches of each step."""
    clipped: bool = False
    optimizers: tuple[str, ...] = ("AdamW",)
    """Each of its share of the parameters."""
    share: float = 0.5
    """Of the way from the least cap to one with room for all."""
    taken: int = 0
    """Bytes beyond that cap that the user takes after the first step."""

    def options(self, folder: str) -> dict[str, Any]:
        kinds = dict(zip(("params", "grads", "optimizer", "activations"), self.words, strict=True))
        options = {"compute": "fx", **SIZES, **kinds}
        return {**options, "nvme": folder} if {"nvme", "auto"} & set(self.words[:3]) or self.words[3] == "nvme" else options


def train(case: Case, options: dict[str, Any], rank: int) -> None:
    """Take the steps of a case; without `batches`, a forward alone."""
    torch.compiler.reset()
    zinf_compile.reset()
    gc.collect()
    torch.manual_seed(0)
    model = MODELS[case.model][0]().to("late")
    torch.manual_seed(rank)
    batch = tuple(part.to("late") for part in MODELS[case.model][1]())
    parameters = list(model.parameters())
    shares = [parameters[number :: len(case.optimizers)] for number in range(len(case.optimizers))]
    made = [_optimizer(name, share) for name, share in zip(case.optimizers, shares, strict=True)]
    call = torch.compile(model, backend="zero_infinity", options=options)
    taken = None
    for micro_batches in case.batches:
        for _ in range(micro_batches):
            call(*batch).backward()
        if case.clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        if case.taken and taken is None:
            taken = torch.empty(case.taken, dtype=torch.uint8, device="late")
    zinf_compile.synchronize()
    torch.accelerator.synchronize()


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=False)
    return torch.optim.AdamW(parameters, foreach=False)


def least_of(case: Case, options: dict[str, Any], rank: int) -> int:
    """Return the smallest device_memory that a refusal names."""
    try:
        train(case, {**options, "device_memory": 1}, rank)
    except BudgetError as refused:
        return named_cap(refused)
    raise AssertionError("a byte is enough")


def peak_beside_cap(rank: int, size: int, case: Case, folder: str) -> tuple[int, int, str]:
    """Return a cap, the most bytes that the allocator held under it, and where above it, who had them."""
    options = case.options(folder)
    least = least_of(case, options, rank)
    stays = {"compute": "fx", **SIZES, **dict.fromkeys(("params", "grads", "optimizer"), "device"), "activations": "keep"}
    whole = least_of(case, stays, rank)
    cap = least + math.ceil(case.share * max(0, 9 * whole // 8 - least))
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    refused = contextlib.suppress(BudgetError) if case.taken else contextlib.nullcontext()  # a plan may use all of the cap
    with memory_watch() as watch, refused:
        train(case, {**options, "device_memory": cap + case.taken}, rank)
    peak = torch.accelerator.max_memory_allocated()
    zinf_compile.reset()
    assert not late.defects(), late.defects()[:3]
    return cap + case.taken, peak, watch.text() if peak > cap + case.taken else ""
