"""Models that the command line knows by name, to look at a schedule without writing one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(width, dim=2)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.ln_2(x))))
        return out


class GPT(nn.Module):
    """A GPT-2 shaped model whose embedding and head are tied; `forward(tokens, targets)` returns the loss."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt(*, layers: int, width: int, heads: int) -> Callable[[], Example]:
    def build() -> Example:
        model = GPT(layers=layers, width=width, heads=heads, vocabulary=50257, length=1024)
        tokens = torch.zeros(1, 1024, dtype=torch.long)
        return model, (tokens, tokens)

    return build


class MLP(nn.Module):
    """Two linear layers without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.relu(self.up(x)))
        return out


def _mlp() -> Example:
    return MLP(width=512, hidden=2048), (torch.zeros(8, 512),)


TARGETS: dict[str, Callable[[], Example]] = {
    "mlp": _mlp,
    "gpt2-small": _gpt(layers=12, width=768, heads=12),
    "gpt2-medium": _gpt(layers=24, width=1024, heads=16),
    "gpt2-xl": _gpt(layers=48, width=1600, heads=25),
}
"""Two linear layers; and GPT-2 in 124M, 355M and 1.6B parameters on one sequence of 1024 tokens."""
