"""A model with an LSTM, and one with a graph break in a loop: Dynamo leaves forwards as these to eager code."""

from __future__ import annotations

import torch
from torch import nn

WORDS, WIDTH, HIDDEN = 11, 6, 9


class Recurrent(nn.Module):
    """A language model; `apart`: a module of its own calls the LSTM, and the rest is compiled."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(HIDDEN, WORDS)
        layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
        self.layer: nn.Module = _Apart(layer) if apart else layer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        logits = self.head(self.layer(self.words(tokens[:, :-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Looped(nn.Module):
    """A language model of which no version of PyTorch compiles anything."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.words(tokens[:, :-1])
        for _ in range(2):
            torch._dynamo.graph_break()
            x = torch.tanh(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class _Apart(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, object]:
        result: tuple[torch.Tensor, object] = self.layer(x)
        return result


def batch(step: int, rank: int) -> torch.Tensor:
    """Return a rank's tokens of a step."""
    return torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
