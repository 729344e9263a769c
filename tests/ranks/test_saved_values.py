"""Each saved value at a place of its own, drawn from a seed: the bits of keeping all of them, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import more
from rank_saved_values import run_out_of_space, train_mixed, train_within_caps
from ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
]
FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("ranks", "names", "dtype", "compute", "apart"),
    [
        (2, ["gpt2"], FLOAT, "fx", False),
        more(1, ["llama", "t5", "mixtral"], FLOAT, "fx", True),
        more(2, ["t5", "mixtral"], BRAIN, "fx", True),
        more(2, ["gpt2", "llama"], FLOAT, "inductor", False),
        more(1, ["gpt2", "mixtral"], BRAIN, "inductor", True),
    ],
)
def test_any_mixture_has_the_same_bits(
    ranks: int, names: list[str], dtype: torch.dtype, compute: str, apart: bool, tmp_path: Path
) -> None:
    arguments: tuple[Any, ...] = (str(tmp_path), names, dtype, compute, apart, [1, 2] if len(names) > 1 else [1])
    moved = [train_mixed(0, 1, *arguments)] if ranks == 1 else run_ranks(train_mixed, ranks, *arguments)
    assert min(moved) > 0


def test_a_full_drive_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    here, there = run_ranks(run_out_of_space, 2, str(tmp_path))
    assert here == "rank 1 has no space on its drives for saved values, see its error"
    assert there == "[Errno 28] the drive is full"


@pytest.mark.parametrize("free", [False, True], ids=["words", "homes as well"])
def test_each_rank_moves_what_it_has_no_room_for(free: bool, tmp_path: Path) -> None:
    """The other one has half the batch: what moves is its own affair, and the collectives are the same."""
    more_tokens, fewer = run_ranks(train_within_caps, 2, str(tmp_path), free)
    assert [decided.get("nvme", 0) for decided in more_tokens][2] == 0, "everything fits"
    assert more_tokens[0]["nvme"] > fewer[0].get("nvme", 0)
