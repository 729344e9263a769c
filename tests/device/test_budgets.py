"""Memory is never over budget: many caps for one model, from the least that works to more than all of it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from capped_run import NEAR, Run, least_for
from marks import more

import zinf_compile
from zinf_compile.errors import BudgetError

BUDGETS, FEWER = 20, 3


@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        ("wide", BUDGETS),
        ("experts", FEWER),
        more("gpt", BUDGETS),
        more("pictures", BUDGETS),
        more("experts", BUDGETS),
    ],
)
def test_the_device_holds_no_more_than_any_cap_allows(name: str, budgets: int, tmp_path: Path) -> None:
    """Homes, and what becomes of saved values, follow from the cap: it changes no bit."""
    sizes = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}, "tile": "1MiB"}
    options = {**sizes, **dict.fromkeys(NEAR, "auto"), "nvme": str(tmp_path)}
    run = Run(name, sizes)
    run.peak()
    expected = zinf_compile.full_state_dict(run.model)
    del run
    least, whole = least_for(name, options), least_for(name, {**sizes, "activations": "keep"})
    assert least < whole
    for number in range(budgets):
        cap = least + (9 * whole // 8 - least) * number // (budgets - 1)
        run = Run(name, {**options, "device_memory": cap})
        peak = run.peak()
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,}, {number} of {budgets}"
        for key, value in zinf_compile.full_state_dict(run.model).items():
            assert torch.equal(value, expected[key]), f"{key} under a cap of {cap:,}"
        del run


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_memory_that_is_taken_in_the_middle_of_a_run_loses_nothing(place: str) -> None:
    """By a tensor of the user's: the next forward for which there is no room is refused, before it runs, and works without it."""
    plain = Run("wide", {})
    plain.peak()
    expected = zinf_compile.full_state_dict(plain.model)
    run = Run("wide", {"device_memory": least_for("wide", {})})
    refused = 0
    for step in range(3):
        for _ in range(2):
            taken = [torch.empty(1 << 20, dtype=torch.uint8, device="late")] if step and place == "forward" else []
            try:
                loss = run.call(*run.batch)
            except BudgetError as error:
                refused += "are taken by others" in str(error)
                taken.clear()
                loss = run.call(*run.batch)
            taken += [torch.empty(1 << 20, dtype=torch.uint8, device="late")] if step and place == "backward" else []
            loss.backward()
            del loss, taken
        taken = [torch.empty(1 << 20, dtype=torch.uint8, device="late")] if step and place == "step" else []
        run.optimizer.step()
        run.optimizer.zero_grad()
        del taken
    assert refused == (4 if place == "forward" else 0)
    for key, value in zinf_compile.full_state_dict(run.model).items():
        assert torch.equal(value, expected[key])
