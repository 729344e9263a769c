"""The memory model against the ledgers of each of two ranks: shards are padded, and full gradients wait for their reduction."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from rank_memory_model import check_a_rank
from ranks import run_ranks

TIERS = st.sampled_from(["device", "host", "nvme"])


@pytest.mark.distributed
@settings(max_examples=2, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
@given(
    widths=st.lists(st.sampled_from([5, 64, 97, 130]), min_size=1, max_size=3),
    placement=st.fixed_dictionaries({"params": TIERS, "grads": TIERS, "optimizer": TIERS}),
    apart=st.booleans(),
    master=st.booleans(),
    tile=st.sampled_from([None, 1 << 13]),
    bucket=st.sampled_from([512, 1 << 20]),
)
@example([97], {"params": "device", "grads": "device", "optimizer": "device"}, False, True, 1 << 13, 512)
@example([5, 97], {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}, False, False, None, 512)
@example([5, 97], {"params": "host", "grads": "device", "optimizer": "nvme", "reduce_grads": "step"}, False, True, None, 512)
@example([97], {"params": "host", "grads": "nvme", "optimizer": "host"}, True, True, 1 << 13, 512)
def test_what_the_model_says_is_what_each_rank_measures(
    widths: list[int], placement: dict[str, str], apart: bool, master: bool, tile: int | None, bucket: int
) -> None:
    options: dict[str, Any] = {**placement, "bucket": bucket}
    options |= {"tile": tile} if tile is not None else {}
    options |= {"master": "float32"} if master else {}
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_a_rank, 2, folder, widths, torch.bfloat16 if master else torch.float32, options, apart)
