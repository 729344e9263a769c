"""Problems for planners: like those of `facts`, by seed, and by hypothesis."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Link, Memory, Region, Unit

SHARES = (0.15, 0.2, 0.3, 0.45, 0.6)
"""Of all bytes, for budgets."""


def links(down: float, up: float | None = None, far: Tier = Tier.NVME, near: Tier = Tier.DEVICE) -> tuple[Link, ...]:
    """Return both directions between two tiers."""
    return (
        Link(name=f"{far} to {near}", source=far, destination=near, bytes_per_second=down),
        Link(name=f"{near} to {far}", source=near, destination=far, bytes_per_second=up or down),
    )


def read_only(seed: int, blocks: int, share: float, *, rate: float | None = None) -> StepProblem:
    """Return one link and frozen units of uneven sizes, each used by a block forward and backward; a budget of `share` of all."""
    draw = random.Random(seed)
    sizes = [draw.randint(20, 100) for _ in range(blocks)]
    forward = [draw.uniform(0.5, 1.5) for _ in range(blocks)]
    seconds = [*forward, *(2 * each for each in reversed(forward))]
    rate = rate or sum(sizes) * 2 / sum(seconds) * draw.uniform(0.5, 1.5)
    regions = tuple(Region(name=f"r{number}", seconds=each) for number, each in enumerate(seconds))
    units = tuple(
        Unit(name=f"u{number}", stored_bytes=size, uses=(number, 2 * blocks - 1 - number)) for number, size in enumerate(sizes)
    )
    budget = max(int(share * sum(sizes)), *sizes)
    return StepProblem(
        regions=regions,
        units=units,
        memories=(Memory(tier=Tier.DEVICE, bytes=budget), Memory(tier=Tier.NVME)),
        links=links(rate),
        name=f"read-only {seed}",
    )


def read_only_problems(blocks: tuple[int, int] = (1, 14)) -> st.SearchStrategy[StepProblem]:
    """Return problems as `read_only` makes them, those in which nothing has to move among them."""
    return st.builds(
        read_only,
        seed=st.integers(0, 1 << 16),
        blocks=st.integers(*blocks),
        share=st.floats(0.0, 1.0),
        rate=st.one_of(st.none(), st.floats(5.0, 500.0)),
    )
