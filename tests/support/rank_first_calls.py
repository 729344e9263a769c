"""A model that is loaded, or has gradients, before its first call on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zinf_compile

OPTIONS: dict[str, Any] = {"compute": "fx", "timeout_s": 60}


class Net(nn.Module):
    """Tied weights, and a running mean of each rank's own batches, which its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 9), nn.Linear(9, 16, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(9))
        self.register_buffer("mean", torch.zeros(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.words(tokens)
        with torch.no_grad():
            self.mean.lerp_(found.mean(0), 0.1)
        return nn.functional.cross_entropy(self.head((found - self.mean) * self.scale), tokens)


Training = tuple[Net, torch.optim.Optimizer]


def made(options: dict[str, Any], *, meta: bool = False) -> Training:
    """Return a model that is compiled and not called, and its optimizer."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    model.compile(backend="zero_infinity", options={**OPTIONS, **options})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def batch(rank: int, number: int) -> torch.Tensor:
    """Return a rank's micro-batch of that number."""
    return torch.randint(16, (6,), generator=torch.Generator().manual_seed(100 * rank + number))


def went_on(rank: int, training: Training, numbers: range) -> list[torch.Tensor]:
    """Take a step for every two micro-batches, from the second one on; return the losses, this rank's buffer and the model."""
    model, optimizer = training
    losses = []
    for number in numbers:
        loss = model(batch(rank, number))
        loss.backward()
        losses.append(loss.detach())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    whole = zinf_compile.full_state_dict(model)
    return [*losses, model.mean.clone(), *whole.values()]


def loaded_before_its_first_call(rank: int, size: int, folder: str, options: dict[str, Any], meta: bool) -> list[Any]:
    """Save between two micro-batches; return what the run that went on gave, and what one that loads gives."""
    training = made(options)
    went_on(rank, training, range(5))
    zinf_compile.save(folder, *training, wait=True)
    expected = went_on(rank, training, range(5, 9))
    training = made(options, meta=meta)
    zinf_compile.load(folder, *training)
    return [expected, went_on(rank, training, range(5, 9))]


def gradients_before_its_first_call(rank: int, size: int, options: dict[str, Any]) -> list[Any]:
    """Take a micro-batch before the model is compiled, of which rank 1 has none; return it with the gradients behind another."""
    torch.manual_seed(0)
    eager = Net()
    torch.manual_seed(0)
    model = Net()
    if rank != 1:
        model(batch(rank, 0)).backward()
    with torch.no_grad():
        model.mean.zero_()
    model.compile(backend="zero_infinity", options={**OPTIONS, **options})
    model(batch(rank, 1)).backward()
    found = [p.grad.full_tensor() for p in model.parameters()]
    for each in range(size):
        if each != 1:
            eager.mean.zero_()
            (eager(batch(each, 0)) / size).backward()
        eager.mean.zero_()
        (eager(batch(each, 1)) / size).backward()
    return [found, [p.grad for p in eager.parameters()]]


def buffers_by_dcp(rank: int, size: int, folder: str) -> list[Any]:
    """Save and load buffers that differ; return them."""
    model, optimizer = made({})
    model(batch(rank, 0)).backward()
    optimizer.step()
    model.mean.fill_(rank + 1)
    dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
    dist.barrier()
    model.mean.zero_()
    dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
    return [model.mean.clone()]
