"""What the host waits for while it trains: as often with 16 layers as with 4. Lanes of drives have threads of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import EVERY, PLACEMENTS, Options, Training, on_drives
from rank_steps_late import waits_on_ranks
from ranks import run_ranks
from torch import nn

import zinf_compile
from zinf_compile.runtime import gather_steps
from zinf_compile.runtime.lanes.stream_lane import StreamTransfer

MANY_CHUNKS = "many chunks, updated on the device"
ACTIVATIONS = {
    f"{place}, activations {word}": {**PLACEMENTS[place], "activations": word}
    for place in ("device", "host", "drive")
    for word in ("host", "recompute")
}
BY_DEFAULT = ("host", "states on the drive", MANY_CHUNKS, "host, activations host", "host, activations recompute")
CASES = {
    **PLACEMENTS,
    MANY_CHUNKS: {**PLACEMENTS["host, updated on the device"], "compute_shape": {"piece_numel": 4096}},
    **ACTIVATIONS,
    **EVERY,
}


def waits_of_compute() -> int:
    """Return how often threads that issue compute have waited for the device."""
    return sum(count for thread, count in late.waits_by_thread().items() if not thread.startswith("zinf"))


def waits_of_a_step(options: Options, layers: int, for_drives: Counter[str], *, micro_batches: int = 1) -> int:
    """Return the waits of a step after two others, those for drives aside; with several micro-batches gradients are clipped.

    In a model of time in which nothing is over before the host has waited for it, so that they depend on no other process.
    """
    torch.compiler.reset()
    zinf_compile.reset()
    training = Training("late", options, layers=layers)
    with late.durations({}, otherwise=1.0):
        for step in range(3):
            batches = training.batches(step, micro_batches)
            late.clear()
            for_drives.clear()
            training.step(batches, clipped=micro_batches > 1)
    return waits_of_compute() - for_drives["waits"]


@pytest.fixture
def for_drives(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a count of the waits until memory that drives fill is free again: by design there is little of it."""
    counted: Counter[str] = Counter()
    let_go = StreamTransfer.let_go

    def noted(transfer: StreamTransfer) -> None:
        before = waits_of_compute()
        let_go(transfer)
        counted["waits"] += waits_of_compute() - before

    monkeypatch.setattr(StreamTransfer, "let_go", noted)
    return counted


def cases(*by_default: str) -> list[Any]:
    """Return the cases, with marks."""
    return [pytest.param(name, marks=[] if name in by_default else [pytest.mark.thorough]) for name in CASES]


@pytest.mark.parametrize("name", cases(*BY_DEFAULT))
def test_once_a_graph_and_twice_a_step_however_many_layers_there_are(name: str, tmp_path: Path, for_drives: Counter[str]) -> None:
    few, many = (waits_of_a_step(on_drives(CASES[name], tmp_path), layers, for_drives) for layers in (4, 16))
    assert few == many <= 2 * 1 + 2
    assert not for_drives or "nvme" in CASES[name].values(), "only drives are waited for beside these"


@pytest.mark.parametrize("name", cases(*BY_DEFAULT, "drive"))
def test_no_more_where_gradients_are_accumulated_and_clipped(name: str, tmp_path: Path, for_drives: Counter[str]) -> None:
    few, many = (waits_of_a_step(on_drives(CASES[name], tmp_path), layers, for_drives, micro_batches=3) for layers in (4, 16))
    assert few == many <= 2 * 3 + 2


@pytest.mark.distributed
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["device", "host", "parameters on the host", MANY_CHUNKS])
def test_no_more_on_two_ranks(name: str, micro_batches: int) -> None:
    few, many = (run_ranks(waits_on_ranks, 2, CASES[name], layers, micro_batches, backend="late") for layers in (4, 16))
    assert few == many
    assert max(few) <= 2 * micro_batches + 2


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

    monkeypatch.setattr(gather_steps, "gather_rows", counted(gather_steps.gather_rows))
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
