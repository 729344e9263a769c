"""Looking rows up in embeddings that are cut into tiles, on several ranks."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from tiers import context_of, in_pieces
from torch import nn
from training import assert_same

import zinf_compile
from zinf_compile.errors import StoreWarning
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating
from zinf_compile.sharded.parameter import ShardedParameter

SHAPES = ((23, 16, 5), (50, 7, 6), (9, 3, 4), (40, 33, 3))
"""Rows, columns, and rows of a tile: borders of shards lie within rows, and the last tile is shorter."""


class Words(nn.Module):
    """An embedding."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, columns)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.words(indices)
        return out


def look_up_anywhere(
    rank: int,
    size: int,
    folder: str,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    *,
    every: bool = True,
    device: str | None = None,
) -> int:
    """Look rows up in embeddings of these shapes, on each tier; return how often.

    Not `every`: on each tier every other shape, a tier the even ones, the next tier the odd ones.

    `device` is one of PyTorch's; without one host memory is the device, and then the CPU plays one. Raises where a row is wrong,
    or moved for nothing.
    """
    warnings.filterwarnings("ignore", category=StoreWarning)
    done = 0
    apart = ("device", "host", "nvme")
    without = ((contextlib.nullcontext(), ("device", "nvme")), (simulating(SimulatedDevice()), apart))
    for played, tiers in without if device is None else ((contextlib.nullcontext(), apart),):
        with played:
            for (number, tier), (place, (rows, columns, tile_rows)) in itertools.product(enumerate(tiers), enumerate(shapes)):
                if not every and (number + place) % 2:
                    continue
                torch.compiler.reset()
                done += _look_up(rank, size, Path(folder), tier, rows, columns, tile_rows * columns * 4, device or "cpu")
    return done


def _look_up(rank: int, size: int, folder: Path, tier: str, rows: int, columns: int, tile: int, device: str) -> int:
    torch.manual_seed(rows)
    model = Words(rows, columns).to(device)
    weight = model.words.weight.detach().cpu().clone()
    options = {"params": tier, "tile": tile, "compute": "fx", **({"nvme": folder} if tier == "nvme" else {}), **in_pieces(64)}
    model.compile(backend="zero_infinity", options=options, dynamic=True)
    generator = torch.Generator().manual_seed(rank)
    cases = [
        torch.randint(rows, (3, 4), generator=generator),
        torch.randint(rows, (1, 2) if rank else (5, 200), generator=generator),
        torch.full((6,), rows - 1 - rank),
        torch.arange(rows) if rank == size - 1 else torch.empty(0, dtype=torch.int64),
        torch.tensor([0], dtype=torch.int32),
    ]
    for indices in cases:
        with torch.no_grad():
            before = zinf_compile.stats(model)
            what = f"{rows}x{columns} {tier} {indices.shape}"
            assert_same(what, torch.nn.functional.embedding(indices, weight), model(indices.to(device)))
            after = zinf_compile.stats(model)
        if before and size > 1:
            moved = after["links"]["from ranks"]["bytes"] - before["links"]["from ranks"]["bytes"]
            assert moved == _missing(model, indices) * 4, (tier, rows, columns, indices.shape, moved)
    return len(cases)


def _missing(model: Words, indices: torch.Tensor) -> int:
    """Return how many elements of these rows this rank hasn't."""
    parameter = model.words.weight
    assert isinstance(parameter, ShardedParameter)
    here = torch.zeros(parameter.numel(), dtype=torch.bool)
    for start, end in parameter._zinf_unit.held:
        here[start:end] = True
    return int((~here.view(parameter.shape)[indices.unique().long()]).sum())


def name_rows_that_are_none(rank: int, size: int, folder: str) -> list[str]:
    """Let one rank name a row that isn't there; return what this one is told. Raises where it can't go on afterwards."""
    torch.manual_seed(0)
    model = Words(40, 8)
    weight = model.words.weight.detach().clone()
    model.compile(backend="zero_infinity", options={"tile": 10 * 8 * 4, "compute": "fx"})
    told = []
    for bad in (40, -1):
        try:
            model(torch.tensor([3, bad if rank == size - 1 else 5]))
        except IndexError as error:
            told.append(str(error))
    assert_same("afterwards", model(torch.tensor([3, 39])).detach(), weight[[3, 39]])
    assert context_of(model).memory.ledger.now()["gathered"] == 0
    return told


def read_few_blocks(rank: int, size: int, folder: str) -> list[int]:
    """Look few rows up in a large embedding on a drive; return the bytes that came from there each time."""
    torch.manual_seed(0)
    model = Words(1 << 13, 64)
    weight = model.words.weight.detach().clone()
    options = {"params": "nvme", "nvme": folder, "tile": 1 << 19, "compute": "fx", **in_pieces(1 << 12)}
    model.compile(backend="zero_infinity", options=options)
    read = []
    for indices in ([0], [5000, 7, 5001, 7], [8191]):
        before = zinf_compile.stats(model)
        with torch.no_grad():
            assert_same(str(indices), model(torch.tensor(indices)), weight[indices])
        after = zinf_compile.stats(model)["links"]["nvme to host"]["bytes"]
        read.append(after - (before["links"]["nvme to host"]["bytes"] if before else 0))
    return read
