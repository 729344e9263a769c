"""The memory model beside the ledgers on one of several ranks, as a function for `test_memory_model_on_ranks.py`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from memory_models import check_against_ledgers

from zinf_compile import StoreWarning
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating


def check_a_rank(
    rank: int, size: int, folder: str, widths: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any], apart: bool
) -> None:
    """Train as `check_against_ledgers` does; with `apart` on a device with memory of its own."""
    own = Path(folder) / f"rank {rank}"
    own.mkdir()
    drive = {"nvme": str(own)} if "nvme" in options.values() else {}
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        check_against_ledgers(widths, dtype, {"timeout_s": 60, **options, **drive})
