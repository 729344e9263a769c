"""A device with memory of its own: what stays away from it, and what moves while it computes."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from tiers import MICRO_BATCHES, Meter, compiled, context_of, options_for, sundry, train_step
from torch import nn
from training import adamw

from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.overlap_log import Spans, Timed, overlapped_s, recorded

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


@pytest.mark.parametrize("tier", [more("host"), "nvme"])
def test_optimizer_states_never_cross_to_the_device(tier: str, tmp_path: Path) -> None:
    """Of a step only gradients cross, and values: each one time, or never where both are on the host's side."""
    with simulating(SimulatedDevice()) as device:
        for params, grads in itertools.product(("device", "host", "nvme"), repeat=2):
            torch.compiler.reset()
            model = compiled(sundry(), options_for((params, grads, tier), tmp_path, piece=96))
            optimizer = adamw(model.parameters())
            train_step(model, optimizer, 0)
            trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad and p.dim())
            meter = Meter(device)
            for step in range(1, 3):
                for micro in range(MICRO_BATCHES):
                    model(torch.zeros(3, 8, dtype=torch.long) + micro).backward()
                meter.read(model)
                optimizer.step()
                moved = meter.read(model)
                values, gradients = (trained if where == "device" else 0 for where in (params, grads))
                assert (moved.to_device, moved.to_host) == (values, values + gradients), f"{params} {grads} {tier}, step {step}"
                optimizer.zero_grad()


LAYERS, WIDTH, ROWS = 12, 384, 1024
BYTES_PER_S = 3e8
"""Of the slow link: a weight crosses it in two milliseconds, less than its layer computes."""


class Chain(nn.Module):
    """Layers that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Waiting(SimulatedDevice):
    """One whose every copy is waited for, as if there were no lanes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.waits = Spans()

    def to_device(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        pending = super().to_device(source, into, after)
        with Timed(self.waits):
            pending.wait()
        return pending

    def to_host(self, source: torch.Tensor, into: torch.Tensor, after: Pending | None) -> Pending:
        pending = super().to_host(source, into, after)
        with Timed(self.waits):
            pending.wait()
        return pending


def share_beside_compute(device: SimulatedDevice, tier: str, folder: Path) -> float:
    """Return the share of the links' seconds during which compute went on, in the best of a few steps."""
    shares = []
    with simulating(device):
        torch.compiler.reset()
        model = compiled(Chain(), options_for((tier, tier, tier), folder, bucket="600KiB"))  # a layer each
        x = torch.randn(ROWS, WIDTH)
        model(x).backward()
        for _ in range(4):
            model.zero_grad()
            Meter(device).read(model)
            for link in device.links.values():
                link.spans.clear()
            with recorded(context_of(model)) as log:
                model(x).backward()
                end = time.perf_counter()
            Meter(device).read(model)
            spans = [span for link in device.links.values() for span in link.spans]
            assert len(spans) > 4 * LAYERS, "weights and biases: to the device, and gradients from it"
            waits = [*log.waits, *(device.waits if isinstance(device, Waiting) else ()), (end, math.inf)]
            shares.append(overlapped_s(spans, waits) / sum(stop - start for start, stop in spans))
    return max(shares)


@pytest.mark.slow
@pytest.mark.parametrize("tier", [more("host"), "nvme"])
def test_copies_go_on_beside_compute(tier: str, tmp_path: Path) -> None:
    """Stages overlap; with a link that is waited for at each copy they don't."""
    shares = [share_beside_compute(kind(bytes_per_s=BYTES_PER_S), tier, tmp_path) for kind in (SimulatedDevice, Waiting)]
    assert shares[0] > 0.6, shares
    assert shares[1] < 0.1, shares
