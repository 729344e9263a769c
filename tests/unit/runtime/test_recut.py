"""Units that are cut anew: the same elements on every tier, in other tiles and pieces."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from zinf_compile.errors import StoreError
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.runtime.close_context import close_context
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.device.simulated import SimulatedDevice
from zinf_compile.runtime.transfer.move import move, on_host, route_of
from zinf_compile.runtime.units import recut as module
from zinf_compile.runtime.units.backing import NvmeBacking
from zinf_compile.runtime.units.create import make_units
from zinf_compile.runtime.units.recut import recut
from zinf_compile.runtime.units.unit import Unit

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

SHAPES = [(96, 100), (7,), (64, 33), ()]
BEFORE, AFTER = (1 << 14, 4096), (1 << 12, 1500)
"""Bytes of a tile, and elements of a piece."""


@pytest.fixture(params=["here", "apart"])
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    made = Context(None, torch.device("cpu"), timeout_s=20, link=SimulatedDevice() if request.param == "apart" else None)
    yield made
    close_context(made)


def made_units(context: Context, folder: Path, params: str, grads: str) -> tuple[list[nn.Parameter], list[Unit]]:
    """Return parameters, and their units in tiles, with the parameters' values."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    tile, piece = BEFORE
    placement = Placement(
        params=Tier(params), grads=Tier(grads), optimizer=Tier.NVME, nvme=(str(folder),), tile=tile, piece_numel=piece
    )
    units = make_units([(p, f"p{n}") for n, p in enumerate(parameters)], context, placement)
    for parameter, unit in zip(parameters, units, strict=True):
        shard = unit.blank()
        shard.copy_(unit.local_part(parameter.detach()))
        unit.save(shard)
    return parameters, units


def in_tiles(unit: Unit) -> torch.Tensor:
    """Return a shard as graphs load it, tile by tile."""
    parts = []
    for tile in unit.tiles:
        host = torch.empty(tile.shard_numel)
        move(tile.location(), on_host(host), by=route_of(unit.context)).wait()
        parts.append(host)
    return torch.cat(parts)


@pytest.mark.parametrize("grads", ["device", "nvme"])
@pytest.mark.parametrize("params", ["device", "host", "nvme"])
def test_elements_stay_and_tiles_change(params: str, grads: str, context: Context, tmp_path: Path) -> None:
    parameters, units = made_units(context, tmp_path, params, grads)
    assert [len(unit.tiles) for unit in units] == [3, 0, 0, 0]
    assert units[0].layout["tile"] == BEFORE[0]
    tile, piece = AFTER
    recut(units, tile, piece)
    assert [len(unit.tiles) for unit in units] == [10, 0, 3, 0]
    for parameter, unit in zip(parameters, units, strict=True):
        if unit.shape:
            assert (unit.placement.tile, unit.placement.piece_numel, unit.layout["tile"]) == (tile, piece, tile)
        assert torch.equal(unit.load().cpu()[: unit.numel], parameter.detach().flatten())
        if unit.tiles:
            assert torch.equal(in_tiles(unit), parameter.detach().flatten())
        assert (unit.gradient_pool is not None) == (grads == "nvme" and bool(unit.shape))


def test_no_tiles_at_all(context: Context, tmp_path: Path) -> None:
    parameters, units = made_units(context, tmp_path, "nvme", "nvme")
    recut(units, None, 1 << 20)
    assert not any(unit.tiles for unit in units)
    for parameter, unit in zip(parameters, units, strict=True):
        assert torch.equal(unit.load().cpu()[: unit.numel], parameter.detach().flatten())


def test_values_stay_where_they_are_if_the_drive_fails(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, units = made_units(context, tmp_path, "nvme", "nvme")

    def fails(*args: object) -> None:
        raise StoreError(errno.ENOSPC, "the drive is full", str(tmp_path))

    with monkeypatch.context() as patched:
        patched.setattr(module, "make_gradient_pools", fails)
        with pytest.raises(StoreError, match="the drive is full"):
            recut(units, *AFTER)
    for parameter, unit in zip(parameters, units, strict=True):
        assert unit.placement.tile == (BEFORE[0] if unit.shape else None)
        assert torch.equal(unit.load().cpu()[: unit.numel], parameter.detach().flatten())


def test_only_the_old_space_is_freed(tmp_path: Path) -> None:
    context = Context(None, torch.device("cpu"), timeout_s=20)
    _, units = made_units(context, tmp_path, "nvme", "device")
    old = units[0].backing
    assert isinstance(old, NvmeBacking)
    recut(units, *AFTER)
    new = units[0].backing
    assert isinstance(new, NvmeBacking)
    assert new.shards is not old.shards
    assert context.memory.host_ledger.now()["staging"] == 0, "what a copy was made through"
    close_context(context)
