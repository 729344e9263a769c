"""Many small steps with everything on a drive: memory, threads and descriptors stay level, peaks within the caps."""

from __future__ import annotations

from pathlib import Path

import pytest
from marks import more
from rank_long_run import take_many_steps
from ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("steps", [300, more(1000)])
def test_nothing_grows(steps: int, tmp_path: Path) -> None:
    run_ranks(take_many_steps, 1, str(tmp_path), steps, alone=True)
