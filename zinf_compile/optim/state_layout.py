"""Layout of a rank's states: the elements that they belong to, saved with the states and compared when they are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import UnsupportedOptimizerError
from zinf_compile.runtime.units.own_shards import OWN
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole_unit import whole_unit_of
from zinf_compile.sharded.parameter import ShardedParameter

from .record import record_of
from .state_entry import in_memory

LAYOUT = "zinf_layout"
"""Key of the layout among the states: a mapping of numbers, which `load_state_dict` and `torch.load` keep as it is."""

_WARNED = "states that don't say which elements they are of"


def noted(state: dict[str, Any], unit: Unit) -> dict[str, Any]:
    """Return local states with their layout added; those of a single rank are full and need none."""
    return {**state, LAYOUT: unit.layout} if state and unit.shard_group.size > 1 else state


def note(state: dict[str, Any], unit: Unit) -> None:
    """Add the layout to local states."""
    if unit.shard_group.size > 1:
        state[LAYOUT] = unit.layout


def is_noted(state: Mapping[str, Any]) -> bool:
    """Say whether the layout is among the states."""
    return LAYOUT in state


def without_note(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states without their layout."""
    return {name: value for name, value in state.items() if name != LAYOUT}


def check_layouts(optimizer: Optimizer, states: Iterable[tuple[torch.Tensor, Mapping[str, Any]]], *, renew: bool = False) -> None:
    """Raise `UnsupportedOptimizerError` for states of other elements than this rank's shard, even of the same count.

    `renew`: put this rank's own note in the place of an equal one that was loaded.
    """
    for parameter, given in states:
        unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else whole_unit_of(parameter)
        if unit is None:
            continue
        state = in_memory(given)
        found = state.get(LAYOUT)
        if found is None:
            _warn_of_unknown(optimizer, state, unit)
            continue
        own = unit.layout
        if any(_tuples(found[key]) != own[key] for key in ("order", "elements")):
            raise UnsupportedOptimizerError(
                f"states of {type(optimizer).__name__} for parameter {unit.name}, shape {list(unit.shape)}, are of other "
                f"elements than this rank has. Found: those of {_text(found)}. Accepted: those of {_text(own)}, or whole ones, "
                f"of the parameter's shape. Compile the model as it was when they were saved, on {found['ranks']} ranks "
                f"{_way(found)}, and give each rank what it saved itself; or there and then save whole ones, by "
                "zinf_compile.full_optimizer_state_dict, which load under any tile and on any number of ranks"
            )
        if renew and found is not own and isinstance(state, dict):
            state[LAYOUT] = own


def is_own(layout: Mapping[str, Any], unit: Unit) -> bool:
    """Say whether a layout is that of the unit's shard on this rank."""
    return all(key in layout and _tuples(layout[key]) == kept for key, kept in unit.layout.items() if key != OWN)


def _tuples(value: Any) -> Any:
    """Return numbers with lists, which some savers make of tuples, as tuples again."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _text(layout: Mapping[str, Any]) -> str:
    cut = len(layout["elements"])
    tiles = f"in {cut} tiles (option tile={layout['tile']:,})" if cut > 1 else "not in tiles"
    order = "" if list(layout["order"]) == sorted(layout["order"]) else f", dimensions in memory in the order {layout['order']}"
    return f"rank {layout['rank']} of {layout['ranks']}, {tiles}{order}"


def _way(layout: Mapping[str, Any]) -> str:
    if layout["tile"] is not None:
        return f'with options={{"tile": {layout["tile"]}}}'
    return "without tiles (where device_memory is given: with a tile as large as the largest parameter)"


def _warn_of_unknown(optimizer: Optimizer, state: Mapping[str, Any], unit: Unit) -> None:
    """Warn, once, of local states without a layout, as earlier versions saved them, if tiles may decide their elements."""
    if unit.shard_group.size == 1 or len(unit.shape) < 2 or _WARNED in record_of(optimizer).warned:
        return
    if any(isinstance(value, torch.Tensor) and value.shape == (unit.shard_numel,) for value in state.values()):
        record_of(optimizer).warned.add(_WARNED)
        warnings.warn(
            f"states of this {type(optimizer).__name__}, those for parameter {unit.name} for one, don't say which elements they "
            f"are of, as those saved by an earlier version: they are taken for those of {_text(unit.layout)}. If they were "
            "saved on another rank or under another option tile or device_memory, training goes on from wrong states: compile "
            "the model as it was then",
            stacklevel=4,
        )
