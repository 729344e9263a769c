"""Caps on several ranks: where one is short of memory all refuse, and name a cap that works for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_caps import EXTRA, average_within, caps_of_all, host_memory_of_this_node
from ranks import run_ranks


@pytest.mark.distributed
def test_ranks_refuse_together_and_name_what_works_for_all() -> None:
    for wide, narrow, _, uneven in run_ranks(caps_of_all, 2):
        assert narrow < wide < uneven <= wide + 2 * EXTRA


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory
def test_averages_are_made_within_a_small_cap_beside_states_on_a_drive(tmp_path: Path) -> None:
    """No graph stages anything, so that nothing of the cap is kept for staging."""
    cap = 1 << 20
    assert all(peak <= cap for peak in run_ranks(average_within, 2, str(tmp_path), cap))


@pytest.mark.distributed
def test_ranks_that_nobody_has_counted_share_the_host_memory_of_their_node() -> None:
    ranks = 3
    found = run_ranks(host_memory_of_this_node, ranks)
    for cap, peak, refusal in found:
        assert f"for {ranks} ranks of a node" in refusal
        assert ranks * peak <= cap
    assert sum(peak for _, peak, _ in found) > found[0][0] // ranks, "one rank alone doesn't need all of it"
