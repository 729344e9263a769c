"""A forward and its backward planned as one keep to the cap, on a device with an allocator of its own, and change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capped_run import Run, least_for
from marks import more

import zinf_compile
from zinf_compile.backend import replan, replan_pairs
from zinf_compile.backend.kept_graphs import KeptGraph
from zinf_compile.errors import PlanError
from zinf_compile.passes.graph.node_facts import leaving
from zinf_compile.plan.costs import LinkCost

SIZES: dict[str, Any] = {"bucket": "64KiB", "compute_shape": {"piece_numel": 1 << 14}}
FAR = dict.fromkeys(("params", "grads", "optimizer"), "host")


def train(run: Run) -> None:
    for _ in range(replan.FIRST + replan.MEASURED + 1):
        run.step()


def forward_of(run: Run) -> KeptGraph:
    context = next(run.model.parameters())._zinf_unit.context  # type: ignore[attr-defined]
    (found,) = [kept for kept in replan.replanner_of(context)._living() if not kept.is_backward]
    return found


def refuse(self: object) -> None:
    raise PlanError("not this one")


@pytest.mark.parametrize(("activations", "retimed"), [("auto", False), ("host", False), ("host", True)])
@pytest.mark.parametrize(("name", "budgets"), [("wide", 6), ("gpt", 3), more("gpt", 12), more("experts", 12)])
def test_the_device_holds_no_more_than_the_cap(
    name: str, budgets: int, activations: str, retimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = LinkCost(1e6, 0.0)  # links of this device cost next to nothing
    monkeypatch.setattr(replan, "link_costs", lambda records, links: {link.name: slow for link in links})
    if retimed:  # also where it is no faster than to leave saved values as they are
        monkeypatch.setattr(replan_pairs._Pair, "_as_one", refuse)
    options = {**SIZES, **FAR, "activations": activations}
    run = Run(name, SIZES)
    train(run)
    run.peak()
    expected = zinf_compile.full_state_dict(run.model)
    del run
    least, whole = least_for(name, options), least_for(name, {**SIZES, "activations": "keep"})
    handed, moved = 0, 0
    for number in range(budgets):
        cap = least + (whole - least) * number // budgets
        run = Run(name, {**options, "device_memory": cap})
        run.step()
        before = leaving(forward_of(run).gm)
        train(run)
        handed += len(forward_of(run).handed)
        moved += leaving(forward_of(run).gm) != before
        peak = run.peak()
        assert peak <= cap, f"{peak:,} bytes under a cap of {cap:,}, {number} of {budgets}"
        del run
        run = Run(name, {**options, "device_memory": cap})
        train(run)
        run.peak()
        for key, value in zinf_compile.full_state_dict(run.model).items():
            assert torch.equal(value, expected[key]), f"{key} under a cap of {cap:,}"
        del run
    assert handed
    assert moved or not retimed
