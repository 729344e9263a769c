"""Full parameters that stay on a device with memory of its own until the step: the same bits, and one copy of each in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import late
import pytest
import torch
from gradient_cases import Trained, train
from late_training import on_drives

import zinf_compile

STAY = {"reshard_after_backward": False}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"params": "host", "grads": "host", "optimizer": "host"},
    "parameters on the host": {"params": "host"},
    "drive": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
}


def loaded(trained: Trained) -> int:
    """Return the bytes that the last step brought to the device."""
    return int(zinf_compile.stats(trained.model)["links"]["host to device"]["bytes_last_step"])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_three_micro_batches_load_each_parameter_once(place: str, half: bool, tmp_path: Path) -> None:
    options = on_drives(PLACES[place], tmp_path)
    results = []
    for more in ({}, STAY):
        with late.delays(0.001, seed=3), torch.autocast("late", torch.bfloat16, enabled=half):
            trained = train("late", {**options, **more}, micro_batches=3, before_step=lambda model: None)
        assert late.defects() == []
        results.append((trained.losses, loaded(trained), trained))
    (losses, released, _), (staying_losses, once, staying) = results
    assert all(map(torch.equal, losses, staying_losses))
    sizes = {name: 4 * parameter.numel() for name, parameter in staying.model.named_parameters()}
    update = sum(sizes.values()) if place == "parameters on the host" else 0  # states on the device are updated there
    assert once - update == sum(sizes.values())
    assert released - update == 3 * sum(sizes.values()) + 3 * sum(size for name, size in sizes.items() if read_again(name))


def read_again(name: str) -> bool:
    """Say whether a backward brings a parameter, too: all weights but the first, whose input takes no gradient, and the last."""
    return name.endswith("weight") and name not in ("layers.0.0.weight", "layers.3.2.weight")


def test_what_is_let_go_of_at_the_step_is_the_devices_again() -> None:
    trained = train("late", {**PLACES["host"], **STAY}, micro_batches=2, before_step=lambda model: None)
    zinf_compile.synchronize()
    context = next(trained.model.parameters())._zinf_unit.context  # type: ignore[attr-defined]
    assert not context.full_copies
    trained.called(torch.randn(8, 32, device="late")).item()
    held = context.full_copies.bytes
    assert held == sum(4 * parameter.numel() for parameter in trained.model.parameters())
    assert zinf_compile.stats(trained.model)["memory"]["device"]["now"]["gathered"] >= held


def test_another_stream_may_read_what_stays() -> None:
    """It comes after the gather; the memory, which is free behind the next step, after it."""
    trained = train("late", {**PLACES["host"], **STAY}, micro_batches=1, before_step=lambda model: None)
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    batch = torch.randn(8, 32).to("late")
    side = torch.Stream(device="late")
    side.wait_stream(torch.accelerator.current_stream())
    with late.delays(0.002, seed=5):
        losses = []
        for _ in range(3):
            loss = trained.called(batch)
            with side, torch.no_grad():
                losses.append((loss.detach(), trained.called(batch)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            filled = [torch.full((parameter.numel(),), 7.0, device="late") for parameter in trained.model.parameters()]
            del filled
    torch.accelerator.synchronize()
    assert late.defects() == []
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in losses)
