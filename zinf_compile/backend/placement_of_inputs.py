"""Placement of a graph whose parameters are partitioned already: theirs, in the place of the options' defaults.

Called by `graph_compiler` before the passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from zinf_compile.config import AUTO, Config
from zinf_compile.errors import OptionError
from zinf_compile.ir.placements import KINDS, Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement, Tier, Topology
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.allowed_homes import farthest_homes
from zinf_compile.sharded.parameter import unit_of


def follow_units(config: Config, given: Collection[str], inputs: Sequence[Any]) -> Config:
    """Return the config with the placement of the inputs that are partitioned parameters, if they share one.

    Raises `OptionError` if an option that was `given` contradicts it.
    """
    units = [unit for value in inputs if (unit := unit_of(value)) is not None and unit.shape and unit.numel]
    if not units:
        return config
    wanted = config.placement()
    free = {kind for kind in KINDS if getattr(config, kind) == AUTO}
    for field in dataclasses.fields(Placement):
        for unit in units if field.name in given and field.name not in free else ():
            found = getattr(unit.placement, field.name)
            if found == ():  # no folders: no state is on a drive, saved values may be
                continue
            same = found == getattr(wanted, field.name) or _lives_alike(unit, wanted, field.name)
            if not same and not _reduces_alike(unit, wanted, field.name):
                raise _contradiction(unit, field.name, getattr(config, field.name), found)
    shape = config.compute_shape or {}
    for unit in units if "piece_numel" in shape and "compute_shape" in given else ():
        if unit.placement.piece_numel != wanted.piece_numel:
            found = {"piece_numel": unit.placement.piece_numel}
            raise _contradiction(unit, "compute_shape", {"piece_numel": wanted.piece_numel}, found)
    nowhere: dict[str, Any] = dict.fromkeys(free, Tier.DEVICE)
    placements = {dataclasses.replace(unit.placement, tile=None, **nowhere) for unit in units}
    tiles = {unit.placement.tile for unit in units}
    if len(placements) > 1:
        return config
    placement = placements.pop()
    words: dict[str, Any] = {kind: AUTO if kind in free else getattr(placement, kind) for kind in KINDS}
    return dataclasses.replace(
        config,
        **words,
        nvme=placement.nvme or config.nvme,
        update=placement.update,
        master="float32" if placement.master else None,
        reduce_dtype=placement.reduce_dtype,
        reshard_after_backward=placement.reshard_after_backward,
        tile=tiles.pop() if len(tiles) == 1 else config.tile,
    )


def with_piece(config: Config, inputs: Sequence[Any], numel: int) -> Config:
    """Return the config with the piece of parameters that are partitioned already, else with one for shards of so many elements.

    Not among the options that ranks compare: a rank that compiles alone follows what is there.
    """
    pieces = [unit.placement.piece_numel for value in inputs if (unit := unit_of(value)) is not None]
    return config.with_piece(pieces[0]) if pieces else config.for_shards(numel)


def placements_of(config: Config, slots: Sequence[ParameterSlot], inputs: Sequence[Any], topology: Topology) -> Placements:
    """Return the placements of a graph's parameters: their own where they are partitioned already, else the farthest allowed."""
    units = [(slot.index, unit_of(inputs[slot.index])) for slot in slots]
    own = {index: unit.placement for index, unit in units if unit is not None}
    return Placements(farthest_homes(config, topology), own)


def refuse_closed(inputs: Sequence[Any]) -> None:
    """Raise `PartitionedParameterError` where a parameter was partitioned before `zinf_compile.reset()`.

    Before a context is looked up: making another would need all ranks.
    """
    for value in inputs:
        unit = unit_of(value)
        if unit is not None:
            _ = unit.context.ranks  # a closed context raises


def _lives_alike(unit: Unit, wanted: Placement, option: str) -> bool:
    """Return whether `option` is a kind of states that lives in the same memory: the host's may be the device."""
    if option not in KINDS:
        return False
    side = unit.context.link.topology.side
    found, asked = side(getattr(unit.placement, option)), side(getattr(wanted, option))
    return found is not None and found == asked


def _reduces_alike(unit: Unit, wanted: Placement, option: str) -> bool:
    """Return whether `reduce_dtype` equals its default for this unit."""
    return option == "reduce_dtype" and wanted.reduce_dtype == unit.reduce_dtype


def _contradiction(unit: Unit, option: str, asked: object, found: object) -> OptionError:
    return OptionError(
        f"option {option}={asked!r}, but parameter {unit.name} was partitioned with {option}={found!r}: give the option the "
        "same value, or omit it: later graphs use the options of partition(), partitioned() or the first compiled call"
    )
