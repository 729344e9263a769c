"""The memory model against the ledgers, over placements, tiles and types: what it says stays is there, to the byte, and what
passes through memory is never more than it says."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from memory_models import check_against_ledgers

from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

TIERS = st.sampled_from(["device", "host", "nvme"])


@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
@settings(max_examples=5, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
@given(
    widths=st.lists(st.sampled_from([5, 64, 97, 130]), min_size=1, max_size=3),
    placement=st.fixed_dictionaries({"params": TIERS, "grads": TIERS, "optimizer": TIERS}),
    apart=st.booleans(),
    master=st.booleans(),
    tile=st.sampled_from([None, 1 << 13]),
    bucket=st.sampled_from([512, 1 << 20]),
)
@example([97], {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}, False, True, 1 << 13, 512)
@example([97], {"params": "host", "grads": "nvme", "optimizer": "host"}, True, False, None, 512)
def test_what_the_model_says_is_what_the_ledgers_measure(
    widths: list[int], placement: dict[str, str], apart: bool, master: bool, tile: int | None, bucket: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        options: dict[str, Any] = {**placement, "bucket": bucket}
        options |= {"nvme": folder} if "nvme" in placement.values() else {}
        options |= {"tile": tile} if tile is not None else {}
        options |= {"master": "float32"} if master else {}
        check_against_ledgers(widths, torch.bfloat16 if master else torch.float32, options)
