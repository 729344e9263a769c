"""Check of a captured graph against the caps, and the bytes that its transfers may hold ahead of their use."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import fx

from zinf_compile.config import Config
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.saved_memory import SavedMemory, bytes_in_memory
from zinf_compile.ir.sizes import BLOCK_BYTES, Sides
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes import LOOK_AHEAD
from zinf_compile.passes.analysis.memory_needs import ahead_key, measure_needs, measure_one_ahead
from zinf_compile.passes.graph.node_facts import Counts, counts_all, slot_behind, wire_type
from zinf_compile.plan.graph_plan import BUCKETS_GATHERED, BUCKETS_ON_THE_WAY, GraphPlan, GraphRoom
from zinf_compile.plan.headroom import plan_graph
from zinf_compile.plan.memory_model import TransientMemory, held_memory, model_memory
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.runtime.memory.reservations import Reservation, references
from zinf_compile.runtime.system.node import ranks_of_node
from zinf_compile.runtime.units.create import shard_group_of

from .caps import Caps, Collection, collect_unused, find_caps, held_bytes
from .compute_budget import GraphCompute, outside_bytes, rounding_bytes
from .graph_needs import GraphNeeds, Measures
from .graph_room import room_for_units
from .other_graphs import bytes_beside, copies_to_come, not_held_yet, running_units, transient_of_unseen, unseen_parameters
from .parameter import ShardedParameter, unit_of
from .planned_parameters import PlannedParameters
from .short_ranks import least_of_ranks
from .shortage import Need, advice, gradient_bytes, reserved_by_others
from .training_to_come import backward_to_come, chunk_to_come, gradients_to_come
from .unplanned import is_unplanned, planned


class _Side(NamedTuple):
    """Of the device, or of host memory beside it: the cap, what is left beside the least, what cap works."""

    cap: int
    spare: int
    works: int


class GraphBudget:
    """The caps as one captured graph meets them; `limits` decides how far its gathers and reads run ahead.

    Forward and backward are both planned before `check` speaks: the smallest cap that it names is that of both. `caps`: those of
    this process. While `measuring` nothing is reserved, as it won't run. `together`: all ranks plan for it at the same point.
    """

    def __init__(
        self,
        config: Config,
        slots: Sequence[ParameterSlot],
        inputs: Sequence[Any],
        context: Context,
        placements: Placements | None = None,
        *,
        caps: Caps | None = None,
        measuring: bool = False,
        together: bool = False,
    ) -> None:
        fresh = [slot for slot in slots if not isinstance(inputs[slot.index], ShardedParameter)]
        units = {slot.index: unit for slot in slots if (unit := unit_of(inputs[slot.index])) is not None}
        self._used, self._units = set(units.values()), {index: unit for index, unit in units.items() if is_unplanned(unit)}
        whole = sum(slot.bytes for slot in fresh)
        self._declared = config.device_memory is not None or config.host_memory is not None
        self._parameters = references(inputs[slot.index] for slot in slots)
        self._caps_before = context.memory.reservations.caps
        self.caps = caps or find_caps(config, context, held=whole + context.memory.ledger.total()[0])
        self._unseen: list[ParameterSlot] = []
        self._alike: frozenset[Any] = frozenset()
        """Shapes and types of these: any of them may take the place of a parameter."""
        self._for_all = self._strict = False
        self.later = self.not_held = self.second = self._training = Sides(0, 0)
        """Transient memory of parameters that no graph has seen yet; what other graphs, and earlier variants of this one, don't
        hold yet; of the latter what a forward doesn't make, second gradients of its parameters; what training will pass of the
        parameters that a graph evaluates, by an estimate."""
        self._not_held: Sides | None = None
        """The latter, as found before this graph's reservations."""
        self.planned = PlannedParameters()
        self.reservations: list[Reservation] = []
        """Its own, and its backward's: they count for as long as this object lives, which is as long as the compiled graph."""
        self._checked, self.measuring, self._collect = False, measuring, Collection()
        self._together = together and context.size > 1
        self._needs = GraphNeeds(context, together=self._together)
        self.signature, self._tile, self._advice = config.signature(), config.tile_bytes, functools.partial(advice, config)
        self.context, self._bucket = context, config.shape().bucket_of(slots)
        self._slots, self._size, self._topology = slots, shard_group_of(units.values(), context).size, context.link.topology
        self._known = [slot for slot in slots if slot in fresh or slot.index in self._units]
        self._placed: Placements | None = None
        """What `place` counted last; None where parameters were added since. `decide_for_all` also asks for that after a copy."""
        self.saved_on_host, self._saves_on_drives = 0, False
        """Of values that a forward saves for its backward: bytes in host memory, and whether any are on drives."""
        self.place(placements or Placements(config.placement(), {index: unit.placement for index, unit in units.items()}))
        self._rounding = functools.partial(rounding_bytes, config, slots, topology=context.link.topology, size=self._size)
        self.compute = GraphCompute(
            config,
            context.device,
            context.link.topology,
            outside=outside_bytes(config, context, inputs, () if fresh else units.values(), collect=self._collect).more(
                self._rounding(self.placements).total
            ),
            gradient_stays=self._gradient_stays,
        )
        known = [inputs[slot.index] for slot in slots]
        self.unseen = unseen_parameters(known) if self.compute.counts else []
        others = sum(slot.bytes for slot in self.unseen) if fresh else bytes_beside(known) if self.compute.counts else 0
        own = sum(slot.bytes for slot in slots)
        self.others = others / own if own else 0.0
        """Bytes of parameters that other graphs use in a step, or will, for each of this graph's; 0 for a graph without any."""
        self._outside = 0 if fresh else self.compute.outside
        self.keepable = 0
        """Bytes of full units that could stay gathered from the forward to the backward, and don't for want of room."""
        self._returning = copies_to_come(context, self._units.values())
        """Bytes of full parameters that other graphs have planned for, and that no step has changed at the moment."""
        self.plans: list[tuple[TransientMemory, GraphPlan]] = []
        """Transient memory of each graph, and how far ahead it runs."""

    @property
    def device_cap(self) -> int:
        """The device's cap: both where host memory is the device."""
        return self.caps.on_device(self.context.link.topology)

    def place(self, placements: Placements) -> None:
        """Let the parameters that these graphs use live there."""
        self.placements = placements
        moved, held, topology = [*self._slots, *self._unseen], self._units.keys(), self._topology
        self.model = model_memory(self.counted, placements, size=self._size, topology=topology, held=held, moved=moved)
        """Memory of the parameters that these graphs use, without what an earlier graph has planned for."""
        self.model = self.planned.with_chunks(self.model, self.counted, placements)
        if self._saves_on_drives:
            self.model = dataclasses.replace(self.model, staging=max(self.model.staging, BLOCK_BYTES))
        self.later = transient_of_unseen(self.model, self._unseen, self._bucket, tile=self._tile)
        homes = {slot.index: placements.of(slot).params for slot in self._slots if slot.shape and slot.numel}
        apart = len(set(homes.values())) > 1
        away = frozenset(index for index, tier in homes.items() if topology.is_offloaded(tier))
        self.gathered = away if apart and self._size == 1 else None
        """The parameters that take memory while they are gathered, wherever others like them live; None: all do."""
        self.counts: Counts = self._takes_memory if apart else counts_all
        """Says which units take memory while they are gathered."""
        self._placed = placements

    @property
    def counted(self) -> list[ParameterSlot]:
        """The parameters whose memory is counted here: no earlier graph has planned for it."""
        return [*self._known, *self._unseen]

    def held_at(self, placements: Placements) -> tuple[Sides, Sides, Sides]:
        """Return of that memory what is held all the while: shards, one gradient of each parameter, and states."""
        return held_memory(self.counted, placements, size=self._size, topology=self._topology, held=self._units.keys())

    def _gradient_stays(self, slot: ParameterSlot) -> bool:
        """Say whether a gradient is kept where it is made: on one rank, on the device."""
        return self._size == 1 and not self.context.link.topology.is_offloaded(self.placements.of(slot).grads)

    def decide_for_all(self, unseen: Sequence[ParameterSlot], *, strict: bool) -> None:
        """Let homes be decided within the caps, or `strict`ly refuse graphs that don't fit with all that steps add.

        Room is left for parameters that no graph has seen yet, for what other graphs don't hold yet, and for what steps add.
        """
        if not self.measuring:
            collect_unused(self.context, self.caps, self._collect, declared=self._declared)
        self._for_all, self._strict, self._unseen, self._placed = True, strict, list(unseen), None
        self._alike = frozenset((slot.shape, slot.dtype) for slot in unseen)
        self.caps = self.caps.with_whole(sum(slot.bytes for slot in unseen), on_host=self.context.device.type == "cpu")
        self.not_held = not_held_yet(self.context, self._units.values())
        second = gradient_bytes(self.context, self._used - set(self._units.values()))
        self.second = Sides(min(second[Tier.DEVICE], self.not_held.device), min(second[Tier.HOST], self.not_held.host))
        own, running = set(self._units.values()), self._used | running_units()
        self.planned = PlannedParameters.of(self.context, own, running=running, size=self._size)

    def saved_by_others(self, saved: int) -> int:
        """Return the bytes that other graphs' forwards will hold where this one's leaves `saved`: in proportion to parameters.

        A graph of parameters that no graph has seen is followed by those of others. One that is compiled again, as for a block of
        a model that is compiled block by block, may run for any of them: all others save as much, but for what is there.
        """
        return max(0, math.ceil(self.others * saved) - self._outside)

    def _takes_memory(self, node: fx.Node) -> bool:
        """Say whether a unit takes memory while it is gathered: on one rank, compute reads the shards that are there."""
        slot = slot_behind(node)
        if self.gathered is None or slot.index in self.gathered or (slot.shape, slot.dtype) in self._alike:
            return True
        return wire_type(node) != slot.dtype

    def plan_saved(self, moving: Iterable[SavedMemory], placements: Placements | None = None) -> None:
        """Count what forward and backward have in host memory, and in blocks on their way to drives, for saved values.

        `placements`: let the parameters live there as well.
        """
        moving, apart = list(moving), self.context.link.topology.host_apart
        on_drives = any(not memory.tier.in_memory for memory in moving)
        placements = placements or self.placements
        if placements is not self._placed or on_drives != self._saves_on_drives:
            self._saves_on_drives = on_drives
            self.place(placements)
        self.saved_on_host = bytes_in_memory(moving) if apart else 0

    def room(self, graph: fx.Graph, wanted: int) -> GraphRoom:
        """Return the bytes of device and host for gathered units and shards in flight, of which `wanted` can be used."""
        if self.measuring:
            return GraphRoom(math.inf, math.inf)
        self.limits(graph, wanted=wanted)
        return room_for_units(graph, *self.plans[-1], self.compute.free)

    def limits(self, graph: fx.Graph, *, wanted: int = 0) -> tuple[int, int]:
        """Return how many bytes may be gathered, and how many gathered or in flight; more than one group ahead if `wanted`."""
        context, model = self.context, self.model
        needs, compute = measure_needs(graph, counts=self.counts), self.compute.measure(graph)
        transient = model.transient(needs, compute)
        made = gradients_to_come(self.counted, measure_needs(graph).gathered) if self.compute.is_evaluation else 0
        self._training = backward_to_come(model, needs, compute, made) if made else Sides(0, 0)
        device, host = self._check_device(transient), self._check_host(transient)
        fixed = BUCKETS_GATHERED * self._bucket, BUCKETS_ON_THE_WAY * self._bucket
        if self.measuring:
            return fixed
        homes = {self.placements.of(slot).params for slot in self._slots}
        next_gathered, next_inflight = measure_one_ahead(graph, homes, self._topology, look_ahead=LOOK_AHEAD, counts=self.counts)
        next_inflight = math.ceil(transient.widening * next_inflight)
        if not self._for_all:
            device, host = self._beside_all(transient)
        chunk = chunk_to_come(model, self.counted, self.placements)
        spare = Sides(max(0, device.spare - chunk.device), max(0, host.spare - chunk.host))
        ahead, first = max(next_inflight, wanted), wanted > 0 and self._size == 1 and self._topology.host_apart
        plan = plan_graph(model, transient, spare=spare, bucket_bytes=self._bucket, one_ahead=ahead, gathers_first=first)
        if context.size > 1:
            plan = self._agree(graph, transient, plan)
        self.plans.append((transient, plan))
        self._reserve(transient, plan, device, host)
        if not transient.gathered:  # what is used is held anyway
            return fixed
        ahead = transient.full + plan.ahead
        return min(int(ahead / transient.widening), max(next_gathered, BUCKETS_GATHERED * self._bucket)), ahead

    def _beside_all(self, transient: TransientMemory) -> tuple[_Side, _Side]:
        """Return what is left, and what works, beside all that steps will hold, of parameters of other graphs as well."""
        trial = copy.copy(self)
        trial._needs, trial.measuring = GraphNeeds(self.context, together=False), len(self.context.units) <= len(self._units)
        trial.decide_for_all(self.unseen, strict=False)
        trial.not_held = self._not_held = trial.not_held if self._not_held is None else self._not_held
        trial.place(trial.placements)
        return trial._check_device(transient), trial._check_host(transient)

    def _agree(self, graph: fx.Graph, transient: TransientMemory, plan: GraphPlan) -> GraphPlan:
        """Return the plan of all ranks: what they send each other follows from it.

        A rank that compiles again alone keeps the earlier plan, if it has reserved as much or the plan takes less.
        """
        reservations, key = self.context.memory.reservations, (self.signature, ahead_key(graph))
        known = dataclasses.replace(plan, ahead=reservations.ahead.setdefault(key, plan.ahead))
        taken = transient.with_plan(known)
        if known.ahead < plan.ahead or (taken.device <= reservations.passing and taken.host <= reservations.passing_host):
            plan = known
        if self._together and not self._checked:
            reservations.ahead[key] = least_of_ranks(self.context, plan.ahead, what="room to run ahead")
            plan = dataclasses.replace(plan, ahead=reservations.ahead[key])
        return plan

    def _reserve(self, transient: TransientMemory, plan: GraphPlan, device: _Side, host: _Side) -> None:
        memory, staging, taken = self.context.memory, self.model.staging + plan.staging, transient.with_plan(plan)
        reservations = memory.reservations
        reservations.device_cap, reservations.host_cap = device.cap, self.caps.host
        reservation = Reservation(
            passing=taken.device,
            left=transient.left,
            reduced=transient.reduced + plan.reduced,
            chunk_buffers=plan.chunk_buffers,
            chunk_numel=self.model.chunk_numel,
            backward=self.compute.is_backward or not self.compute.counts,
            compute=transient.compute.peak,
            results=transient.compute.results,
            rounding=self._rounding(self.placements).gathers,
            saved_outside=self.compute.saved_outside,
            chunk=self.model.chunk,
            passing_host=taken.host,
            staging=staging or None,
            least=transient.least,
            works=Sides(device.works, host.works),
            wish=plan.wish,
            keepable=math.ceil(self.keepable * (1 + self.others)),
            parameters=self._parameters,
            caps=Sides(device.cap, self.caps.host),
        )
        self.reservations.append(reservation)
        reservations.add(reservation)
        memory.inflight_gradients.limit = reservations.on_the_way
        memory.staging.limit(reservations.staging_limit)

    def _check_device(self, transient: TransientMemory) -> _Side:
        context, model = self.context, self.model
        topology = context.link.topology
        cap = self.device_cap
        chunk, added = self.planned.chunk_to_come(model).device, model.added_by_steps.device
        second = model.gradients.device if self.compute.is_forward else 0  # it makes none beside earlier ones
        most = max(transient.least.device, self.later.device)
        others = max(self.not_held.device - (self.second.device if self.compute.is_forward else 0), self._returning)
        here = model.resident.device + chunk + most + others
        least = here + self._held(context.memory.ledger, here, cap)
        gathered, reduced = transient.gathered + transient.rows, transient.reduced + transient.converted
        several = gathered + reduced > 0
        stay, reserved = least - chunk - most - others, reserved_by_others(others)
        computing = transient.compute
        saved = f"{computing.activations:,} are activations (values saved for the backward, inputs and results), "
        named = saved + f"{computing.temporaries:,} temporaries of compute, " if computing.peak else ""
        what = "tensors outside of this graph, workspaces of libraries and rounding"
        outside = f"{computing.outside:,} are {what}, " if computing.outside else ""
        self._needs.note(
            Need(
                side=Tier.DEVICE,
                text=f"the model needs {least:,} bytes on {context.device} of each rank: {stay:,} stay there "
                f"(parameters and gradients whose tier that is), {reserved}{gathered:,} are gathered at once (with "
                f"{transient.largest or 'nothing'}), {reduced:,} are full gradients in flight, {named}{outside}"
                f"{chunk:,} one chunk of the optimizer's step, {most - gathered - reduced - computing.peak:,} for gradients read "
                "back and blocks in flight to a drive",
                fixed=least - most,
                least=least,
                compute=computing.peak,
                added_by_steps=added - second,
                cap=cap,
                options=self.caps.options(topology),
                source=self.caps.device_source if cap == self.caps.device else self.caps.host_source,
                advice=self._advice(self.placements.nearest(self._slots), topology=topology, side=Tier.DEVICE, several=several),
                strict=self._strict,
                to_come=max(0, self._training.device - most),
            ),
            at_once=self._checked,
        )
        return _Side(cap, max(0, cap - least - added - self.saved_by_others(self.compute.saved)), least + added - second)

    def _check_host(self, transient: TransientMemory) -> _Side:
        context, model, cap = self.context, self.model, self.caps.host
        if not context.link.topology.host_apart:
            return _Side(cap, 0, 0)
        chunk, added = self.planned.chunk_to_come(model).host, model.added_by_steps.host
        most = max(transient.least.host, self.later.host)
        here = model.resident.host + chunk + most + self.not_held.host + self.saved_on_host
        least = here + self._held(context.memory.host_ledger, here, cap)
        fixed = least - chunk - most - self.saved_on_host - self.not_held.host
        self._needs.note(
            Need(
                side=Tier.HOST,
                text=f"the model needs {least:,} bytes of host memory for each rank: {fixed:,} of parameters and gradients, "
                f"{reserved_by_others(self.not_held.host)}"
                f"{most:,} in flight from drives and to them, {chunk:,} for one chunk of the optimizer's step"
                + (f", {self.saved_on_host:,} of activations" if self.saved_on_host else ""),
                fixed=least - most,
                least=least,
                added_by_steps=added,
                cap=cap,
                options={"host_memory": ranks_of_node()},
                source=self.caps.host_source,
                advice=self._advice(self.placements.nearest(self._slots), topology=context.link.topology, side=Tier.HOST),
                strict=self._strict,
                to_come=max(0, self._training.host - most),
            ),
            at_once=self._checked,
        )
        return _Side(cap, max(0, cap - least - added - math.ceil(self.others * self.saved_on_host)), least + added)

    def check(self, *, measure: Measures | None = None, may_cut: bool = False) -> int | None:
        """Raise `BudgetError` for the graphs seen so far if one doesn't fit; from now on, at once for any other.

        `measure` returns the budget of the same graphs for another `device_memory`, where their tiles would follow from that.
        Where they would fit with those of a smaller one, and `may_cut` their parameters so, that one is returned.
        """
        self._checked, lacks = True, self._needs.lacks()
        may_cut &= measure is not None
        if (short := self._needs.is_short(lacks)) or (may_cut and self._needs.is_tight(lacks)):
            reservations, made, now = self.context.memory.reservations, self.reservations, self.context.memory.reservations.caps
            for reservation in made:
                reservations.remove(reservation)
            self.reservations, reservations.caps = [], self._caps_before
            found = self._needs.settle(self, self.caps, lacks, measure, short=short, may_cut=may_cut)
            if found is not None:
                return found
            self.reservations, reservations.caps = made, now
            for reservation in made:
                reservations.add(reservation)
        planned(self._units.values())
        return None

    def works(self, side: Tier, *, trains: bool = False) -> int:
        """See `graph_needs.Works`."""
        return self._needs.works(side, trains=trains)

    def _held(self, ledger: Ledger, more: int, cap: int) -> int:
        cap = sys.maxsize if self.measuring else cap  # what nobody uses went before
        return held_bytes(ledger, more, cap, self.context.memory)
