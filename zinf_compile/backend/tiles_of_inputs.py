"""Tiles of a graph's parameters: whether they follow from the cap, and smaller ones, where the graph doesn't fit with those.

Called by `graph_compiler`; `sharded/graph_needs` finds how small they have to be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from zinf_compile.config import Config
from zinf_compile.optim.unused import are_unused
from zinf_compile.runtime.units.recut import recut
from zinf_compile.sharded.parameter import unit_of


def follows_cap(config: Config, given: Collection[str], inputs: Sequence[Any]) -> bool:
    """Return whether tiles follow from `device_memory`: option `tile` isn't given, and all parameters have those tiles."""
    if config.tile is not None or "tile" in given or config.device_memory is None:
        return False
    units = [unit for value in inputs if (unit := unit_of(value)) is not None and unit.shape and unit.numel]
    default = config.tile_bytes
    return all(unit.placement.tile == default or unit.smaller_tile == (default, unit.placement.tile) for unit in units)


def may_cut(inputs: Sequence[Any], *, alone: bool) -> bool:
    """Return whether the parameters may be cut into other tiles: `alone`, also those that nothing has used."""
    return (alone or all(unit_of(value) is None for value in inputs)) and are_unused(inputs)


def recut_inputs(config: Config, inputs: Sequence[Any]) -> None:
    """Cut parameters that are partitioned already as the config says."""
    units = {id(unit): unit for value in inputs if (unit := unit_of(value)) is not None}
    recut(list(units.values()), config.tile_bytes, config.shape().piece_numel)


def note_tiles(default: int | None, config: Config, inputs: Sequence[Any]) -> None:
    """Note of parameters cut as the config says that other tiles are the default: checkpoints say so."""
    for value in inputs:
        if (unit := unit_of(value)) is not None and default is not None and config.tile_bytes is not None:
            unit.smaller_tile = default, config.tile_bytes
