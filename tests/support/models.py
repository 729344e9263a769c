"""Small models for tests, each for one thing that models do; sizes are uneven, so that shards need padding.

`CASES[name].build()` makes the model, `CASES[name].batch(step, rank)` the arguments of its forward, which returns the loss
(`ReturnsParameters`: a tuple that starts with it). What takes part in a step depends on `step` alone, values on both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from places import place
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IN, OUT, WORDS = 7, 5, 23


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its data."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]]


def generator(step: int, rank: int = 0) -> torch.Generator:
    """Return the random numbers of one rank's step."""
    return torch.Generator().manual_seed(1000 * rank + step)


def vectors(step: int, rank: int = 0, *, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [rows, 7] and targets [rows, 5]."""
    numbers = generator(step, rank)
    return torch.randn(rows, IN, generator=numbers).to(place()), torch.randn(rows, OUT, generator=numbers).to(place())


def tokens(step: int, rank: int = 0, *, rows: int = 3, length: int = 11) -> tuple[torch.Tensor]:
    """Return token numbers [rows, length]."""
    return (torch.randint(WORDS, (rows, length), generator=generator(step, rank)).to(place()),)


class Mlp(nn.Module):
    """Two layers and a norm."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.first = nn.Linear(IN, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, OUT)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(self.norm(F.gelu(self.first(x)))), y)


class Block(nn.Module):
    """A residual block; breaks Dynamo's graph in its middle if told to."""

    def __init__(self, width: int = 9, *, broken: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.down(hidden)


class Blocks(nn.Module):
    """A stack of blocks between two layers."""

    def __init__(self, *, broken_inside: bool = False, broken_between: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(IN, 9)
        self.blocks = nn.ModuleList(Block(broken=broken_inside) for _ in range(3))
        self.last = nn.Linear(9, OUT)
        self.broken_between = broken_between

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if self.broken_between:
                torch._dynamo.graph_break()
        return F.mse_loss(self.last(x), y)


class UnrolledBlocks(Blocks):
    """The same without a loop: a frame with a loop that breaks inside is left to eager PyTorch by Dynamo, this one isn't."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, two, three = self.blocks
        return F.mse_loss(self.last(three(two(one(self.first(x))))), y)


class TiedWords(nn.Module):
    """A language model whose last layer is its embedding."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.block = Block(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embedding(words)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Frozen(Mlp):
    """Its first layer and one bias don't learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.second.bias.requires_grad_(False)


class Lora(nn.Module):
    """Frozen layers with trained low-rank updates beside them."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(IN, 11), nn.Linear(11, OUT)]).requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(IN, rank, bias=False), nn.Linear(11, rank, bias=False)])
        self.up = nn.ModuleList([nn.Linear(rank, 11, bias=False), nn.Linear(rank, OUT, bias=False)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + 0.5 * up(down(x)))
        return F.mse_loss(x, y)


class Branches(nn.Module):
    """One of two layers takes part in a step; a third never does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, 9)
        self.even = nn.Linear(9, OUT)
        self.odd = nn.Linear(9, OUT, bias=False)
        self.never = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, even: bool) -> torch.Tensor:
        return F.mse_loss((self.even if even else self.odd)(torch.relu(self.first(x))), y)


class UsedTwice(nn.Module):
    """One layer applied twice, and its weight once more, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, 9)
        self.shared = nn.Linear(9, 9)
        self.last = nn.Linear(9, OUT)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.shared(self.first(x)))))
        return F.mse_loss(self.last(x @ self.shared.weight.t()), y)


class ReturnsParameters(nn.Module):
    """Hands out a parameter whole, detached and as views, beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.scale = nn.Parameter(torch.randn(OUT))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.layer.weight
        loss = F.mse_loss(self.layer(x) * self.scale, y)
        return loss, weight, weight.detach(), weight[1:3], weight.t(), self.scale.detach()[:2]


class MutatedBuffers(nn.Module):
    """Batch statistics, a moving average and a count, all changed in forward."""

    average: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, 9)
        self.norm = nn.BatchNorm1d(9)
        self.last = nn.Linear(9, OUT)
        self.register_buffer("average", torch.zeros(9))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        self.average.mul_(0.9).add_(x.detach().abs().mean(0) * 0.1)  # alpha= is another rounding in 2.11 when compiled
        self.count += 1
        return F.mse_loss(self.last(x - self.average), y)


class Dropped(nn.Module):
    """Dropout after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, 33), nn.Linear(33, OUT)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(F.dropout(self.last(F.dropout(self.first(x), 0.3, self.training)), 0.1, self.training), y)


class Checkpointed(Blocks):
    """Recomputes its blocks, dropout included where there is any, in the backward."""

    def __init__(self, *, reentrant: bool, rate: float = 0.2) -> None:
        super().__init__()
        self.reentrant, self.rate = reentrant, rate

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(self._run, block, x, use_reentrant=self.reentrant, preserve_rng_state=self.rate > 0)
        return F.mse_loss(self.last(x), y)

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(block(x), self.rate) if self.rate else block(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """nn.MultiheadAttention over embedded tokens, causal, then a head."""

    def __init__(self, width: int = 15, heads: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(words))
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=words.device).triu(1)
        mixed, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return F.cross_entropy(self.head(x + mixed)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class OddShapes(nn.Module):
    """Parameters of no dimension, of one element, of no element, transposed in memory; a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.transposed = nn.Parameter(torch.randn(IN, OUT).t())
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        image = F.linear(x, self.transposed)[None, None]
        return F.mse_loss(image[0, 0] * self.scalar + self.single, y) + self.conv(image).square().mean() + self.empty.sum()


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, vectors),
    "tied": Case(TiedWords, tokens),
    "frozen": Case(Frozen, vectors),
    "lora": Case(Lora, vectors),
    "branches": Case(Branches, lambda step, rank=0: (*vectors(step, rank), step % 2 == 0)),
    "used_twice": Case(UsedTwice, vectors),
    "returns_parameters": Case(ReturnsParameters, vectors),
    "mutated_buffers": Case(MutatedBuffers, vectors),
    "dropout": Case(Dropped, vectors),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False), vectors),
    "checkpoint_without_dropout": Case(lambda: Checkpointed(reentrant=False, rate=0.0), vectors),
    "checkpoint_reentrant": Case(lambda: Checkpointed(reentrant=True), vectors),
    "blocks": Case(Blocks, vectors),
    "breaks_between_blocks": Case(lambda: Blocks(broken_between=True), vectors),
    "breaks_inside_blocks": Case(lambda: Blocks(broken_inside=True), vectors),
    "breaks_inside_unrolled_blocks": Case(lambda: UnrolledBlocks(broken_inside=True), vectors),
    "attention": Case(Attention, tokens),
    "odd_shapes": Case(OddShapes, vectors),
}


NOT_COMPILED = {
    "branches": {"never.weight", "never.bias"},
    "breaks_between_blocks": {"first.weight", "first.bias", "last.weight", "last.bias"},
    "breaks_inside_blocks": {"first.weight", "first.bias", "last.weight", "last.bias"},
}
"""Parameters that no compiled graph uses; in a frame that loops and breaks, Dynamo compiles what it calls only."""


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss from what a model of this file returned; tensors handed out beside it take part in it.

    Not a parameter handed out whole: that is the parameter itself, whose value several ranks can't read.
    """
    if isinstance(output, torch.Tensor):
        return output
    loss, *others = output
    for tensor in others:
        if not isinstance(tensor, nn.Parameter):
            loss = loss + 0.1 * tensor.square().sum()
    return loss
