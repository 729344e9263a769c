"""Cases of tests/support on the device: with streams that are late, and with nothing left unordered. On one rank or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import late
import torch

import zinf_compile

LONGEST_S = 0.0005
"""The longest delay of each work of a stream."""

DEFECTS = (
    "unordered accesses",
    "waits for unrecorded events",
    "sources changed before their copy",
    "record_stream",
    "failures on streams",
)
"""Counters that stay at zero."""


def on_device(rank: int, size: int, seed: int, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call `function(rank, size, *args, device="late")` with delays of this seed; raise where the device counts a defect."""
    zinf_compile.reset()
    late.clear()
    with late.delays(LONGEST_S, seed=seed + rank, chance=0.3):
        value = function(rank, size, *args, device="late", **named)
        torch.accelerator.synchronize()
    check()
    return value


def check() -> None:
    """Raise where the device has counted a defect since `late.clear`."""
    assert not late.defects(), late.defects()[:6]
    counted = late.counters()
    found = {name: count for name, count in counted.items() if name.split(":")[0] in DEFECTS}
    assert not found, found
