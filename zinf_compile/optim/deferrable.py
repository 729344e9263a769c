"""Which steps may be deferred to the next forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from zinf_compile.ir.tiers import Placement, Topology
from zinf_compile.sharded.parameter import ShardedParameter

from .chunks import Kept
from .record import record_of
from .state_table import StateTable
from .step_gradient import StepGradient
from .watched_states import unshared


def may_defer(placement: Placement, kept: Sequence[Kept], topology: Topology) -> bool:
    """Return whether updates of parameters and states at this placement may be deferred: compute has something else to do.

    Beside a device with memory of its own, where the host updates. Where the device is the CPU, where all is on drives: otherwise
    the update and the forward would only compete for the same cores and memory.
    """
    if topology.host_apart:
        return not placement.update_on_device
    tiers = [placement.params, placement.grads, *([placement.optimizer] if any(kept) else [])]
    return not any(tier.in_memory for tier in tiers)


def may_wait(optimizer: Optimizer, table: StateTable, gradients: Mapping[ShardedParameter, StepGradient]) -> bool:
    """Return whether the step that begins may be deferred, with the gradients that it has taken.

    User code reaches what it reads and changes only by ways that wait for it; all states exist; and graphs have room beside its
    gradients. Where somebody has a tensor of a parameter's, a gradient's or a state's memory, the step ends at once, as he sees.
    """
    if not all(gradient.may_wait for gradient in gradients.values()):
        return False
    if any(parameter._zinf_unit.aliased for parameter in gradients):
        return False
    if not all(_is_known(optimizer, table, parameter) for parameter in gradients):
        return False
    return table.transfers.context.memory.has_room_for_graphs()


def _is_known(optimizer: Optimizer, table: StateTable, parameter: ShardedParameter) -> bool:
    """Return whether a parameter's states exist, and nobody has a tensor of their memory."""
    names = table.kept[parameter]
    if table.by_entry:
        entry = table.entries.get(parameter)
        return not names if entry is None else not entry.copies
    if parameter not in optimizer.state:
        return not names and record_of(optimizer).reported
    return table.present(parameter, optimizer) == set(names) and set(unshared(optimizer, parameter, names)) == set(names)
