"""What two ranks once got wrong."""

from __future__ import annotations

import pytest
from rank_regressions import CASES, run_all
from ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run_ranks(run_all, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, found: list[dict[str, str]]) -> None:
    assert [on_rank[case] for on_rank in found] == ["", ""]
