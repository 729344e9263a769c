"""Gradients that are kept whole until the step, and reduced there once: the bits of averaging sums, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
from marks import more
from rank_gradients_at_step import (
    AT_STEP,
    backwards_without_a_step,
    contradictions,
    in_tiles,
    least_cap,
    one_backward_is_as_before,
    onto_zeros,
    read_between,
    sent_and_received,
    train,
)
from rank_kept_units import LAYERS, WIDTH
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "options", "model", "half"),
    [
        (2, {}, "tied", False),
        (3, {"optimizer": "nvme", "reshard_after_forward": False}, "plain", False),
        more(2, {"params": "host", "optimizer": "host"}, "broken", False),
        more(4, {}, "tied", False),
        more(2, {"planner": "cached_prefetch"}, "tied", False),
        more(2, {"activations": "recompute"}, "tied", False),
        more(2, {}, "tied", True),
        more(3, {"reduce_dtype": "float64"}, "plain", False),
    ],
)
def test_sums_are_averaged_once(ranks: int, options: dict[str, Any], model: str, half: bool, tmp_path: Any) -> None:
    if "nvme" in options.values():
        options = {**options, "nvme": str(tmp_path)}
    run_ranks(train, ranks, options, model, half)


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), more(3, {}), more(2, {"compute": "inductor"})])
def test_one_backward_gives_the_same_bits_as_before(ranks: int, options: dict[str, Any]) -> None:
    run_ranks(one_backward_is_as_before, ranks, options)


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_1_sends_each_gradient_once(ranks: int) -> None:
    """Each rank sends what others keep: of each parameter once a step, whatever number of backwards; ZeRO-3 once for each."""
    shard = 4 * -(-WIDTH * WIDTH // ranks)
    once = LAYERS * (ranks - 1) * shard
    options = {"reshard_after_forward": False}
    for sent, received, _ in run_ranks(sent_and_received, ranks, {**options, **AT_STEP}, 1):
        assert (sent, received) == (once, once)  # 2 Psi, of which each rank has 1/N already
    for sent, received, held in run_ranks(sent_and_received, ranks, {**options, **AT_STEP}, 3):
        assert (sent, received) == (once, 3 * once)
        assert held == 2 * LAYERS * (4 * WIDTH * WIDTH + shard)
    for sent, *_ in run_ranks(sent_and_received, ranks, options, 3):
        assert sent == 3 * once


def test_gradients_are_read_between_backwards() -> None:
    run_ranks(read_between, 2)


def test_what_is_dropped_unread_is_not_sent() -> None:
    once = LAYERS * 4 * -(-WIDTH * WIDTH // 2)
    assert run_ranks(backwards_without_a_step, 2) == [0, 0]
    assert run_ranks(onto_zeros, 2) == [3 * once, 3 * once]


def test_tiles_are_reduced_in_the_backward() -> None:
    run_ranks(in_tiles, 2)


def test_caps_count_whole_gradients() -> None:
    for before, now in run_ranks(least_cap, 2):
        assert now - before >= LAYERS * 4 * WIDTH * WIDTH // 2


def test_contradictions_are_refused_by_name() -> None:
    run_ranks(contradictions, 2)
