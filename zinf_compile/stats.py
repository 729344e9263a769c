"""What a partitioned model moves, holds and waits for on this rank; and the line that says so at the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

_log = logging.getLogger("zinf_compile")

ENDURANCE_BYTES = 600e12
"""A usual rating of a consumer drive of 1 TB: 600 TBW."""

_NAMES = {Tier.DEVICE: "the device", Tier.HOST: "host memory", Tier.NVME: "NVMe"}


def stats(model: nn.Module) -> dict[str, Any]:
    """Return this rank's account since its first compiled call, for all models partitioned over these ranks.

    `steps`: of optimizers. `links`: for each of "nvme to host", "host to nvme", "host to device", "device to host", "from ranks"
    and "to ranks" `bytes`; `waited_s`, the seconds compute stood still for it; and `peak_bytes`, the most on their way over it
    at a time (over drives: begun, and not known to have ended). A wait for what comes by several links counts for those that
    kept it: while a copy to the device itself waits for a drive, it is the drive's. Each number once more with `_last_step`: of
    the last step and the forward and backward before it, what an earlier step left for their time included. `memory`: for
    "device" and "host" (one account where the device is host memory) the bytes held `now`, at the `peak` and at the
    `peak_last_step`, by kind, as `memory` gives them, and of all kinds together. `caps`: what the schedule keeps within. Empty
    before the first compiled call. Ranks whose GPUs exchange over streams wait there, which isn't seen here.
    """
    context = next((p._zinf_unit.context for p in model.parameters() if isinstance(p, ShardedParameter)), None)
    if context is None:
        return {}
    accounts = (
        {Tier.DEVICE: context.memory.ledger}
        if context.bridge.unified
        else {Tier.DEVICE: context.memory.ledger, Tier.HOST: context.memory.host_ledger}
    )
    return {
        "steps": context.lanes.meter.steps,
        "links": context.lanes.meter.report(),
        "memory": {
            side: {
                "now": {**ledger.now(), "all": ledger.total()[0]},
                "peak": {**ledger.peak(), "all": ledger.total()[1]},
                "peak_last_step": ledger.peak_of_last_step(),
            }
            for side, ledger in accounts.items()
        },
        "caps": {"device_memory": context.memory.reservations.device_cap, "host_memory": context.memory.reservations.host_cap},
    }


def log_first_step(context: Context, optimizer: Optimizer, parameters: Iterable[ShardedParameter], states_bytes: int) -> None:
    """Log, on the first rank, what lives where and what a step writes to drives."""
    if context.rank == 0 and _log.isEnabledFor(logging.INFO):
        units = [p._zinf_unit for p in parameters if p._zinf_unit.context is context]
        _log.info("%s", first_line(units, type(optimizer).__name__, states_bytes, context.lanes.meter.last_step()))


def first_line(units: list[Unit], optimizer: str, states_bytes: int, step: tuple[int, float]) -> str:
    """Write the line; `step` is (bytes written to drives, seconds) of one step."""
    placement = max(units, key=lambda unit: unit.numel).placement
    context = units[0].context
    shards = sum(unit.format.bytes(unit.shard_numel) for unit in units)
    trained = sum(unit.reduce_format.bytes(unit.shard_numel) for unit in units if _is_trained(unit))
    kinds = (
        ("parameters", shards, placement.params),
        ("gradients", trained, placement.grads),
        (f"states of {optimizer}", states_bytes, placement.optimizer),
    )
    lives = ", ".join(f"{name} on {_NAMES[_tier(tier, context)]} ({count:,} B)" for name, count, tier in kinds)
    text = f"each of {context.size} rank(s) keeps {lives}; updated on {_updated_on(placement, context)}"
    written, seconds = step
    if written:
        days = ENDURANCE_BYTES / written * seconds / 86400
        folders = ", ".join(placement.nvme)
        text += (
            f". A step writes {written:,} B to {folders}: at this one's {seconds:.3g} s a drive rated for "
            f"{ENDURANCE_BYTES / 1e12:.0f} TBW lasts {days:,.0f} days of training"
        )
    return text


def _is_trained(unit: Unit) -> bool:
    parameter = unit.parameter()
    return parameter is not None and parameter.requires_grad


def _tier(tier: Tier, context: Context) -> Tier:
    return context.bridge.topology.side(tier) or tier


def _updated_on(placement: Placement, context: Context) -> str:
    return _NAMES[Tier.DEVICE if context.bridge.unified or placement.update_on_device else Tier.HOST]


def memory(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return bytes on this rank: `{"now": {...}, "peak": {...}}`, each with params, grads, states, gathered, staged and bounced.

    `params`, `grads` and `states` are this rank's shards with their padding, of all models partitioned over these ranks;
    `gathered` are full units in use or on their way, in the type in which they travel; `staged` is what else is on its way, and
    `bounced` memory for blocks that drives can't move from and to where they are. Empty counts before the first compiled call.
    """
    for parameter in model.parameters():
        if isinstance(parameter, ShardedParameter):
            ledger = parameter._zinf_unit.context.memory.ledger
            return {"now": ledger.now(), "peak": ledger.peak()}
    return {"now": {}, "peak": {}}
