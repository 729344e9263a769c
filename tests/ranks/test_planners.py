"""Planners on two ranks: one plan for both, and the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drawn_plans import DrawnPlan, plans, train_under
from hypothesis import given, settings
from marks import more
from rank_experts import train_experts
from rank_planners import train_on_a_slow_drive, train_under_planners
from ranks import run_ranks

from zinf_compile.backend.replan import FIRST, MEASURED
from zinf_compile.config import PLANNERS

ALL, DRIVE, DEVICE = ("nvme", "nvme", "nvme"), ("nvme", "device", "device"), ("device", "device", "device")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "compute", "apart"),
    [(torch.float32, "fx", False), more(torch.float32, "fx", True), more(torch.bfloat16, "inductor", False)],
)
def test_bits_under_every_planner(dtype: torch.dtype, compute: str, apart: bool, tmp_path: Path) -> None:
    planners, placements = (*PLANNERS, 1, 2), [DEVICE, ALL if apart else DRIVE]
    done = run_ranks(train_under_planners, 2, str(tmp_path), dtype, compute, 2, planners, placements, 300, apart)
    assert done == [len(planners) * len(placements)] * 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("dtype", "examples"), [(torch.bfloat16, 3), more(torch.float32, 30), more(torch.bfloat16, 30)])
def test_bits_under_plans_that_decide_everything(dtype: torch.dtype, examples: int, tmp_path: Path) -> None:
    """A home for each parameter, gradient and state; where updates run; what becomes of saved values; when units move."""

    @settings(max_examples=examples, deadline=None, derandomize=examples < 10, database=None)
    @given(plan=plans())
    def check(plan: DrawnPlan) -> None:
        kinds = run_ranks(train_under, 2, str(tmp_path), dtype, plan)
        assert kinds == [kinds[0]] * 2

    check()


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_plan_again_alike_and_each_draws_its_step(tmp_path: Path) -> None:
    plain = run_ranks(train_on_a_slow_drive, 2, str(tmp_path), False)
    found = run_ranks(train_on_a_slow_drive, 2, str(tmp_path), True)
    for (losses, changes, collectives, page, left), (expected, *_, nothing) in zip(found, plain, strict=True):
        assert losses == expected
        assert any(line.startswith(f"planned again after step {FIRST + MEASURED}") for line in changes)
        assert collectives == found[0][2]
        assert "measured / planned" in page
        assert nothing == 0 < left, "shards stay between the graphs as they are planned then"
    assert "rank 1 of 2" in found[1][3]


@pytest.mark.distributed
def test_layers_whose_graphs_name_parameters_alike_follow_plans_of_their_own_homes(tmp_path: Path) -> None:
    assert run_ranks(train_experts, 2, str(tmp_path), "greedy") == run_ranks(train_experts, 2, str(tmp_path), None)
