"""Plans drawn by hypothesis, and training under them, on one rank or several, against all on the device without a planner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from hypothesis import strategies as st
from rank_homes import Home, alike, train_at_homes
from rank_planners import drawn_plan
from rank_tiers import Run, _check, _prepare, _train
from tiers import Meter, sundry

from zinf_compile.ir.tiers import TIERS, Tier
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

BUCKETS = 300, 1 << 20
NUMBERS = st.lists(st.integers(0, 5), max_size=24).map(tuple)


class Choices:
    """Chooses by numbers, one after the other; once they are used up, the first of all that there is to choose from."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._left = iter(numbers)

    def below(self, count: int) -> int:
        """Return a number from 0 to `count` - 1."""
        return next(self._left, 0) % count


@dataclasses.dataclass(frozen=True)
class DrawnPlan:
    """All that a plan decides; simpler ones have shorter and smaller numbers."""

    homes: tuple[int, ...]
    """By which homes are chosen, three for each parameter."""
    transfers: tuple[int, ...]
    """By which units stay between uses, and start to move."""
    activations: str
    update: str | None
    apart: bool
    """Whether the device has memory of its own."""
    blocks: bool
    """Whether the model is one of equal blocks."""
    bucket: int


@st.composite
def plans(draw: st.DrawFn) -> DrawnPlan:
    """Draw one."""
    apart = draw(st.booleans())
    return DrawnPlan(
        homes=draw(NUMBERS),
        transfers=draw(NUMBERS),
        activations=draw(st.sampled_from(["keep", "recompute", "nvme", *(["host"] if apart else [])])),
        update=draw(st.sampled_from([None, "host", "device"])) if apart else None,
        apart=apart,
        blocks=draw(st.booleans()),
        bucket=draw(st.sampled_from(BUCKETS)),
    )


def train_under(rank: int, size: int, folder: str, dtype: torch.dtype, plan: DrawnPlan) -> int:
    """Train for three steps as a plan says; raises where it has other bits. Returns how many homes parameters have."""
    _prepare()
    choices, homes = Choices(plan.homes), dict[str, Home]()
    tiers = TIERS if plan.apart else (Tier.DEVICE, Tier.NVME)

    def home(name: str) -> Home:
        if name not in homes:
            homes[name] = tiers[choices.below(len(tiers))], tiers[choices.below(len(tiers))], tiers[choices.below(len(tiers))]
        return homes[name]

    build = alike if plan.blocks else sundry
    options: dict[str, Any] = {"activations": plan.activations, "update": plan.update, "bucket": plan.bucket, "nvme": folder}
    with simulating(SimulatedDevice()) if plan.apart else contextlib.nullcontext():
        drawn = drawn_plan(Choices(plan.transfers))
        found = train_at_homes({**SAME, **options, "planner": drawn}, home, dtype, build, rank)
    _check(("drawn", str(plan), ""), None, found, _expected(rank, size, dtype, plan.blocks))
    return len(set(homes.values()))


SAME: dict[str, Any] = {"compute": "fx", "compute_shape": {"piece_numel": 96}}
"""Options that decide bits."""


@functools.cache
def _expected(rank: int, size: int, dtype: torch.dtype, blocks: bool) -> Run:
    return _train(rank, {**SAME, "bucket": BUCKETS[0]}, Meter(None), None, dtype, 3, alike if blocks else sundry)
