"""Two models of one class, as policy and reference are: graphs of the second one are further ones of the same function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import zinf_compile
from zinf_compile.cli.models import GPT
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.parameter import ShardedParameter

AWAY = {"params": "host", "grads": "host", "optimizer": "host", "compute": "fx"}


def _gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(layers=2, width=128, heads=4, vocabulary=512, length=64)


def with_a_reference(rank: int, size: int, options: dict[str, Any], steps: int = 3) -> tuple[list[int], list[float]]:
    """Train a model beside one of the same class that is evaluated; return the graphs after each step, and the losses."""
    torch.compiler.reset()
    counters.clear()
    policy, reference = _gpt(0), _gpt(1).requires_grad_(False)
    graphs, losses = [], []
    with simulating(SimulatedDevice()):
        models = [torch.compile(each, backend="zero_infinity", options={**AWAY, **options}) for each in (policy, reference)]
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        for step in range(steps):
            tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(step * size + rank))
            with torch.no_grad():
                expected = models[1](tokens, tokens.roll(1))
            loss = models[0](tokens, tokens.roll(1)) - expected
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"])
            losses.append(loss.item())
        zinf_compile.synchronize()
    return graphs, losses


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def experts_of_other_rows(rank: int, size: int, rows: Sequence[Sequence[int]]) -> tuple[list[int], float, float]:
    """Train experts that are compiled each by itself, with `rows` of each rank for each expert.

    Returns the graphs after each expert's first call, and the largest differences from eager PyTorch: of losses, of parameters.
    """
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    experts, plain = nn.ModuleList(_Expert() for _ in rows[0]), nn.ModuleList(_Expert() for _ in rows[0])
    plain.load_state_dict(experts.state_dict())
    for expert in experts:
        expert.compile(backend="zero_infinity", options={"compute": "fx"})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (experts, plain)]
    graphs: list[int] = []
    apart = 0.0
    for step in range(3):
        inputs = [[torch.randn(n, 8, generator=torch.Generator().manual_seed(step)) for n in each] for each in rows]
        loss = torch.zeros(())
        for expert, x in zip(experts, inputs[rank], strict=True):
            loss = loss + expert(x).square().mean()
            graphs.append(counters["stats"]["unique_graphs"])
        loss.backward()
        everyone = [sum(e(x).square().mean() for e, x in zip(plain, each, strict=True)) for each in inputs]
        (sum(everyone) / size).backward()
        apart = max(apart, abs(loss.item() - everyone[rank].item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(parameter, ShardedParameter) for parameter in experts.parameters())
    whole, expected = zinf_compile.full_state_dict(experts), plain.state_dict()
    differences = [(whole[name] - value).abs().max().item() for name, value in expected.items()] if rank == 0 else []
    return graphs[: len(rows[0])], apart, max(differences, default=0.0)
