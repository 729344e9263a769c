"""What the host waits for while it trains: as often with 16 layers as with 4. Lanes of drives have threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import EVERY, PLACEMENTS, Options, Training, on_drives
from torch import nn

import zinf_compile
from zinf_compile.runtime import executor

MANY_CHUNKS = "many chunks, updated on the device"
BY_DEFAULT = ("device", "host", "states on the drive", MANY_CHUNKS)
CASES = {
    **PLACEMENTS,
    MANY_CHUNKS: {**PLACEMENTS["host, updated on the device"], "compute_shape": {"piece_numel": 4096}},
    **EVERY,
}


def waits_of_compute() -> int:
    """Return how often threads that issue compute have waited for the device."""
    return sum(count for thread, count in late.waits_by_thread().items() if not thread.startswith("zinf"))


def waits_of_steps(options: Options, layers: int) -> list[int]:
    """Return the waits of a plain step, and of one with accumulated and clipped gradients, each after two of its kind.

    In a model of time in which nothing is over before the host has waited for it, so that they depend on no other process.
    """
    torch.compiler.reset()
    zinf_compile.reset()
    training, waits = Training("late", options, layers=layers), []
    with late.durations({}, otherwise=1.0):
        for micro_batches, clipped in ((1, False), (3, True)):
            for step in range(3):
                batches = training.batches(step, micro_batches)
                late.clear()
                training.step(batches, clipped=clipped)
            waits.append(waits_of_compute())
    return waits


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.thorough) for name in CASES])
def test_once_a_graph_and_twice_a_step_however_many_layers_there_are(name: str, tmp_path: Path) -> None:
    few, many = (waits_of_steps(on_drives(CASES[name], tmp_path), layers) for layers in (4, 16))
    assert few == many
    for waits, micro_batches in zip(many, (1, 3), strict=True):
        assert waits <= 2 * micro_batches + 2


class Words(nn.Module):
    """An embedding whose rows are looked up, and layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.words(indices)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_lookups_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read what indices say, which the host waits for."""
    within: list[int] = []

    def counted(look_up: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any) -> Any:
            before = waits_of_compute()
            found = look_up(*args)
            within.append(waits_of_compute() - before)
            return found

        return counts

    monkeypatch.setattr(executor, "gather_rows", counted(executor.gather_rows))
    options = {"compute": "fx", **PLACEMENTS["parameters on the host"], "tile": 4096}
    found = []
    for layers in (4, 16):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Words(layers).to("late")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        called = torch.compile(model, backend="zero_infinity", options=options)
        indices = torch.arange(64, device="late").reshape(4, 16)
        with late.durations({}, otherwise=1.0):
            for _ in range(3):
                within.clear()
                late.clear()
                called(indices).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((within[:], waits_of_compute() - sum(within)))
    assert found[0] == found[1]
    (looked_up, others) = found[0]
    assert len(looked_up) == 1
    assert looked_up[0] > 0
    assert others <= 2 + 2
