"""Saved values that are made again, for models and options of many kinds: the bits of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recompute_twins import TOKENS, WIDTH, Block, Model, Twin, batch, same, train, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.keeps_graphs,
]


def test_a_large_buffer_is_read_again_and_may_not_change() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(600, 512))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x + self.table[:4, :8])
            return x.square().mean()

    def act(twin: Twin) -> torch.Tensor:
        loss = twin.call(torch.ones(4, 8))
        loss.backward()
        return loss

    pair = twins(Table)
    same(pair, act)
    loss = pair[1].call(torch.ones(4, 8))
    pair[1].model.table.zero_()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Checkpointed(nn.Module):
    """Blocks of which some are checkpointed by the user, and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)) for _ in range(6)
        )

    def half(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for number in range(first, first + 3):
            block = self.blocks[number]
            x = x + (checkpoint(block, x, use_reentrant=False) if number % 2 else block(x.sin()))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(x, 0)
        torch._dynamo.graph_break()
        return self.half(x, 3).square().mean()


def test_checkpoints_in_the_model_and_several_graphs() -> None:
    def act(twin: Twin) -> torch.Tensor:
        x = torch.randn(8, WIDTH, requires_grad=True)
        loss = twin.call(x)
        loss.backward()
        return loss

    same(twins(Checkpointed), act)


class Small(nn.Module):
    """Blocks with dropout: little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, 50)[..., :32] * scale
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Small, {"device_memory": "64MiB"}),
        (Small, {"planner": "cached_prefetch"}),
        (Small, {"tile": "4KiB"}),
        (Small, {"bucket": "8KiB"}),
        (Model, {"chunk_loss": True}),
    ],
)
def test_other_options(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    same(twins(make, **options), train, drops="tile" not in options)


def test_batch_norm_without_momentum() -> None:
    """It breaks the graph within a block."""

    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(momentum=None if number == 1 else 0.1) for number in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, x.mean())
            return x.square().mean()

    def act(twin: Twin) -> torch.Tensor:
        first, second = twin.call(torch.randn(4, TOKENS, WIDTH)), twin.call(torch.randn(4, TOKENS, WIDTH))
        first.backward()
        second.backward()
        return first + second

    same(twins(Averaging), act, drops=None)


class Experts(nn.Module):
    """Blocks of four experts each, of which a gate weighs two for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleList(self.expert() for _ in range(4)) for _ in range(2))

    def expert(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, gate, experts in zip(self.norms, self.gates, self.layers, strict=True):
            y = norm(x)
            scores = gate(y).softmax(-1)
            kept = scores * (scores >= scores.topk(2, -1).values[..., -1:])
            x = x + sum(kept[..., n : n + 1] * expert(y) for n, expert in enumerate(experts))  # type: ignore[operator]
        return x.square().mean()


def test_experts() -> None:
    def act(twin: Twin) -> torch.Tensor:
        loss = twin.call(torch.randn(4, TOKENS, WIDTH))
        loss.backward()
        return loss

    same(twins(Experts, planner="one_ahead", device_memory="64MiB"), act)


def test_dynamic_shapes() -> None:
    pair = twins()

    def act(twin: Twin) -> torch.Tensor:
        losses = []
        for size in (4, 5, 7):
            loss = twin.call(*batch(size, size))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    same(pair, act)


def test_autocast() -> None:
    def act(twin: Twin) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = twin.call(*batch(1))
        loss.backward()
        return loss

    same(twins(), act)


def test_parameters_on_a_drive(tmp_path: Any) -> None:
    same(twins(Small, params="nvme", nvme=str(tmp_path)), train)
