"""Eager code of forwards that computes from parameters which are spread over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import rank_eager_expressions
from rank_full_optimizer import ALL_ON_DRIVE, placed
from ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize(("world", "options"), [(2, {}), (3, {}), (2, ALL_ON_DRIVE)], ids=["2 ranks", "3 ranks", "on a drive"])
def test_what_is_computed_from_parameters_trains_as_in_eager(world: int, options: Any, tmp_path: Any) -> None:
    run_ranks(rank_eager_expressions.train, world, placed(options, str(tmp_path)))


@pytest.mark.distributed
def test_what_would_be_lost_is_refused() -> None:
    for errors in run_ranks(rank_eager_expressions.write, 2):
        of_view, without_gradients, in_place, in_inference_mode, returned = errors
        assert "is a view and is being modified inplace" in of_view
        assert "Inplace update to inference tensor" in without_gradients
        assert "dropout() reads parameter inner.long" in in_place
        assert "it changes values in place, of which it was given a copy" in in_place
        assert "a copy of parameter inner.long, shape [9, 6], for its value is spread over 2 ranks" in in_inference_mode
        for error in (in_inference_mode, returned):
            assert "it returns a part of a copy, and what was written to that would be lost" in error


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_of_custom_functions_are_averaged(world: int) -> None:
    mean = (world + 1) / 2
    for of_learned, of_frozen, of_both, error in run_ranks(rank_eager_expressions.differentiate, world):
        assert (of_learned, of_frozen, of_both) == ({3 * mean}, {mean}, {2 * mean})
        assert "differentiates the gradient of inner.long, which eager code computed with create_graph=True" in error
