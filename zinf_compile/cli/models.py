"""Built-in models of the command line, to inspect a schedule without writing one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        q, k, v = (part(y).unflatten(2, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(_rotate(q, angles), _rotate(k, angles), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Llama(nn.Module):
    """A Llama shaped model: rotary positions, grouped keys and values, SwiGLU; `forward(tokens, targets)` returns the loss."""

    def __init__(
        self, *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, checkpointed: bool = False
    ) -> None:
        """`checkpointed`: each block's activations are made again in the backward."""
        super().__init__()
        self.heads = heads
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([_LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        size = x.shape[2] // self.heads
        steps = torch.arange(size // 2, device=x.device) * (2 / size)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * 500_000.0**-steps
        for layer in self.layers:
            x = checkpoint(layer, x, angles, use_reentrant=False) if self.checkpointed else layer(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _llama_70b(layers: int = 80) -> Example:
    model = Llama(layers=layers, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    return model, (tokens, tokens)


def _llama_405b(layers: int = 126) -> Example:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Llama(layers=layers, width=16384, heads=128, kv_heads=8, hidden=53248, vocabulary=128256, checkpointed=True)
    finally:
        torch.set_default_dtype(before)
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    return model, (tokens, tokens)


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
    "llama-70b": _llama_70b,
    "llama-405b": _llama_405b,
}
"""Two linear layers; GPT-2 in 124M, 355M and 1.6B parameters on one sequence of 1024 tokens; Llama 3 in 70.6B on one of 2048, and
in 405B, in 16 bits, on one of 8192 with each block checkpointed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deep:
    """A target of many blocks that are alike."""

    build: Callable[[int], Example]
    """Makes it with so many blocks."""
    blocks: str
    """The name of their list."""
    count: int


DEEP = {"llama-70b": Deep(_llama_70b, "layers", 80), "llama-405b": Deep(_llama_405b, "layers", 126)}
"""Targets of which `zinf plan` traces few blocks."""
