"""Models that are captured in several graphs, or in one that is compiled again."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS = 256, 2048


class Layers(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Broken(nn.Module):
    """Two stacks of layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.second:
            x = torch.tanh(layer(x))
        return x.square().mean()


class FrozenWords(nn.Module):
    """A frozen embedding whose result is made a leaf, as libraries do for checkpointing; a head in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH).requires_grad_(requires_grad=False)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        x.requires_grad_()
        torch._dynamo.graph_break()
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


class LossApart(nn.Module):
    """A head, and its loss in a graph without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.head(x)
        torch._dynamo.graph_break()
        return x.float().log_softmax(-1)[:, 0].neg().mean()


class Noticing(nn.Module):
    """One graph, compiled again at the second call: the first sets what it is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "mean"
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() if self.kind == "mean" else x.square().sum()


def batch_of(kind: type[nn.Module], number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if kind is FrozenWords:
        return torch.randint(WORDS, (2, 32), generator=generator)
    return torch.randn(64, WIDTH, generator=generator)
