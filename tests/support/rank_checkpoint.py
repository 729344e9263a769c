"""Saving and loading checkpoints on several ranks, as functions that `test_save.py` starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint.load import load
from zinf_compile.checkpoint.save import save


class Uneven(nn.Module):
    """Tied and frozen weights, a number, a buffer, a weight in channels-last, and one that no rank number divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 37)
        self.down = nn.Linear(37, 13)
        self.frozen = nn.Linear(13, 37)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.down(self.words(tokens)))) * self.scale
        y = self.conv(x[:, :3, :16].reshape(-1, 3, 4, 4))
        return (x @ self.words.weight.t()).square().mean() + y.square().mean() + self.seen.sum()


def build(options: dict[str, Any]) -> tuple[Any, Any, torch.optim.Optimizer]:
    """Return the compiled model, the model and its optimizer."""
    torch.manual_seed(0)
    model = Uneven()
    return torch.compile(model, backend=BACKEND, options=options), model, optimizer_of(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01, fused=True)


def train(compiled: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on the same batch on all ranks; return the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the whole states, on rank 0."""
    return zinf_compile.full_state_dict(model), zinf_compile.full_optimizer_state_dict(optimizer)


def saved(rank: int, size: int, folder: str, options: dict[str, Any]) -> Any:
    """Train, save; return the whole states as they were, and the losses of the next steps."""
    options = {**options, "process_group": dist.new_group(list(range(size)))} if size > 1 else options
    torch.compiler.reset()
    compiled, model, optimizer = build(options)
    train(compiled, optimizer, range(3))
    found = full(model, optimizer)
    save(folder, model, optimizer, extra={"step": 3, "names": ("a", torch.arange(3))}, wait=True)
    return found, train(compiled, optimizer, range(3, 5))


def loaded(rank: int, size: int, folder: str, options: dict[str, Any]) -> Any:
    """Load onto a model that has taken one other step; return the whole states, and the losses of the next steps."""
    options = {**options, "process_group": dist.new_group(list(range(size)))} if size > 1 else options
    torch.compiler.reset()
    compiled, model, optimizer = build(options)
    train(compiled, optimizer, range(7, 8))
    extra = load(folder, model, optimizer)
    assert extra["step"] == 3
    assert torch.equal(extra["names"][1], torch.arange(3))
    return full(model, optimizer), train(compiled, optimizer, range(3, 5))


def bounded(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """Save and load what is on a drive; return how far each made the process grow, and bytes saved and received by this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6)))
    options = {**options, "process_group": dist.new_group(list(range(size)))} if size > 1 else options
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled(torch.ones(2, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.synchronize()
    before = received(model)
    grown = [
        growth(lambda: save(folder, model, optimizer, wait=True)),
        growth(lambda: load(folder, model, optimizer)),
    ]
    own = sum(path.stat().st_size for path in Path(folder).glob(f"*/rank-{rank:05}-*"))
    return grown[0], grown[1], own, received(model) - before


def received(model: nn.Module) -> int:
    """Return the bytes that this rank has received of units from others."""
    return int(zinf_compile.stats(model)["links"]["from ranks"]["bytes"])


def growth(act: Callable[[], object]) -> int:
    """Return how far the memory of this process grows meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return a number of /proc/self/status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])
