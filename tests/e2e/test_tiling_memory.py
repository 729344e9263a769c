"""What an MLP in tiles holds of its activations: measured, in multiples of one of them whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

WIDTH, HIDDEN, ROWS = 32, 2048, 512
ACTIVATION = 4 * ROWS * HIDDEN


class Perceptron(nn.Module):
    """The second weight is as linear layers have it, or turned: with the hidden dimension first."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.up, self.turned = nn.Linear(WIDTH, HIDDEN), turned
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH) if turned else torch.randn(WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        return hidden @ (self.down if self.turned else self.down.t())


def peak_bytes(step: Callable[[], object], folder: Path) -> int:
    """Return the most that the allocations of a step came to."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    record.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found = sorted((e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    (_, first, taken), *_ = found
    return max(total for _, total, _ in found) - (first - taken)


@pytest.mark.filterwarnings("ignore:.*Profiler:UserWarning")
@pytest.mark.parametrize("turned", [False, True], ids=["linear", "turned"])
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_activations_that_exist_whole(turned: bool, trained: bool, tmp_path: Path) -> None:
    whole, tiled = (held(None, turned, trained, tmp_path), held(4 * WIDTH * HIDDEN // 16, turned, trained, tmp_path))
    expected = {
        (False, False): (2, 1),  # relu's result alone, which each tile of the second weight reads
        (False, True): (3, 2),  # that, which the backward reads too, and its gradient
        (True, False): (2, 0),
        (True, True): (3, 1),  # what the backward reads, in parts
    }
    assert (whole // ACTIVATION, tiled // ACTIVATION) == expected[turned, trained]
    assert tiled % ACTIVATION < ACTIVATION // 2


def held(tile: int | None, turned: bool, trained: bool, folder: Path) -> int:
    """Return the most bytes that a step takes."""
    torch._dynamo.reset()
    model = torch.compile(Perceptron(turned=turned), backend="zero_infinity", options={"compute": "fx", "tile": tile})
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step() -> None:
        with torch.set_grad_enabled(trained):
            out = model(x)
        if trained:
            out.backward(torch.ones_like(out))

    step()
    return peak_bytes(step, folder)
