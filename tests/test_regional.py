"""Blocks that are compiled one by one: the rest of the model is whole, its optimizer states are split, and the log says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_regional
from marks import more
from rank_full_optimizer import ALL_ON_DRIVE, placed
from ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize(
    ("optimizer", "world", "options"),
    [("adamw", 2, {}), more("momentum", 3, {}), more("adagrad", 2, {}), more("adamw", 3, ALL_ON_DRIVE)],
)
def test_states_of_whole_parameters_are_split(optimizer: str, world: int, options: dict[str, Any], tmp_path: Path) -> None:
    assert run_ranks(rank_regional.states_are_split, world, optimizer, placed(options, str(tmp_path))) == [[]] * world


@pytest.mark.distributed
def test_what_stays_whole_is_said_at_the_first_step() -> None:
    (warned, line, states), (other, nothing, _) = run_ranks(rank_regional.said_at_the_first_step, 2)
    assert other == nothing == ""
    assert warned.count("no compiled graph uses 3 parameters") == 1
