"""Traffic, memory and waiting time of a partitioned model on this rank, and the log line of its first step."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.parameter import ShardedParameter

_log = logging.getLogger("zinf_compile")

ENDURANCE_BYTES = 600e12
"""Usual endurance of a consumer drive of 1 TB: 600 TBW."""

_NAMES = {Tier.DEVICE: "the device", Tier.HOST: "host memory", Tier.NVME: "NVMe"}


def stats(model: nn.Module) -> dict[str, Any]:
    """Return this rank's traffic, waits and memory since its first compiled call, for all models partitioned over these ranks.

    `steps`: optimizer steps. `links`: for each of "nvme to host", "host to nvme", "host to device", "device to host", "from
    ranks" and "to ranks" `bytes`; `waited_s`, the seconds that compute was stalled by it; and `peak_bytes`, the most in flight at
    a time (on drives: submitted, completion not yet seen). A wait for a transfer over several links counts for the link that
    delays it: while a copy to the device waits for a drive, that is the drive. `exposed_s` is the same; `busy_s` are the seconds
    of steps in which the link moved something, `idle_s` the rest of these; on an accelerator, links of streams are only timed in
    steps that `timeline` records. After a recorded step that was planned, `predicted_busy_s` and `predicted_exposed_s` say what
    its plan comes to. Each number again with `_last_step`: of the last step with its forward and backward, including what an
    earlier step deferred to them. `memory`: for "device" and "host" (one entry if the device is host memory) the bytes held
    `now`, at the `peak` and at the `peak_last_step`, by kind, as `memory` gives them, and of all kinds together. `activations`:
    what a forward of each graph saves, by what becomes of it (`keep`, `host`, `nvme`, bytes), and under a declared
    `device_memory` the bytes that are `held` on the device and the most that were (`peak`), results included. `caps`: the limits
    of the schedule. Empty before the first compiled call, and where parameters stay ordinary ones: on one rank, where nothing
    moves.
    """
    context = next((p._zinf_unit.context for p in plain(model).parameters() if isinstance(p, ShardedParameter)), None)
    if context is None:
        return {}
    ledgers = {Tier.DEVICE: context.memory.ledger, Tier.HOST: context.memory.host_ledger}
    accounts = {side: ledgers[side] for side in context.link.topology.sides}
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
        "activations": _activations(context),
        "caps": {"device_memory": context.memory.reservations.device_cap, "host_memory": context.memory.reservations.host_cap},
    }


def _activations(context: Context) -> dict[str, int]:
    found: dict[str, int] = {}
    for own in list(context.memory.saved.values()):
        for word, count in own.items():
            found[word] = found.get(word, 0) + count
    return {**found, "held": context.memory.activations.held(), "peak": context.memory.activations.peak}


def log_first_step(context: Context, optimizer: Optimizer, parameters: Iterable[ShardedParameter], states_bytes: int) -> None:
    """Log, on rank 0, the placement of this rank's shards and the bytes that a step writes to drives."""
    if context.rank == 0 and _log.isEnabledFor(logging.INFO):
        units = [p._zinf_unit for p in parameters if p._zinf_unit.context is context]
        _log.info("%s", first_line(units, type(optimizer).__name__, states_bytes, context.lanes.meter.last_step()))
        for told in context.plans:
            _log.info("%s", told())
        context.plans.clear()


def first_line(units: list[Unit], optimizer: str, states_bytes: int, step: tuple[int, float]) -> str:
    """Return the log line; `step` is (bytes written to drives, seconds) of one step."""
    context, trained = units[0].context, [unit for unit in units if _is_trained(unit)]
    largest = max(units, key=lambda unit: unit.numel).placement
    homes = {unit: unit.placement if unit.shape and unit.numel else largest for unit in units}  # numbers are not worth a word
    kinds = (
        ("parameters", _by_tier(((homes[u].params, u.format.bytes(u.shard_numel)) for u in units), context)),
        ("gradients", _by_tier(((homes[u].grads, u.reduce_format.bytes(u.shard_numel)) for u in trained), context)),
        (f"states of {optimizer}", _share(states_bytes, [(homes[u].optimizer, u.shard_numel) for u in trained], context)),
    )
    placed = ", ".join(
        f"{name} on {' and '.join(f'{_NAMES[tier]} ({count:,} B)' for tier, count in tiers.items())}"
        for name, tiers in kinds
        if tiers
    )
    sides = dict.fromkeys(_updated_on(homes[unit], context) for unit in trained) or [_updated_on(largest, context)]
    placement = next((unit.placement for unit in units if unit.placement.nvme), largest)
    text = f"each of {context.size} rank(s) keeps {placed}; updated on {' and '.join(sides)}"
    written, seconds = step
    if written:
        days = ENDURANCE_BYTES / written * seconds / 86400
        folders = ", ".join(placement.nvme)
        text += (
            f". A step writes {written:,} B to {folders}: at this one's {seconds:.3g} s a drive rated for "
            f"{ENDURANCE_BYTES / 1e12:.0f} TBW lasts {days:,.0f} days of training"
        )
    return text


def _by_tier(rows: Iterable[tuple[Tier, int]], context: Context) -> dict[Tier, int]:
    """Return bytes by tier, from near to far."""
    found: dict[Tier, int] = {}
    for tier, count in sorted(rows, key=lambda row: row[0].distance):
        found[_tier(tier, context)] = found.get(_tier(tier, context), 0) + count
    return found


def _share(total: int, rows: list[tuple[Tier, int]], context: Context) -> dict[Tier, int]:
    """Return bytes by tier in the proportion of the elements there."""
    numbers = _by_tier(rows, context)
    whole = sum(numbers.values())
    return {tier: round(total * count / whole) for tier, count in numbers.items()} if whole else {}


def _is_trained(unit: Unit) -> bool:
    parameter = unit.parameter()
    return parameter is not None and parameter.requires_grad


def _tier(tier: Tier, context: Context) -> Tier:
    return context.link.topology.side(tier) or tier


def _updated_on(placement: Placement, context: Context) -> str:
    return _NAMES[context.link.topology.updated_on(placement)]


def memory(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return bytes on this rank: `{"now": {...}, "peak": {...}}`, each with params, grads, states, gathered, activations, staging
    and bounce.

    `params`, `grads` and `states` are this rank's shards with their padding, of all models partitioned over these ranks;
    `states` also the buffers in which a step has chunks of states that live elsewhere;
    `gathered` are full units in use or in flight, in the type in which they are communicated; `activations` the values that
    forwards have saved in host memory beside the device; `staging` are the buffers of other transfers in flight, and `bounce`
    the bounce buffers for blocks that direct I/O can't transfer in place. Empty before the first compiled call.
    """
    for parameter in plain(model).parameters():
        if isinstance(parameter, ShardedParameter):
            ledger = parameter._zinf_unit.context.memory.ledger
            return {"now": ledger.now(), "peak": ledger.peak()}
    return {"now": {}, "peak": {}}
