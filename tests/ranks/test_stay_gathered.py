"""Full parameters that stay on the device until the step: the bits of letting go of them, and one gather in each step."""

from __future__ import annotations

from typing import Any

import pytest
from marks import more
from rank_kept_units import LAYERS, WIDTH
from rank_stay_gathered import (
    STAY,
    another_model_is_gone,
    changes_between,
    closures,
    frozen_stay,
    handed_out,
    least_cap,
    loads,
    sent_and_received,
    states_within_cap,
    train,
)
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "options", "model", "half"),
    [
        (2, {}, "tied", False),
        (3, {"params": "nvme", "optimizer": "nvme", "reduce_grads": "step"}, "plain", False),
        more(2, {"params": "host", "optimizer": "host"}, "broken", False),
        more(4, {}, "tied", False),
        more(2, {"planner": "cached_prefetch"}, "tied", False),
        more(2, {"activations": "recompute"}, "tied", False),
        more(2, {"reshard_after_forward": False}, "tied", True),
        more(2, {"params": "nvme", "tile": "4KiB"}, "tied", False),
        more(2, {"compute": "inductor"}, "tied", False),
    ],
)
def test_the_bits_are_the_same(ranks: int, options: dict[str, Any], model: str, half: bool, tmp_path: Any) -> None:
    if "nvme" in options.values():
        options = {**options, "nvme": str(tmp_path)}
    for released, staying in run_ranks(train, ranks, options, model, half):
        assert staying < released


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_gathers_each_parameter_once(ranks: int) -> None:
    """Whatever number of micro-batches it has; 2 Psi in all where gradients are reduced once, too."""
    shard = 4 * -(-WIDTH * WIDTH // ranks)
    once = LAYERS * (ranks - 1) * shard
    for sent, received, held in run_ranks(sent_and_received, ranks, STAY, 3):
        assert (sent, received) == (3 * once, once)
        assert held == LAYERS * 4 * WIDTH * WIDTH
    for sent, received, _ in run_ranks(sent_and_received, ranks, {**STAY, "reduce_grads": "step"}, 3):
        assert (sent, received) == (once, once)
    for sent, received, held in run_ranks(sent_and_received, ranks, {}, 3):
        assert (sent, received, held) == (3 * once, 6 * once, 0)


def test_what_a_script_changes_is_gathered_again() -> None:
    run_ranks(changes_between, 2)


def test_a_step_that_calls_its_closure_several_times() -> None:
    run_ranks(closures, 2)


def test_a_step_lets_go_of_what_it_changes() -> None:
    run_ranks(frozen_stay, 2)


def test_a_shard_that_one_rank_has_handed_out() -> None:
    run_ranks(handed_out, 2)


def test_another_model_that_one_rank_has_let_go_of() -> None:
    run_ranks(another_model_is_gone, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_loaded_is_gathered_again(ranks: int, tmp_path: Any) -> None:
    run_ranks(loads, ranks, str(tmp_path))


def test_caps_count_what_stays() -> None:
    for released, staying in run_ranks(least_cap, 2):
        assert staying - released == LAYERS * 4 * WIDTH * WIDTH


def test_more_states_than_were_planned_are_refused_with_what_stays() -> None:
    for released, staying in run_ranks(states_within_cap, 2):
        assert staying > released
