"""Blocks that a forward passes twice: values made again take the memory of eager checkpoints, with the bits of keeping them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compute_models import allocated_at_most
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import BACKEND

import zinf_compile
from zinf_compile.sharded.parameter import ShardedParameter

ROWS, WIDTH, BLOCKS = 2048, 64, 6
VALUE = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Passes all its blocks twice, one block after the other or each twice in a row."""

    def __init__(self, *, in_a_row: bool, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.order = [n // 2 if in_a_row else n % BLOCKS for n in range(2 * BLOCKS)]
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.square().mean()


def train(options: Mapping[str, Any] | None, *, in_a_row: bool, checkpoints: bool = False) -> tuple[list[torch.Tensor], int]:
    """Return the loss and gradients of a step, and the bytes that it holds at most; `options`: None is eager PyTorch."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(in_a_row=in_a_row, checkpoints=checkpoints)
    x = torch.randn(ROWS, WIDTH)
    if options is not None:
        model.compile(backend=BACKEND, options={"compute": "fx", **options})

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        zinf_compile.synchronize()
        return loss.detach()

    found = [step(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    assert len(found) == 1 + len(list(model.parameters()))
    assert all(isinstance(p, ShardedParameter) == (options is not None) for p in model.parameters())
    return found, allocated_at_most(step)


@pytest.mark.parametrize("in_a_row", [False, True])
def test_a_second_passage_runs_again_by_itself(in_a_row: bool) -> None:
    """PyTorch's compilers take a multiple of eager's memory where all units of a passage are there, and its compute is one."""
    kept, everything = train({"activations": "keep"}, in_a_row=in_a_row)
    again, held = train({"activations": "recompute"}, in_a_row=in_a_row)
    assert all(map(torch.equal, kept, again))
    _, of_eager = train(None, in_a_row=in_a_row, checkpoints=True)
    assert of_eager < everything / 3
    assert held <= of_eager + VALUE


@pytest.mark.parametrize("compute", ["fx", "inductor"])
def test_checkpoints_of_the_model(compute: str) -> None:
    """The user's own: with Inductor a region's temporaries are there at once."""
    _, of_eager = train(None, in_a_row=False, checkpoints=True)
    _, held = train({"activations": "keep", "compute": compute}, in_a_row=False, checkpoints=True)
    assert held <= of_eager + (VALUE if compute == "fx" else 8 * VALUE)


def test_caps_count_it() -> None:
    """Within a cap that is far below what keeping takes, the plan finds the same."""
    kept, everything = train({}, in_a_row=False)
    found, held = train({"device_memory": "24MiB", **dict.fromkeys(("params", "grads", "optimizer"), "device")}, in_a_row=False)
    assert all(map(torch.equal, kept, found))
    assert held <= 24 << 20 < everything / 2
