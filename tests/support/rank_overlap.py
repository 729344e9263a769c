"""What a rank's lanes note of themselves in steps with plenty of compute for each transfer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from training import plain_step

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.lanes import InlineLane
from zinf_compile.runtime.lanes.overlap_log import recorded
from zinf_compile.sharded.parameter import ShardedParameter

WIDTH, BLOCKS, ROWS, STEPS = 128, 24, 2048, 6
ENOUGH = 0.8
"""The share of transfer seconds that a step should have beside compute."""


class Block(nn.Module):
    """Two products and a residual: 512 KiB of parameters, 0.8 GFLOP in a forward of 2048 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Deep(nn.Module):
    """Blocks one after the other; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def overlap_by_step(rank: int, size: int, serial: bool) -> list[tuple[float, float]]:
    """Return for each of a few steps the seconds that transfers took beside compute, and that they took in all, of all ranks.

    The last one is the first in which `ENOUGH` went on beside compute: a busy machine takes more of them.
    """
    torch.manual_seed(0)
    model = Deep()
    compiled = torch.compile(model, backend="zero_infinity", options={"bucket": "512KiB", "timeout_s": 100, "compute": "fx"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank)),)
    plain_step(compiled, optimizer, batch)
    context = context_of(model)
    if serial:
        context.lanes.gather, context.lanes.reduce = InlineLane(), InlineLane()
    found = []
    for _ in range(STEPS):
        with recorded(context) as log:
            plain_step(compiled, optimizer, batch)
        assert len(log.gathers) >= 2 * BLOCKS - 1, "the backward begins with what the forward ends with"
        assert len(log.reductions) == BLOCKS
        both = torch.tensor([log.overlapped_s(), log.transfer_s()], dtype=torch.float64)
        dist.all_reduce(both)
        found.append((float(both[0]), float(both[1])))
        if both[0] >= ENOUGH * both[1]:
            break
    assert not context.lanes.gather.log
    assert not context.lanes.waits
    return found


def context_of(model: nn.Module) -> Context:
    """Return the ranks over which a model is partitioned."""
    parameter = next(model.parameters())
    assert isinstance(parameter, ShardedParameter)
    return parameter._zinf_unit.context
