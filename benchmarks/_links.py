"""The profile of a device that the CPU plays behind two simulated links: by its rates the compiler decides."""

from __future__ import annotations

from pathlib import Path


def write_profile(path: Path, *, flops: float, rate: float, memory: int) -> str:
    """Write it, for `flops` per second, links of `rate` bytes per second, and a device of `memory` bytes; return the path."""
    from zinf_compile.plan.profile import Profile  # noqa: PLC0415  (in the worker: the environment decides about threads)

    profile = Profile(
        name="the CPU behind links",
        device_memory_bytes=memory,
        flops_per_second={"float32": flops},
        reached=1.0,
        device_bytes_per_second=2e10,
        to_device_bytes_per_second=rate,
        from_device_bytes_per_second=rate,
    )
    path.write_text(profile.to_json())
    return str(path)
