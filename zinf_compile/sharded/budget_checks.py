"""Checks against the caps outside of graphs: of shards before they are made, of states, of second gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from zinf_compile._torch import no_torch_function
from zinf_compile.config import Config
from zinf_compile.errors import BudgetError
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import CHUNK_BUFFERS, STAGING_BYTES, Sides
from zinf_compile.ir.tiers import Placement, Tier
from zinf_compile.plan.memory_model import model_memory
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.named_caps import name_host_memory
from zinf_compile.runtime.memory.reservations import Reservation
from zinf_compile.runtime.units.unit import Unit

from .allowed_homes import farthest_homes
from .caps import agree_on_device, find_caps, held_bytes
from .other_graphs import copies_to_come
from .parameter import has_gradient
from .short_ranks import Lack, refusal_text
from .shortage import advice_for_shards, gradient_bytes, name_cap, name_smallest


def check_shards(
    config: Config, slots: Sequence[ParameterSlot], context: Context, homes: Sequence[Placement] | None = None
) -> None:
    """Raise `BudgetError` where the shards of parameters about to be made, and one of them whole, exceed a cap."""
    agree_on_device(context)
    caps = find_caps(config, context, held=context.memory.ledger.total()[0])
    topology = context.link.topology
    placements = Placements(config.placement())
    if homes is not None:
        slots = [dataclasses.replace(slot, index=number) for number, slot in enumerate(slots)]
        placements = Placements(farthest_homes(config, topology), dict(enumerate(homes)))
    nearest = placements.nearest(slots)
    model = model_memory(slots, placements, size=context.ranks.shard_group.size, topology=topology)
    largest = max(slots, key=lambda slot: slot.bytes)
    cap = caps.on_device(topology)
    staging, here = model.staging, model.before_computing(largest.bytes)
    needed = here.device + held_bytes(context.memory.ledger, here.device, cap)
    if needed > cap:
        raise BudgetError(
            f"the model needs {needed:,} bytes on {context.device} of each rank before anything is computed: "
            f"{model.resident.device:,} "
            f"of parameters and gradients that stay there, and {largest.name} whole{_blocks(staging)}. {cap:,} are allowed ("
            f"{caps.device_source if cap == caps.device else caps.host_source}); {name_smallest(caps.options(topology), needed)}"
            + advice_for_shards(config, nearest, topology=topology, side=Tier.DEVICE)
        )
    host = here.host + held_bytes(context.memory.host_ledger, here.host, caps.host) if topology.host_apart else 0
    if topology.host_apart and host > caps.host:
        raise BudgetError(
            f"the model needs {host:,} bytes of host memory for each rank before anything is computed: "
            f"{model.resident.host:,} of parameters and gradients, and {largest.name} whole{_blocks(staging)}. "
            f"{caps.host:,} are allowed ({caps.host_source}); {name_host_memory(host)}"
            + advice_for_shards(config, nearest, topology=topology, side=Tier.HOST)
        )
    if staging and not context.memory.reservations.staging:
        context.memory.staging.limit(min(STAGING_BYTES, staging + (caps.host - host if topology.host_apart else cap - needed)))


@contextlib.contextmanager
def capped(config: Config, slots: Sequence[ParameterSlot], context: Context) -> Iterator[None]:
    """Apply the caps to what is made inside, before any graph has planned for them; after an error they are those before.

    `slots`: of the parameters that are made. A collective operation.
    """
    agree_on_device(context)
    memory, topology = context.memory, context.link.topology
    reservations, caps = memory.reservations, find_caps(config, context, held=memory.ledger.total()[0])
    before = reservations.caps
    reservations.declare(
        device=None if config.device_memory is None else caps.device, host=None if config.host_memory is None else caps.host
    )
    reservations.device_cap, reservations.host_cap = caps.on_device(topology), caps.host
    model = model_memory(slots, farthest_homes(config, topology), size=context.ranks.shard_group.size, topology=topology)
    passing = topology.counted(Sides(0, model.staging))
    fitting = [
        cap // 4 // chunk
        for cap, chunk in zip((reservations.device_cap, reservations.host_cap), model.chunk, strict=True)
        if chunk
    ]
    made = Reservation(
        passing=passing.device,
        passing_host=passing.host,
        left=0,
        reduced=0,
        chunk_buffers=max(1, min([CHUNK_BUFFERS, *fitting])),  # they stay when graphs plan for what is left
        staging=model.staging or None,
        least=passing,
    )
    reservations.add(made)
    memory.staging.limit(reservations.staging_limit)
    try:
        yield
    except BaseException:
        reservations.caps = before
        raise
    finally:
        reservations.remove(made)


def _that_stay(staying: int) -> str:
    return f", {staying:,} are full parameters that will stay" if staying else ""


def _blocks(staging: int) -> str:
    return f", and {staging:,} for blocks in flight to a drive" if staging else ""


def check_states(context: Context, *, on_device: bool, states: int, slots: int, name: str) -> None:
    """Raise `BudgetError` where states in memory and chunks, about to be made, exceed a cap. Nothing was updated yet."""
    reservations = context.memory.reservations
    on_device = on_device or not context.link.topology.host_apart
    ledger, cap = (
        (context.memory.ledger, reservations.device_cap) if on_device else (context.memory.host_ledger, reservations.host_cap)
    )
    if cap is None:
        return
    side = Tier.DEVICE if on_device else Tier.HOST
    held = held_bytes(
        ledger, slots + states + (reservations.passing if on_device else reservations.passing_host), cap, context.memory
    )
    passing = reservations.passing if on_device else reservations.passing_host  # perhaps less by now
    staying = copies_to_come(context) if on_device else 0
    needed = held + slots + states + passing + staying
    if needed > cap:
        more = gradient_bytes(context, context.units)[side]
        works = reservations.works(side, held + slots + states + staying, second=more, unforeseen=True)
        works = works if works > cap else reservations.above(side, cap, needed)
        second = f", with {more:,} for second gradients while they accumulate" if more else ""
        named = name_cap(context, side, works, smallest=not reservations.keeps_more or works <= reservations.planned(side))
        raise BudgetError(
            f"{name} needs {needed:,} bytes on the {side} of this rank: {held:,} are held, {states:,} are its states, {slots:,} "
            f"its chunks, {passing:,} are gathered or reduced at once{_that_stay(staying)}. {cap:,} are allowed; nothing was "
            f"updated. {named[0].upper()}{named[1:]}{second}" + ("; optimizer='nvme' keeps states on a drive" if states else "")
        )


def lack_of_second_gradients(context: Context, units: Iterable[Unit]) -> dict[Tier, Lack]:
    """Return what a backward needs of each side that makes gradients in memory beside earlier ones of the same units."""
    reservations = context.memory.reservations
    if reservations.device_cap is None and reservations.host_cap is None:
        return {}
    with no_torch_function():
        again = {unit for unit in units if (p := unit.parameter()) is not None and has_gradient(p)}
        if not again:
            return {}
        second = gradient_bytes(context, again)
    sides = (
        (Tier.DEVICE, context.memory.ledger, reservations.device_cap, reservations.passing_backward),
        (Tier.HOST, context.memory.host_ledger, reservations.host_cap, reservations.passing_host),
    )
    lacks = {}
    for side, ledger, cap, passing in sides:
        more = second[side]
        if more and cap is not None:
            handed = context.full_copies.handed_on_bytes if side == Tier.DEVICE else 0  # which `passing` includes
            held = held_bytes(ledger, more + passing - handed, cap, context.memory) - handed
            works = reservations.works(side, held, second=more)
            if not ledger.now()["states"]:  # no step was made yet
                works = max(works, reservations.planned(side))
            needed = held + more + passing
            lacks[side] = Lack(
                needed=needed,
                cap=cap,
                works=works if needed <= cap or works > cap else reservations.above(side, cap, needed),
                text=f"a second backward before the step needs {needed:,} bytes on the {side} of this rank: "
                f"{held:,} are held, {more:,} second gradients until they are added to the first, {passing:,} pass at once",
            )
    return lacks


def refuse_second_gradients(context: Context, lacks: Mapping[Tier, Lack]) -> NoReturn:
    """Raise `BudgetError`, on all ranks, where one lacks memory for second gradients. Collective."""
    text = refusal_text(
        context,
        lacks,
        functools.partial(name_cap, context),
        what="a second backward before the step",
    )
    raise BudgetError(f"{text}; grads='nvme' keeps gradients on a drive")
