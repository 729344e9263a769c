"""A thousand small steps with everything on a drive: memory, threads and descriptors stay level, peaks within the caps."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_long_run import take_a_thousand_steps
from ranks import run_ranks


@pytest.mark.slow
def test_a_thousand_steps(tmp_path: Path) -> None:
    run_ranks(take_a_thousand_steps, 1, str(tmp_path))
