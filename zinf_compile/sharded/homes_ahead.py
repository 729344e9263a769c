"""Homes of parameters that are partitioned before any graph is known: by an estimate of what graphs will need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from zinf_compile.config import Config
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.plan.fill_homes import Excess, fill_homes
from zinf_compile.plan.memory_model import adam_states, gradient_numel, model_memory, shard_numel
from zinf_compile.plan.plan import Homes
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import Allowed, Memory, Region, StatePiece, Unit
from zinf_compile.plan.rates import Rates
from zinf_compile.runtime.context import Context

from .allowed_homes import allowed_homes, farthest_homes, is_open
from .caps import agree_on_device, find_caps
from .other_graphs import not_held_yet, transient_of_unseen
from .short_ranks import least_of_ranks


def homes_ahead(config: Config, slots: Sequence[ParameterSlot], context: Context) -> list[Placement]:
    """Return where the states of each parameter live. Collective where ranks share them.

    Room is left for what graphs gather and reduce at once, by an estimate: a few buckets, and the largest parameter.
    """
    topology = context.link.topology
    if not is_open(config, topology):
        return [config.placement()] * len(slots)
    agree_on_device(context)
    slots = [dataclasses.replace(slot, index=number) for number, slot in enumerate(slots)]
    rest, room = farthest_homes(config, topology), _room(config, context, whole=0, together=True)

    def check(homes: Homes) -> Excess:
        return _excess(config, slots, _placed(homes, slots, rest), context, room)

    moving = [slot for slot in slots if slot.shape and slot.numel]
    if not moving:
        return [rest] * len(slots)
    filled = fill_homes(_problem(config, moving, context, rest), check)
    placements = _placed(filled.homes if filled.excess.fits else Homes(), slots, rest)
    return [placements.own[slot.index] for slot in slots]


def fits_near(config: Config, slots: Sequence[ParameterSlot], context: Context, *, together: bool) -> bool:
    """Say whether all states of parameters that are whole yet fit as near as is allowed, by the same estimate.

    Collective where ranks ask together; False on a rank that asks alone.
    """
    if context.size > 1 and not together:
        return False
    agree_on_device(context)
    room = _room(config, context, whole=sum(slot.bytes for slot in slots), together=together)
    return _excess(config, slots, Placements(config.placement()), context, room).fits


def _room(config: Config, context: Context, *, whole: int, together: bool) -> list[int]:
    """Return the bytes of device and host that are left; `whole` bytes are still held by what is about to be cut."""
    memory, apart = context.memory, context.link.topology.host_apart
    caps = find_caps(config, context, held=whole + memory.ledger.total()[0])
    limits = (caps.device if apart else min(caps.device, caps.host), caps.host)
    held = [ledger.total()[0] for ledger in (memory.ledger, memory.host_ledger)]
    room = [cap - own - more for cap, own, more in zip(limits, held, not_held_yet(context, ()), strict=True)]
    if context.size > 1 and together:
        room = [least_of_ranks(context, each, what="room for homes") for each in room]
    return room


def _excess(
    config: Config, slots: Sequence[ParameterSlot], placements: Placements, context: Context, room: Sequence[int]
) -> Excess:
    topology = context.link.topology
    model = model_memory(slots, placements, size=context.ranks.shard_group.size, topology=topology)
    passing = transient_of_unseen(model, slots, config.shape().bucket_of(slots), tile=config.tile_bytes)
    chunks = model.chunk.plus(context.memory.reservations.chunks)
    needed = model.resident.plus(model.added_by_steps).plus(chunks).plus(passing)
    return Excess(needed.device - room[0], needed.host - room[1] if topology.host_apart else 0)


def _placed(homes: Homes, slots: Sequence[ParameterSlot], rest: Placement) -> Placements:
    own = {}
    for slot in slots:
        key = str(slot.index)
        tiers = {"params": homes.params.get(key), "grads": homes.grads.get(key), "optimizer": homes.states.get(key)}
        given: dict[str, Any] = {kind: tier for kind, tier in tiers.items() if tier is not None}
        own[slot.index] = dataclasses.replace(rest, **given)
    return Placements(rest, own)


def _problem(config: Config, slots: Sequence[ParameterSlot], context: Context, rest: Placement) -> StepProblem:
    """Return a step that uses one parameter after the other, and then once more in reverse."""
    topology, allowed, size = context.link.topology, allowed_homes(config, context.link.topology), context.size
    beside = [Tier.HOST] if topology.host_apart else []
    far = {tier for tiers in allowed.values() for tier in tiers} - {Tier.DEVICE, Tier.HOST}
    tiers = [Tier.DEVICE, *beside, *sorted(far, key=lambda tier: tier.distance)]
    units, pieces = [], []
    for number, slot in enumerate(slots):
        name, numel, back = str(slot.index), shard_numel(slot.numel, size), 2 * len(slots) - 1 - number
        values, kept_in = slot.format.bytes(numel), format_of(rest.reduce_dtype_of(slot.dtype))
        states = sum(format_of(dtype).bytes(numel) for dtype in adam_states(rest, slot.dtype).values())
        trained = slot.requires_grad
        units.append(
            Unit(
                name=name,
                stored_bytes=values,
                uses=(number, back) if trained else (number,),
                trained=trained,
                gradients=(back,) if trained else (),
                gradient_bytes=kept_in.bytes(gradient_numel(slot, rest, size)) if trained else 0,
            )
        )
        if trained:
            pieces.append(
                StatePiece(
                    name=name,
                    units=(name,),
                    state_bytes=states,
                    read_bytes=states,
                    written_bytes=states,
                    value_bytes=values,
                    value_read_bytes=values,
                    gradient_bytes=kept_in.bytes(numel),
                )
            )
    on = {kind: tuple(dict.fromkeys(t if t in tiers else Tier.DEVICE for t in found)) for kind, found in allowed.items()}
    return StepProblem(
        regions=tuple(Region(name=str(number), seconds=0.0) for number in range(2 * len(slots))),
        memories=tuple(Memory(tier=tier) for tier in tiers),
        links=tuple(Rates.of(context.device.type, config.machine_name(), context.rates).links(tiers, 1)),
        units=tuple(units),
        pieces=tuple(pieces),
        allowed=Allowed(params=on["params"], grads=on["grads"], states=on["optimizer"]),
    )
