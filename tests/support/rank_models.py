"""Models that only tests on several ranks need; `models.CASES` holds the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import IN, WORDS, Mlp
from torch import nn


class Table(nn.Module):
    """A layer, and a buffer of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, 5)
        self.register_buffer("table", torch.randn(5))
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.table


def apply(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Call a module: what `f(model, x)` compiles."""
    loss: torch.Tensor = module(x, y)
    return loss


class Pair(nn.Module):
    """Two models of one class with weights of their own, called one after the other through `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()
        self.call = apply

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.call(self.first, x, y) + 0.5 * self.call(self.second, x, y)


class Normed(nn.Module):
    """A part that has buffers and no parameter, before a break of the graph, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(IN, affine=False), nn.Linear(IN, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return F.mse_loss(self.layer(x), y)


class Transformer(nn.Module):
    """Embeddings, attention, layer norms and a head: what sees a sequence's length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 6), nn.Embedding(64, 6)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.attend, self.merge = nn.Linear(6, 18), nn.Linear(6, 6)
        self.feed = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6))
        self.head = nn.Linear(6, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        batch, length = words.shape
        x = self.words(words) + self.places(torch.arange(length))
        query, key, value = self.attend(self.norms[0](x)).view(batch, length, 3, 2, 3).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, 6))
        x = x + self.feed(self.norms[1](x))
        return self.head(self.norms[2](x))


class Wide(nn.Module):
    """About 50 million parameters in layers of 2.4 million."""

    def __init__(self, depth: int = 21, width: int = 1537) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tiny_gpt2() -> nn.Module:
    """GPT-2 with its tied head and its dropout, 2 layers of width 12."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  (seconds to import; few tests need it)

    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=12, n_layer=2, n_head=2, use_cache=False))


def tiny_llama() -> nn.Module:
    """Llama with shared keys and values, 2 layers of width 12."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (seconds to import; few tests need it)

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=12, intermediate_size=19, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
        )
    )  # fmt: skip
