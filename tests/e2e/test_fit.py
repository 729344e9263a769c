"""The bound by which homes are passed over: never more than the account of what they exceed, and never less for nearer ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import BACKEND

from zinf_compile.errors import BudgetError
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.fill_homes import Excess
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.fit import Fit


class Model(nn.Module):
    """Blocks with parameters smaller than an allocator's rounding, and one without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96)) for _ in range(3)))
        self.last = nn.Linear(96, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.layers(x))) * self.scale).square().mean()


def near(placements: Placements) -> tuple[tuple[bool, bool], ...]:
    """Return of each kind of each parameter's states whether it lives on the device, and whether on the host."""
    tiers = [getattr(own, kind) for own in placements.own.values() for kind in ("params", "grads", "optimizer")]
    return tuple((tier == Tier.DEVICE, tier == Tier.HOST) for tier in tiers)


@pytest.mark.parametrize("compute", ["fx", "inductor"])
@pytest.mark.parametrize("apart", [False, True])
def test_the_bound_of_what_homes_exceed(compute: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Fit, Placements, tuple[tuple[str, Tier], ...], Excess, Excess]] = []
    account = Fit.excess

    def excess(self: Fit, placements: Placements, moving: Sequence[SavedMemory]) -> Excess:
        exceeded = account(self, placements, moving)
        bound = self.at_least(placements, moving)
        found.append((self, placements, tuple((memory.name, memory.tier) for memory in moving), exceeded, bound))
        return exceeded

    monkeypatch.setattr(Fit, "excess", excess)
    options: dict[str, Any] = {"compute": compute, "nvme": str(tmp_path), "device_memory": 1 << 20, "host_memory": 1 << 20}
    model = Model()
    model.compile(backend=BACKEND, options={**options, "bucket": 40_000, "compute_shape": {"piece_numel": 8192}})
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext(), pytest.raises(BudgetError):
        model(torch.ones(512, 96))
    assert len(found) > 20
    assert any(not exceeded.fits for *_, exceeded, _ in found)
    for *_, exceeded, bound in found:
        assert bound.device <= exceeded.device
        assert bound.host <= exceeded.host
    for fit, placements, moving, _, bound in found:
        for other, nearer, moves, _, others in found:
            if other is fit and moves == moving:
                pairs = list(zip(near(placements), near(nearer), strict=True))
                if all(one[0] <= two[0] for one, two in pairs):
                    assert bound.device <= others.device
                if all(one[1] <= two[1] for one, two in pairs):
                    assert bound.host <= others.host
