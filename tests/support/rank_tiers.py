"""Training with the states at each combination of tiers, on one rank or several, against all on the device."""

from __future__ import annotations

import collections
import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tiers import (
    MICRO_BATCHES,
    PLACEMENTS,
    UNIFIED,
    Meter,
    Needed,
    Placement,
    Traffic,
    compiled,
    in_pieces,
    options_for,
    sundry,
    train_step,
)
from torch import nn
from training import assert_same

import zinf_compile
from zinf_compile.errors import StoreWarning
from zinf_compile.optim.state_layout import without_note
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.runtime.storage.engine import Engine

Run = tuple[list[float], dict[str, torch.Tensor], dict[Any, dict[str, Any]]]
"""Losses, the whole parameters (on rank 0), this rank's optimizer states."""


PIECE = 96
"""Elements of a piece of a shard: whole vectors, as what is left of one a fused optimizer may round otherwise."""

Build = Callable[[torch.dtype], nn.Module]


def train_everywhere(
    rank: int,
    size: int,
    folder: str,
    dtype: torch.dtype,
    compute: str,
    steps: int,
    updates: Sequence[str | None] = (None,),
    piece_numel: int = PIECE,
    master: str | None = None,
    reduced: torch.dtype | None = None,
    placements: Sequence[Placement] = PLACEMENTS,
    device: str | None = None,
) -> int:
    """Train with all combinations on a device with memory of its own; return their number.

    `device` is one of PyTorch's; without one the CPU plays it. Raises where a combination has other bits than training on the
    CPU has, with all of it there, or moved another number of bytes than it needs.
    """
    _prepare()
    others = {"compute": compute, "master": master, "reduce_dtype": reduced, **in_pieces(piece_numel)}
    expected = _train(rank, others, Meter(None), None, dtype, steps)
    with contextlib.nullcontext() if device else simulating(SimulatedDevice()) as simulated:
        meter = Meter(simulated)
        for placement in placements:
            for update in updates:
                needed = Needed(
                    placement,
                    update=update,
                    unified=False,
                    ranks=size,
                    dtype=dtype,
                    master=bool(master),
                    reduced=reduced,
                    piece=piece_numel,
                    rank=rank,
                    norms_on_device=device is not None,
                )
                options = options_for(placement, folder, update=update, **others)
                found = _train(rank, options, meter, needed, dtype, steps, device=device)
                _check(placement, update, found, expected)
    return len(placements) * len(updates)


def train_without_a_device(
    rank: int,
    size: int,
    folder: str,
    dtype: torch.dtype,
    compute: str,
    steps: int,
    placements: Sequence[Placement] = UNIFIED,
) -> int:
    """Do the same where the device is host memory, which makes "host" the same as "device"."""
    _prepare()
    meter = Meter(None)
    expected = _train(rank, {"compute": compute}, meter, None, dtype, steps)
    for placement in placements:
        needed = Needed(placement, update=None, unified=True, ranks=size, dtype=dtype, piece=PIECE)
        options = options_for(placement, folder, piece=PIECE, compute=compute)
        _check(placement, None, _train(rank, options, meter, needed, dtype, steps), expected)
    return len(placements)


def train_in_tiles(
    rank: int,
    size: int,
    folder: str,
    dtype: torch.dtype,
    compute: str,
    tile: int,
    *,
    fake: bool,
    build: Build,
    placements: Sequence[Placement] | None = None,
    device: str | None = None,
) -> int:
    """Train with large parameters in tiles, and with their states anywhere; compare with all in tiles on the CPU.

    The device is `device`, one of PyTorch's, or played by the CPU where it is `fake`, or else host memory.

    Returns the number of combinations; raises where one has other bits, or where tiles change more than the order of sums does.
    """
    _prepare()
    whole = _train(rank, {"compute": compute}, Meter(None), None, dtype, 2, build)
    expected = _train(rank, {"compute": compute, "tile": tile}, Meter(None), None, dtype, 2, build)
    assert_close_runs(whole, expected, dtype)
    placements = (PLACEMENTS if fake else UNIFIED) if placements is None else placements
    with simulating(SimulatedDevice()) if fake and device is None else contextlib.nullcontext() as simulated:
        meter = Meter(simulated)
        for placement in placements:
            options = options_for(placement, folder, piece=PIECE, compute=compute, tile=tile)
            _check(placement, None, _train(rank, options, meter, None, dtype, 2, build, device), expected)
    return len(placements)


def train_in_folders(rank: int, size: int, nvme: str | list[str], steps: int, device: str | None = None) -> list[dict[str, int]]:
    """Train with the states in these folders, then with all of it there, on a device; compare with all in memory, on the CPU.

    Returns the bytes that went to each folder.
    """
    _prepare()
    expected = _train(rank, {"compute": "fx"}, Meter(None), None, torch.float32, steps)
    counts: list[dict[str, int]] = []
    for placement in (("device", "device", "nvme"), ("nvme", "nvme", "nvme")):
        with _noting_writes() as written:
            options = options_for(placement, nvme, piece=PIECE, compute="fx")
            found = _train(rank, options, Meter(None), None, torch.float32, steps, device=device)
            _check(placement, None, found, expected)
        counts.append(written)
    return counts


@contextlib.contextmanager
def _noting_writes() -> Iterator[dict[str, int]]:
    """Context that yields how many bytes stores write to files of each folder."""
    written: dict[str, int] = collections.defaultdict(int)
    really = Engine.write

    def write(engine: Engine, file: Any, offset: int, source: Any, *, checksum: bool = False) -> Any:
        if checksum:  # not a drive's speed
            written[os.path.dirname(os.readlink(f"/proc/self/fd/{file.fd}"))] += source.nbytes
        return really(engine, file, offset, source, checksum=checksum)

    Engine.write = write  # type: ignore[method-assign]
    try:
        yield written
    finally:
        Engine.write = really  # type: ignore[method-assign]


def assert_close_runs(one: Run, other: Run, dtype: torch.dtype) -> None:
    """Check that two runs differ as sums in another order do: for two steps of AdamW at 0.01, in fp32."""
    bound = 1e-5 if dtype == torch.float32 else 4e-2  # a bf16 value of this model moves by one unit in the last place, 2**-8
    torch.testing.assert_close(one[0], other[0], rtol=bound, atol=bound)
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name], value, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


def _prepare() -> None:
    warnings.filterwarnings("ignore", category=StoreWarning)  # of a folder in memory
    warnings.filterwarnings("ignore", "all .* parameters are torch.bfloat16 and updated in that precision")


def _train(
    rank: int,
    options: dict[str, Any],
    meter: Meter,
    needed: Needed | None,
    dtype: torch.dtype,
    steps: int,
    build: Build = sundry,
    device: str | None = None,
) -> Run:
    torch.compiler.reset()
    model = compiled(build(dtype).to(device), options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    losses: list[float] = []
    for step in range(steps):
        losses += train_step(model, optimizer, step, rank, arrived=needed is not None and needed.by_arrival)
        moved = meter.read(model)
        if needed is not None:
            due = needed.micro_batches(MICRO_BATCHES) + needed.step(first=step == 0)
            due += Traffic() if step else needed.partitioning()
            assert moved == due, f"{options}, step {step}: moved {moved}, needed {due}"
    whole = zinf_compile.full_state_dict(model)
    states = optimizer.state_dict()["state"]
    meter.read(model)
    return losses, whole, states


def _check(placement: Placement, update: str | None, run: Run, expected: Run) -> None:
    what = f"{placement}, update={update}:"
    assert run[0] == expected[0], f"{what} losses"
    assert run[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert_same(f"{what} {name}", value, run[1][name])
    assert run[2].keys() == expected[2].keys()
    for index, state in expected[2].items():
        assert run[2][index].keys() == state.keys()
        for name, value in without_note(state).items():
            assert_same(f"{what} {name} of parameter {index}", value, run[2][index][name])
