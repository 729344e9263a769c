"""Forwards that Dynamo leaves to eager code, on parameters that another graph has spread over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import rank_eager_frames
import torch
from rank_full_optimizer import ALL_ON_DRIVE, placed
from ranks import run_ranks


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@pytest.mark.parametrize(
    ("world", "options", "reentrant"), [(2, {}, None), (3, {}, None), (2, ALL_ON_DRIVE, None), (2, {}, False), (2, {}, True)]
)
def test_training_goes_on_behind_an_evaluation(world: int, options: Any, reentrant: bool | None, tmp_path: Any) -> None:
    for losses, expected in run_ranks(rank_eager_frames.train, world, placed(options, str(tmp_path)), reentrant):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


@pytest.mark.distributed
def test_ranks_that_draw_otherwise_are_told() -> None:
    errors = run_ranks(rank_eager_frames.draw_otherwise, 2, alone=True)
    assert all(errors), errors


@pytest.mark.distributed
def test_code_outside_of_a_forward_is_refused() -> None:
    for error in run_ranks(rank_eager_frames.read_alone, 2):
        assert "reads parameter up.weight" in error
        assert "spread over 2 ranks" in error


@pytest.mark.distributed
def test_no_room_on_one_rank_is_every_ranks_error() -> None:
    first, second = run_ranks(rank_eager_frames.without_room, 2)
    assert "failed on another rank, see there" in first
    assert "takes N bytes whole" in second or "takes N,N bytes whole" in second


@pytest.mark.distributed
def test_a_module_that_is_called_uncompiled_is_named() -> None:
    for of_copy, of_part in run_ranks(rank_eager_frames.call_a_copy, 2):
        assert "outside a compiled graph (Model is called uncompiled: call what torch.compile() returned, or " in of_copy
        assert "(Encoder is called uncompiled" in of_part
