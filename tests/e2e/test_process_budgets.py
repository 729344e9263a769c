"""Memory is never over budget, by the kernel's count: what a process grows by beside the cap, over many caps."""

from __future__ import annotations

from pathlib import Path

import pytest
from marks import more
from rank_process_memory import LARGER, growths
from ranks import run_ranks

RESERVE = 24 << 20
"""What a process grows by beside what a cap counts: graphs, plans, and memory that `malloc` has not given back."""
BUDGETS, FEWER, AT_A_TIME = 20, 2, 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "budgets"), [("gpt", FEWER), *(more(name, BUDGETS) for name in LARGER)])
def test_the_process_grows_by_no_more_than_the_cap_and_a_reserve(name: str, budgets: int, tmp_path: Path) -> None:
    found: list[tuple[int, int]] = []
    for first in range(0, budgets, AT_A_TIME):
        numbers = range(first, min(budgets, first + AT_A_TIME))
        found += run_ranks(growths, 1, str(tmp_path), name, budgets, numbers, alone=True)[0]
    for cap, grown in found:
        assert grown <= cap + RESERVE, f"{grown:,} bytes under a cap of {cap:,}"
    assert found[0][1] > RESERVE, "the models are large enough to tell"
