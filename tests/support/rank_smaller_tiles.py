"""A cap that is too small for its own default tiles on one rank alone: all ranks have the same smaller ones."""

from __future__ import annotations

import tempfile

import torch
from capped_stack import ALL_AWAY, Stack, named_by, refusal_of, train
from rank_caps import held_on, same_on_all
from tiers import context_of

import zinf_compile
from zinf_compile.config import Config
from zinf_compile.sharded.parameter import unit_of

TILE = 4 << 20


def smaller_tiles(rank: int, size: int) -> tuple[list[int], list[float], list[float]]:
    """Train within the smallest cap for tiles of 4 MiB, then with memory held on rank 1; return tiles, and losses of the latter.

    And the losses with option `tile`.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {**ALL_AWAY, "nvme": folder, "timeout_s": 60}
        cap = same_on_all(named_by(refusal_of(seeded(), {**options, "device_memory": 1, "tile": TILE})))
        assert Config(device_memory=cap).tile_bytes == TILE, "else they are not those that follow from it"
        tiles, losses, held = [], [], None
        for _ in range(2):
            model = seeded()
            losses = train(model, {**options, "device_memory": cap})
            (tile,) = {unit_of(p).placement.tile for p in model.parameters()}  # type: ignore[union-attr]
            tiles.append(same_on_all(tile or 0))
            held = held_on(rank, context_of(model))
        expected = train(seeded(), {**options, "device_memory": cap, "tile": tiles[1]})
        del held
        return tiles, losses, expected


def cut_already(rank: int, size: int) -> tuple[str, str]:
    """Return what is said where parameters were cut by a cap's tiles, for which it is a byte too small; and with others."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**ALL_AWAY, "nvme": folder, "timeout_s": 60}
        cap = same_on_all(named_by(refusal_of(Stack(2048, 2048), {**options, "device_memory": 1, "tile": TILE}))) - 1

        def said(**more: int) -> str:
            with torch.device("meta"):
                model = Stack(2048, 2048)
            zinf_compile.partition(model, **options, **more, device_memory=cap)
            return refusal_of(model, {"device_memory": cap, "timeout_s": 60})

        refused = said()
        tile = Config(device_memory=named_by(refused)).tile_bytes
        assert tile is not None
        return refused, said(tile=tile)


def seeded() -> Stack:
    torch.manual_seed(3)
    return Stack(768, 1500, 1000)
