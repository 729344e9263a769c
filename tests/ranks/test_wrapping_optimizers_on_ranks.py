"""Optimizers that work through others, on several ranks."""

from __future__ import annotations

import pytest
import rank_wrapping_optimizers
from ranks import run_ranks
from wrapping_optimizers import WRAPPERS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_trains_as_in_eager(name: str) -> None:
    run_ranks(rank_wrapping_optimizers.compare, 2, name)
