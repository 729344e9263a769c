"""Saved values leave the device and come back: the bits of the CPU, nothing unordered, and all memory given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from tiers import context_of
from torch import nn

import zinf_compile


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


OFFLOADED = {
    "host": {"activations": "host"},
    "nvme": {"activations": "nvme"},
    "all on nvme": {"activations": "nvme", "params": "nvme", "grads": "nvme", "optimizer": "nvme"},
}


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    torch.compiler.reset()
    zinf_compile.reset()
    yield
    zinf_compile.reset()
    torch.compiler.reset()


def _train(device: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], nn.Module]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = _Blocks().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    called: Any = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
    losses = []
    for step in range(3):
        batches = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(step)).to(device)
        found = [called(batch) for batch in batches]  # two forwards before the first backward
        for loss in found:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() for loss in found]
    return losses, model


def _let_copies_go(model: nn.Module) -> None:
    """Let the lanes know that their copies are over, at the next one."""
    link = context_of(model).link
    host, there = link.host_buffer(16, torch.uint8), link.device_buffer(16, torch.uint8)
    link.to_device(host, there, None).wait()
    link.to_host(there, host, None).wait()


def _with_the_bits_of_the_cpu(options: dict[str, Any]) -> Any:
    """Train as on the CPU, bit by bit and with every access ordered; return the model."""
    expected, _ = _train("cpu", {})
    with late.delays(0.0003, seed=7, chance=0.3):
        losses, model = _train("late", options)
        found = [loss.cpu() for loss in losses]
    torch.accelerator.synchronize()
    _let_copies_go(model)
    assert all(map(torch.equal, found, expected))
    assert not late.defects()
    assert late.counters()["unordered accesses"] == 0
    return model


def test_values_that_are_made_again() -> None:
    _with_the_bits_of_the_cpu({"activations": "recompute", "params": "host"})


@pytest.mark.parametrize("options", OFFLOADED.values(), ids=OFFLOADED)
def test_the_bits_of_the_cpu(options: dict[str, Any], tmp_path: Path) -> None:
    given = {**options, "nvme": str(tmp_path)} if "nvme" in options.values() else options
    model = _with_the_bits_of_the_cpu(given)
    stats = zinf_compile.stats(model)
    moved = stats["links"]
    saved = 2 * 3 * 3 * 128 * (256 + 256) * 4  # batches, steps, blocks: what goes into GELU, and what comes out
    assert moved["device to host"]["bytes"] >= saved
    assert moved["host to device"]["bytes"] >= saved
    if options["activations"] == "nvme":
        assert moved["host to nvme"]["bytes"] >= saved
    host = stats["memory"]["host"]
    assert host["now"]["activations"] == 0, "all is given back"
    assert host["peak"]["activations"] >= (2 * saved // 6 if options["activations"] == "host" else 128 * 256 * 4)
