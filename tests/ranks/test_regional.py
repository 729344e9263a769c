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
    (much, little, states), (other, nothing, _) = run_ranks(rank_regional.said_at_the_first_step, 2)
    assert other == nothing == ""
    (warning,) = [line for line in much.splitlines() if "no compiled graph uses" in line]
    assert warning.startswith("WARNING no compiled graph uses 3 parameters, 41% of the model: they stay whole on each rank")
    assert f"(468 B of parameters, {states:,} B of states, this rank's part of them)" in warning
    assert "the largest is embedding.weight (308 B)" in warning
    assert "compile the whole model rather than its blocks" in warning
    (line,) = [line for line in little.splitlines() if "no compiled graph uses" in line]
    assert line.startswith("INFO no compiled graph uses 3 parameters, 2% of the model")
    assert line.endswith("(468 B of parameters); the largest is embedding.weight (308 B)")


@pytest.mark.distributed
@pytest.mark.thorough
def test_states_that_were_split_become_those_of_partitioned_parameters() -> None:
    assert run_ranks(rank_regional.joined, 2) == [(True, False)] * 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("where", [more("memory"), "drive"])
@pytest.mark.parametrize("library", rank_regional.LIBRARIES)
def test_what_a_library_compiles_block_by_block(library: str, where: str, tmp_path: Path) -> None:
    """accelerate's `compile_regions` and diffusers' `compile_repeated_blocks` hand backend and options on."""
    options = placed(ALL_ON_DRIVE if where == "drive" else {}, str(tmp_path))
    first, second = run_ranks(rank_regional.compiled_by, 2, library, options)
    assert first == second
    assert any("transformer.h.1" in name or "transformer_blocks.1" in name for name in first)
