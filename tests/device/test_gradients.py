"""Gradients on the host: added up, scaled and measured beside compute, with the CPU's bits; the host waits for none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import late
import pytest
import torch
from gradient_cases import Trained, train
from torch import nn

import zinf_compile
from zinf_compile.runtime.lanes.lanes import Job
from zinf_compile.sharded.gradient import ShardedGradient

SLOW_S = 0.002
"""The longest delay of each work of a stream."""

PLACEMENTS: dict[str, dict[str, Any]] = {
    "gradients on the host": {"grads": "host"},
    "all on the host": {"params": "host", "grads": "host", "optimizer": "host"},
    "updated on the device": {"params": "host", "grads": "host", "optimizer": "host", "update": "device"},
    "in tiles": {"grads": "host", "tile": "4KiB"},
}


def late_train(*args: Any, **kwargs: Any) -> Trained:
    with late.delays(SLOW_S, seed=1):
        return train("late", *args, **kwargs)


def some_thorough(names: Iterable[str]) -> list[Any]:
    """Return all but the first as `thorough` cases."""
    return [pytest.param(name, marks=pytest.mark.thorough if number else ()) for number, name in enumerate(names)]


@pytest.mark.parametrize("placement", some_thorough(PLACEMENTS))
def test_accumulated_and_clipped_ones_keep_nobody(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whichever of 16 layers: nobody waits for one gradient's copy, and twice a step for the lane that adds and scales."""
    steps, blocked, wait = 3, [0], Job.wait

    def counted(job: Job) -> None:
        blocked[0] += not job.is_over() and not threading.current_thread().name.startswith("zinf")
        wait(job)

    monkeypatch.setattr(Job, "wait", counted)
    waits = []
    for layers in (4, 16):
        blocked[0] = 0
        found = late_train(PLACEMENTS[placement], layers=layers, steps=steps)
        waits.append(found.waits)
        assert late.defects() == []
        assert blocked[0] <= 2 * steps + 1, "once more where the first step plans"
    assert waits[0] == waits[1] <= 2


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "clipped one by one": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "largest elements clipped": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "with their parameters": lambda model: [p.grad.add_(p.detach(), alpha=0.01) for p in model.parameters()],
    "squared": lambda model: [p.grad.mul_(p.grad) for p in model.parameters()],
}


@pytest.mark.parametrize("placement", some_thorough(PLACEMENTS))
@pytest.mark.parametrize("changes", CHANGES)
def test_changes_have_the_bits_of_the_cpu(changes: str, placement: str) -> None:
    tiled = {"tile": PLACEMENTS[placement]["tile"]} if "tile" in PLACEMENTS[placement] else None  # which rounds otherwise
    expected = train("cpu", tiled, layers=2, before_step=CHANGES[changes], set_to_none=False)
    found = late_train(PLACEMENTS[placement], layers=2, before_step=CHANGES[changes], set_to_none=False)
    assert all(map(torch.equal, found.losses, expected.losses))
    assert late.defects() == []


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_scaler_unscales_them_and_skips_what_overflowed(placement: str) -> None:
    def steps(device: str, options: dict[str, Any] | None) -> list[torch.Tensor]:
        torch.compiler.reset()
        zinf_compile.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        called = model if options is None else torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
        scaler, seen = torch.amp.GradScaler(device, init_scale=4.0), []
        for factor in (1.0, float("inf"), 1.0):
            loss = called(torch.ones(4, 8, device=device)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.detach().cpu(), torch.tensor(scaler.get_scale())]
        return seen

    expected = steps("cpu", None)
    with late.delays(SLOW_S, seed=1):
        found = steps("late", PLACEMENTS[placement])
    assert all(map(torch.equal, found, expected))
    assert late.defects() == []


def test_settings_on_the_device_are_read_after_the_users_stream(tmp_path: Path) -> None:
    """All on drives, so that a thread of its own updates beside the next forward, by a rate that was set a moment ago."""

    def trained(device: str, options: dict[str, Any] | None) -> list[torch.Tensor]:
        rate = torch.full((), 0.1, device=device)

        def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
            first, *others = parameters
            return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": rate}], lr=0.1, momentum=0.9, foreach=False)

        return train(device, options, micro_batches=1, optimizer=sgd, before_step=lambda model: rate.mul_(0.5)).losses

    everything = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": str(tmp_path)}
    expected = trained("cpu", None)
    with torch.Stream(device="late"), late.delays(SLOW_S, seed=1):
        found = trained("late", everything | {"compute_shape": {"piece_numel": 2048}})
        zinf_compile.synchronize()
        assert late.defects() == []
        torch.accelerator.current_stream().synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_norms_are_taken_before_gradients_leave(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the CPU, and no gradient is brought back for them from the second step on."""
    brought, bring = list[str](), ShardedGradient._bring

    def noted(self: ShardedGradient, start: int, end: int | None) -> Any:
        brought.append(self.unit.name)
        return bring(self, start, end)

    monkeypatch.setattr(ShardedGradient, "_bring", noted)
    tiled = {"tile": PLACEMENTS[placement]["tile"]} if "tile" in PLACEMENTS[placement] else None  # which rounds otherwise
    expected = train("cpu", tiled, micro_batches=1)
    late_train(PLACEMENTS[placement], micro_batches=1, steps=1)
    once = len(brought)
    found = late_train(PLACEMENTS[placement], micro_batches=1)
    assert len(brought) == 2 * once > 0
    assert late.defects() == []
    assert all(map(torch.equal, found.losses, expected.losses))
