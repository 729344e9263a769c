"""Companions and random generators on several ranks, as functions that `test_saved_state.py` starts."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_checkpoint import Uneven
from training import BACKEND

import zinf_compile
from zinf_compile.sharded.tensor import ShardedTensor

Drawn = tuple[list[float], float]


def build(options: dict[str, Any], size: int) -> Any:
    """Return a model with averages of two of its parameters in buffers, and the average's values."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Uneven()
    group = {"process_group": dist.new_group(list(range(size)))} if size > 1 else {}
    torch.compile(model, backend=BACKEND, options={"compute": "fx", **options, **group})(torch.ones(2, 8, dtype=torch.long))
    with torch.no_grad():
        model.register_buffer("words_average", model.words.weight.detach() * 0.5)
        model.register_buffer("conv_average", model.conv.weight.detach().square())
    return model


def averages(model: Any) -> list[torch.Tensor]:
    """Return the whole averages."""
    found = [model.words_average, model.conv_average]
    return [each.full_tensor() if isinstance(each, ShardedTensor) else each for each in found]


def drawn() -> Drawn:
    """Draw numbers of this rank."""
    return torch.randn(3).tolist(), random.random()


def saved(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], Drawn, int]:
    """Save; return the averages, what this rank draws next, and the number of shards' elements that were averages."""
    model = build(options, size)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    drawn()
    zinf_compile.save(folder, model)
    return averages(model), drawn(), sum(isinstance(b, ShardedTensor) for b in model.buffers())


def loaded(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], Drawn, list[str]]:
    """Load after other values and draws; return the same, and what was logged of generators."""
    model = build(options, size)
    model.words_average.zero_()
    model.conv_average.zero_()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zinf_compile")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        zinf_compile.load(Path(folder), model)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return averages(model), drawn(), [message for message in messages if "random generators" in message]
