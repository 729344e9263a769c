"""Facts of a machine for tests of problems made from graphs."""

from __future__ import annotations

import itertools
from typing import Any

from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.plan.problem_parts import Link, Memory


def facts(*, world_size: int = 1, host: bool = False, device_bytes: int | None = None, **given: Any) -> StepFacts:
    """Return facts of a device at 1 TFLOP/s with a drive, and host memory between where `host`."""
    tiers = [Tier.DEVICE, *([Tier.HOST] if host else []), Tier.NVME]
    links = [
        Link(name=f"{a} to {b}", source=a, destination=b, bytes_per_second=2e9)
        for near, far in itertools.pairwise(tiers)
        for a, b in ((near, far), (far, near))
    ]
    if world_size > 1:
        links += [
            Link(name="from ranks", source=None, destination=Tier.DEVICE, bytes_per_second=1e9),
            Link(name="to ranks", source=Tier.DEVICE, destination=None, bytes_per_second=1e9),
        ]
    return StepFacts(
        memories=tuple(Memory(tier=t, bytes=device_bytes if t == Tier.DEVICE else None) for t in tiers),
        links=tuple(links),
        world_size=world_size,
        flops_per_second=lambda dtype: 1e12,
        bytes_per_second=1e11,
        **given,
    )
