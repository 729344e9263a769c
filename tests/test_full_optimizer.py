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
    load,
    placed,
    save,
)
from rank_tile_states import assert_same_values
from ranks import run_ranks

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
        return
    eager = Run(name, None)
    eager.load(copy.deepcopy(saved))
    for run in (alone, eager):
        run.train(2, 3)
    expected, found = eager.save(), [alone.save()]
    if many in (2, 4):  # of which the mean of equal gradients is that gradient, bit by bit
        found.append(trained)
    for end in found:
        assert_same_values(expected["model"], end["model"], "weights")
        assert_same_optimizer(expected["optimizer"], end["optimizer"])


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
    assert first[:6] == second[:6]
    assert all("doesn't fit this AdamW; nothing was changed" in text for text in first[:6])
    assert first[6] == "state_dict() of AdamW failed on rank 1, see there; nothing was saved"
    assert second[6] == "mine"
    assert "state exp_avg of up.weight" in first[7]


@pytest.mark.distributed
def test_before_the_first_step() -> None:
    run_ranks(before_the_first_step, 2)


def test_one_rank_needs_no_others() -> None:
    run = Run("tall", {})
    run.train(0)
    saved = run.save()
    kept: Any = copy.deepcopy(saved)
    run.train(1)
    assert_same_optimizer(kept["optimizer"], saved["optimizer"])  # nobody else's memory
    zinf_compile.load_full_optimizer_state_dict(run.optimizer, saved["optimizer"])
    assert_same_optimizer(kept["optimizer"], run.save()["optimizer"])
