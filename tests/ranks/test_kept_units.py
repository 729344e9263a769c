"""Full parameters that stay gathered from a forward to its backward: the bits of gathering them again, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
from marks import more
from rank_kept_units import (
    LAYERS,
    WIDTH,
    bytes_of_plain_steps,
    caps_for_more_states,
    change_before_the_backward,
    compile_again_alone,
    keep_what_fits,
    train_at_each_word,
)
from ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.mark.parametrize(
    ("ranks", "options", "half"),
    [
        (2, {}, False),
        (3, {"params": "host", "grads": "host", "optimizer": "host"}, False),
        (2, {"compute": "inductor"}, True),
        more(2, {}, True),
        more(4, {"compute": "inductor"}, False),
        more(2, {"planner": "cached_prefetch"}, False),
        more(2, {"activations": "recompute"}, False),
        more(2, {"tile": "1MiB", "device_memory": "8MiB", "activations": "recompute"}, True),
    ],
)
def test_what_is_kept_changes_no_bit(ranks: int, options: dict[str, Any], half: bool) -> None:
    for again, kept in run_ranks(train_at_each_word, ranks, options, half):
        assert kept < again


@pytest.mark.parametrize("ranks", [2, more(3)])
def test_zero_2_sends_two_thirds_of_zero_3(ranks: int) -> None:
    """Each rank receives the other ranks' shards: of every parameter twice, or once."""
    others = (ranks - 1) * 4 * -(-WIDTH * WIDTH // ranks)
    for again, kept in run_ranks(bytes_of_plain_steps, ranks):
        assert kept == LAYERS * others
        assert again == 2 * kept


def test_a_parameter_that_changed_before_the_backward_is_eagers_error() -> None:
    again, kept = (set(run_ranks(change_before_the_backward, 2, word)) for word in (True, False))
    assert again == kept
    assert "has been modified by an inplace operation" in next(iter(kept))


@pytest.mark.parametrize("word", ["auto", True])
def test_the_cap_named_for_more_states_than_two_works(word: str | bool) -> None:
    """Within a larger cap more units stay gathered, whose room is no longer there for states."""
    for said, (first, then) in run_ranks(caps_for_more_states, 2, word):
        assert then > first
        assert ("or less with reshard_after_forward=True" in said) == (word == "auto")


@pytest.mark.parametrize("ranks_alike", [True, more(False)])
def test_a_larger_cap_keeps_more(ranks_alike: bool) -> None:
    for received in run_ranks(keep_what_fits, 2, ranks_alike):
        assert received == sorted(received, reverse=True)
        assert received[-1] < received[0]


def test_a_rank_that_compiles_again_alone_keeps_what_was_agreed() -> None:
    for again, kept in run_ranks(compile_again_alone, 2):
        assert kept < again
