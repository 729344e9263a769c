"""The least that a step can take: bytes over the drive's rates, matrix products over the processor's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import _peers

from zinf_compile.cli import bench_io

BURST, BLOCK, DEPTH, SECONDS = 256 << 20, 1 << 20, 32, 3.0
"""Settings of the measurement of the drive, which takes 15 seconds."""

KEPT = {"params": 1, "grads": 1, "optimizer": 2}
"""Elements on the drive for each element of a parameter."""


class Traffic(NamedTuple):
    """Bytes that a step moves from and to the drive."""

    read: int
    written: int


def traffic(parameters: int, offloaded: Collection[str], *, forward: bool) -> Traffic:
    """Return what a step of fp32 AdamW moves for this many parameters, each element as often as it must.

    Parameters are read by the backward, read and written by the update, which can hand them to the forward; gradients are written
    by the backward and read by the update; the two states are read and written by the update.
    """
    passes = {"params": (1, 0)} if forward else {"params": (2, 1), "grads": (1, 1), "optimizer": (2, 2)}
    read, written = (sum(counts[i] for kind, counts in passes.items() if kind in offloaded) for i in (0, 1))
    return Traffic(4 * parameters * read, 4 * parameters * written)


def drive_rates(folder: str, size: int, seconds: float = SECONDS) -> dict[str, float]:
    """Return the bytes per second of sustained reads, writes, and both at once (in equal parts, together), as `zinf bench-io`.

    The file has `size` bytes: one smaller than what a step moves through could lie in a cache that the step's data does not fit.
    Each lasts for `seconds`, as long as the step where that is many: a drive that is shared can be faster for a moment.
    """
    found = bench_io.measure(folder, size=max(size, 2 * BURST), burst=BURST, seconds=seconds, blocks=[BLOCK], depths=[DEPTH])
    return {case["mode"]: case["bytes_per_s"] for case in found["sustained"]}


def io_s(moved: Traffic, rates: dict[str, float]) -> float:
    """Return the drive's time for these bytes: one direction after the other, or both at once, whichever it was faster with.

    A drive that does both at once as fast as each alone takes the longer of the two; one that shares its rate takes their sum.
    """
    alone = moved.read / rates["read"], moved.written / rates["write"]
    together = min(moved)
    rest = (moved.read - together) / rates["read"] + (moved.written - together) / rates["write"]
    return min(sum(alone), max(*alone, 2 * together / rates["both"] + rest))


def compute_s(model: dict[str, int], tokens: int, *, forward: bool) -> float:
    """Return the time of the step's matrix products alone, at the rate of one large product measured here and now."""
    elements = model["layers"] * 12 * model["width"] ** 2 + model["vocabulary"] * model["width"]
    return (2 if forward else 6) * elements * tokens / _peers.matmul_rate(_peers.all_cores())


def bf16_rate() -> float:
    """Return the floating-point operations per second of one large matrix product in bf16, measured here and now."""
    import torch  # noqa: PLC0415

    return _peers.matmul_rate(_peers.all_cores(), torch.bfloat16)


def measure(folder: str, settings: dict[str, Any], parameters: int) -> dict[str, Any]:
    """Return the limits of a step, with what they were computed from, as the benchmark keeps them."""
    model, forward = settings["model"], settings["forward"]
    moved = traffic(parameters, settings["offload"], forward=forward)
    rates = drive_rates(folder, 4 * parameters * sum(KEPT[kind] for kind in settings["offload"]))
    return {
        "read_bytes": moved.read,
        "written_bytes": moved.written,
        "drive_bytes_per_s": rates,
        "io_s": io_s(moved, rates),
        "compute_s": compute_s(model, settings["batch"] * model["length"], forward=forward),
    }


def count_parameters(model: dict[str, int]) -> int:
    """Return how many elements the model's parameters have, the tied ones counted once."""
    import torch  # noqa: PLC0415

    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(**model).parameters())
