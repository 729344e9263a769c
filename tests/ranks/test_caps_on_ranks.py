"""Caps on several ranks: where one is short of memory all refuse, and name a cap that works for all."""

from __future__ import annotations

import pytest
from rank_caps import EXTRA, caps_of_all
from ranks import run_ranks


@pytest.mark.distributed
def test_ranks_refuse_together_and_name_what_works_for_all() -> None:
    for wide, narrow, _, uneven in run_ranks(caps_of_all, 2):
        assert narrow < wide < uneven <= wide + 2 * EXTRA
