"""Small models whose activations are most of their memory, and what a step of theirs takes of PyTorch's allocator on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

Batch = tuple[torch.Tensor, ...]


class Stretches(nn.Module):
    """Eight layers, each with a result that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.between, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """Three blocks, and a head with its loss."""

    def __init__(self, words: int = 300, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.words(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Wide(nn.Module):
    """Layers of uneven widths."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        widths = ((64, 256), (256, 500), (500, 64))
        self.layers = nn.ModuleList(nn.Linear(a * times, b * times) for a, b in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Pictures(nn.Module):
    """Convolutions, each with a BatchNorm, whose buffers the forward changes."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        widths = ((3, 16 * times), (16 * times, 32 * times), (32 * times, 32 * times))
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths)
        )
        self.head = nn.Linear(32 * times, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), labels)


class Experts(nn.Module):
    """Four experts in one product, mixed by the two largest of their weights."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(width, width), nn.Linear(width, 4)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, width, 4 * width) / 8),
            nn.Parameter(torch.randn(4, 4 * width, width) / 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        weights = self.router(x).softmax(-1)
        most, which = weights.topk(2, -1)
        chosen = torch.zeros_like(weights).scatter(-1, which, most)
        each = F.gelu(torch.einsum("nd,edf->enf", x, self.up))
        return (torch.einsum("enf,efd->end", each, self.down) * chosen.t()[..., None]).sum(0).square().mean()


def _words() -> Batch:
    return torch.randint(300, (4, 48)), torch.randint(300, (4, 48))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (Gpt, _words),
    "wide": (Wide, lambda: (torch.randn(256, 64),)),
    "pictures": (Pictures, lambda: (torch.randn(8, 3, 24, 24), torch.randint(10, (8,)))),
    "experts": (Experts, lambda: (torch.randn(256, 64),)),
}


def allocated_at_most(call: Callable[[], object]) -> int:
    """Return by how many bytes more than at its beginning PyTorch's allocator for the CPU held at the peak of a call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: else PyTorch 2.11 warns that later cycles would drop the events of this one
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def most_held(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Any]) -> int:
    """Take three steps of two micro-batches; return the most bytes that PyTorch's allocator and the runtime held in the third."""

    def step() -> None:
        for _ in range(2):
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        zinf_compile.synchronize()

    step()
    step()
    parameter = next(p for p in model.parameters() if isinstance(p, ShardedParameter))
    held: int = parameter._zinf_unit.context.memory.ledger.total()[0]
    parts = batch[0].values() if isinstance(batch[0], dict) else batch
    return held + sum(part.nbytes for part in parts) + allocated_at_most(step)
