"""ZeRO-1 for whole parameters: each rank keeps and updates 1/N of the states of what no graph partitions.

A step updates this rank's shard of the value with its shards of gradient and states; then the ranks all-gather the values.
An element-wise update has the bits of the unsplit one. An optimizer that needs whole matrices updates the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.runtime.units.whole import gather_whole
from zinf_compile.runtime.units.whole_unit import WHOLE, WholeUnit, whole_unit_of
from zinf_compile.sharded.parameter import ShardedParameter

from .elementwise_probe import is_elementwise
from .shard_state import shard_state
from .state_entry import in_memory, states_of
from .state_layout import LAYOUT, is_own, noted, without_note


def split_units(optimizer: Optimizer) -> dict[torch.nn.Parameter, WholeUnit]:
    """Return the whole parameters whose states this optimizer splits over the ranks, in the order of its groups."""
    found: dict[torch.nn.Parameter, WholeUnit] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            unit = whole_unit_of(parameter)
            if unit is not None and parameter.requires_grad and is_elementwise(optimizer, group, unit.dtype):
                found[parameter] = unit
    return found


class SplitStep:
    """The part of one step that updates shards of whole parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._units = split_units(optimizer)
        with torch.no_grad():
            self._padded = {p: unit.local_part(p) for p, unit in self._units.items()}
        self._shards = {p: self._padded[p][: unit.used] for p, unit in self._units.items()}
        self._states: dict[tuple[int, str], torch.Tensor] = {}
        """States with padding, as kept between steps; the step sees them without."""

    def members(self) -> Mapping[int, torch.Tensor]:
        """Return the shard that replaces each parameter in the step, by the parameter's id."""
        return {id(parameter): shard for parameter, shard in self._shards.items()}

    def drop_gradients(self) -> None:
        """Let go of this rank's shards of the gradients."""
        for shard in self._shards.values():
            shard.grad = None

    def refresh(self) -> None:
        """Take this rank's shards of the current gradients."""
        for parameter, shard in self._shards.items():
            grad, unit = parameter.grad, self._units[parameter]
            shard.grad = None if grad is None else unit.local_part(grad)[: unit.used]

    def fill(self, optimizer: Optimizer, stand_in: Optimizer) -> None:
        """Give the stand-in gradients and states."""
        self.refresh()
        for parameter, shard in self._shards.items():
            if parameter in optimizer.state:
                unit, given = self._units[parameter], without_note(optimizer.state[parameter])
                whole = {name: shard_state(value, unit, name, optimizer) for name, value in given.items()}
                stand_in.state[shard] = {name: self._used(value, shard, name, unit) for name, value in whole.items()}

    @torch.no_grad()
    def finish(self, optimizer: Optimizer, stand_in: Optimizer) -> None:
        """Keep the states, and all-gather the parameters. A collective operation."""
        updated = [(p, shard) for p, shard in self._shards.items() if shard.grad is not None]
        for context in {self._units[p].context: None for p, _ in updated}:
            names = [self._units[p].name for p, _ in updated if self._units[p].context is context]
            context.ranks.agree([f"the step updates {name}" for name in names], what=f"a step of {type(optimizer).__name__}")
        for parameter, shard in self._shards.items():
            state, unit = stand_in.state.pop(shard, None), self._units[parameter]
            if state is not None:
                kept = {name: self._kept(value, shard, name, unit) for name, value in state.items()}
                optimizer.state[parameter] = noted(kept, unit)
        for parameter, shard in updated:
            unit = self._units[parameter]
            full = unit.context.full_buffer(unit.numel, unit.dtype, unit.device)
            padded = self._padded[parameter]
            if shard.data_ptr() != padded.data_ptr():  # the optimizer replaced its storage
                padded[: unit.used].copy_(shard)
            gather_whole(unit, padded, full, f"gathering {unit.name} after a step")
            parameter.copy_(unit.logical(full))
            shard.grad = None

    def _used(self, value: Any, shard: torch.Tensor, name: str, unit: WholeUnit) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != unit.shard_numel:
            return value
        self._states[id(shard), name] = value
        return value[: unit.used]

    def _kept(self, value: Any, shard: torch.Tensor, name: str, unit: WholeUnit) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != unit.used:
            return value
        padded = self._states.get((id(shard), name))
        if padded is not None and padded.dtype == value.dtype and padded.data_ptr() == value.data_ptr():
            return padded
        return torch.cat([value, value.new_zeros(unit.shard_numel - unit.used)]) if unit.used < unit.shard_numel else value


@torch.no_grad()
def join_states(optimizer: Optimizer, partitioned: Sequence[ShardedParameter]) -> None:
    """Gather the split states of parameters that have been partitioned since. A collective operation."""
    for parameter in partitioned:
        state = in_memory(states_of(optimizer, parameter))
        if not state.get(LAYOUT, {}).get(WHOLE):
            continue
        home = parameter._zinf_unit
        unit = WholeUnit(parameter, home.name, home.context)
        if not is_own(state[LAYOUT], unit):
            continue  # of another rank or world size: `check_layouts` raises
        home.context.ranks.agree([f"states of {unit.name} become those of a partitioned parameter"], what="a step")
        joined = {}
        for name, value in without_note(state).items():
            joined[name] = value
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == unit.shard_numel:
                full = unit.context.full_buffer(unit.numel, value.dtype, unit.device)
                gather_whole(unit, value.to(unit.device), full, f"gathering state {name} of {unit.name}")
                joined[name] = unit.logical(full)
        optimizer.state[parameter] = joined
