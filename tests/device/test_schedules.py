"""Compiled training on the device, with streams that are late: the CPU's bits, ordered accesses, and a host that goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from torch import nn

import zinf_compile

SLOW_S = 0.002
"""The longest delay of each work of a stream."""

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"params": "host", "grads": "host", "optimizer": "host"},
    "host, updated on the device": {"params": "host", "grads": "host", "optimizer": "host", "update": "device"},
    "parameters on the host": {"params": "host"},
    "gradients on the host": {"grads": "host"},
    "states on the host": {"optimizer": "host"},
    "drive": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "drive, updated on the device": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "update": "device"},
    "states on the drive": {"params": "host", "grads": "host", "optimizer": "nvme", "update": "device"},
}


class Stack(nn.Module):
    """Residual layers, each with two products."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def train(
    device: str, options: dict[str, Any] | None, *, layers: int = 4, micro_batches: int = 2, clipped: bool = True
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Return the losses of three steps, and what the last step counted."""
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model = Stack(layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    called = model if options is None else torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    generator, losses = torch.Generator().manual_seed(1), []
    batches = [torch.randn(micro_batches, 8, 32, generator=generator).to(device) for _ in range(3)]
    for batch in batches:
        late.clear()
        for part in batch:
            loss = called(part)
            loss.backward()
            losses.append(loss.detach())
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    counted = late.counters()
    return [loss.cpu() for loss in losses], counted


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    found = PLACEMENTS[request.param]
    return {**found, "nvme": str(tmp_path)} if "nvme" in found.values() else found


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return train("cpu", None)[0]


@pytest.mark.parametrize("options", PLACEMENTS, indirect=True)
def test_bits_are_those_of_the_cpu_and_every_access_is_ordered(options: dict[str, Any], expected: list[torch.Tensor]) -> None:
    with late.delays(SLOW_S, seed=1):
        found, counted = train("late", options)
    assert all(map(torch.equal, found, expected))
    assert late.defects() == []
    assert counted["unordered accesses"] == counted["waits for unrecorded events"] == counted["record_stream"] == 0


@pytest.mark.parametrize("options", [name for name, found in PLACEMENTS.items() if "nvme" not in found.values()], indirect=True)
def test_the_host_waits_once_a_graph_and_twice_a_step_however_many_layers_there_are(options: dict[str, Any]) -> None:
    waits = []
    for layers in (4, 16):
        with late.delays(SLOW_S, seed=1):
            _, counted = train("late", options, layers=layers, micro_batches=1, clipped=False)
            waits.append(counted["host waits"])
    assert waits[0] == waits[1] <= 2 * 1 + 2
