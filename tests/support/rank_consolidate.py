"""Checkpoints of two models, made on several ranks for `test_consolidate.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_checkpoint import build, train
from training import BACKEND
from transformer_models import causal, qwen2

import zinf_compile
from zinf_compile.checkpoint.save import save


def saved_models(rank: int, size: int, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train a model of transformers and one with weights in channels-last, save both; return their whole states on rank 0."""
    options: dict[str, Any] = {"timeout_s": 60}
    if size > 1:
        options["process_group"] = dist.new_group(list(range(size)))
    torch.compiler.reset()
    torch.manual_seed(0)
    model = qwen2()
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(**causal(0, rank)[0]).loss.backward()
    optimizer.step()
    save(f"{folder}/qwen2", model, optimizer, wait=True)
    other_compiled, other, other_optimizer = build(options)
    train(other_compiled, other_optimizer, range(1))
    save(f"{folder}/uneven", other, other_optimizer, wait=True)
    return zinf_compile.full_state_dict(model), zinf_compile.full_state_dict(other)
