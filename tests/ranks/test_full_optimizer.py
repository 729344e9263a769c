"""Whole optimizer states: saved by some ranks, loaded by others, or by plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_full_optimizer import (
    ALL_ON_DRIVE,
    SAVED,
    TRAINED,
    Run,
    assert_same_optimizer,
    bad_input,
    before_the_first_step,
    inside_gathered,
    load,
    nested,
    placed,
    save,
)
from rank_tile_states import assert_near_values, assert_same_values
from ranks import run_ranks
from torch import nn
from training import BACKEND

import zinf_compile

MASTER = {"master": "float32"}
HANDED_OVER = {
    "uneven sizes, into tiles on drives": ("odd", 2, {}, 3, ALL_ON_DRIVE | {"tile": 32}),
    "from tiles on drives": ("tall", 3, ALL_ON_DRIVE | {"tile": 1024}, 2, {}),
    "frozen, into other tiles": ("frozen", 2, {"tile": 1024}, 2, {"optimizer": "nvme", "tile": 2048}),
    "master copies": ("short", 2, ALL_ON_DRIVE | MASTER, 4, MASTER),
}
MORE = ("from tiles on drives", "master copies")


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.distributed
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.thorough if case in MORE else ()) for case in HANDED_OVER])
def test_states_go_from_some_ranks_to_others(case: str, tmp_path: Path) -> None:
    name, few, options, many, others = HANDED_OVER[case]
    run_ranks(save, few, str(tmp_path), name, options)
    run_ranks(load, many, str(tmp_path), name, others)
    saved, trained = (torch.load(tmp_path / file, weights_only=True) for file in (SAVED, TRAINED))
    alone = Run(name, placed(others, str(tmp_path)))
    alone.load(copy.deepcopy(saved))
    again = alone.save()
    assert_same_optimizer(saved["optimizer"], again["optimizer"])
    if "master" in others:
        return  # eager PyTorch keeps no master copies
    eager = Run(name, None)
    eager.load(copy.deepcopy(saved))
    for run in (alone, eager):
        run.train(2, 3)
    expected, found = eager.save(), [alone.save()]
    if many in (2, 4):  # of which the mean of equal gradients is that gradient, bit by bit
        found.append(trained)
    compare = (
        assert_near_values if "tile" in others else assert_same_values
    )  # eager products have other shapes than those of tiles
    for end in found:
        compare(expected["model"], end["model"], "weights")
        assert_same_optimizer(expected["optimizer"], end["optimizer"], compare)


@pytest.mark.distributed
def test_what_does_not_fit_is_named_on_all_ranks() -> None:
    first, second = run_ranks(bad_input, 2)
    assert "rank 0 was given no state" in first[0]
    assert "it has no 'state'; it has no 'param_groups'" in first[1]
    assert first[2].endswith("it has no 'param_groups'")
    assert "groups of [2, 1] parameters in the state, of [3, 1] in the optimizer" in first[3]
    assert "shape of state 'exp_avg' of up.weight: [16, 64] in the state, [64, 16] in the model" in first[4]
    assert "shape of state 'exp_avg_sq' of down.weight: [7] in the state, [4, 64] in the model" in first[4]
    assert "the states of up.weight are one rank's own (zinf_layout): that rank loads them by load_state_dict" in first[5]
    assert "'int' object is not subscriptable" in first[6]
    assert "loading the optimizer failed on rank 0, see there" in second[6]
    assert "pickle" in first[7]
    assert second[7] == "loading the optimizer failed on rank 0, see there"
    assert first[:6] == second[:6]
    assert all("doesn't fit this AdamW; nothing was changed" in text for text in first[:6])
    assert "saving the optimizer failed on rank 1, see there" in first[8]
    assert second[8] == "mine"
    assert "exp_avg of up.weight" in first[9]


@pytest.mark.distributed
def test_nested_states_are_refused() -> None:
    for said in run_ranks(nested, 2):
        assert "state 'history' of AdamW is a list of tensors" in said


@pytest.mark.distributed
def test_while_the_model_is_gathered() -> None:
    run_ranks(inside_gathered, 2)


@pytest.mark.distributed
def test_before_the_first_step() -> None:
    run_ranks(before_the_first_step, 2)


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize("options", [{}, ALL_ON_DRIVE], ids=["in memory", "on a drive"])
def test_one_rank_needs_no_others(options: dict[str, Any], tmp_path: Path) -> None:
    run = Run("tall", placed(options, str(tmp_path)))
    run.train(0)
    saved = run.save()
    kept: Any = copy.deepcopy(saved)
    for _ in range(2):
        run.train(1)
        assert_same_optimizer(kept["optimizer"], saved["optimizer"])  # nobody else's memory
        zinf_compile.load_full_optimizer_state_dict(run.optimizer, saved["optimizer"])
        assert_same_optimizer(kept["optimizer"], run.save()["optimizer"])


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "its own"])
@pytest.mark.parametrize("options", [{}, ALL_ON_DRIVE], ids=["in memory", "on a drive"])
def test_states_from_before_the_first_step_are_none(options: dict[str, Any], whole: bool, tmp_path: Path) -> None:
    """What was kept meanwhile must not come back."""
    runs = [Run("tall", None), Run("tall", placed(options, str(tmp_path)))]
    for run in runs:
        first = run.save()["model"] if run is runs[0] else zinf_compile.full_state_dict(run.model)
        none = copy.deepcopy(run.optimizer.state_dict())
        run.train(0, 1)
        zinf_compile.load_full_state_dict(run.model, first)
        if whole:
            zinf_compile.load_full_optimizer_state_dict(run.optimizer, none)
        else:
            run.optimizer.load_state_dict(none)
        assert not run.optimizer.state_dict()["state"]
        run.train(2)
    expected, found = (run.save() for run in runs)
    assert_same_values(expected["model"], found["model"], "weights")
    assert_same_optimizer(expected["optimizer"], found["optimizer"])


class Scaled(nn.Module):
    """In bf16, with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.layer(x) * self.scale).square().mean()
        return out


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning", "ignore:all .* parameters are torch.bfloat16")
@pytest.mark.parametrize("tiers", [{}, ALL_ON_DRIVE], ids=["in memory", "on a drive"])
@pytest.mark.parametrize(("before", "after"), [(MASTER, MASTER), (MASTER, {}), ({}, MASTER), ({}, {})], ids=str)
def test_states_are_in_the_types_in_which_they_are_kept(
    before: dict[str, str], after: dict[str, str], tiers: dict[str, str], tmp_path: Path
) -> None:
    """With fewer digits than before where there is no master copy any more; what isn't of a parameter's size keeps its own."""
    runs = []
    for options in (before, after):
        torch.compiler.reset()
        torch.manual_seed(1)
        model = Scaled()
        model.compile(backend=BACKEND, options=placed(tiers, str(tmp_path)) | options)
        runs.append((model, torch.optim.NAdam(model.parameters(), foreach=False)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.bfloat16)).backward()
        optimizer.step()

    (first, optimizer), (second, other) = runs
    step(first, optimizer)
    saved = zinf_compile.full_optimizer_state_dict(optimizer)
    with torch.no_grad():
        second(torch.ones(2, 4, dtype=torch.bfloat16))
    zinf_compile.load_full_state_dict(second, zinf_compile.full_state_dict(first))
    zinf_compile.load_full_optimizer_state_dict(other, saved)
    step(second, other)
    step(first, optimizer)
    found = zinf_compile.full_optimizer_state_dict(other)["state"]
    kept = torch.float32 if after else torch.bfloat16
    for index, state in zinf_compile.full_optimizer_state_dict(optimizer)["state"].items():
        assert found[index].keys() == (state.keys() | {"master"} if after else state.keys() - {"master"})
        for name, value in found[index].items():
            assert value.dtype == (torch.float32 if name in ("step", "mu_product") else kept), name
            if before == after:
                assert_same_values({name: state[name]}, {name: value}, index)
        torch.testing.assert_close(found[index]["exp_avg"].float(), state["exp_avg"].float(), rtol=0.02, atol=1e-4)
