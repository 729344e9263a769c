"""Measures this machine for `zinf doctor --profile` and `zinf plan --machine here`: products, memory, links, a folder's drive."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable

import torch

from zinf_compile.errors import PlanError
from zinf_compile.plan.profile import Drive, Profile, Rate, find_profile
from zinf_compile.runtime.device.measured_rates import fastest
from zinf_compile.runtime.system.accelerator import device_names, free_and_total_bytes
from zinf_compile.runtime.system.cgroups import find_limits, memory_limit_bytes
from zinf_compile.runtime.system.filesystem import look_up

from . import bench_io

HERE = "here"
"""The name of this machine, for commands that take a profile."""

NARROWEST, WIDEST = 256, 2048
"""Rows and columns of the products that are measured on the CPU; four times as many on an accelerator."""
COPIED = 256 << 20
SECONDS = 0.5
"""For which each rate is measured."""
DRIVE_SECONDS = 5.0
DRIVE_BYTES = 2 << 30


def profile_named(machine: str) -> Profile:
    """Return what a command's `--machine` names: this machine, measured now without its drive, or what `find_profile` finds."""
    return measure_machine(machine) if machine == HERE else find_profile(machine)


def measure_machine(name: str, *, nvme: str | None = None) -> Profile:
    """Return this machine's profile: of its accelerator if it has one, else of the processor. Takes some seconds.

    The drive under the folder `nvme` is measured too: in bursts and for longer, by 4 MiB blocks. Rates are what was reached here,
    beside whatever else ran.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    types = (torch.float32, torch.bfloat16) if accelerator is None else (torch.float32, torch.bfloat16, torch.float16)
    flops = {str(dtype).removeprefix("torch."): _products(device, dtype) for dtype in types}
    total = free_and_total_bytes(device)[1] if accelerator is not None else _host_bytes()
    host = _copies(torch.device("cpu"), torch.device("cpu"))
    to_device = _copies(torch.device("cpu"), device) if accelerator is not None else 0.0
    from_device = _copies(device, torch.device("cpu")) if accelerator is not None else 0.0
    when = f"measured here, torch {torch.__version__}, {torch.get_num_threads()} threads"
    return Profile(
        name=name,
        device_memory_bytes=total,
        flops_per_second=flops,
        reached=1.0,
        device_bytes_per_second=2 * _copies(device, device),
        host_is_device=accelerator is None,
        host_memory_bytes=0 if accelerator is None else _host_bytes(),
        host_bytes_per_second=2 * host,
        to_device_bytes_per_second=to_device,
        from_device_bytes_per_second=from_device,
        ranks_bytes_per_second=min(to_device, from_device) or host,
        devices_per_node=max(1, len(device_names())),
        drive=None if nvme is None else _drive(nvme),
        source={
            "machine": f"{', '.join(device_names()) or platform.processor() or platform.machine()}; {when}",
            "ranks": "not measured: as copies between host and device",
        },
    )


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of the widest products of which one takes no longer than `SECONDS`.

    A processor without kernels for bfloat16 reaches about a GFLOP per second in it: a product of `WIDEST` takes 20 seconds there.
    """
    scale = 1 if device.type == "cpu" else 4
    width = scale * NARROWEST
    while True:
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        product = functools.partial(torch.mm, a, b)
        doubling = 8 / _times(product, device, seconds=SECONDS / 10)  # twice as wide takes 8 times as long
        if width == scale * WIDEST or doubling > SECONDS:
            return 2 * width**3 * _times(product, device)
        width *= 2


def _copies(source: torch.device, end: torch.device) -> float:
    pinned = source.type != end.type
    tensors = [
        torch.ones(COPIED, dtype=torch.uint8, device=each, pin_memory=pinned and each.type == "cpu") for each in (source, end)
    ]
    accelerator = source if source.type != "cpu" else end
    return COPIED * _times(lambda: tensors[1].copy_(tensors[0], non_blocking=pinned), accelerator)


def _times(run: Callable[[], object], device: torch.device, *, seconds: float = SECONDS) -> float:
    """Return how often something would run in a second: by the fastest of as many runs as fit in `seconds`, at least one."""
    wait = (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))
    return 1 / fastest(run, wait, runs=1, seconds=seconds)


def _host_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit_bytes(find_limits())
    return min(total, limit) if limit is not None else total


def _drive(folder: str) -> Drive:
    try:
        place = look_up(folder)
    except OSError as error:
        raise PlanError(f"--nvme {folder!r}: {error.strerror}; accepted: a folder that exists") from error
    size = min(DRIVE_BYTES, place.free_bytes // 4)
    if size < 1 << 26:
        raise PlanError(f"--nvme {folder!r} has {place.free_bytes:,} bytes free; measuring its drive needs {1 << 28:,}")
    blocks = (1 << 18, 1 << 22)
    found = bench_io.measure(folder, size=size, burst=256 << 20, seconds=DRIVE_SECONDS, blocks=blocks, depths=(16,))
    rows = []
    for block in blocks:
        alone = {case["mode"]: case["bytes_per_s"] for case in found["burst"] if case["block"] == block}
        rows.append(_rate(alone, extent=block, seconds=256e6 / max(alone.values())))
    rows.append(_rate({case["mode"]: case["bytes_per_s"] for case in found["sustained"]}, extent=1 << 22, seconds=0.0))
    return Drive(rates=tuple(rows), capacity_bytes=place.total_bytes)


def _rate(alone: dict[str, float], *, extent: int, seconds: float) -> Rate:
    return Rate(
        read_bytes_per_second=alone["read"],
        write_bytes_per_second=alone["write"],
        both_bytes_per_second=min(alone["both"], alone["read"] + alone["write"]),
        extent_bytes=extent,
        seconds=seconds,
    )
