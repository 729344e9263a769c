"""Losses in chunks on one of several ranks, near the mean of eager's gradients over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from losses import CLASSES, LOSSES, Head, batch
from near import assert_gradients_near, assert_near
from torch import nn


def compare_on_a_rank(rank: int, size: int, compute: str) -> str:
    """Train a head two steps on another batch on each rank; return "" where loss and gradients are near eager's."""
    torch.manual_seed(7)
    options = {"compute": compute, "chunk_loss": True, "compute_shape": {"chunk_bytes": 4 * CLASSES * 5}, "timeout_s": 100}
    return train_near_mean(
        rank, size, Head(LOSSES["smoothed"], bias=True), lambda step, source: batch(10 * step + source), options
    )


def train_near_mean(rank: int, size: int, model: nn.Module, batch_of: Callable[[int, int], Any], options: dict[str, Any]) -> str:
    """Train a model two steps on `batch_of(step, rank)`; return "" where loss and gradients are near eager's."""
    eager = [copy.deepcopy(model) for _ in range(size)]
    compiled = torch.compile(model, backend="zero_infinity", options=options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, *eager)]
    for step in range(2):
        losses = []
        for source, called in ((rank, compiled), *enumerate(eager)):
            losses.append(called(*batch_of(step, source)))
            losses[-1].backward()
        assert_near(f"loss of step {step}", losses[0], losses[1 + rank])
        mean = {}
        for parts in zip(*(m.named_parameters() for m in eager), strict=True):
            mean[parts[0][0]] = torch.stack([p.grad for _, p in parts if p.grad is not None]).mean(0)
            for _, parameter in parts:
                parameter.grad = mean[parts[0][0]].clone()
        assert_gradients_near(model, mean, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return ""
